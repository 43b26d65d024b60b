"""Trees of processes as real launchers make them, through the real agent.

mpirun is Debian's. torchrun and srun are too large to install: their trees are made by scripts
that set the variables that those set, in the processes in which those set them.
"""

from __future__ import annotations

import shutil

import pytest

from tests.sidecar.sandbox import Page, Sandbox

WATCH = {"KITTY_WATCH": "1"}
TRAINER = "/usr/bin/python3 -c 'import os, time; os.fork() and os.fork(); time.sleep(60)'"
"""A trainer that forks two data-loader workers, without an exec."""

TORCHRUN = """
import os, subprocess, sys
for local in range(2):
    rank = str(2 * int(os.environ["GROUP"]) + local)
    env = {
        **os.environ, "LOCAL_RANK": str(local), "RANK": rank, "GROUP_RANK": os.environ["GROUP"],
        "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": sys.argv[1],
    }
    subprocess.Popen(["sh", "-c", sys.argv[2]], env=env)
sys.stdin.read()
"""

SLURMD = """
import os, subprocess, sys
plain = {"PATH": os.environ["PATH"]}
job = {**plain, "KITTY_WATCH": "1", "SLURM_JOB_ID": "77", "SLURM_PROCID": "0"}
stepd = "import os, subprocess, sys; "
stepd += "[subprocess.Popen(['sh', '-c', sys.argv[1]], env={**os.environ, **e}) for e in %s]; "
stepd += "sys.stdin.read()"
def start(environments, command):
    script = stepd % repr(environments)
    subprocess.Popen([sys.executable, "-c", script, command], env=plain)
start([job], "sleep 60 & wait")  # the batch script, and in it srun
tasks = [{**job, "SLURM_PROCID": str(4 + i), "SLURM_STEP_ID": "0"} for i in range(2)]
tasks.append({**job, "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"})
start(tasks, sys.argv[1])
sys.stdin.read()
"""


def settled(sandbox: Sandbox, ranks: list[str], watched: float) -> Page:
    """Waits until the sidecar sees so many processes; returns its page."""
    sandbox.sidecar()
    page = Page()

    def seen() -> bool:
        nonlocal page
        page = sandbox.scrape()
        return (
            sorted(page.label("kitty_rank_threads", "rank")) == ranks
            and sorted(page.label("proc_threads", "rank")) == ranks
            and page.values("kitty_watched_processes") == [watched]
        )

    sandbox.until(seen)
    return page


def test_mpirun(sandbox: Sandbox) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    command = [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-np",
        "2",
        "sh",
        "-c",
        f"exec {TRAINER}",
    ]
    sandbox.start(*command, env={**WATCH, "JOB_NAME": "mpi", "HOME": "/tmp"})
    page = settled(sandbox, ["0", "1"], 7.0)
    assert [page.value("kitty_rank_threads", rank=rank) for rank in "01"] == [3, 3]
    assert page.label("kitty_rank_threads", "job") == ["mpi", "mpi"]
    assert [page.value("kitty_rank_workers", rank=rank, state="S") for rank in "01"] == [2, 2]


def test_torchrun(sandbox: Sandbox) -> None:
    """The second of two nodes: the ranks are 2 and 3, the agent has none."""
    sandbox.python(TORCHRUN, "run-9", f"exec {TRAINER}", GROUP="1", **WATCH)
    page = settled(sandbox, ["2", "3"], 7.0)
    assert [page.value("kitty_rank_threads", rank=rank) for rank in "23"] == [3, 3]
    assert set(page.label("kitty_rank_threads", "job")) == {"run-9"}


def test_torchrun_where_the_operator_sets_a_rank_of_the_pod(sandbox: Sandbox) -> None:
    """Kubeflow sets RANK on the pod: the agent inherits it, and it is no rank of a worker's."""
    sandbox.python(TORCHRUN, "run-9", f"exec {TRAINER}", GROUP="0", RANK="1", **WATCH)
    page = settled(sandbox, ["0", "1"], 7.0)
    assert [page.value("kitty_rank_threads", rank=rank) for rank in "01"] == [3, 3]


def test_srun(sandbox: Sandbox) -> None:
    """slurmd starts tasks beside the batch script, whose SLURM_PROCID is 0 and means nothing."""
    sandbox.python(SLURMD, f"exec {TRAINER}")
    page = settled(sandbox, ["0", "4", "5"], 11.0)
    assert [page.value("kitty_rank_threads", rank=rank) for rank in "045"] == [3, 3, 3]
    assert set(page.label("kitty_rank_threads", "job")) == {"77"}


def test_plain_forks_have_the_rank_of_the_pod(sandbox: Sandbox) -> None:
    sandbox.start("sh", "-c", f"exec {TRAINER}", env=WATCH)
    sandbox.sidecar(KITTY_RANK="6", KITTY_POD="p", KITTY_JOB="llm")
    sandbox.until(
        lambda: sandbox.scrape().values("kitty_rank_threads", rank="6", job="llm") == [3.0]
    )
