"""The BTF reader, against what the compiler says of the same types and against this kernel."""

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.ebpf.btf import DEFAULT_PATH, Btf, BtfError

SOURCE = r"""
#include <stdio.h>
#include <stddef.h>
typedef struct { int unused; struct { long deep[2]; } in; } wrapped;
enum colour { RED = 3, GREEN, BLUE = -7 };
struct outer {
    char first;
    union { int number; struct { short low, high; }; };
    const volatile wrapped typed;
    unsigned bits : 3, more : 5;
    void *last;
};
struct outer kept;
enum colour colour = GREEN;
typedef void (*btf_trace_three)(void *, int, struct outer *, long);
btf_trace_three trace;
int main(void)
{
    printf("first %zu\nnumber %zu\nhigh %zu\ntyped.in.deep %zu\nlast %zu\nsize %zu\n",
           offsetof(struct outer, first), offsetof(struct outer, number),
           offsetof(struct outer, high), offsetof(struct outer, typed.in.deep),
           offsetof(struct outer, last), sizeof(struct outer));
    return 0;
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Btf, dict[str, int]]:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("btf")
    (folder / "a.c").write_text(SOURCE)
    subprocess.run(["gcc", "-gbtf", "-c", "a.c"], cwd=folder, check=True)
    flags = ["--only-section=.BTF", "--set-section-flags", ".BTF=alloc"]
    subprocess.run(["objcopy", "-O", "binary", *flags, "a.o", "a.btf"], cwd=folder, check=True)
    subprocess.run(["gcc", "a.o", "-o", "a"], cwd=folder, check=True)
    said = subprocess.run(["./a"], cwd=folder, check=True, capture_output=True, text=True).stdout
    truth = {name: int(value) for name, value in (line.split() for line in said.splitlines())}
    return Btf.load(str(folder / "a.btf")), truth


def test_offsets_are_the_compilers(compiled: tuple[Btf, dict[str, int]]) -> None:
    btf, truth = compiled
    assert btf.size("outer") == truth.pop("size")
    for member, offset in truth.items():
        assert btf.offset(f"outer.{member}") == offset


def test_enums_and_arities(compiled: tuple[Btf, dict[str, int]]) -> None:
    btf, _ = compiled
    assert btf.enum("colour") == {"RED": 3, "GREEN": 4, "BLUE": -7}
    assert btf.enumerator("colour.BLUE") == -7
    assert btf.tracepoint_arity("three") == 3


def test_the_first_alternative_that_exists_counts(compiled: tuple[Btf, dict[str, int]]) -> None:
    btf, truth = compiled
    assert btf.offset("outer.gone|nothing.at_all|outer.last") == truth["last"]


@pytest.mark.parametrize("path", ["outer.gone", "outer.first.below", "nothing.first", "outer.more"])
def test_what_is_not_there_is_named(compiled: tuple[Btf, dict[str, int]], path: str) -> None:
    # `more` is there but starts within a byte: reading it as a number would be wrong.
    with pytest.raises(BtfError, match=path):
        compiled[0].offset(path)


def test_what_kernels_differ_in(compiled: tuple[Btf, dict[str, int]]) -> None:
    btf = compiled[0]
    for ask in (btf.size, btf.enum, btf.tracepoint_arity):
        with pytest.raises(BtfError, match="no "):
            ask("missing")
    assert not btf.has_function("missing")


def test_this_kernel() -> None:
    if not os.path.exists(DEFAULT_PATH):
        pytest.skip("this kernel has no BTF")
    btf = Btf.load()
    assert btf.offset("sock_common.skc_rcv_saddr") == btf.offset("sock_common.skc_daddr") + 4
    assert btf.offset("sock.__sk_common.skc_num") == btf.offset("sock_common.skc_num")
    assert 0 < btf.offset("tcp_sock.rack.rtt_us") < btf.size("tcp_sock")
    assert btf.tracepoint_arity("tcp_probe") == 2
    assert btf.has_function("tcp_v4_connect")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(BtfError, match="No such file"):
        Btf.load(str(tmp_path / "vmlinux"))


@given(st.binary(max_size=200))
def test_garbage_is_no_btf(blob: bytes) -> None:
    with pytest.raises(BtfError):
        Btf(blob)


@given(st.binary(min_size=1, max_size=11))
def test_a_type_section_that_is_cut_short(types: bytes) -> None:
    header = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), 1)
    with pytest.raises(BtfError, match="cut short"):
        Btf(header + types + bytes(1))
