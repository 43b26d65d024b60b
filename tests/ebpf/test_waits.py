"""Futex waits, preemption and wake-up latency of real processes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from sidecar.ebpf import loader, waits

# Each story waits for a line on stdin, does its waiting, says so, and stays until stdin ends.
PROLOGUE = "import os, sys, threading, time; sys.stdin.readline()\n"
EPILOGUE = "\nprint('done', flush=True); sys.stdin.readline()"
FUTEX = "lock = threading.Lock(); lock.acquire()\nfor _ in range(20): lock.acquire(timeout=0.02)"
SLEEP = "for _ in range(20): time.sleep(0.02)"
SPIN = "end = time.monotonic() + 0.5\nwhile time.monotonic() < end: pass"
THREAD = (
    "def work():\n lock = threading.Lock(); lock.acquire()\n"
    " for _ in range(20): lock.acquire(timeout=0.02)\n"
    "thread = threading.Thread(target=work); thread.start(); thread.join()"
)
CHILD = f"if os.fork() == 0:\n {FUTEX.replace(chr(10), chr(10) + ' ')}\n os._exit(0)\nos.wait()"


class Story:
    def __init__(self, body: str, cpu: int | None = None) -> None:
        pin = ["taskset", "-c", str(cpu)] if cpu is not None else []
        self.process = subprocess.Popen(
            [*pin, sys.executable, "-c", PROLOGUE + body + EPILOGUE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        time.sleep(0.3)  # the interpreter's own start is no part of the story

    def go(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def done(self) -> None:
        assert self.process.stdout
        assert self.process.stdout.readline() == "done\n"

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture
def probe(load: loader.Loader) -> Iterator[waits.WaitProbe]:
    [loaded] = load.load([waits.candidate()])
    assert isinstance(loaded, loader.Loaded), loaded
    made = waits.WaitProbe(loaded)
    yield made
    made.close()


@pytest.fixture
def tell() -> Iterator[Callable[..., Story]]:
    told: list[Story] = []

    def start(body: str, cpu: int | None = None) -> Story:
        told.append(Story(body, cpu))
        return told[-1]

    yield start
    for story in told:
        story.end()


def read(probe: waits.WaitProbe) -> dict[int, waits.ProcessWaits]:
    return {pid: waits.ProcessWaits.unpack(growth) for pid, growth in probe.read()}


def test_a_futex_wait_is_told_from_sleep_and_processes_apart(
    probe: waits.WaitProbe, tell: Callable[..., Story]
) -> None:
    locked, asleep, unwatched = tell(FUTEX), tell(SLEEP), tell(FUTEX)
    probe.watch([locked.pid, asleep.pid])
    for story in (locked, asleep, unwatched):
        story.go()
    for story in (locked, asleep, unwatched):
        story.done()
    seen = read(probe)
    assert seen.keys() == {locked.pid, asleep.pid}
    futex = seen[locked.pid].futex
    assert 19 <= sum(futex.counts) <= 24
    assert futex.sum_seconds >= 0.38
    slow = sum(
        count
        for count, edge in zip(futex.counts[1:], waits.BUCKET_EDGES_SECONDS, strict=True)
        if edge >= 0.016
    )
    assert slow >= 18
    assert sum(seen[asleep.pid].futex.counts) == 0
    assert sum(seen[asleep.pid].wakeup.counts) >= 19
    assert probe.read() == []


@pytest.mark.parametrize("body", [THREAD, CHILD], ids=["thread", "child"])
def test_what_a_watched_process_starts_is_followed(
    probe: waits.WaitProbe, tell: Callable[..., Story], body: str
) -> None:
    story = tell(body)
    probe.watch([story.pid])
    story.go()
    story.done()
    seen = read(probe)
    if body is THREAD:
        assert sum(seen[story.pid].futex.counts) >= 18
    else:
        [child] = seen.keys() - {story.pid}
        # How a thread left its CPU the first time is not known: its first wait does not count.
        assert sum(seen[child].futex.counts) >= 18
        assert story.pid not in seen or sum(seen[story.pid].futex.counts) == 0


def test_two_on_one_cpu_preempt_each_other(
    probe: waits.WaitProbe, tell: Callable[..., Story]
) -> None:
    cpu = min(os.sched_getaffinity(0))
    both = [tell(SPIN, cpu), tell(SPIN, cpu)]
    probe.watch([story.pid for story in both])
    for story in both:
        story.go()
    for story in both:
        story.done()
    seen = read(probe)
    # Each spins for half a second of one CPU: what one had, the other waited for.
    for story in both:
        assert seen[story.pid].preempt.sum_seconds > 0.1
        assert sum(seen[story.pid].preempt.counts) >= 5


def test_a_process_watched_twice_counts_once(
    probe: waits.WaitProbe, tell: Callable[..., Story]
) -> None:
    story = tell(FUTEX)
    probe.watch([story.pid])
    events = list(probe._events[story.pid])
    again = probe._open(story.pid)
    assert len(again) == len(events)
    story.go()
    story.done()
    assert 19 <= sum(read(probe)[story.pid].futex.counts) <= 24
    for event in again:
        os.close(event)


def test_what_is_no_longer_watched_is_forgotten(
    probe: waits.WaitProbe, tell: Callable[..., Story]
) -> None:
    story = tell(FUTEX)
    probe.watch([story.pid])
    assert probe._events[story.pid]
    probe.watch([])
    story.go()
    story.done()
    assert probe.read() == []
    probe.watch([1 << 22])  # gone before it could be watched
    assert probe.read() == []


# Makes a process with a number of one's choice, as the kernel does once numbers have gone round
# (clone3 with set_tid; the number must be free).
CLONE = """
import ctypes, struct
def clone(number):
    tids = ctypes.create_string_buffer(struct.pack("i", number))
    args = struct.pack("<11Q", 0, 0, 0, 0, 17, 0, 0, 0, ctypes.addressof(tids), 1, 0)
    pid = ctypes.CDLL(None).syscall(435, ctypes.create_string_buffer(args, 88), 88)
    assert pid in (0, number), "clone3"
    return pid
