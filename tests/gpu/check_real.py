"""Checks the agent's page on a machine with NVIDIA GPUs against nvidia-smi; not a pytest module.

    python tests/gpu/check_real.py

Starts a process that is given every GPU by its environment, and the shipped agent beside it;
reads both for half a minute and compares. With torch in the interpreter that TORCH_PYTHON names,
a process that multiplies matrices on GPU 0 shows attribution and the profiling rows too.
Exit status: 0 all agree, 1 something does not, 77 not run, since there is no GPU.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

PORT = 19455
READINGS = 12
NOT_RUN = 77
LOAD = """
import time, torch
a = torch.randn(8192, 8192, device="cuda:0", dtype=torch.bfloat16)
end = time.time() + 90
while time.time() < end:
    a @ a
torch.cuda.synchronize()
"""

Labels = dict[str, str]
Page = dict[tuple[str, str, str], float]
"""Values by family, uuid and further label."""


@dataclass(frozen=True)
class Row:
    """One value of both sides; ours times `scale` is nvidia-smi's, within the larger tolerance."""

    query: str
    family: str
    part: str = ""
    scale: float = 1.0
    absolute: float = 0.0
    relative: float = 0.02


ROWS = (
    Row("memory.total", "gpu_memory_total", scale=2**-20, absolute=2),
    Row("memory.used", "gpu_memory_used", scale=2**-20, absolute=64),
    Row("memory.free", "gpu_memory_free", scale=2**-20, absolute=64),
    Row("utilization.gpu", "gpu_sm_utilization", absolute=15),
    Row("utilization.memory", "gpu_memory_utilization", absolute=15),
    Row("power.draw", "gpu_power_draw_watts", absolute=15, relative=0.15),
    Row("temperature.gpu", "gpu_temperature_c", absolute=3),
    Row("clocks.sm", "kitty_gpu_clock_hertz", "sm", scale=1e-6, absolute=60, relative=0.1),
    Row("clocks.mem", "kitty_gpu_clock_hertz", "memory", scale=1e-6, absolute=1),
    Row("pcie.link.gen.max", "kitty_gpu_pcie_link_generation_max"),
    Row("pcie.link.width.max", "kitty_gpu_pcie_link_width_max"),
    Row("ecc.errors.corrected.volatile.total", "kitty_gpu_ecc_errors_total", "corrected"),
    Row("ecc.errors.uncorrected.volatile.total", "kitty_gpu_ecc_errors_total", "uncorrected"),
    Row(
        "clocks_event_reasons_counters.sw_power_cap",
        "kitty_gpu_throttled_seconds_total",
        "sw_power_cap",
        scale=1e6,
        absolute=2e6,
    ),
)
"""nvidia-smi tells MiB, percent, watts, MHz and microseconds."""
RATIOS = ("gpu_sm_active", "gpu_sm_occupancy", "gpu_tensor_core_active", "gpu_dram_active")


