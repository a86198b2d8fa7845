"""fp32 values that are multiplied as sums of several TF32 values: families/halo_sm90/terms.cuh."""

from __future__ import annotations

from haloconv.precision import Precision

TERMS: dict[Precision, int] = {"tf32x3": 2}
"""Precisions that multiply fp32 as several TF32 values. Three products of two each lose at most 2^-20 of one."""


def products_of(terms: int) -> int:
    """Multiplies for one of fp32: of terms i and j with i + j below ``terms``."""
    return terms * (terms + 1) // 2
