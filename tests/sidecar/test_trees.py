"""The real agent over real process trees."""

import json
import signal

import pytest

from tests.sidecar.sandbox import Sandbox

TREE = """
import json, os, subprocess, sys
children = [
    subprocess.Popen(
        [sys.executable, '-c', os.environ['SCRIPT'], json.dumps(below)], env={**os.environ, **env}
    )
    for env, below in json.loads(sys.argv[1])
]
print(os.getpid(), flush=True)
sys.stdin.read()
for child in children:
    child.kill(); child.wait()
"""


def grow(sandbox: Sandbox, tree: list[object]) -> None:
    """Starts a tree of processes: a list of [environment changes, children]."""
    process = sandbox.python(TREE, json.dumps(tree), SCRIPT=TREE)
    assert process.stdout is not None
    expected = json.dumps(tree).count("{") + 1
    for _ in range(expected):
        process.stdout.readline()


def test_a_launcher_with_two_ranks_and_their_workers(sandbox: Sandbox) -> None:
    worker: list[object] = [{}, []]
    grow(
        sandbox,
        [
            [
                {"KITTY_WATCH": "1", "TORCHELASTIC_RUN_ID": "run-7"},
                [
                    [{"RANK": "0", "LOCAL_RANK": "0"}, [worker, worker]],
                    [{"RANK": "1", "LOCAL_RANK": "1"}, [worker]],
                ],
            ]
        ],
    )
    sandbox.sidecar()
    sandbox.until(lambda: sandbox.scrape().values("kitty_watched_processes") == [6.0])
    page = sandbox.scrape()
    assert sorted(page.label("kitty_pod_info", "rank")) == ["0", "1"]
    assert set(page.label("kitty_pod_info", "job")) == {"run-7"}
    assert sorted(page.label("proc_threads", "rank")) == ["0", "1"]


@pytest.mark.parametrize(
    "env",
    [{"KITTY_WATCH": "10"}, {"XKITTY_WATCH": "1"}, {"KITTY_WATCH": ""}, {"X": "\nKITTY_WATCH=1"}],
)
def test_what_is_not_watched(sandbox: Sandbox, env: dict[str, str]) -> None:
    grow(sandbox, [[env, []], [{"KITTY_WATCH": "1", "RANK": "0"}, []]])
    sandbox.sidecar()
    sandbox.until(lambda: sandbox.scrape().values("kitty_watched_processes") == [1.0])


def test_a_series_disappears_with_its_process(sandbox: Sandbox) -> None:
    trainer = sandbox.start("sleep", "60", env={"KITTY_WATCH": "1", "RANK": "0"})
    sandbox.sidecar()
    sandbox.until(lambda: sandbox.scrape().values("proc_threads", rank="0") == [1.0])
    sandbox.signal(trainer, signal.SIGKILL)
    trainer.communicate()
    sandbox.until(lambda: not sandbox.scrape().values("proc_threads"))
    sandbox.until(lambda: sandbox.scrape().values("kitty_watched_processes") == [0.0])
    page = sandbox.scrape()
    assert not page.values("net_tcp_out_segs_total")
    assert not page.values("kitty_tcp_sent_segments_total")


def test_a_rank_given_by_exec_is_seen(sandbox: Sandbox) -> None:
    """mpirun forks first and execs the trainer a moment later, in the same process."""
    process = sandbox.start(
        "sh",
        "-c",
        "read go; RANK=3 exec sleep 60",
        env={"KITTY_WATCH": "1"},
    )
    sandbox.sidecar()
    sandbox.until(lambda: sandbox.scrape().label("proc_threads", "rank") == [""])
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    sandbox.until(lambda: sandbox.scrape().label("proc_threads", "rank") == ["3"])


def test_a_stopped_process_shows(sandbox: Sandbox) -> None:
    trainer = sandbox.start("sleep", "60", env={"KITTY_WATCH": "1", "RANK": "0"})
    sandbox.sidecar()
    sandbox.until(lambda: sandbox.scrape().values("proc_state", state="S") == [1.0])
    sandbox.signal(trainer, signal.SIGSTOP)
    sandbox.until(lambda: sandbox.scrape().values("proc_state", state="T") == [1.0])
    assert sandbox.scrape().values("proc_state", state="S") == [0.0]
