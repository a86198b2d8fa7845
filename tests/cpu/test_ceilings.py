"""The kernels that measure a GPU's ceilings: each compiles, and keeps its sums in registers."""

from __future__ import annotations

import pytest

from haloconv.jit import compile_source
from haloconv.roofline import CEILINGS
from tools import ceilings


@pytest.mark.parametrize("label", ceilings.RATES)
def test_what_measures_a_rate_compiles_without_spilling(label: str) -> None:
    assert compile_source(ceilings.source(ceilings.RATES[label]), ceilings.ARCH).spill_bytes == 0


def test_every_rate_of_one_product_can_be_measured() -> None:
    """Those of several products are fractions of them."""
    assert all({"tf32x3", "bf16x6"} | ceilings.RATES.keys() >= each.flops_per_s.keys() for each in CEILINGS.values())
