"""Kernels of a few lines on the emulator, for the tests of its rules: what they write, and what it finds."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch

from haloconv import emulator
from haloconv.emulator import EmulatorError, Module, Region
from haloconv.emulator.runtime import LaunchStatistics
from haloconv.jit import KernelSource
from haloconv.jit.launch import LaunchShape

OUT = 64  # elements of the output of a toy kernel


def toy(body: str, before: str = "") -> KernelSource:
    """A kernel with ``in`` (read-only) and ``out``, two tensors of OUT ints; its body starts on line 11 of toy.cu."""
    code = f"""// toy
//@ begin toy.cu
{before.strip()}
struct alignas(16) Quad {{ int lane[4]; }};
struct Params {{
    const int* in;
    int* out;
}};
extern "C" __global__ void toy(const Params p) {{
    extern __shared__ __align__(16) char dynamic_smem[];
    int* smem = reinterpret_cast<int*>(dynamic_smem);
    const int t = threadIdx.x;
{body}
}}
//@ end toy.cu
"""
    return KernelSource("toy", "toy", (), code)


class Result:
    """What a toy kernel left behind: its output, its findings."""

    def __init__(self, source: KernelSource, shape: LaunchShape, **options: Any) -> None:
        self.input = torch.arange(OUT, dtype=torch.int32)
        self.out = torch.full((OUT,), -1, dtype=torch.int32)
        self.findings: tuple[emulator.Finding, ...] = ()
        self.error: EmulatorError | None = None
        self.statistics: LaunchStatistics | None = None
        data = struct.pack("2Q", self.input.data_ptr(), self.out.data_ptr())
        block = ctypes.create_string_buffer(data, len(data))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(block))
        regions = [
            Region(tensor.data_ptr(), tensor.data_ptr() + 4 * OUT, writable)
            for tensor, writable in ((self.input, False), (self.out, True))
        ]
        try:
            self.statistics = Module(source).run(shape, ctypes.addressof(pointers), regions, **options)
        except EmulatorError as error:
            self.error, self.findings = error, error.findings

    @property
    def kinds(self) -> set[str]:
        return {finding.kind for finding in self.findings}


def run(
    body: str, threads: int = OUT, grid: int = 1, smem_bytes: int = 1024, before: str = "", **options: Any
) -> Result:
    return Result(toy(body, before), LaunchShape(grid, threads, smem_bytes), **options)


def only(result: Result, kind: str) -> emulator.Finding:
    assert result.kinds == {kind}, result.error
    return result.findings[0]
