"""Batches from a file, read by a worker process: the part of a trainer that can starve it.

As in PyTorch's own loader the worker is a fork of the trainer, it reads ahead, and a step waits
when no batch is there. Each batch is read from storage, not from memory: the page cache lets go
of it afterwards. Standard library only.
"""

import fcntl
import os
import signal
import struct
import tempfile
from contextlib import suppress
from typing import NoReturn

BATCHES = 16
AHEAD = 2  # batches that wait in the pipe, as PyTorch's prefetch factor
NUMBER = struct.Struct("<Q")
PIPE_MAX = 1 << 20  # what the kernel allows without privilege (/proc/sys/fs/pipe-max-size)


class Batches:
    """A file of numbered batches, without a name: it goes with the last process that has it open.

    Args:
        size: Of a batch, in bytes.
        folder: Where the file is; None is the folder for temporary files.
    """

    def __init__(self, *, size: int, folder: str | None = None) -> None:
        self._size = size
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            self._file = os.dup(file.fileno())
        for number in range(BATCHES):
            os.pwrite(
                self._file, NUMBER.pack(number) + os.urandom(size - NUMBER.size), number * size
            )
        os.fsync(self._file)
        # Without reading ahead: what a limit on reads lets through is then all of some batch.
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, step: int) -> bytes:
        """Read the batch of a step from storage.

        Raises:
            OSError: The file could not be read.
        """
        start = step % BATCHES * self._size
        data = bytearray()
        while len(data) < self._size:
            part = os.pread(self._file, self._size - len(data), start + len(data))
            if not part:
                raise EOFError(f"batch {step % BATCHES} ends early")
            data += part
        os.posix_fadvise(self._file, start, self._size, os.POSIX_FADV_DONTNEED)
        return bytes(data)


def number_of(batch: bytes | bytearray) -> int:
    """Return the number that a batch begins with."""
    return int(NUMBER.unpack_from(batch)[0])


class Loader:
    """Hands over one batch a step, from a worker process of its own.

    Make it before any connection: the worker is a fork and would hold them open.

    Args:
        size: Of a batch, in bytes.

    Attributes:
        pid: Of the worker.
    """

    def __init__(self, *, size: int) -> None:
        self._size = size
        batches = Batches(size=size)
        self._pipe, writing = os.pipe()
        with suppress(OSError):  # a smaller pipe reads less far ahead
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, min(AHEAD * size, PIPE_MAX))
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._pipe)
            _work(batches, writing)
        os.close(writing)

    def next(self, step: int) -> bytes:
        """Return the batch of a step; steps count from 0.

        Raises:
            ConnectionError: The worker ended.
            ArithmeticError: It brought another batch.
        """
        data = bytearray()
        while len(data) < self._size:
            part = os.read(self._pipe, self._size - len(data))
            if not part:
                raise ConnectionError("the loader's worker ended")
            data += part
        if number_of(data) != step % BATCHES:
            raise ArithmeticError(f"step {step}: the loader brought batch {number_of(data)}")
        return bytes(data)

    def close(self) -> None:
        """End the worker."""
        os.close(self._pipe)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # a pod's first process may have reaped it
            os.waitpid(self.pid, 0)


def _work(batches: Batches, pipe: int) -> NoReturn:
    """Read batch after batch into the pipe until nobody reads from it."""
    status = 0
    try:
        step = 0
        while True:
            waiting = memoryview(batches.read(step))
            while waiting:
                waiting = waiting[os.write(pipe, waiting) :]
            step += 1
    except BrokenPipeError:
        pass
    except OSError:
        status = 1
    finally:
        os._exit(status)
