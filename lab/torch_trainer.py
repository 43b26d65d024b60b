"""Data-parallel training with PyTorch: DDP over gloo, on processors, one thread.

Started by PyTorch's own launcher (``python3 -m torch.distributed.run -m lab.torch_trainer``) with
the system's Python. It writes the same line a step as ``lab.trainer``; where DDP overlaps the
all-reduce with the backward pass, ``allreduce_seconds`` is the backward pass as a whole.
"""

import json
import os
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from lab.loader import BATCHES, Batches, number_of

WIDTH = 512  # two layers of 512 x 512 and their like: 2 MB of gradient
ROWS = 16


class Stored(IterableDataset):  # type: ignore[misc]  # torch is the system's: no types here
    """Batches read from storage, without end."""

    def __init__(self, size: int) -> None:
        self._batches = Batches(size=size)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield one batch a step: its number and its values."""
        step = 0
        while True:
            data = self._batches.read(step)
            values = torch.frombuffer(bytearray(data), dtype=torch.uint8)[: ROWS * WIDTH]
            yield number_of(data), values.float().div(255).reshape(ROWS, WIDTH)
            step += 1


def model() -> torch.nn.Module:
    """Return a small network of some half a million parameters."""
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    )


def train() -> None:
    """Run steps until the launcher ends the process."""
    size = int(os.environ.get("TRAINER_BATCH_BYTES", "262144"))
    accelerator_s = float(os.environ.get("TRAINER_ACCELERATOR_SECONDS", "0.06"))
    steps = int(os.environ.get("TRAINER_STEPS", "0"))
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(7)
    batches = iter(DataLoader(Stored(size), batch_size=None, num_workers=1))
    step, (number, values) = 0, next(batches)  # the worker is a fork: before any connection
    dist.init_process_group("gloo")
    trained = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    while steps == 0 or step < steps:
        wall, start = time.time(), time.monotonic()
        if step:
            number, values = next(batches)
        if number != step % BATCHES:
            raise ArithmeticError(f"step {step}: the loader brought batch {number}")
        loaded = time.monotonic()
        loss = torch.nn.functional.mse_loss(trained(values), values)
        time.sleep(accelerator_s)
        computed = time.monotonic()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done = time.monotonic()
        line = {
            "rank": rank,
            "step": step,
            "time": round(wall, 6),
            "step_seconds": round(done - start, 6),
            "input_seconds": round(loaded - start, 6),
            "compute_seconds": round(computed - loaded, 6),
            "allreduce_seconds": round(done - computed, 6),
            "loss": round(float(loss), 6),
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        step += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
