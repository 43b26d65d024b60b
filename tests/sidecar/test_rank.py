"""The sums over a rank's tree: what grows, what stays when processes end, what is unknown."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from sidecar.collectors.rank import RankCollector
from sidecar.config import Config
from sidecar.pod import Pod
from sidecar.sources.delays import TASKS_A_ROUND, DelayTable
from sidecar.sources.maps import AGE, MapTable
from sidecar.sources.processes import ProcessTable
from sidecar.sources.procfs import TICKS, ProcFS
from sidecar.sources.trees import TreeTable
from tests.sidecar.fixture import Fixture, write
from tests.sidecar.sandbox import Sandbox

RANK = {"KITTY_WATCH": "1", "RANK": "3"}
HEAD, WORKER, SECOND = 10, 11, 12


class Ranks:
    """The collector over a fixture with clocks of its own."""

    def __init__(self, folder: Path) -> None:
        self.fixture = Fixture(folder)
        procfs = ProcFS(str(self.fixture.proc))
        self.now = 1000.0
        self.pod = Pod(procfs, ProcessTable(procfs, own_pid=2), Config())
        self.trees = TreeTable(
            procfs,
            DelayTable(procfs),
            view=lambda: self.pod.view,
            stats=lambda: self.pod.stats,
            clock=lambda: self.now,
        )
        self.maps = MapTable(
            view=lambda: self.pod.view,
            proc=str(self.fixture.proc),
            sys=str(self.fixture.sys),
            clock=lambda: self.now,
        )
        self.collector = RankCollector(self.pod, self.trees, self.maps, clock=lambda: self.now)

    def process(self, pid: int, **options: Any) -> None:
        """Writes a process of rank 3: the head, or one below it."""
        self.end(pid)
        below = {"ppid": 1 if pid == HEAD else HEAD}
        self.fixture.process(pid, **{"environ": RANK, **below, **options})

    def end(self, pid: int) -> None:
        """Lets a process be gone."""
        shutil.rmtree(self.fixture.proc / str(pid), ignore_errors=True)

    def sample(self) -> dict[str, float]:
        """Reads once; values by name and the labels but rank, node and job."""
        self.pod.refresh()
        self.collector.sample()
        self.now += 1
        return {
            "/".join(
                [s.name, *(v for k, v in s.labels.items() if k not in {"rank", "job"} and v)]
            ): s.value
            for family in self.collector.collect()
            for s in family.samples
        }


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path / "machine")


CPU = "kitty_rank_cpu_seconds_total"
READ = "kitty_rank_io_read_bytes_total"


def test_the_tree_is_summed_up(ranks: Ranks) -> None:
    ranks.process(HEAD, ticks=(100, 50, 0, 0), io=(9, 4096, 512), rss=10, faults=(5, 0, 2, 0))
    ranks.process(WORKER, ticks=(30, 20, 0, 0), io=(1, 1024, 0), rss=5, state="D")
    ranks.process(SECOND, ppid=WORKER, state="R")
    page = ranks.sample()
    assert page[CPU] == 200 / TICKS
    assert page[READ] == 5120
    assert page["kitty_rank_io_write_bytes_total"] == 512
    assert page["kitty_rank_io_requested_read_bytes_total"] == 10
    assert page["kitty_rank_resident_memory_bytes"] == 25 * 4096
    assert page["kitty_rank_threads"] == 3
    assert page["kitty_rank_page_faults_total/minor"] == 205
    assert page["kitty_rank_page_faults_total/major"] == 2
    assert [page[f"kitty_rank_workers/{state}"] for state in "RSDTZ"] == [1, 0, 1, 0, 0]


def test_a_worker_that_was_waited_for_counts_once(ranks: Ranks) -> None:
    ranks.process(HEAD, ticks=(100, 0, 0, 0), io=(0, 1000, 0))
    ranks.process(WORKER, ticks=(70, 0, 0, 0), faults=(40, 0, 0, 0), io=(0, 500, 0))
    assert ranks.sample()[CPU] == 170 / TICKS
    ranks.end(WORKER)  # it ran 5 ticks and read 10 bytes more before it ended
    ranks.process(HEAD, ticks=(110, 0, 70, 5), faults=(100, 45, 0, 0), io=(0, 1510, 0))
    page = ranks.sample()
    assert page[CPU] == 185 / TICKS
    assert page[READ] == 1510


def test_a_worker_that_nobody_waits_for_keeps_what_it_had(ranks: Ranks) -> None:
    ranks.process(HEAD, ticks=(100, 0, 0, 0))
    ranks.process(WORKER, ticks=(70, 0, 0, 0), io=(0, 500, 0))
    ranks.sample()
    ranks.end(WORKER)
    for _ in range(4):
        page = ranks.sample()
        assert (page[CPU], page[READ]) == (170 / TICKS, 500)
    ranks.process(HEAD, ticks=(130, 0, 0, 0))
    assert ranks.sample()[CPU] == 200 / TICKS


def test_a_parent_read_before_its_child_was_waited_for(ranks: Ranks) -> None:
    """The round in which neither has the child's time must not make the counter fall."""
    ranks.process(HEAD, ticks=(100, 0, 0, 0))
    ranks.process(WORKER, ticks=(70, 0, 0, 0), faults=(40, 0, 0, 0))
    ranks.sample()
    ranks.end(WORKER)
    assert ranks.sample()[CPU] == 170 / TICKS
    ranks.process(HEAD, ticks=(101, 0, 70, 0), faults=(100, 40, 0, 0))
    assert ranks.sample()[CPU] == 171 / TICKS
    for _ in range(4):
        assert ranks.sample()[CPU] == 171 / TICKS


