"""The real agent over real process trees."""

import json
import signal
import sys
from pathlib import Path

import pytest

from sidecar.collectors.process import ProcessCollector
from sidecar.config import Config
from sidecar.pod import Pod
from sidecar.sources.descriptors import DescriptorTable
from sidecar.sources.processes import ProcessTable
from sidecar.sources.procfs import ProcFS
from tests.sidecar.fixture import Fixture
from tests.sidecar.sandbox import ROOT, Sandbox

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
    sandbox.until(lambda: sorted(sandbox.scrape().label("proc_threads", "rank")) == ["0", "1"])


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


def test_a_socket_of_any_family_counts_at_once(sandbox: Sandbox) -> None:
    """No TCP socket came or went, and yet there is one more."""
    rank = sandbox.python(
        "import socket, sys\nheld = [socket.socket()]\nfor _ in sys.stdin:\n"
        "    held += [*socket.socketpair(), socket.socket(type=socket.SOCK_DGRAM)]\n",
        KITTY_WATCH="1",
        RANK="0",
    )
    sandbox.sidecar()
    sandbox.until(lambda: sandbox.scrape().values("proc_socket_count", rank="0") == [1.0])
    assert rank.stdin is not None
    rank.stdin.write("more\n")
    rank.stdin.flush()
    sandbox.until(lambda: sandbox.scrape().values("proc_socket_count", rank="0") == [4.0])


def test_a_denied_environment_is_named(sandbox: Sandbox) -> None:
    """Where the sidecar runs as another user nothing else shows why all is empty."""
    sandbox.start("sleep", "60", env={"KITTY_WATCH": "1", "RANK": "0"})
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"]
    agent = sandbox.start(
        *user, sys.executable, "-m", "sidecar", env={"PYTHONPATH": str(ROOT)}, cwd=str(ROOT)
    )
    sandbox.until(lambda: sandbox.get("/healthz")[0] == 200)
    assert agent.stderr is not None
    assert any("SYS_PTRACE" in text for text in agent.stderr)


def test_a_pid_that_is_another_process_by_now_is_not_served(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path)
    fixture.process(40, environ={"KITTY_WATCH": "1", "RANK": "0"}, start=5)
    procfs = ProcFS(str(fixture.proc))
    pod = Pod(procfs, ProcessTable(procfs, own_pid=2), Config())
    pod.refresh()
    collector = ProcessCollector(pod, DescriptorTable(str(fixture.proc)), proc=str(fixture.proc))
    collector.sample()
    assert any(family.samples for family in collector.collect())
    fixture.process(40, environ={}, start=9)
    collector.sample()
    assert not any(family.samples for family in collector.collect())


def test_an_ended_rank_that_nobody_waits_for_is_still_the_rank(tmp_path: Path) -> None:
    """A zombie has neither an environment nor an image any more."""
    fixture = Fixture(tmp_path)
    folder = fixture.process(40, environ={"KITTY_WATCH": "1", "RANK": "3"})
    table = ProcessTable(ProcFS(str(fixture.proc)), own_pid=2)
    table.scan()
    stat = (folder / "stat").read_text()
    (folder / "stat").write_text(stat.replace(") S ", ") Z ").replace(" 4096 0 8192", " 0 0 0"))
    (folder / "environ").write_text("")
    assert [process.rank for process in table.scan()] == [None, "3"]


def test_what_the_agent_starts_is_not_the_pods(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path)
    for pid, parent in ((2, 1), (50, 2), (51, 50), (60, 1)):
        fixture.process(pid, ppid=parent, environ={"KITTY_WATCH": "1", "RANK": "0"})
    table = ProcessTable(ProcFS(str(fixture.proc)), own_pid=2)
    assert [process.pid for process in table.scan()] == [1, 60]
