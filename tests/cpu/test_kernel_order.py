"""Every .cu file reads in one order: header, constants, static_asserts, shared memory, functions, entry."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from haloconv.families import FAMILIES, OWN
from haloconv.jit.source import SOURCE_ROOT, kernel_path
from tests.cpu.test_budgets import KERNELS, name_of, without_comments

FILES = {
    f"{file.relative_to(SOURCE_ROOT / 'families').parts[0]}/{file.stem}": file
    for file in KERNELS
    if file.suffix == ".cu"
}
IN_A_HEADER = "its constants decide types and extents that its headers have: the static_asserts stand there"
ANY_VALUE = "every value of its constants is right"

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("halo_sm90/conv", "no static_assert"): IN_A_HEADER,
    ("halo_sm90/conv_edges", "no static_assert"): IN_A_HEADER,
    ("halo_sm90/pointwise", "no static_assert"): IN_A_HEADER,
    ("halo_sm90/pointwise_planes", "no static_assert"): IN_A_HEADER,
    ("halo_sm90/wgrad", "no static_assert"): IN_A_HEADER,
    ("halo_sm90/wgrad_edges", "no static_assert"): IN_A_HEADER,
    ("halo_sm90/wgrad_ss", "no static_assert"): IN_A_HEADER,
}
"""What a file does otherwise, and why. Entries may go; a new one needs a reason that holds for no other file."""


class Item(NamedTuple):
    """A declaration outside of all braces but a namespace's: what it is, its name, the line it begins in."""

    kind: str
    name: str
    line: int


def _closing(code: str, opening: int) -> int:
    """The place of the brace that closes the one at ``opening``."""
    depth = 0
    for place in range(opening, len(code)):
        depth += {"{": 1, "}": -1}.get(code[place], 0)
        if depth == 0:
            return place
    raise ValueError("a brace is never closed")


def _item(head: str, line: int) -> Item:
    """The declaration that begins with ``head``, up to its body or its end."""
    words = re.sub(r"^\s*template\s*<[^{};]*?>\s*(?=struct|class|__|constexpr)", "", head).strip()
    if struct := re.match(r"(?:struct|class|union)\b(?:\s+alignas\([^{;]*\))?\s*(\w*)", words):
        return Item("struct", struct[1], line)
    if words.startswith("static_assert"):
        return Item("assert", "", line)
    if "__global__" in words:
        plain = re.sub(r"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)", "", words)
        return Item("entry", re.search(r"(\w+)\s*\(", plain.split("__global__")[1])[1], line)
    if "__device__" in words and (
        function := re.search(r"(\w+)\s*(?:<[\w:, ]*>)?\s*\(", words.split("__forceinline__")[-1])
    ):
        return Item("constant" if "constexpr" in words else "function", function[1], line)
    return Item("constant", "", line)


def items(text: str) -> Iterator[Item]:
    """The declarations of a device file, in their order. A function that is constexpr counts as a constant."""
    code = re.sub(
        r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*",
        lambda found: re.sub(r"[^\n]", " ", found[0]),
        without_comments(text),
        flags=re.M,
    )
    code = re.sub(r'extern "C"', "          ", code)
    code = re.sub(r'"[^"\n]*"', lambda found: "_" * len(found[0]), code)
    begin = place = 0
    while place < len(code):
        head = code[begin:place]
        if code[place] == "{" and re.fullmatch(r"\s*namespace\s*[\w:]*\s*", head) or code[place] == "}":
            begin = place + 1
        elif code[place] == "{":
            item = _item(head, code.count("\n", 0, begin + len(head) - len(head.lstrip())) + 1)
            place = _closing(code, place)
            if item.kind == "constant" and "(" not in head.split("=")[0] or item.kind == "struct":
                place = code.index(";", place)
            yield item
            begin = place + 1
        elif code[place] == ";":
            yield _item(head, code.count("\n", 0, begin + len(head) - len(head.lstrip())) + 1)
            begin = place + 1
        place += 1


def shared_structs(text: str) -> set[str]:
    """Names of structs that stand in shared memory: those declared so, and what the whole of it is seen as."""
    code = without_comments(text)
    declared = set(re.findall(r"__shared__\s+(?:__align__\([^)]*\)\s*)?(?:[\w:]+::)?(\w+)\s+\w+;", code))
    return declared | {"Smem"}


