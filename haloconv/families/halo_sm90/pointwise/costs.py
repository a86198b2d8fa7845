"""What the cost models of both kernels share: rates and delays of a multiprocessor of an NVIDIA H200.

Fitted to 110 layers, of one tile each (2026-11-24). Where nothing else is launched beside the product, 61 of pointwise
are 6 % off at 1.755 GHz, 15 % at most, and 18 of pointwise_planes 6 % and 12 %. Packing counts for nothing: all tiles
of a layer have the same.
"""

from __future__ import annotations

L2_BYTES, MEMORY_BYTES = 64, 18  # in a cycle: to and from the L2; to and from memory
LATENCY_CYCLES = 2000  # from asking for a stage until it is there
BEGIN_CYCLES = 10500  # of a launch, before the first stage is there and behind the last sums
_DISTURBED = 0.25


def overlapped(one: float, other: float) -> float:
    """Cycles of what happens at a time: the longer, and some of the other, by which it is disturbed."""
    return max(one, other) + min(one, other) * _DISTURBED
