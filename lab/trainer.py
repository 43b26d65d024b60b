"""A data-parallel trainer in miniature: a batch, compute, a ring all-reduce, step after step.

Run as a container's command (``python -m lab.trainer``) with the environment that PyTorch's own
launchers set: ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``. It writes one JSON line
a step to standard output: the ground truth that a verdict is scored against. Standard library only.
"""

import array
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from lab.loader import Loader

LANE = 4  # bytes of one gradient value; sums stay far below 2**32, so no carry leaves its lane
LENGTH = struct.Struct("!I")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the pod spec tells a rank.

    Attributes:
        rank: This process, 0 to ``world - 1``.
        world: Number of ranks in the ring.
        master: Host and port where rank 0 collects the addresses.
        gradient_bytes: Size of the vector that is summed in each step.
        burn_s: Processor time a step takes (what a Python training loop costs).
        accelerator_s: Time a step then waits without the processor, as for a GPU kernel.
        batch_bytes: Size of what the loader's worker brings for each step.
        steps: Steps until the end; 0 is until SIGTERM.
        timeout_s: Longest wait for a peer before the rank gives up.
    """

    rank: int
    world: int
    master: tuple[str, int]
    gradient_bytes: int = 2 << 20
    burn_s: float = 0.012
    accelerator_s: float = 0.06
    batch_bytes: int = 256 << 10
    steps: int = 0
    timeout_s: float = 120.0

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> "Settings":
        """Read the launcher's variables, and ``TRAINER_*`` for what this trainer adds.

        Raises:
            KeyError: ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` or ``MASTER_PORT`` is not set.
            ValueError: One of the variables is no number.
        """
        return cls(
            rank=int(env["RANK"]),
            world=int(env["WORLD_SIZE"]),
            master=(env["MASTER_ADDR"], int(env["MASTER_PORT"])),
            gradient_bytes=int(env.get("TRAINER_GRADIENT_BYTES", cls.gradient_bytes)),
            burn_s=float(env.get("TRAINER_BURN_SECONDS", cls.burn_s)),
            accelerator_s=float(env.get("TRAINER_ACCELERATOR_SECONDS", cls.accelerator_s)),
            batch_bytes=int(env.get("TRAINER_BATCH_BYTES", cls.batch_bytes)),
            steps=int(env.get("TRAINER_STEPS", cls.steps)),
            timeout_s=float(env.get("TRAINER_TIMEOUT_SECONDS", cls.timeout_s)),
        )


def read_exactly(sock: socket.socket, size: int) -> bytes:
    """Read ``size`` bytes; ConnectionError when the peer closes before."""
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(size - len(parts))
        if not part:
            raise ConnectionError("a peer closed its connection")
        parts += part
    return bytes(parts)


def send_message(sock: socket.socket, value: object) -> None:
    """Send one length-prefixed JSON value."""
    text = json.dumps(value).encode()
    sock.sendall(LENGTH.pack(len(text)) + text)


def receive_message(sock: socket.socket) -> object:
    """Receive what ``send_message`` sent."""
    (length,) = LENGTH.unpack(read_exactly(sock, LENGTH.size))
    return json.loads(read_exactly(sock, length))


def connect(address: tuple[str, int], timeout_s: float) -> socket.socket:
    """Connect, again and again until somebody listens: pods of a job start in any order."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection(address, timeout=timeout_s)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class Rendezvous:
    """Rank 0 collects every rank's listening address and tells all of them to all.

    The connections stay open and idle, as those of a framework's key-value store do.

    Attributes:
        host: This rank's own address.
    """

    def __init__(self, *, settings: Settings) -> None:
        self._settings = settings
        self._connections: list[socket.socket] = []
        self.host = settings.master[0]
        if settings.rank != 0:
            sock = connect(settings.master, settings.timeout_s)
            self._connections.append(sock)
            self.host = sock.getsockname()[0]

    def addresses(self, port: int) -> list[tuple[str, int]]:
        """Return host and port of each rank's ring listener, in order of rank."""
        if self._settings.rank == 0:
            return self._collect(port)
        send_message(self._connections[0], [self._settings.rank, self.host, port])
        table = receive_message(self._connections[0])
        assert isinstance(table, list)
        return [(host, number) for host, number in table]

    def _collect(self, port: int) -> list[tuple[str, int]]:
        world = self._settings.world
        table = {0: (self.host, port)}
        with socket.create_server(self._settings.master, backlog=world) as listener:
            listener.settimeout(self._settings.timeout_s)
            while len(table) < world:
                sock, _ = listener.accept()
                sock.settimeout(self._settings.timeout_s)
                self._connections.append(sock)
                message = receive_message(sock)
                assert isinstance(message, list)
                rank, host, number = message
                table[rank] = (host, number)
        ordered = [table[rank] for rank in range(world)]
        for sock in self._connections:
            send_message(sock, ordered)
        return ordered


class Ring:
    """The connections of one rank: it sends to the next rank and receives from the one before."""

    def __init__(self, *, settings: Settings, rendezvous: Rendezvous) -> None:
        self._timeout_s = settings.timeout_s
        self._rendezvous = rendezvous  # keeps its connections open
        self._rank, self._world = settings.rank, settings.world
        with socket.create_server((rendezvous.host, 0), backlog=2) as listener:
            listener.settimeout(settings.timeout_s)
            addresses = rendezvous.addresses(listener.getsockname()[1])
            self._next = connect(addresses[(settings.rank + 1) % settings.world], self._timeout_s)
            self._previous, _ = listener.accept()
        for sock in (self._next, self._previous):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)

    def all_reduce(self, gradient: bytes) -> bytes:
        """Sum the vectors of all ranks: reduce-scatter, then all-gather.

        Each of the ``2 * (world - 1)`` transfers sends what the transfer before brought, so one
        slow link slows every rank.

        Args:
            gradient: Unsigned 32-bit little-endian values; a multiple of ``world`` of them.
        """
        size = len(gradient) // self._world
        chunks = [gradient[i * size : (i + 1) * size] for i in range(self._world)]
        for turn in range(self._world - 1):
            received = self._exchange(chunks[(self._rank - turn) % self._world])
            target = (self._rank - turn - 1) % self._world
            chunks[target] = add_lanes(chunks[target], received)
        for turn in range(self._world - 1):
            target = (self._rank - turn) % self._world
            chunks[target] = self._exchange(chunks[(target + 1) % self._world])
        return b"".join(chunks)

    def _exchange(self, outgoing: bytes) -> bytes:
        """Send a chunk to the next rank while one of the same size comes from the previous."""
        waiting = memoryview(outgoing)
        incoming = bytearray(len(outgoing))
        free = memoryview(incoming)
        while waiting or free:
            readable, writable, _ = select.select(
                [self._previous] if free else [],
                [self._next] if waiting else [],
                [],
                self._timeout_s,
            )
            if not readable and not writable:
                raise TimeoutError(f"no peer moved for {self._timeout_s:.0f} s")
            if writable:
                waiting = waiting[self._next.send(waiting) :]
            if readable:
                count = self._previous.recv_into(free)
                if count == 0:
                    raise ConnectionError("a peer closed its connection")
                free = free[count:]
        return bytes(incoming)


def add_lanes(left: bytes, right: bytes) -> bytes:
    """Add two vectors of 32-bit values whose sums fit in their lanes: one long addition."""
    total = int.from_bytes(left, "little") + int.from_bytes(right, "little")
    return total.to_bytes(len(left), "little")


def gradient_of(rank: int, step: int, size: int) -> bytes:
    """Return this rank's contribution: the same value in every lane, so that sums are known."""
    return struct.pack("<I", (rank + 1) * (step % 1000 + 1)) * (size // LANE)


def expected_sum(world: int, step: int) -> int:
    """Return what every lane holds after the all-reduce."""
    return world * (world + 1) // 2 * (step % 1000 + 1)


def calibrate(seconds: float) -> int:
    """Return how many rounds of ``burn`` take that much processor time on this machine."""
    rounds = 1000
    while True:
        start = time.thread_time()
        burn(rounds)
        spent = time.thread_time() - start
        if spent > 0.005:
            return max(1, int(rounds * seconds / spent))
        rounds *= 2


def burn(rounds: int) -> None:
    """Work for a fixed amount of instructions: a contended processor makes it longer."""
    value = 1
    for _ in range(rounds):
        value = value * 1103515245 + 12345 & 0x7FFFFFFF


def train(settings: Settings) -> None:
    """Run the steps; each one's times go to standard output.

    Raises:
        ArithmeticError: An all-reduce gave a wrong sum, or the loader a wrong batch.
        OSError: A peer or the loader's worker went away, or no peer moved for ``timeout_s``.
    """
    loader = Loader(size=settings.batch_bytes)
    try:
        rounds = calibrate(settings.burn_s)
        ring = Ring(settings=settings, rendezvous=Rendezvous(settings=settings))
        step = 0
        while settings.steps == 0 or step < settings.steps:
            sys.stdout.write(json.dumps(train_one(settings, step, loader, ring, rounds)) + "\n")
            sys.stdout.flush()
            step += 1
    finally:
        loader.close()


def train_one(
    settings: Settings, step: int, loader: Loader, ring: Ring, rounds: int
) -> dict[str, float]:
    """Run one step; its times in seconds."""
    size = settings.gradient_bytes // (LANE * settings.world) * (LANE * settings.world)
    wall, start = time.time(), time.monotonic()
    loader.next(step)
    loaded = time.monotonic()
    burn(rounds)
    time.sleep(settings.accelerator_s)
    computed = time.monotonic()
    total = ring.all_reduce(gradient_of(settings.rank, step, size))
    done = time.monotonic()
    lanes = array.array("I", total[:LANE] + total[-LANE:])
    if any(lane != expected_sum(settings.world, step) for lane in lanes):
        raise ArithmeticError(f"step {step}: the all-reduce gave {lanes.tolist()}")
    return {
        "rank": settings.rank,
        "step": step,
        "time": round(wall, 6),
        "step_seconds": round(done - start, 6),
        "input_seconds": round(loaded - start, 6),
        "compute_seconds": round(computed - loaded, 6),
        "allreduce_seconds": round(done - computed, 6),
    }


def leave(_signal: int, _frame: FrameType | None) -> NoReturn:
    """End at once: a terminated pod has nothing to save here."""
    os._exit(0)


def main() -> int:
    """Train by the environment's settings.

    Returns:
        0 when done or terminated, 1 when a peer was lost, 2 when the environment is not complete.
    """
    signal.signal(signal.SIGTERM, leave)
    try:
        settings = Settings.from_environment(os.environ)
    except (KeyError, ValueError) as error:
        print(f"trainer: bad or missing variable: {error}", file=sys.stderr)
        return 2
    try:
        train(settings)
    except (OSError, ArithmeticError) as error:
        print(f"trainer: rank {settings.rank}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
