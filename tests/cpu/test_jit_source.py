"""The joined sources: what is inlined, what is refused, where lines come from, the same source in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from haloconv.jit import KernelSource, SourceError, family_sources, kernel_source, source
from haloconv.version import __version__

ROOT = Path(__file__).resolve().parents[2]

FILES = {
    "families/toy.cu": (
        '// toy\n#include "a.cuh"\n#include "ptx/b.cuh"\nint main_line;\n  #  include "a.cuh"\nint last_line;\n'
    ),
    "a.cuh": '#pragma once\n#include "ptx/b.cuh"\nint a_line;\n',
    "ptx/b.cuh": "#pragma once\nint b_line;\n",
    "families/missing.cu": '\n\n#include "gone.cuh"\n',
    "families/system.cu": '#include "a.cuh"\n#include <cuda_fp16.h>\n',
    "families/escape.cu": '#include "../secret.cuh"\n',
    "families/circle.cu": '#include "round.cuh"\n',
    "round.cuh": '#include "families/circle.cu"\nint round_line;\n',
}


@pytest.fixture(autouse=True)
def kernel_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(source, "SOURCE_ROOT", tmp_path)
    _forget()
    yield tmp_path
    _forget()


def _forget() -> None:
    source._specialised.cache_clear()
    source._joined.cache_clear()


def _code(joined: KernelSource) -> list[str]:
    return [line for line in joined.code.splitlines() if line.startswith("int ")]


def test_headers_are_joined_once_and_in_order() -> None:
    joined = kernel_source("toy", "toy", {})
    assert _code(joined) == ["int b_line;", "int a_line;", "int main_line;", "int last_line;"]
    assert "#include" not in joined.code.replace(" ", "")
    assert "#pragma once" not in joined.code


def test_a_circle_of_includes_ends() -> None:
    assert _code(kernel_source("circle", "circle", {})) == ["int round_line;"]


def test_banner_and_constants_come_first_in_the_given_order() -> None:
    joined = kernel_source("toy", "toy_fprop", {"ZULU": 3, "ALPHA": -2, "ELEM": "hc::fp16", "WIDE": "unsigned short"})
    banner, *defines = joined.code.splitlines()[:5]
    assert banner.startswith("//") and "toy_fprop" in banner and __version__ in banner
    assert defines == [
        "#define ZULU 3",
        "#define ALPHA (-2)",
        "#define ELEM hc::fp16",
        "#define WIDE unsigned short",
    ]


def test_every_line_knows_its_file_and_number(kernel_folder: Path) -> None:
    joined = kernel_source("toy", "toy", {"K": 1})
    for number, line in enumerate(joined.code.splitlines(), 1):
        if line.startswith("int "):
            origin = joined.origin(number)
            assert origin is not None
            assert (kernel_folder / origin.file).read_text().splitlines()[origin.line - 1] == line
    assert joined.origin(1) is None and joined.origin(2) is None


def test_family_sources_lists_every_file(kernel_folder: Path) -> None:
    assert family_sources("toy") == [kernel_folder / name for name in ("families/toy.cu", "a.cuh", "ptx/b.cuh")]


@pytest.mark.parametrize(
    "kernel, words",
    [
        ("missing", ["missing.cu:3", "gone.cuh"]),
        ("system", ["system.cu:2", "cuda_fp16.h", "system header"]),
        ("escape", ["escape.cu:1", "../secret.cuh", "outside"]),
        ("absent", ["absent.cu"]),
    ],
)
def test_a_bad_include_is_named_with_its_place(kernel: str, words: list[str]) -> None:
    with pytest.raises(SourceError) as raised:
        kernel_source(kernel, kernel, {})
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("name, value", [("1K", 3), ("K K", 3), ("K", 1.5), ("K", "a+b"), ("K", ""), ("K", "x\n#y")])
def test_a_bad_constant_is_refused(name: str, value: object) -> None:
    with pytest.raises(SourceError, match="constant"):
        kernel_source("toy", "toy", {name: value})  # type: ignore[dict-item]


def test_the_digest_tells_kernels_entries_and_constants_apart() -> None:
    variants = [
        kernel_source("toy", "toy", {"K": 1}),
        kernel_source("toy", "toy", {"K": 2}),
        kernel_source("toy", "toy", {"K": 1, "C": 1}),
        kernel_source("toy", "toy", {"C": 1, "K": 1}),
        kernel_source("toy", "other", {"K": 1}),
        kernel_source("circle", "toy", {"K": 1}),
    ]
    assert len({variant.digest for variant in variants}) == len(variants)
    same_code = KernelSource("toy", "other", (), variants[0].code)
    assert same_code.digest != variants[0].digest


def test_the_same_arguments_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = kernel_source("toy", "toy", {"K": 1})
    monkeypatch.setattr(source, "_read", lambda *_: pytest.fail("a kernel was read twice"))
    assert kernel_source("toy", "toy", {"K": 1}) is first


def test_every_process_makes_the_same_source(kernel_folder: Path) -> None:
    code = (
        "from pathlib import Path; from haloconv.jit import source\n"
        f"source.SOURCE_ROOT = Path({str(kernel_folder)!r})\n"
        "print(source.kernel_source('toy', 'toy', {'K': 1, 'ELEM': 'float'}).digest)"
    )
    outputs = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code]
        run = subprocess.run(
            command, env=environment, cwd=kernel_folder, capture_output=True, text=True, timeout=120, check=True
        )
        outputs.add(run.stdout.strip())
    assert outputs == {kernel_source("toy", "toy", {"K": 1, "ELEM": "float"}).digest}
