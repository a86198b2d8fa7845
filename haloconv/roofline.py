"""The ceilings of each GPU as data, and the time that no kernel of the dense definition can beat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from haloconv.problem import Problem


class Ceilings(NamedTuple):
    """Measured rates of one GPU: device-memory bytes per second, and FLOP per second by precision label."""

    bytes_per_s: float
    flops_per_s: Mapping[str, float]


CEILINGS = {
    "H200": Ceilings(4.3e12, {"fp32": 51e12, "tf32": 420e12, "fp16": 776e12, "bf16": 804e12}),
}
"""By the part of the GPU's name that identifies it: device-to-device copy, and cuBLAS on 8192 x 8192 x 8192.

In TF32 cuBLAS reaches 410 to 420 TFLOP/s there; the upper end counts, because halo_sm90 was measured at 415.2.
"""


def ceilings_of(gpu_name: str) -> Ceilings | None:
    """The ceilings of the GPU that torch calls ``gpu_name``, or None if nobody has measured it."""
    return next((ceilings for part, ceilings in CEILINGS.items() if part in gpu_name), None)


def memory_limit_ms(problem: Problem, gpu_name: str) -> float | None:
    """The ms for reading and writing every tensor of the problem once; None for an unknown GPU."""
    ceilings = ceilings_of(gpu_name)
    return None if ceilings is None else problem.bytes / ceilings.bytes_per_s * 1e3


def limit_ms(problem: Problem, gpu_name: str) -> float | None:
    """The larger of memory limit and flops / cuBLAS rate, in ms; None if the GPU or the precision has no ceiling."""
    ceilings = ceilings_of(gpu_name)
    rate = ceilings.flops_per_s.get(problem.precision_label) if ceilings else None
    if ceilings is None or rate is None:
        return None
    return max(problem.flops / rate, problem.bytes / ceilings.bytes_per_s) * 1e3
