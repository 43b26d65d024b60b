"""The map reader on real maps."""

import ctypes
import errno
import os
import struct
from collections.abc import Iterator

import pytest

from sidecar.ebpf import syscall
from sidecar.ebpf.maps import BpfMap

HASH, ARRAY, LRU_HASH = 1, 2, 9
BPF_MAP_CREATE = 0


def create(kind: int, key: int, value: int, entries: int) -> int:
    attr = struct.pack("<IIIII", kind, key, value, entries, 0)
    return syscall.bpf(BPF_MAP_CREATE, ctypes.create_string_buffer(attr, len(attr)))


@pytest.fixture(params=[True, False], ids=["batch", "one by one"])
def table(request: pytest.FixtureRequest) -> Iterator[BpfMap]:
    if os.geteuid() != 0:
        pytest.skip("needs root: bpf(2)")
    made = BpfMap(create(HASH, 6, 12, 4096), batch=request.param)
    yield made
    made.close()


def test_sizes_are_the_kernels(table: BpfMap) -> None:
    assert (table.key_size, table.value_size, table.max_entries) == (6, 12, 4096)


def test_an_empty_map(table: BpfMap) -> None:
    assert list(table.items()) == []
    assert table.get(bytes(6)) is None
    table.delete(bytes(6))


@pytest.mark.parametrize("count", [1, 255, 256, 257, 4096])
def test_all_entries_are_read_once(table: BpfMap, count: int) -> None:
    wanted = {i.to_bytes(6, "big"): i.to_bytes(12, "big") for i in range(count)}
    for key, value in wanted.items():
        table.set(key, value)
    for _ in range(2):  # buffers have grown by the second time
        found = list(table.items())
        assert len(found) == count
        assert dict(found) == wanted


def test_write_and_delete(table: BpfMap) -> None:
    table.set(b"first.", b"a" * 12)
    table.set(b"first.", b"b" * 12)
    table.set(b"second", b"c" * 12)
    table.delete(b"second")
    assert dict(table.items()) == {b"first.": b"b" * 12}


def test_a_full_map_says_so(table: BpfMap) -> None:
    for i in range(4096):
        table.set(i.to_bytes(6, "big"), bytes(12))
    with pytest.raises(OSError) as caught:  # noqa: PT011 # the errno is the point
        table.set(b"\xff" * 6, bytes(12))
    assert caught.value.errno == errno.E2BIG


def test_arrays_and_lru_maps(table: BpfMap) -> None:
    array = BpfMap(create(ARRAY, 4, 8, 3))
    array.set((1).to_bytes(4, "little"), b"12345678")
    assert [value for _, value in array.items()] == [bytes(8), b"12345678", bytes(8)]
    array.close()
    lru = BpfMap(create(LRU_HASH, 4, 8, 64))
    for i in range(1000):
        lru.set(i.to_bytes(4, "little"), bytes(8))
    assert 0 < len(list(lru.items())) <= 64
    lru.close()
