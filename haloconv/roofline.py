"""The ceilings of each GPU as data, the time that its measured rates allow, and the one that nothing can beat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from haloconv.problem import Problem


class Ceilings(NamedTuple):
    """Rates of one GPU: device-memory bytes per second, and FLOP per second by precision label."""

    bytes_per_s: float
    flops_per_s: Mapping[str, float]


CEILINGS = {
    "H100 80GB HBM3": Ceilings(
        2.98e12,
        {
            "fp64": 66.6e12,
            "fp32": 64e12,
            "tf32": 464e12,
            "fp16": 866e12,
            "bf16": 896e12,
            "tf32x3": 155e12,
            "bf16x6": 149e12,
        },
    ),
    "H200": Ceilings(
        4.3e12, {"fp32": 51e12, "tf32": 490e12, "fp16": 907e12, "bf16": 907e12, "tf32x3": 163e12, "bf16x6": 151e12}
    ),
}
"""Measured, by the part of the GPU's name that identifies it: a device-to-device copy, wgmma from shared memory, FFMA.

Those of the H100 are tools/ceilings.py's of random numbers, whose products need power (2026-11-26; of zeros tf32 had
501, fp16 922, bf16 978 TFLOP/s).

A row between these and the data sheet says that they have to be measured again; they are raised for all rows then.
"""

_SXM5 = {
    "fp64": 67e12,
    "fp32": 67e12,
    "tf32": 495e12,
    "fp16": 990e12,
    "bf16": 990e12,
    "tf32x3": 165e12,
    "bf16x6": 165e12,
}

DATA_SHEETS = {"H100 80GB HBM3": Ceilings(3.35e12, _SXM5), "H200": Ceilings(4.8e12, _SXM5)}
"""What NVIDIA states of the same GPUs: a time below it is no time."""


def _of(gpu_name: str, rates: Mapping[str, Ceilings]) -> Ceilings | None:
    return next((ceilings for part, ceilings in rates.items() if part in gpu_name), None)


def _ms(ceilings: Ceilings | None, label: str, flops: int, bytes_moved: int) -> float | None:
    rate = ceilings.flops_per_s.get(label) if ceilings else None
    if ceilings is None or rate is None:
        return None
    return max(flops / rate, bytes_moved / ceilings.bytes_per_s) * 1e3


def ceilings_of(gpu_name: str) -> Ceilings | None:
    """The measured ceilings of the GPU that torch calls ``gpu_name``, or None if nobody has measured it."""
    return _of(gpu_name, CEILINGS)


def limit_of(gpu_name: str, label: str, flops: int, bytes_moved: int) -> float | None:
    """The larger of flops / rate of the precision and bytes / copy rate, as measured, in ms; None without a ceiling."""
    return _ms(ceilings_of(gpu_name), label, flops, bytes_moved)


def needed_flops(problem: Problem) -> int:
    """Multiplies and adds with pixels of the image, two for each, the same in each direction.

    Those with zeros around it are in ``Problem.flops``, but nothing has to be multiplied there: of a 3x3 filter with a
    dilation of 36 on 64 x 64 pixels these are 61 of 100.
    """
    rows = _inside(problem.h, problem.padding[0], problem.p, problem.stride[0], problem.r, problem.dilation[0])
    cols = _inside(problem.w, problem.padding[2], problem.q, problem.stride[1], problem.s, problem.dilation[1])
    return 2 * problem.n * problem.k * problem.c_per_group * rows * cols


def _inside(extent: int, pad: int, outputs: int, stride: int, taps: int, dilation: int) -> int:
    """Pairs of an output and a tap, along one dimension, that meet the image."""
    starts = (tap * dilation - pad for tap in range(taps))  # of the first output: output i is at start + i * stride
    return sum(
        max(0, min((extent - 1 - start) // stride, outputs - 1) - max(-(start // stride), 0) + 1) for start in starts
    )


def limit_ms(problem: Problem, gpu_name: str) -> float | None:
    """``limit_of`` a problem, in ms: pixels that some tap reads are read once, and results written once."""
    return limit_of(gpu_name, problem.precision_label, needed_flops(problem), problem.bytes)


def least_ms(problem: Problem, gpu_name: str) -> float | None:
    """The ms below which the data sheet says that the time is wrong; None if the GPU or the precision has no sheet."""
    return _ms(_of(gpu_name, DATA_SHEETS), problem.precision_label, needed_flops(problem), problem.bytes)


def least_memory_ms(problem: Problem, gpu_name: str) -> float | None:
    """``least_ms`` of the memory alone, which holds for algorithms with fewer multiplications, too."""
    return least_traffic_ms(problem.bytes, gpu_name)


def least_traffic_ms(traffic_bytes: int, gpu_name: str) -> float | None:
    """The ms that the data sheet's memory needs for so many bytes; None if the GPU has no sheet."""
    sheet = _of(gpu_name, DATA_SHEETS)
    return None if sheet is None else traffic_bytes / sheet.bytes_per_s * 1e3
