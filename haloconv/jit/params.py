"""The struct that a kernel takes, read from the kernel's own source: the name, kind and place of every scalar in it."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from haloconv.jit.driver import TENSOR_MAP_BYTES
from haloconv.jit.source import KernelSource

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_STRUCT = re.compile(r"\bstruct\s+(?:alignas\(\d+\)\s*)?(\w+)\s*\{")
_ALIAS = re.compile(r"\busing\s+(\w+)\s*=\s*([\w:]+)\s*(?:<[^;]*>)?\s*;")
_OPTIONAL = re.compile(r"^#ifdef (\w+)\n(.*?)^#endif$", re.DOTALL | re.MULTILINE)
_NAMESPACE = re.compile(r"\w+::")
_MEMBER = re.compile(r"(?:const )?(unsigned (?:char|short|int)|[\w:]+)(\*?) (.*)")
_DECLARATOR = re.compile(r"(\**)\s*(\w+)\s*(?:\[(\d+)\])?")
_SCALARS = {"int": "i", "unsigned": "I", "i64": "q", "float": "f"}
_POINTER, _MAP, _MAP_ALIGNMENT = "Q", f"{TENSOR_MAP_BYTES}s", 64


class ParamsError(RuntimeError):
    """A kernel's struct is written in a way that this file cannot read."""


class Field(NamedTuple):
    """One scalar, pointer or tensor map. ``code`` is its format as the module struct names it: P for a pointer."""

    name: str
    code: str
    offset: int

    @property
    def is_pointer(self) -> bool:
        return self.code == _POINTER

    @property
    def is_map(self) -> bool:
        return self.code == _MAP


def size_of(fields: tuple[Field, ...]) -> int:
    """Bytes up to the end of the last field."""
    return fields[-1].offset + struct.calcsize(fields[-1].code)


def unpacked(fields: tuple[Field, ...], block: bytes) -> list[int | float | bytes]:
    """The values of the fields in a launch's argument block."""
    return [struct.unpack_from(f"={field.code}", block, field.offset)[0] for field in fields]


@cache
def params_of(source: KernelSource) -> tuple[Field, ...]:
    """The fields of the only parameter of ``source.entry``, in their order and with C's alignment.

    Of constants only those decide about a field that a source may lack: what stands in ``#ifdef NAME``, without an
    ``#else``, is there where the source has a constant of the name.

    Raises ParamsError if the entry or a type is not found.
    """
    names = {name for name, _ in source.constants}
    joined = _OPTIONAL.sub(lambda found: found[2] if found[1] in names else "", source.unspecialised)
    return _parsed(joined, source.kernel, source.entry)


@cache
def _parsed(joined: str, kernel: str, entry: str) -> tuple[Field, ...]:
    """The fields that specialisations of a kernel have which lack the same constants: the values decide nothing."""
    joined = _COMMENT.sub("", joined)
    aliases, structs = dict(_ALIAS.findall(joined)), dict(_bodies(joined))
    return _layout(_parameter_type(joined, kernel, entry), aliases, structs).fields


def _parameter_type(joined: str, kernel: str, entry: str) -> str:
    """The type of the entry's parameter; an entry may be named by the macro ENTRY."""
    for name in (entry, "ENTRY"):
        found = re.search(
            rf"__global__[^;{{]*?\b{name}\s*\(\s*const\s+(?:__grid_constant__\s+)?([\w:]+)\s+\w+\s*\)", joined
        )
        if found:
            return found[1]
    raise ParamsError(f"{kernel}.cu has no entry {entry} that takes one struct by value")


def _bodies(joined: str) -> Iterator[tuple[str, str]]:
    """Name and body of every struct, the bodies of its functions left out."""
    for found in _STRUCT.finditer(joined):
        depth, at, kept = 1, found.end(), []
        while depth:
            letter = joined[at]
            if letter == "{" and depth == 1:
                kept.append(";")
            depth += {"{": 1, "}": -1}.get(letter, 0)
            if depth == 1 and letter not in "{}":
                kept.append(letter)
            at += 1
        yield found[1], "".join(kept)


class _Layout(NamedTuple):
    """The scalars of a type, those of inner structs and arrays one by one; its bytes, padded to its alignment."""

    fields: tuple[Field, ...]
    size: int
    alignment: int


def _layout(kind: str, aliases: dict[str, str], structs: dict[str, str]) -> _Layout:
    plain = _NAMESPACE.sub("", kind)
    if plain in _SCALARS:
        return _single(_SCALARS[plain])
    if plain == "TensorMap":
        return _single(_MAP, _MAP_ALIGNMENT)
    if plain in structs:
        return _joined(
            (name, _single(_POINTER) if is_pointer else _layout(member, aliases, structs))
            for member, name, is_pointer in _members(structs[plain])
        )
    if plain in aliases:
        return _layout(aliases[plain], aliases, structs)
    raise ParamsError(f"a kernel's parameter has the type {kind}, of which no definition was found")


def _single(code: str, alignment: int = 0) -> _Layout:
    size = struct.calcsize(code)
    return _Layout((Field("", code, 0),), size, alignment or size)


def _joined(members: Iterable[tuple[str, _Layout]]) -> _Layout:
    """A struct of these members: each at its alignment, and the end at the struct's."""
    fields, at, alignment = [], 0, 1
    for name, member in members:
        at += -at % member.alignment
        fields += [
            Field(f"{name}.{inner.name}" if inner.name else name, inner.code, at + inner.offset)
            for inner in member.fields
        ]
        at += member.size
        alignment = max(alignment, member.alignment)
    return _Layout(tuple(fields), at + -at % alignment, alignment)


def _members(body: str) -> Iterator[tuple[str, str, bool]]:
    """Type, name and whether it is a pointer, of every data member; an array gives one for each of its elements."""
    for statement in body.split(";"):
        words = " ".join(statement.split())
        if not words or "(" in words or words.startswith(("using ", "static ", "template", "constexpr ")):
            continue
        member = _MEMBER.fullmatch(words)
        parts = member[3].split(",") if member else []
        declarators = [found for part in parts if (found := _DECLARATOR.fullmatch(part.strip())) is not None]
        if member is None or len(declarators) < len(parts):
            raise ParamsError(f"a kernel's parameter has a member that is not understood: {words}")
        for i, (stars, name, count) in enumerate(each.groups() for each in declarators):
            names = [name] if count is None else [f"{name}[{index}]" for index in range(int(count))]
            yield from ((member[1], each, bool(stars or (i == 0 and member[2]))) for each in names)