def test_a_child_shorter_than_a_round_counts(ranks: Ranks) -> None:
    ranks.process(HEAD, ticks=(100, 0, 0, 0))
    ranks.sample()
    ranks.process(HEAD, ticks=(100, 0, 25, 5), faults=(100, 60, 0, 0))
    assert ranks.sample()[CPU] == 130 / TICKS


def test_a_subtree_that_ends_together(ranks: Ranks) -> None:
    """The worker waited for its own child, and the head for the worker."""
    ranks.process(HEAD, ticks=(100, 0, 0, 0))
    ranks.process(WORKER, ticks=(10, 0, 0, 0), faults=(40, 0, 0, 0))
    ranks.process(SECOND, ppid=WORKER, ticks=(20, 0, 0, 0), faults=(30, 0, 0, 0))
    ranks.sample()
    ranks.end(WORKER)
    ranks.end(SECOND)
    ranks.process(HEAD, ticks=(100, 0, 31, 0), faults=(100, 70, 0, 0))
    for _ in range(4):
        assert ranks.sample()[CPU] == 131 / TICKS


def test_a_pid_used_again_is_another_process(ranks: Ranks) -> None:
    ranks.process(HEAD)
    ranks.process(WORKER, ticks=(70, 0, 0, 0), start=20)
    ranks.sample()
    ranks.process(WORKER, ticks=(1, 0, 0, 0), start=90)
    for _ in range(4):
        page = ranks.sample()
    assert page[CPU] == 71 / TICKS


def test_an_ended_rank_leaves(ranks: Ranks) -> None:
    ranks.process(HEAD)
    ranks.sample()
    ranks.end(HEAD)
    assert not ranks.sample()


def test_the_time_of_the_last_read_from_storage(ranks: Ranks) -> None:
    """Unknown until a read is seen: when it was before that nobody can tell."""
    last = "kitty_rank_last_read_timestamp_seconds"
    ranks.process(HEAD, io=(0, 4096, 0))
    assert last not in ranks.sample()
    ranks.process(HEAD, io=(0, 8192, 0))
    seen = ranks.now
    assert ranks.sample()[last] == seen
    ranks.process(HEAD, io=(10_000, 8192, 0))
    assert ranks.sample()[last] == seen


def test_bytes_that_may_not_be_read_are_absent(ranks: Ranks) -> None:
    ranks.process(HEAD)
    ranks.process(WORKER)
    write(ranks.fixture.proc / f"{WORKER}/io", "nothing known\n")
    page = ranks.sample()
    assert READ not in page
    assert CPU in page


def test_waiting_for_a_cpu_and_for_a_device(ranks: Ranks) -> None:
    delay, wait = "kitty_rank_run_queue_delay_seconds_total", "kitty_rank_io_wait_seconds_total"
    ranks.process(HEAD, delays={10: (3_000_000_000, 50), 100: (1_000_000_000, 0)})
    page = ranks.sample()
    assert (page[delay], page[wait]) == (4.0, 50 / TICKS)
    ranks.process(HEAD, delays={10: (5_000_000_000, 60)})
    page = ranks.sample()
    assert (page[delay], page[wait]) == (6.0, 60 / TICKS)


def test_waiting_that_the_kernel_does_not_keep_is_absent(ranks: Ranks) -> None:
    ranks.process(HEAD)
    write(ranks.fixture.proc / "sys/kernel/task_delayacct", "0\n")
    write(ranks.fixture.proc / f"{HEAD}/task/{HEAD}/schedstat", "0 0 0\n")
    page = ranks.sample()
    assert not [name for name in page if "delay" in name or "io_wait" in name]


