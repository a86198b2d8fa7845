"""Exact integer runs, and the limits that the tests' oracle derives from operands."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from haloconv import reference
from tests import oracle
from tests.cases import DTYPES, STORAGES, case, make, store
from tests.exact import LARGEST, make_exact
from tests.specials import cut_to_tf32

LAYER = case("layer", "four paddings, strides, groups", (2, 6, 9, 11), (10, 3, 2), stride=(2, 1), padding=(0, 2, 1, 1),
             groups=2)  # fmt: skip


@pytest.mark.parametrize("result", (*oracle.RESULTS, oracle.RELU))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_the_references_bits_pass(result: str, dtype: torch.dtype) -> None:
    t = make_exact(LAYER, dtype)
    right = oracle.tap_sums(result, t, LAYER.spec).to(dtype)
    oracle.check_exact(result, right, t, LAYER.spec)
    wrong = right.clone()
    wrong.flatten()[-1] += 1
    with pytest.raises(AssertionError, match=r"1 of \d+ sums of integers are wrong, the first at"):
        oracle.check_exact(result, wrong, t, LAYER.spec)
    wrong.flatten()[-1] = float("nan")
    with pytest.raises(AssertionError, match="got nan"):
        oracle.check_exact(result, wrong, t, LAYER.spec)


def test_sums_that_fp32_does_not_hold_are_refused() -> None:
    t = make_exact(LAYER, torch.float32)
    t = t._replace(x=t.x * 2**20)
    with pytest.raises(AssertionError, match="not exact in fp32"):
        oracle.check_exact("fprop", t.dy, t, LAYER.spec)


def test_operands_are_integers_without_zero() -> None:
    for each in make_exact(LAYER, torch.float32):
        assert set(each.unique().tolist()) <= {-3, -2, -1, 1, 2, 3} and len(each.unique()) > LARGEST


def test_split_values_have_low_terms() -> None:
    """Of 13 bits the first TF32 value keeps 11."""
    split = replace(LAYER, spec=LAYER.spec._replace(precision="tf32x3"))
    t = make_exact(split, torch.float32)
    assert t.w.abs().unique().tolist() == [1.0] and t.x.abs().max() < 2**13
    assert not torch.equal(cut_to_tf32(t.x), t.x) and not torch.equal(cut_to_tf32(t.dy), t.dy)


def test_limits_follow_the_operands() -> None:
    t, spec = make(LAYER, torch.float32), LAYER.spec._replace(precision="tf32")
    rounded = oracle.limits_of("fprop", t, spec).element
    short = t._replace(x=cut_to_tf32(t.x), w=cut_to_tf32(t.w))
    kept = oracle.limits_of("fprop", short, spec).element
    assert rounded == pytest.approx(kept + reference.TF32_OPERANDS)
    assert oracle.limits_of("dgrad", short, spec).element > reference.TF32_OPERANDS > kept  # dy has all of its bits
    many = make(replace(LAYER, extents=(2, 64, 9, 11, 10, 3, 2)), torch.float16)
    random = oracle.limits_of("fprop", many, LAYER.spec).element
    for x in (store(many.x, "expanded"), torch.full_like(many.x, 0.3)):
        assert oracle.limits_of("fprop", many._replace(x=x), LAYER.spec).element > random


@pytest.mark.parametrize("storage", STORAGES)
def test_only_expanded_and_constant_tensors_repeat(storage: str) -> None:
    t = torch.randn(3, 4, 5, 6)
    assert oracle.repeats(store(t, storage)) == storage.startswith("expanded")
    assert oracle.repeats(store(torch.ones_like(t), storage))
    assert not oracle.repeats(t[:0])
