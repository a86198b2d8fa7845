"""What fp32 factors lose that tensor cores multiply as sums of shorter numbers: the table of docs/precision.md.

A factor is cut to its first term; what is left is cut again, and the last rest is rounded. Products of terms i and j
with i + j below the number of terms are summed, here in float64, so that the error is that of the split alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from haloconv.families.halo_sm90.terms import products_of
from haloconv.problem import Problem
from haloconv.reference import error_limits
from haloconv.roofline import ceilings_of
from tests.cases import values
from tools.result_tables import table

KINDS = ("normal", "positive", "wide", "cancellation")
_LENGTH, _SUMS, _SEED = 1152, 512, 20261127


class Split(NamedTuple):
    """``terms`` of ``bits`` bits each, with the leading one, that tensor cores multiply at the rate of ``unit``."""

    name: str
    unit: str
    bits: int
    terms: int


SPLITS = (Split("bf16x3", "bf16", 8, 2), Split("tf32x3", "tf32", 11, 2), Split("bf16x6", "bf16", 8, 3))


def split(factor: torch.Tensor, bits: int, terms: int) -> list[torch.Tensor]:
    """Float64 terms of fp32 values, largest first."""
    rest, found = factor.double(), []
    for index in range(terms):
        mantissa, exponent = torch.frexp(rest)
        scaled = mantissa * 2**bits
        kept = torch.ldexp(scaled.round() if index == terms - 1 else scaled.trunc(), exponent - bits)
        found.append(kept)
        rest = rest - kept
    return found


def error_of(one: Split, kind: str) -> float:
    """Norm of the error of ``_SUMS`` sums of ``_LENGTH`` products, relative to the sums of absolute products."""
    gen = torch.Generator().manual_seed(_SEED)
    x = values((_SUMS, _LENGTH), torch.float32, gen, kind)
    w = values((_SUMS, _LENGTH), torch.float32, gen, "positive" if kind == "cancellation" else kind)
    exact = x.double() * w.double()
    x_terms, w_terms = split(x, one.bits, one.terms), split(w, one.bits, one.terms)
    pairs = [(i, j) for i in range(one.terms) for j in range(one.terms - i)]
    lost = exact - sum(x_terms[i] * w_terms[j] for i, j in pairs)
    scale = exact.abs() if kind == "cancellation" else exact
    return float(lost.sum(1).norm() / scale.sum(1).norm())


def limit() -> float:
    """What fp32 may err by in all, at so many products."""
    return error_limits(Problem("fprop", 1, _LENGTH, 1, 1, 1, 1, 1)).norm


def splits_section(gpu: str = "NVIDIA H200") -> str:
    """The Markdown between the splits markers of docs/precision.md."""
    rates = ceilings_of(gpu)
    if rates is None:
        raise ValueError(f"no rate of {gpu} was measured")
    body = [
        [one.name, str(products), f"{rates.flops_per_s[one.unit] / products / 1e12:.0f}",
         *(f"{error_of(one, kind):.1e}" for kind in KINDS)]
        for one in SPLITS
        for products in [products_of(one.terms)]
    ]  # fmt: skip
    lines = table(["split", "products", "TFLOP/s of fp32, at most", *KINDS], body)
    return "\n".join([*lines, "", f"The limit of fp32 is {limit():.1e} at {_LENGTH} products."])
