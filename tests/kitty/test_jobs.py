"""The jobs and one job, as the shipped rules judge them in a real Prometheus."""

import json
import os
import pty
import re
import signal
import subprocess
import time

import pytest

from tests.kitty.conftest import Kitty
from tests.kitty.dataset import HOSTILE, POD
from tests.kitty.servers import ROOT, RealPrometheus


def test_every_health(kitty: Kitty, prometheus: RealPrometheus) -> None:
    ran = kitty("jobs", "--json", url=prometheus.url)
    assert (ran.status, ran.err) == (0, "")
    told = {(job["namespace"], job["job"]): job for job in json.loads(ran.out)["jobs"]}
    recorded = told.pop(("lab", "recorded"))
    assert (recorded["health"], recorded["details"]) == ("verdict", "rank 2: gpu")
    assert {key: job["health"] for key, job in told.items()} == {
        ("training", "ring"): "verdict",
        ("training", "big"): "verdict",
        ("evil", HOSTILE): "verdict",
        ("training", "dark"): "blind",
        ("training", "rankless"): "blind",
        ("training", "solo"): "blind",
        ("other", "ring"): "ok",
        ("training", "ended"): "no data",
        ("training", "over"): "no data",
    }
    assert told["training", "ring"]["details"] == "rank 2: network-latency"
    assert (told["training", "big"]["pods"], told["training", "big"]["ranks"]) == (64, 512)
    assert told["training", "dark"]["details"] == "rtt (lockdown)"
    assert told["training", "ended"]["pods"] is None
    ago = time.time() - told["training", "ended"]["since_timestamp_seconds"]
    assert 400 < ago < 600


def test_list_is_plain_and_harmless_in_a_pipe(kitty: Kitty, prometheus: RealPrometheus) -> None:
    ran = kitty("jobs", url=prometheus.url)
    assert ran.status == 0
    lines = [line for line in ran.out.splitlines() if " recorded " not in line]
    assert lines[0].split() == ["namespace", "job", "pods", "ranks", "health", "since"]
    assert len(lines) == 2 + 9
    assert "\x1b" not in ran.out
    assert "\u202e" not in ran.out
    assert r"&\u202e\é\n" in ran.out
    # Those that need somebody come first.
    health = [re.search(r"verdict|blind|no data|ok", line) for line in lines[2:]]
    assert [found[0] for found in health if found] == [
        *["verdict"] * 3,
        *["blind"] * 3,
        "ok",
        *["no data"] * 2,
    ]


def test_verdict_first_in_one_sentence(kitty: Kitty, prometheus: RealPrometheus) -> None:
    ran = kitty("job", "ring", "-n", "training", url=prometheus.url)
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert re.fullmatch(
        r"Rank 2 of job training/ring, pod ring-worker-2 on node-2, is slow: network-latency, "
        r"confidence 9\d%, since \d\d:\d\d:\d\d UTC \(\d+ s\); round trips with every peer take at "
        r"least 52 ms \(median of the job 1 ms\)\.",
        lines[0].rstrip(),
    )
    assert lines[1].startswith("Not told by network-latency: ")
    table = lines[lines.index("") + 1 :]
    assert table[0].split()[:4] == ["rank", "pod", "node", "RTT"]
    assert table[2].split()[0] == "median"
    assert table[3].split()[:5] == ["2", "ring-worker-2", "node-2", "52", "ms!"]
    assert [row.split()[0] for row in table[3:]] == ["2", "0", "1", "3"]


def test_json_has_all_of_it(kitty: Kitty, prometheus: RealPrometheus) -> None:
    ran = kitty("job", "ring", "-n", "training", "--json", url=prometheus.url)
    told = json.loads(ran.out)
    (verdict,) = told["verdicts"]
    assert (verdict["class"], verdict["rank"], verdict["pod"], verdict["node"]) == (
        "network-latency",
        "2",
        "ring-worker-2",
        "node-2",
    )
    (evidence,) = verdict["evidence"]
    assert (evidence["signal"], evidence["unit"]) == ("rtt", "s")
    assert evidence["value"] == pytest.approx(0.052, rel=0.05)
    assert evidence["median"] == pytest.approx(0.001, rel=0.05)
    assert 0 <= told["timestamp_seconds"] - verdict["since_timestamp_seconds"] < 300
    assert told["by_rank"][0]["z"]["rtt"] > 3.5
    assert len(told["signals"]) == 14
    assert told["not_seen"] == []
    assert told["sudden_changes"] == ["rtt of rank 2 (00:53:20 UTC)"]


