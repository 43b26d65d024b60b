"""Reads the kernel's own type information (BTF): member offsets, enums, function arities.

Source: Documentation/bpf/btf.rst and include/uapi/linux/btf.h of the Linux kernel. The kernel
serves its types as one file, `/sys/kernel/btf/vmlinux`: a header, a type section and a string
section. Offsets differ by kernel build, so nothing that reads kernel memory may hard-code one.

Standard library only: the loader child runs it under the system's Python.
"""

from __future__ import annotations

import struct
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_PATH = "/sys/kernel/btf/vmlinux"

_MAGIC = 0xEB9F
_HEADER = struct.Struct("<HBBIIIII")
_TYPE = struct.Struct("<III")  # name_off, info, size or type
_TRIPLE = struct.Struct("<III")  # a member: name_off, type, offset; an array: type, index, count
_PAIR = struct.Struct("<Ii")  # an enumerator: name_off, value

_PTR, _ARRAY, _STRUCT, _UNION, _ENUM, _TYPEDEF, _FUNC, _FUNC_PROTO = 2, 3, 4, 5, 6, 8, 12, 13
_SAME_TYPE = frozenset({8, 9, 10, 11, 18})  # typedef, volatile, const, restrict, type tag
# Bytes that follow the 12 of every type: a constant, or a size for each of `vlen` elements.
_TAIL = {1: 4, _ARRAY: 12, 14: 4, 17: 4}
_TAIL_EACH = {_STRUCT: 12, _UNION: 12, _ENUM: 8, _FUNC_PROTO: 8, 15: 12, 19: 12}


class BtfError(Exception):
    """The kernel's type information is unreadable or lacks what was asked for."""


