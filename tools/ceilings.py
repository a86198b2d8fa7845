"""Measure the ceilings of the GPU, for haloconv/roofline.py: ``python -m tools.ceilings``.

Prints TFLOP/s by precision label, of random numbers and of zeros, which need less power so that the clock stays up, and
the bytes per second of a device-to-device copy: each the median of launches of some tens of milliseconds on a GPU that
has been busy for two seconds. Kernels: tools/ceilings.cu.
"""

from __future__ import annotations

import statistics
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from haloconv.jit import ArgumentBlock, KernelSource, get_kernel, load_kernel
from tests.conformance.case import joined

FILE = Path(__file__).with_suffix(".cu")
ARCH = "sm_90a"
WORDS = 320 * 32  # as in the file
COPIED_BYTES = 2 << 30
BUSY_S, RUNS = 1.5, 15


class Rate(NamedTuple):
    """A kernel of the file: threads of a block, one on each multiprocessor, and FLOP of a block and a round."""

    entry: str
    type: str
    threads: int
    flops: int
    rounds: int


RATES = {
    "fp64": Rate("f64_rate", "hc::tf32", 512, 16 * 8 * 2 * 16 * 8 * 16, 10_000),
    "fp32": Rate("fma_rate", "hc::tf32", 1024, 1024 * 64 * 2, 20_000),
    "tf32": Rate("wgmma_rate", "hc::tf32", 256, 2 * 16 * 2 * 64 * 256 * 8, 10_000),
    "fp16": Rate("wgmma_rate", "hc::fp16", 256, 2 * 16 * 2 * 64 * 256 * 16, 10_000),
    "bf16": Rate("wgmma_rate", "hc::bf16", 256, 2 * 16 * 2 * 64 * 256 * 16, 10_000),
}


def source(rate: Rate) -> KernelSource:
    """The file with its headers joined in."""
    return joined("ceilings", rate.entry, (("TYPE", rate.type),), (FILE,))


def values(rate: Rate, largest: float) -> torch.Tensor:
    """Random ones in (-largest, largest)."""
    dtype = {"hc::fp16": torch.float16, "hc::bf16": torch.bfloat16}.get(rate.type, torch.float32)
    count = WORDS * 4 // dtype.itemsize
    return (largest * (2 * torch.rand(count, device="cuda") - 1)).to(dtype)


def launches(rate: Rate, largest: float) -> Callable[[], None]:
    """One launch a call, on all multiprocessors."""
    device = torch.cuda.current_device()
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    kernel = load_kernel(get_kernel(source(rate), ARCH), device, 0)
    given, out = values(rate, largest), torch.empty(blocks * rate.threads, device="cuda")
    block = ArgumentBlock(24)
    struct.pack_into("QQi4x", block.buffer, 0, given.data_ptr(), out.data_ptr(), rate.rounds)

    def call(kept: tuple = (given, out)) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch(blocks, rate.threads, 0, stream, block.pointer_array_address)

    return call


def median_s(call: Callable[[], object]) -> float:
    """Seconds of a call on a GPU that is busy with it."""
    times: list[float] = []
    until = time.monotonic() + BUSY_S
    while time.monotonic() < until or len(times) < RUNS:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[-RUNS:])


def main() -> int:
    """Print what was measured; the exit status."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("a GPU of compute capability 9.0 is needed")
        return 1
    print(torch.cuda.get_device_name())
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    for label, rate in RATES.items():
        flops = blocks * rate.flops * rate.rounds
        random, zeros = (flops / median_s(launches(rate, largest)) / 1e12 for largest in (1.0, 0.0))
        print(f"{label}: {random:.1f} TFLOP/s, of zeros {zeros:.1f}")
    first = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    second = torch.empty_like(first)
    print(f"copy: {2 * COPIED_BYTES / median_s(lambda: second.copy_(first)) / 1e12:.2f} TB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
