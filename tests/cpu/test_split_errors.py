"""What fp32 factors lose as sums of shorter numbers (tools/split_errors.py), and what docs/precision.md says of it."""

from __future__ import annotations

import pytest
import torch

from tools.split_errors import KINDS, SPLITS, Split, error_of, limit, split


@pytest.mark.parametrize("one", SPLITS, ids=lambda one: one.name)
def test_terms_are_short_and_add_up(one: Split) -> None:
    """Each has at most so many bits; what is lost is half a unit of the last one, whose bits begin where others end."""
    factor = torch.randn(4096, generator=torch.Generator().manual_seed(1)).exp2()
    terms = split(factor, one.bits, one.terms)
    for term in terms:
        mantissa, _ = torch.frexp(term)
        assert torch.equal(mantissa * 2**one.bits, (mantissa * 2**one.bits).round())
    lost = (factor.double() - sum(terms)).abs() / factor.double()
    assert lost.max() <= 2.0 ** -(one.bits * one.terms)


def test_three_bf16_products_are_not_enough_for_fp32_and_the_others_are() -> None:
    errors = {one.name: {kind: error_of(one, kind) for kind in KINDS} for one in SPLITS}
    assert min(errors["bf16x3"][kind] for kind in ("normal", "positive", "wide")) > 2 * limit()
    assert max(errors["tf32x3"].values()) < limit() / 4 and max(errors["bf16x6"].values()) < limit() / 16