class Btf:
    """The types of one kernel.

    Args:
        blob: the content of a BTF file.

    Raises:
        BtfError: the blob is no BTF of this machine's byte order.
    """

    def __init__(self, blob: bytes) -> None:
        try:
            magic, _, _, header, type_at, type_size, str_at, str_size = _HEADER.unpack_from(blob)
        except struct.error as error:
            raise BtfError("BTF header is cut short") from error
        if magic != _MAGIC:
            raise BtfError(f"no BTF magic (found {magic:#x})")
        self._types = memoryview(blob)[header + type_at : header + type_at + type_size]
        self._strings = blob[header + str_at : header + str_at + str_size]
        self._names = array("I", [0])  # by type id; id 0 is void
        self._places = array("I", [0])
        self._index()

    @classmethod
    def load(cls, path: str = DEFAULT_PATH) -> Btf:
        """Reads a BTF file; raises BtfError where there is none."""
        try:
            with open(path, "rb") as file:
                blob = file.read()
        except OSError as error:
            raise BtfError(f"{path}: {error.strerror}") from error
        return cls(blob)

    def offset(self, path: str) -> int:
        """The byte offset of `struct.member[.member...]`, `|` between alternatives.

        Members of anonymous structs and unions count as their parent's.

        Raises:
            BtfError: no alternative names a byte-aligned member of this kernel.
        """
        for alternative in path.split("|"):
            name, *members = alternative.split(".")
            kind = self._find(name, (_STRUCT, _UNION))
            total = 0
            for member in members:
                found = self._member(kind, member) if kind else None
                if found is None:
                    break
                bits, kind = found
                total += bits
            else:
                if kind and total % 8 == 0:
                    return total // 8
        raise BtfError(f"this kernel has no {path}")

    def size(self, name: str) -> int:
        """The size in bytes of struct `name`; raises BtfError where there is none."""
        kind = self._find(name, (_STRUCT, _UNION))
        if not kind:
            raise BtfError(f"this kernel has no struct {name}")
        return self._read(kind)[2]

    def enum(self, name: str) -> dict[str, int]:
        """The enumerators of enum `name`; raises BtfError where there is none."""
        kind = self._find(name, (_ENUM,))
        if not kind:
            raise BtfError(f"this kernel has no enum {name}")
        _, info, _ = self._read(kind)
        at = self._places[kind] + _TYPE.size
        pairs = _PAIR.iter_unpack(self._types[at : at + (info & 0xFFFF) * _PAIR.size])
        return {self._string(offset): value for offset, value in pairs}

    def enumerator(self, path: str) -> int:
        """The value of `enum.enumerator`; raises BtfError where there is none."""
        name, _, member = path.partition(".")
        value = self.enum(name).get(member)
        if value is None:
            raise BtfError(f"this kernel has no {path}")
        return value

    def tracepoint_arity(self, name: str) -> int:
        """The number of arguments of tracepoint `name`; raises BtfError where there is none.

        Tracepoints appear as typedefs `btf_trace_<name>` of a pointer to a function whose
        first argument is the tracepoint's private data.
        """
        kind = self._find(f"btf_trace_{name}", (_TYPEDEF,))
        if not kind:
            raise BtfError(f"this kernel has no tracepoint {name}")
        while kind:
            _, info, below = self._read(kind)
            if (info >> 24) & 0x1F == _FUNC_PROTO:
                return (info & 0xFFFF) - 1
            kind = below
        raise BtfError(f"tracepoint {name} has no prototype")

    def has_function(self, name: str) -> bool:
        """Whether the kernel kept function `name` with a prototype (what fentry needs)."""
        return self._find(name, (_FUNC,)) != 0

    def _index(self) -> None:
        types, end, place = self._types, len(self._types), 0
        names, places, read = self._names, self._places, _TYPE.unpack_from
        try:
            while place < end:
                name, info, _ = read(types, place)
                names.append(name)
                places.append(place)
                kind = (info >> 24) & 0x1F
                place += 12 + _TAIL.get(kind, 0) + _TAIL_EACH.get(kind, 0) * (info & 0xFFFF)
        except struct.error as error:
            raise BtfError("BTF type section is cut short") from error

    def _read(self, kind: int) -> tuple[int, int, int]:
        name, info, size_or_type = _TYPE.unpack_from(self._types, self._places[kind])
        return name, info, size_or_type

    def _string(self, offset: int) -> str:
        return self._strings[offset : self._strings.index(b"\0", offset)].decode()

    def _find(self, name: str, kinds: tuple[int, ...]) -> int:
        """The id of the type of that name and one of these kinds; 0 where there is none."""
        offset = self._strings.find(b"\0" + name.encode() + b"\0") + 1
        if not offset:
            return 0
        found = 0
        while True:
            try:
                found = self._names.index(offset, found + 1)
            except ValueError:
                return 0
            if (self._read(found)[1] >> 24) & 0x1F in kinds:
                return found

    def _resolve(self, kind: int) -> tuple[int, int]:
        """Follows typedefs and qualifiers; gives the type's id and kind."""
        while kind:
            _, info, below = self._read(kind)
            what = (info >> 24) & 0x1F
            if what not in _SAME_TYPE:
                return kind, what
            kind = below
        return 0, 0

    def _members(self, kind: int) -> Iterator[tuple[int, int, int]]:
        """Each member's name offset, type id and bit offset."""
        kind, what = self._resolve(kind)
        if what not in (_STRUCT, _UNION):
            return
        _, info, _ = self._read(kind)
        at = self._places[kind] + _TYPE.size
        raw = self._types[at : at + (info & 0xFFFF) * _TRIPLE.size]
        for name, member, bits in _TRIPLE.iter_unpack(raw):
            yield name, member, bits & 0xFFFFFF if info >> 31 else bits

    def _member(self, kind: int, name: str) -> tuple[int, int] | None:
        for offset, member, bits in self._members(kind):
            if offset:
                if self._string(offset) == name:
                    return bits, member
            elif (below := self._member(member, name)) is not None:
                return bits + below[0], below[1]
        return None