def test_many_threads_are_read_in_turns(ranks: Ranks) -> None:
    count = TASKS_A_ROUND[1] + 10
    for pid in (HEAD, WORKER):
        ranks.process(pid, delays={pid * 1000 + i: (10**9, 0) for i in range(count)})
    delay = "kitty_rank_run_queue_delay_seconds_total"
    assert ranks.sample()[delay] == count
    assert ranks.sample()[delay] == 2 * count
    assert ranks.sample()[delay] == 2 * count


def test_memory_shared_by_the_tree_counts_once(ranks: Ranks) -> None:
    name = "kitty_rank_proportional_memory_bytes"
    ranks.process(HEAD, pss=100)
    ranks.process(WORKER, pss=50)
    ranks.process(SECOND, state="Z")
    (ranks.fixture.proc / f"{SECOND}/smaps_rollup").unlink()
    ranks.sample()
    assert ranks.maps.step()
    assert name not in ranks.sample()
    while ranks.maps.step():
        pass
    assert ranks.sample()[name] == 150 * 1024
    assert not ranks.maps.step()
    ranks.process(HEAD, pss=80)
    ranks.now += AGE
    while ranks.maps.step():
        pass
    assert ranks.sample()[name] == 130 * 1024


def test_misplaced_memory_needs_more_than_one_node(ranks: Ranks) -> None:
    name = "kitty_rank_misplaced_memory_ratio"
    ranks.process(HEAD)
    write(ranks.fixture.proc / f"{HEAD}/numa_maps", "7f default N0=1 N1=3 kernelpagesize_kB=4\n")
    write(ranks.fixture.sys / "devices/system/node/node0/cpulist", "0-3\n")
    ranks.pod.refresh()
    ranks.maps.step()
    page = ranks.sample()
    assert name not in page
    assert page["kitty_rank_allowed_cpus"] == 4
    write(ranks.fixture.sys / "devices/system/node/node1/cpulist", "4-7\n")
    ranks.now += AGE
    ranks.maps.step()
    assert ranks.sample()[name] == 0.75


WORKERS = """
import os, subprocess, sys, time
burn = "import time\\nend = time.process_time() + 0.3\\nwhile time.process_time() < end: pass"
for _ in range(3):
    subprocess.run([sys.executable, "-c", burn], check=True)
print("burnt", flush=True)
sys.stdin.readline()
for _ in range(3):
    if os.fork() == 0:
        os._exit(0)
sys.stdin.readline()
"""


def test_real_workers_that_ended_count(sandbox: Sandbox) -> None:
    trainer = sandbox.python(WORKERS, KITTY_WATCH="1", RANK="0")
    sandbox.sidecar()
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "burnt\n"
    sandbox.until(lambda: any(v >= 0.9 for v in sandbox.scrape().values(CPU, rank="0")))
    assert trainer.stdin is not None
    trainer.stdin.write("zombies\n")
    trainer.stdin.flush()
    workers = "kitty_rank_workers"
    sandbox.until(lambda: sandbox.scrape().values(workers, state="Z") == [3.0])
    page = sandbox.scrape()
    assert page.value(CPU) >= 0.9
    assert page.value("kitty_rank_threads") == 4


def test_one_that_nobody_waits_for_does_not_make_the_others_count_twice(ranks: Ranks) -> None:
    ranks.process(HEAD, ticks=(100, 0, 0, 0))
    for n in range(9):
        ranks.process(20 + n, ticks=(10, 0, 0, 0), faults=(40, 0, 0, 0))
    ranks.process(WORKER, ticks=(7, 0, 0, 0), faults=(30, 0, 0, 0))
    ranks.sample()
    for pid in (*range(20, 29), WORKER):
        ranks.end(pid)
    ranks.process(HEAD, ticks=(100, 0, 90, 0), faults=(100, 9 * 40, 0, 0))
    for _ in range(4):
        page = ranks.sample()
    assert page[CPU] == 197 / TICKS


def test_workers_that_wait_for_a_device_are_summed_over_time(ranks: Ranks) -> None:
    name = "kitty_rank_worker_device_wait_seconds_total"
    ranks.process(HEAD, state="D")
    ranks.process(WORKER, state="D")
    ranks.process(SECOND, state="D")
    assert ranks.sample()[name] == 0
    assert ranks.sample()[name] == pytest.approx(2)
    ranks.process(SECOND, state="S")
    assert ranks.sample()[name] == pytest.approx(3)
    ranks.now += 60
    assert ranks.sample()[name] == pytest.approx(3), "a gap in the looking is nobody's time"