"""
SHORT = """
first = os.fork()
if first == 0:
    lock = threading.Lock(); lock.acquire()
    for _ in range(3): lock.acquire(timeout=0.02)
    os._exit(0)
os.waitpid(first, 0)
"""
REUSED = f"""{CLONE}{SHORT}
time.sleep(2)
if clone(first) == 0:
    end = time.monotonic() + 0.3
    while time.monotonic() < end: pass
    time.sleep(0.01); time.sleep(0.01)
    os._exit(0)
os.waitpid(first, 0)
"""


def test_a_thread_with_the_number_of_an_earlier_one_starts_anew(
    probe: waits.WaitProbe, tell: Callable[..., Story]
) -> None:
    story = tell(REUSED)
    probe.watch([story.pid])
    story.go()
    story.done()
    counted = read(probe)
    assert counted
    for seen in counted.values():
        assert seen.futex.sum_seconds < 0.5  # three waits of 20 ms, and no two seconds
        assert seen.wakeup.counts[-1] == seen.preempt.counts[-1] == 0  # of 4.2 s and more


def test_a_process_with_the_number_of_an_earlier_child_is_watched(
    probe: waits.WaitProbe, tell: Callable[..., Story]
) -> None:
    parent = tell(f"{SHORT}\nprint(first, flush=True)")
    probe.watch([parent.pid])
    parent.go()
    assert parent.process.stdout
    number = int(parent.process.stdout.readline())
    parent.done()
    probe.read()
    stranger = tell(
        f"{CLONE}\nif clone({number}) == 0:\n time.sleep(0.5)\n"
        f" {FUTEX.replace(chr(10), chr(10) + ' ')}\n os._exit(0)\nos.waitpid({number}, 0)"
    )
    stranger.go()
    deadline = time.monotonic() + 5
    while not os.path.exists(f"/proc/{number}") and time.monotonic() < deadline:
        time.sleep(0.01)
    probe.watch([parent.pid, number])
    stranger.done()
    assert sum(read(probe)[number].futex.counts) >= 18
