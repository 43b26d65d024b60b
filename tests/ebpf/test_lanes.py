"""Vectors of counters in one integer."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from sidecar.ebpf import lanes

COUNTS = st.lists(st.integers(0, 1 << 40), min_size=4, max_size=4)


def packed(values: list[int]) -> bytes:
    return struct.pack("<4Q", *values)


@given(COUNTS, COUNTS)
def test_growth_is_lane_by_lane(start: list[int], more: list[int]) -> None:
    ledger = lanes.Ledger()
    ledger.begin()
    assert lanes.unpack(ledger.grown(b"k", packed(start)), 4) == tuple(start)
    ledger.begin()
    end = [a + b for a, b in zip(start, more, strict=True)]
    assert lanes.unpack(ledger.grown(b"k", packed(end)), 4) == tuple(more)
    assert ledger.grown(b"k", packed(end)) == 0


def test_first_and_second() -> None:
    vector = int.from_bytes(packed([7, 9, 11, 13]), "little")
    assert (lanes.first(vector), lanes.second(vector)) == (7, 9)


def test_an_entry_that_started_anew_counts_from_zero() -> None:
    ledger = lanes.Ledger()
    ledger.grown(b"k", packed([10, 100, 5, 5]))
    assert lanes.unpack(ledger.grown(b"k", packed([2, 20, 1, 1])), 4) == (2, 20, 1, 1)


def test_an_entry_that_started_anew_with_as_many_samples_counts_from_zero() -> None:
    ledger = lanes.Ledger()
    ledger.grown(b"k", packed([1, 300, 0, 1]))
    assert lanes.unpack(ledger.grown(b"k", packed([1, 200, 1, 0])), 4) == (1, 200, 1, 0)


def test_idle_keys_are_forgotten() -> None:
    ledger = lanes.Ledger()
    for turn in range(5):
        ledger.begin()
        ledger.grown(b"idle", packed([1, 1, 1, 1]))
        ledger.grown(b"busy", packed([turn + 1, 1, 1, 1]))
    assert ledger.idle(3) == [b"idle"]
    assert ledger.grown(b"busy", packed([5, 1, 1, 1])) == 0


def test_keys_that_the_map_let_go_do_not_pile_up() -> None:
    """Thousands of short connections pass through a map of a few thousand entries."""
    ledger = lanes.Ledger()
    ledger.grown(b"kept", packed([5, 5, 5, 5]))
    for turn in range(100):
        ledger.begin()
        keys = [b"kept", *(b"%d/%d" % (turn, n) for n in range(500))]
        for key in keys:
            ledger.grown(key, packed([5, 5, 5, 5]))
        ledger.end(keys)
    assert len(ledger._seen) <= 2 * 501 + lanes.SLACK
    assert ledger.grown(b"kept", packed([5, 5, 5, 5])) == 0