def smi(queries: list[str]) -> dict[str, Labels]:
    """Returns nvidia-smi's answers by uuid; a query that it does not know is left out."""
    known = list(queries)
    while known:
        out = subprocess.run(
            ["nvidia-smi", f"--query-gpu=uuid,{','.join(known)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        bad = [query for query in known if query in out.stdout + out.stderr]
        if out.returncode == 0:
            rows = [[cell.strip() for cell in line.split(",")] for line in out.stdout.splitlines()]
            return {row[0]: dict(zip(known, row[1:], strict=True)) for row in rows}
        if not bad:
            break
        known = [query for query in known if query not in bad]
    return {}


def scrape() -> tuple[Page, list[Labels]]:
    """Returns the agent's GPU values, and the labels of kitty_gpu_info."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    page: Page = {}
    infos = []
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            if sample.name == "kitty_gpu_info":
                infos.append(labels)
            if "uuid" in labels:
                part = next((labels[n] for n in ("clock", "reason", "kind") if n in labels), "")
                page[sample.name, labels["uuid"], part] = sample.value
    return page, infos


def compare(pages: list[Page], answers: list[dict[str, Labels]]) -> int:
    """Prints each row of each GPU, medians of all readings; returns how many disagree."""
    wrong = 0
    for uuid in answers[0]:
        for row in ROWS:
            theirs = _numbers([answer.get(uuid, {}).get(row.query, "") for answer in answers])
            ours = [
                page[row.family, uuid, row.part] * row.scale
                for page in pages
                if (row.family, uuid, row.part) in page
            ]
            if not theirs and not ours:
                print(f"   -  {row.family} {row.part}: neither has it")
                continue
            if not theirs or not ours:
                # nvidia-smi may lack a query that NVML has; a value that only it has is a miss.
                wrong += bool(theirs)
                print(f" {'BAD' if theirs else '  -'}  {row.family} {row.part}: {ours=} {theirs=}")
                continue
            a, b = statistics.median(ours), statistics.median(theirs)
            fits = abs(a - b) <= max(row.absolute, row.relative * abs(b))
            wrong += not fits
            print(f" {'ok ' if fits else 'BAD'}  {row.family} {row.part}: {a:g}, nvidia-smi {b:g}")
    return wrong


def judge_load(pages: list[Page], infos: list[Labels], pid: int) -> int:
    """Prints what the matrix multiplication shows; returns how many rows it lacks."""
    mine = [info for info in infos if info["pid"] == str(pid)]
    fits = len(mine) == 1 and mine[0]["attributed_by"] == "processes"
    print(f" {'ok ' if fits else 'BAD'}  the load's GPU is attributed to pid {pid}: {mine}")
    wrong = int(not fits)
    for name in RATIOS:
        values = [v for page in pages[3:] for (n, _, _), v in page.items() if n == name]
        worked = bool(values) and 0 < max(values) <= 1
        expected = bool(mine) and mine[0]["profiled_by"] != "none"
        wrong += expected and not worked
        shown = f"{max(values):.3f}" if values else "absent"
        print(f" {'BAD' if expected and not worked else 'ok '}  {name}: at most {shown}")
    return wrong


def main() -> int:
    """Runs the comparison."""
    if shutil.which("nvidia-smi") is None or not (answer := smi([row.query for row in ROWS])):
        print("NOT RUN: this machine has no NVIDIA GPU that nvidia-smi answers for")
        return NOT_RUN
    env = {
        **os.environ,
        "KITTY_WATCH": "1",
        "RANK": "0",
        "NVIDIA_VISIBLE_DEVICES": ",".join(answer),
    }
    torch = os.environ.get("TORCH_PYTHON")
    command = [torch, "-c", LOAD] if torch else ["sleep", "100"]
    agent_env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("KITTY_")},
        "KITTY_BIND": "127.0.0.1",
        "KITTY_PORT": str(PORT),
        "KITTY_COLLECTORS": "gpu",
    }
    with tempfile.TemporaryFile() as log:
        trainer = subprocess.Popen(command, env=env)
        sidecar = Path(sys.executable).parent / "kitty-sidecar"
        agent = subprocess.Popen([str(sidecar)], env=agent_env, stderr=log)
        try:
            time.sleep(15 if torch else 5)
            pages: list[Page] = []
            answers: list[dict[str, Labels]] = []
            infos: list[Labels] = []
            for _ in range(READINGS):
                page, infos = scrape()
                pages.append(page)
                answers.append(smi([row.query for row in ROWS]))
                time.sleep(1.5)
        finally:
            agent.terminate()
            trainer.kill()
            agent.wait()
            trainer.wait()
            log.seek(0)
            print(log.read().decode())
    wrong = compare(pages, answers)
    if torch:
        wrong += judge_load(pages, infos, trainer.pid)
    else:
        print("   -  no load: TORCH_PYTHON names no interpreter with torch")
    print(f"{wrong} rows disagree" if wrong else "all rows agree")
    return 1 if wrong else 0


def _numbers(texts: list[str]) -> list[float]:
    numbers = []
    for text in texts:
        try:
            numbers.append(float(text))
        except ValueError:
            continue
    return numbers


if __name__ == "__main__":
    sys.exit(main())
