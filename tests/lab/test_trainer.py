"""The trainer's all-reduce is a real one, in lock step, and it ends when it is told to."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.loader import BATCHES, Loader, number_of
from lab.trainer import Settings, add_lanes


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert isinstance(port, int)
        return port


def start(rank: int, port: int, **extra: str) -> "subprocess.Popen[str]":
    env = {
        "RANK": str(rank),
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TRAINER_GRADIENT_BYTES": "300000",
        "TRAINER_BURN_SECONDS": "0.001",
        "TRAINER_ACCELERATOR_SECONDS": "0.001",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "lab.trainer"],
        env=os.environ | env | extra,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_three_ranks_take_the_same_steps() -> None:
    port = free_port()
    ranks = [start(rank, port, TRAINER_STEPS="5") for rank in range(3)]
    for rank, process in enumerate(ranks):
        out, error = process.communicate(timeout=60)
        assert (process.returncode, error) == (0, "")
        steps: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
        assert [step["step"] for step in steps] == [0, 1, 2, 3, 4]
        assert {step["rank"] for step in steps} == {rank}
        for step in steps:
            parts = sum(step[f"{part}_seconds"] for part in ("input", "compute", "allreduce"))
            assert abs(step["step_seconds"] - parts) < 1e-5


def test_sigterm_ends_a_rank_with_status_0_and_its_peers_notice() -> None:
    port = free_port()
    ranks = [start(rank, port) for rank in range(3)]
    for process in ranks:
        assert process.stdout is not None
        assert process.stdout.readline()  # it trains
    ranks[1].send_signal(signal.SIGTERM)
    ranks[1].communicate(timeout=10)
    assert ranks[1].returncode == 0
    for rank in (0, 2):
        _, error = ranks[rank].communicate(timeout=60)
        assert ranks[rank].returncode == 1
        assert error.startswith(f"trainer: rank {rank}: ")


def test_the_loader_brings_every_batch_once_and_in_order() -> None:
    loader = Loader(size=10_000)
    try:
        brought = [loader.next(step) for step in range(2 * BATCHES)]
    finally:
        loader.close()
    assert [number_of(batch) for batch in brought] == 2 * list(range(BATCHES))
    assert brought[:BATCHES] == brought[BATCHES:]
    assert len(set(brought)) == BATCHES
    assert not Path(f"/proc/{loader.pid}").exists()


def test_a_loader_whose_worker_ended_says_so() -> None:
    loader = Loader(size=400_000)
    os.kill(loader.pid, signal.SIGKILL)
    try:
        with pytest.raises(ConnectionError, match="worker ended"):
            [loader.next(step) for step in range(9)]  # some were in the pipe already
    finally:
        loader.close()


def test_a_rank_without_a_job_says_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lab.trainer"],
        env={name: value for name, value in os.environ.items() if name != "RANK"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "'RANK'" in done.stderr


def test_settings_come_from_the_environment() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "7"}
    assert Settings.from_environment(env) == Settings(rank=1, world=4, master=("h", 7))


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1)), min_size=1))
def test_lanes_add_one_by_one(pairs: list[tuple[int, int]]) -> None:
    form = f"<{len(pairs)}I"
    left, right = (struct.pack(form, *(pair[side] for pair in pairs)) for side in (0, 1))
    assert struct.unpack(form, add_lanes(left, right)) == tuple(sum(pair) for pair in pairs)