def test_many_ranks(kitty: Kitty, prometheus: RealPrometheus) -> None:
    few = kitty("job", "big", "--limit", "5", url=prometheus.url).out.splitlines()
    assert few[0].startswith("Rank 137 of job training/big, pod big-worker-17 on node-17, is slow")
    figures = re.search(r"processor ([\d.]+) ms a second \(median of the job ([\d.]+) ms", few[0])
    assert figures is not None
    assert float(figures[1]) > 20 * float(figures[2])
    ranks = [line.split()[0] for line in few if "big-worker-" in line][1:]
    assert ranks == ["137", "0", "1", "2", "3"]
    assert few[-1].strip() == "507 more ranks that stand out less (--all)"
    every = kitty("job", "big", "--all", url=prometheus.url).out
    assert every.count("big-worker-") == 512 + 1


def test_narrow_terminal_shows_what_stands_out(kitty: Kitty, prometheus: RealPrometheus) -> None:
    ran = kitty("job", "ring", "-n", "training", url=prometheus.url, COLUMNS="60")
    table = [line for line in ran.out.splitlines() if line.startswith(("rank ", "2 "))]
    assert "RTT" in table[0]
    assert "52 ms!" in table[1]
    assert max(map(len, table)) <= 60
    assert "not shown for want of room: " in ran.out


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["ring"], 2, "job ring is in several namespaces (other, training): give one by -n"),
        (["rinng"], 1, "no job rinng; close names: ring"),
        (["ring", "-n", "evil"], 1, "no job ring in namespace evil; there is other/ring, training"),
        (["xyzzy"], 1, "no job xyzzy; the jobs are evil/"),
    ],
)
def test_which_job(
    kitty: Kitty, prometheus: RealPrometheus, arguments: list[str], status: int, told: str
) -> None:
    ran = kitty("job", *arguments, url=prometheus.url)
    assert (ran.status, ran.out) == (status, "")
    assert ran.err.startswith(f"kitty: {told}")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("job", "status", "told"),
    [
        ("solo", 0, "No verdict is given on the 1 rank of job training/solo (1 pod): one rank has"),
        ("rankless", 0, "No verdict is given on the 0 ranks of job training/rankless (3 pods): no"),
        (
            "dark",
            0,
            "Nothing stands out among the 3 ranks of job training/dark (3 pods), but it is",
        ),
        ("ended", 1, "Job training/ended has no data now"),
        ("over", 1, "Job training/over has no data now"),
    ],
)
def test_no_verdict(
    kitty: Kitty, prometheus: RealPrometheus, job: str, status: int, told: str
) -> None:
    ran = kitty("job", job, url=prometheus.url)
    assert ran.status == status
    assert ran.out.startswith(told)


def test_what_cannot_be_seen(kitty: Kitty, prometheus: RealPrometheus) -> None:
    ran = kitty("job", "dark", url=prometheus.url)
    assert "Not seen: rtt (lockdown) in 3 pods; no series of gpu_throttled, gpu_clock" in ran.out


def test_hostile_names(kitty: Kitty, prometheus: RealPrometheus) -> None:
    ran = kitty("job", HOSTILE, "--json", url=prometheus.url)
    assert ran.status == 0
    told = json.loads(ran.out)
    assert told["job"] == HOSTILE
    assert told["verdicts"][0]["pod"] == f"{POD}1"
    assert "\u202e" not in told["verdicts"][0]["sentence"]


def on_a_terminal(url: str, *arguments: str, **environment: str) -> bytes:
    """Run it on a pseudo-terminal, 120 columns wide."""
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [ROOT / ".venv/bin/kitty", "--prometheus", url, *arguments],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={"PATH": os.environ["PATH"], "TERM": "xterm-256color", "COLUMNS": "120", **environment},
    )
    os.close(terminal)
    said = b""
    try:
        while part := os.read(main, 1 << 16):
            said += part
    except OSError:
        pass  # the terminal's other side is closed
    os.close(main)
    assert process.wait(30) == 0
    return said


def test_colour_where_a_terminal_has_it(prometheus: RealPrometheus) -> None:
    arguments = ("job", "ring", "-n", "training")
    assert b"\x1b[1;31m" in on_a_terminal(prometheus.url, *arguments)
    said = on_a_terminal(prometheus.url, *arguments, NO_COLOR="1")
    assert b"31m" not in said
    assert b"52 ms!" in said


def test_watch_until_interrupted(prometheus: RealPrometheus) -> None:
    process = subprocess.Popen(
        [
            ROOT / ".venv/bin/kitty",
            "--prometheus",
            prometheus.url,
            "jobs",
            "--json",
            "--watch",
            "1",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first, second = (json.loads(process.stdout.readline()) for _ in range(2))
    process.send_signal(signal.SIGINT)
    process.stdout.close()
    assert process.wait(30) == 0
    assert second["timestamp_seconds"] > first["timestamp_seconds"]


def test_reader_that_goes_away(prometheus: RealPrometheus) -> None:
    process = subprocess.Popen(
        [ROOT / ".venv/bin/kitty", "--prometheus", prometheus.url, "job", "big", "--all"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")
