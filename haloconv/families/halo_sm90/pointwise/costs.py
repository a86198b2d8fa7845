"""What the cost models of both kernels have in common: rates and delays of a multiprocessor of an NVIDIA H200.

Fitted to 1206 tiles of 66 layers of ResNet-50 with 32 images (2026-11-24). The model's first takes 1.1 % longer than
the best that was measured, 8 % at most. Where nothing else is launched beside the product the model is 10 % off for
tiles of pointwise at 1.755 GHz, 42 % at most, and 8 % and 28 % for those of pointwise_planes. Packing counts for
nothing: all tiles of a layer have the same.
"""

from __future__ import annotations

L2_BYTES, MEMORY_BYTES = 64, 20  # in a cycle: to and from the L2; to and from memory
LATENCY_CYCLES = 2000  # from asking for a stage until it is there
BEGIN_CYCLES = 11000  # of a launch, before the first stage is there and behind the last sums
_DISTURBED = 0.45
# Where a tile has the products of many taps: 30 layers of 7 to 256 pixels a row, 0.81 to 1.15 of what the model says.
TAPS_L2_BYTES, TAPS_DISTURBED = 48, 0.1


def overlapped(one: float, other: float, disturbed: float = _DISTURBED) -> float:
    """Cycles of what happens at a time: the longer, and some of the other, by which it is disturbed."""
    return max(one, other) + min(one, other) * disturbed