def deviations(text: str) -> set[str]:
    """What of the order a .cu file does not keep."""
    found, declared = set(), list(items(text))
    first = next((item.line for item in declared if item.kind in ("function", "entry")), 1 << 30)
    asserts = [
        text.count("\n", 0, each.start()) + 1 for each in re.finditer(r"\bstatic_assert\b", without_comments(text))
    ]
    constants = next((i + 1 for i, line in enumerate(text.splitlines()) if re.match(r"// Constants\b", line)), 1 << 30)
    if not text.startswith("//"):
        found.add("no header comment")
    if constants > min((item.line for item in declared if item.kind != "constant"), default=0):
        found.add("constants are not documented first")
    if not asserts:
        found.add("no static_assert")
    if any(line >= first for line in asserts):
        found.add("assert behind a function")
    if any(item.kind == "struct" and item.name in shared_structs(text) and item.line > first for item in declared):
        found.add("shared memory behind a function")
    entries = [item.kind == "entry" for item in declared]
    if not any(entries) or entries != sorted(entries):
        found.add("entry is not last")
    return found


def read(file: Path) -> str:
    """A .cu file; one that is another with constants more, as that one behind its own header."""
    text = file.read_text(encoding="utf-8")
    return re.sub(r'#include "([\w/]+\.cu)"\n', lambda found: read(SOURCE_ROOT / found[1]), text)


@cache
def _constants() -> dict[str, set[str]]:
    """The constants that hosts give to the CI sources of each .cu file."""
    found: dict[str, set[str]] = {}
    for source in (source for name in OWN for source in FAMILIES[name].sources()):
        found.setdefault(source.kernel, set()).update(name for name, _ in source.constants)
    return found


def documented(text: str) -> set[str]:
    """Names in upper case in comments: those of constants, and what they are explained by."""
    return set(re.findall(r"\b[A-Z][A-Z0-9_]*\b", "\n".join(re.findall(r"//[^\n]*", text))))


def test_every_kernel_is_looked_at() -> None:
    assert len(FILES) > 30 and set(FILES) == set(_constants())
    assert {kernel for kernel, _ in EXCEPTIONS} <= set(FILES)
    assert all(Path(f"{SOURCE_ROOT / kernel_path(kernel)}.cu") == file for kernel, file in FILES.items())


@pytest.mark.parametrize("kernel", FILES)
def test_a_kernel_reads_in_the_order(kernel: str) -> None:
    """And what is excepted is so still: an exception that no file needs any more must go."""
    excepted = {what for name, what in EXCEPTIONS if name == kernel}
    assert deviations(read(FILES[kernel])) == excepted


@pytest.mark.parametrize("kernel", FILES)
def test_the_constants_of_a_kernel_are_documented(kernel: str) -> None:
    """In its own file, each with what it is, whatever header uses it."""
    assert _constants()[kernel] - documented(read(FILES[kernel])) == set()


@pytest.mark.parametrize("file", KERNELS, ids=name_of)
def test_static_asserts_are_sentences(file: Path) -> None:
    """At least three words that say what holds."""
    code = file.read_text(encoding="utf-8")
    asserts = re.findall(r'static_assert\((?:[^;"]|"[^"]*")*?(?:"((?:[^"]|"\s*")*)")?\);', code)
    assert len(asserts) == len(re.findall(r"\bstatic_assert\(", without_comments(code)))
    assert not [message for message in asserts if len(message.split()) < 3]


SAMPLE = """// Doubles.
#include "kernels/numeric.cuh"

// Constants: ELEM.
constexpr int TWO = 2;
static_assert(TWO == 2, "two is two");

struct Smem {
    float of[2];
};

template <class T, int N>
__device__ __forceinline__ T twice(T value) { return TWO * value; }

extern "C" __global__ void __launch_bounds__(32 * TWO) doubles(const Params p) { __shared__ Smem smem; }
"""


def test_the_order_is_seen() -> None:
    assert [(item.kind, item.name) for item in items(SAMPLE)] == [
        ("constant", ""), ("assert", ""), ("struct", "Smem"), ("function", "twice"), ("entry", "doubles"),
    ]  # fmt: skip
    assert deviations(SAMPLE) == set()
    lines = SAMPLE.splitlines(keepends=True)
    function, smem = "".join(lines[11:14]), "".join(lines[7:10])
    assert deviations("".join(lines[1:])) == {"no header comment"}
    assert deviations(SAMPLE.replace(function, "").replace(smem, function + smem)) == {
        "shared memory behind a function"
    }
    assert deviations(SAMPLE.replace(lines[5], "")) == {"no static_assert"}
    assert deviations(SAMPLE.replace(lines[5], "").replace("{ return", "{ " + lines[5].strip() + " return")) == {
        "assert behind a function"
    }
    assert deviations(SAMPLE.replace(lines[5], "") + lines[5]) == {"assert behind a function", "entry is not last"}
    assert deviations(SAMPLE.replace(lines[3], "")) == {"constants are not documented first"}
