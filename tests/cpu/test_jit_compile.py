"""The compiler without a GPU: reports, error messages, missing pieces. Launches are tested in tests/gpu."""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from haloconv import jit
from haloconv.jit import compile as compiler
from tests.toy_kernel import ARCH, STATIC_SMEM_BYTES, toy_source

ROOT = Path(__file__).resolve().parents[2]

REPORT_OF_TWO = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_70'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers, 1024 bytes smem, 360 bytes cmem[0]
ptxas info    : Compiling entry function 'second' for 'sm_70'
ptxas info    : Function properties for second
    40 bytes stack frame, 20 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 256+16 bytes smem
ptxas info    : Function properties for _Z6helperv
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
"""


def test_a_kernel_compiles_without_a_gpu_and_is_reported() -> None:
    cubin = jit.compile_source(toy_source(), ARCH)
    assert cubin.image.startswith(b"\x7fELF")
    assert (cubin.entry, cubin.arch, cubin.nvrtc) == ("toy", ARCH, jit.nvrtc_info()[0])
    assert 0 < cubin.registers <= 32
    assert (cubin.spill_bytes, cubin.stack_bytes, cubin.static_smem_bytes) == (0, 0, STATIC_SMEM_BYTES)
    assert cubin.compile_ms > 0


SPILLING = jit.KernelSource(
    "spilling",
    "spilling",
    (),
    """
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* p) {
    float v[64];
    for (int i = 0; i < 64; i++) v[i] = p[i * 33 + threadIdx.x];
    for (int j = 0; j < 100; j++)
        for (int i = 0; i < 64; i++) v[i] = v[i] * v[(i + 7) % 64] + p[j];
    for (int i = 0; i < 64; i++) p[i] = v[i];
}
""",
)


def test_spills_of_a_real_kernel_are_reported() -> None:
    cubin = jit.compile_source(SPILLING, ARCH)
    assert cubin.registers == 32 and cubin.spill_bytes > 0 and cubin.stack_bytes > 0


def test_the_flags_are_what_nvrtc_gets() -> None:
    from cuda.core import ProgramOptions

    options = ProgramOptions(arch=ARCH, **compiler._program_options("13.0"))
    given = {option.decode() for option in options.as_bytes("nvrtc")}
    assert given == {f"-arch={ARCH}", "--no-cache", *compiler.COMPILE_FLAGS}


def test_reports_are_read_per_entry_with_the_functions_it_calls() -> None:
    assert compiler.parse_resources(REPORT_OF_TWO, "first") == (14, 0, 0, 1024)
    assert compiler.parse_resources(REPORT_OF_TWO, "second") == (255, 52, 48, 256)


@pytest.mark.parametrize("log", ["", REPORT_OF_TWO, REPORT_OF_TWO.replace("second", "third").replace("Used 255", "")])
def test_a_missing_report_is_an_error(log: str) -> None:
    with pytest.raises(ValueError, match="third"):
        compiler.parse_resources(log, "third")


def test_an_error_shows_kernel_line_constants_and_log() -> None:
    good = toy_source(factor=77)
    bad = dataclasses.replace(good, code=good.code.replace("params.n;", "params.missing;"))
    with pytest.raises(jit.CompileError) as raised:
        jit.compile_source(bad, ARCH)
    message = str(raised.value)
    assert "kernel 'toy' does not compile, at toy.cu:7" in message
    assert "--> toy.cu:7  |     shared[threadIdx.x] = FACTOR * params.missing;" in message
    assert "    toy.cu:8  |     __syncthreads();" in message
    assert "constants: FACTOR=77" in message
    assert ARCH in message and 'has no member "missing"' in message
    assert "joined.cu" not in message and "\0" not in message


def test_an_error_in_the_constants_is_placed_there() -> None:
    good = toy_source()
    bad = dataclasses.replace(good, code=good.code.replace("#define FACTOR 3", "#error FACTOR is not set"))
    with pytest.raises(jit.CompileError, match=r"at <constants of toy>:2"):
        jit.compile_source(bad, ARCH)


def test_a_failed_static_assert_says_its_sentence() -> None:
    good = toy_source()
    sentence = "the tile must be a multiple of the warp"
    code = good.code.replace("struct Params", f'static_assert(FACTOR == 4, "{sentence}");\nstruct Params')
    with pytest.raises(jit.CompileError, match=sentence):
        jit.compile_source(dataclasses.replace(good, code=code), ARCH)


def test_a_missing_entry_names_those_that_exist() -> None:
    with pytest.raises(jit.CompileError, match=r'no entry "other" \(entries compiled: toy\)'):
        jit.compile_source(dataclasses.replace(toy_source(), entry="other"), ARCH)


@pytest.mark.parametrize("arch", ["sm_52", "sm_999", "compute_80", "80", "sm_", "sm_80; rm"])
def test_an_unknown_architecture_is_refused_by_name(arch: str) -> None:
    with pytest.raises(jit.UnsupportedArchError) as raised:
        jit.compile_source(toy_source(), arch)
    assert arch in str(raised.value)


def test_volta_needs_nvrtc_12_and_the_error_says_so() -> None:
    version, _ = jit.nvrtc_info()
    if int(version.split(".")[0]) < 13:
        pytest.skip(f"NVRTC {version} still compiles for sm_70")
    with pytest.raises(jit.UnsupportedArchError, match=r"sm_70.*CUDA 12.*haloconv\[gpu-cu12,cli\]"):
        jit.compile_source(toy_source(), "sm_70")


def test_loading_without_a_gpu_is_an_error_and_the_compiler_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cubin = jit.compile_source(toy_source(), ARCH)
    with pytest.raises(jit.DriverError, match="no GPU"):
        jit.load_kernel(cubin, 0, 0)
    assert jit.compile_source(toy_source(factor=4), ARCH).image


@pytest.mark.parametrize("size_bytes", [4, 64, 200, 4096])
def test_an_argument_block_is_aligned_and_reached_through_its_pointer(size_bytes: int) -> None:
    block = jit.ArgumentBlock(size_bytes)
    address = ctypes.c_void_p.from_address(block.pointer_array_address).value
    assert address is not None and address % 64 == 0 and len(block.buffer) == size_bytes
    struct.pack_into("@i", block.buffer, size_bytes - 4, 0x1234)
    assert ctypes.c_int.from_address(address + size_bytes - 4).value == 0x1234
    with pytest.raises(struct.error):
        struct.pack_into("@i", block.buffer, size_bytes - 3, 1)


def test_only_two_files_import_the_cuda_packages() -> None:
    importers = set()
    for path in sorted((ROOT / "haloconv").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "cuda" for name in names):
                importers.add(path.relative_to(ROOT).as_posix())
    assert importers == {"haloconv/jit/compile.py", "haloconv/jit/driver.py"}


def test_without_the_cuda_packages_the_import_works_and_compiling_names_the_remedy() -> None:
    code = """
import sys
sys.modules["cuda"] = None
from haloconv import jit
from tests.toy_kernel import toy_source
toy = toy_source()
for attempt in (jit.nvrtc_info, lambda: jit.compile_source(toy, "sm_80"), lambda: jit.get_kernel(toy, "sm_80")):
    try:
        attempt()
    except jit.ToolchainError as error:
        assert 'pip install "haloconv[gpu' in str(error), error
    else:
        raise SystemExit("no error")
print("all refused")
"""
    assert _run(code) == "all refused"


def test_importing_the_package_starts_neither_compiler_nor_gpu() -> None:
    code = """
import sys, torch, haloconv.jit
print("cuda.core" in sys.modules, torch.cuda.is_initialized())
"""
    assert _run(code) == "False False"


def _run(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()
