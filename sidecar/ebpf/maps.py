"""Reads and writes BPF maps by descriptor: batches where the kernel has them, else one by one.

Source: `union bpf_attr` and `struct bpf_map_info` in include/uapi/linux/bpf.h of the Linux
kernel. Batch look-ups came with 5.6 (hash and LRU hash maps, arrays).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

from sidecar.ebpf import syscall

if TYPE_CHECKING:
    from collections.abc import Iterator

_ELEMENT = struct.Struct("<I4xQQQ")  # map_fd, key, value or next_key, flags
_BATCH = struct.Struct("<QQQQIIQQ")  # in_batch, out_batch, keys, values, count, map_fd, flags x 2
_BATCH_COUNT = struct.Struct("<I")
_BATCH_COUNT_AT = 32
_INFO = struct.Struct("<IIIII")  # type, id, key_size, value_size, max_entries
_FIRST_CAPACITY = 256
_REFUSED = frozenset({errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP, 524})  # 524: ENOTSUPP


class BpfMap:
    """One map; owns its descriptor.

    Not thread-safe: look-ups share their buffers.

    Args:
        fd: the map's descriptor, closed by `close`.
        batch: False reads one by one from the start, as kernels before 5.6 make necessary.

    Attributes:
        key_size: bytes of a key.
        value_size: bytes of a value.
        max_entries: entries that the map can hold.
    """

    def __init__(self, fd: int, *, batch: bool = True) -> None:
        self._fd = fd
        info = ctypes.create_string_buffer(_INFO.size)
        attr = struct.pack("<IIQ", fd, len(info), syscall.address(info))
        syscall.bpf(syscall.BPF_OBJ_GET_INFO_BY_FD, ctypes.create_string_buffer(attr, len(attr)))
        _, _, self.key_size, self.value_size, self.max_entries = _INFO.unpack(info.raw)
        self._batch = batch
        self._key = ctypes.create_string_buffer(self.key_size)
        self._next = ctypes.create_string_buffer(self.key_size)
        self._value = ctypes.create_string_buffer(self.value_size)
        self._attr = ctypes.create_string_buffer(_ELEMENT.size)
        self._batch_attr = ctypes.create_string_buffer(_BATCH.size)
        # Where a batch goes on: a bucket number in hash maps, an index in arrays.
        self._cursor = ctypes.create_string_buffer(max(4, self.key_size))
        self._reserve(min(_FIRST_CAPACITY, self.max_entries))

    def close(self) -> None:
        """Closes the descriptor; the map lives as long as programs or others hold it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every entry, key and value.

        Entries that come or go meanwhile may or may not be seen.
        """
        return self.split(self.content())

    def split(self, content: tuple[bytes, bytes]) -> Iterator[tuple[bytes, bytes]]:
        """The entries of what `content` returned."""
        keys, values = content
        size, width = self.key_size, self.value_size
        return zip(
            (keys[at : at + size] for at in range(0, len(keys), size)),
            (values[at : at + width] for at in range(0, len(values), width)),
            strict=True,
        )

    def content(self) -> tuple[bytes, bytes]:
        """All keys and all values, one after another: equal to the last where nothing moved."""
        if self._batch:
            return self._content_by_batch()
        found = [(key, self.get(key)) for key in self._keys_one_by_one()]
        there = [(key, value) for key, value in found if value is not None]
        return b"".join(key for key, _ in there), b"".join(value for _, value in there)

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, or None."""
        self._key.raw = key
        try:
            self._element(syscall.BPF_MAP_LOOKUP_ELEM, self._value, 0)
        except FileNotFoundError:
            return None
        return self._value.raw

    def set(self, key: bytes, value: bytes) -> None:
        """Writes an entry; raises OSError (E2BIG: the map is full)."""
        self._key.raw = key
        self._value.raw = value
        self._element(syscall.BPF_MAP_UPDATE_ELEM, self._value, 0)

    def delete(self, key: bytes) -> None:
        """Removes an entry, if it is there."""
        self._key.raw = key
        with suppress(FileNotFoundError):
            self._element(syscall.BPF_MAP_DELETE_ELEM, None, 0)

    def _element(self, command: int, value: syscall.Buffer | None, flags: int) -> None:
        at = syscall.address(value) if value is not None else 0
        _ELEMENT.pack_into(self._attr, 0, self._fd, syscall.address(self._key), at, flags)
        syscall.bpf(command, self._attr)

    def _reserve(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys = ctypes.create_string_buffer(capacity * self.key_size)
        self._values = ctypes.create_string_buffer(capacity * self.value_size)

    def _content_by_batch(self) -> tuple[bytes, bytes]:
        keys, values = b"", b""
        first = True
        while True:
            try:
                count, last = self._lookup_batch(first=first)
            except OSError as error:
                if error.errno == errno.ENOSPC and self._capacity < self.max_entries:
                    # One bucket holds more entries than the buffers.
                    self._reserve(min(self._capacity * 2, self.max_entries))
                    continue
                if first and error.errno in _REFUSED:
                    self._batch = False
                    return self.content()
                raise
            keys += ctypes.string_at(self._keys, count * self.key_size)
            values += ctypes.string_at(self._values, count * self.value_size)
            if last:
                if first and count * 2 > self._capacity < self.max_entries:
                    self._reserve(min(self._capacity * 2, self.max_entries))
                return keys, values
            first = False

    def _lookup_batch(self, *, first: bool) -> tuple[int, bool]:
        """Fills the buffers; gives the number of entries and whether they are the last."""
        cursor = syscall.address(self._cursor)
        _BATCH.pack_into(
            self._batch_attr,
            0,
            0 if first else cursor,
            cursor,
            syscall.address(self._keys),
            syscall.address(self._values),
            self._capacity,
            self._fd,
            0,
            0,
        )
        last = False
        try:
            syscall.bpf(syscall.BPF_MAP_LOOKUP_BATCH, self._batch_attr)
        except FileNotFoundError:  # ENOENT marks the end; the count is valid
            last = True
        count: int = _BATCH_COUNT.unpack_from(self._batch_attr, _BATCH_COUNT_AT)[0]
        return count, last

    def _keys_one_by_one(self) -> Iterator[bytes]:
        key: bytes | None = None
        # Deleted keys restart the kernel's walk: the bound keeps it finite.
        for _ in range(self.max_entries):
            if key is not None:
                self._key.raw = key
            at = 0 if key is None else syscall.address(self._key)
            _ELEMENT.pack_into(self._attr, 0, self._fd, at, syscall.address(self._next), 0)
            try:
                syscall.bpf(syscall.BPF_MAP_GET_NEXT_KEY, self._attr)
            except FileNotFoundError:
                return
            key = self._next.raw
            yield key
