"""Kinds of numbers: positive, wide range, cancelling, denormal, and single NaN and Inf in their exact places."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from tests import oracle
from tests.cases import (
    DENORMAL_PARTNER,
    Case,
    Tensors,
    case_id,
    generator,
    make,
    pick,
    store,
    values,
    with_special,
)
from tests.families import Subject, computing, each_dtype, each_result, name_of, over
from tests.launches import launched
from tests.specials import cut_to_tf32, special_activations

LAYERS = pick("border_3x3", "small_a", "dilated_strided_coprime", "groups_odd", "depthwise_multiplier", "channels_last")
SPECIAL_LAYERS = pick(
    "plain_3x3", "border_3x3", "four_sides", "padding_with_stride", "stride_beyond_filter", "dilated_strided_coprime",
    "groups_odd", "depthwise_multiplier", "pointwise_stride", "many_channels", "channels_last", "channels_last_odd",
)  # fmt: skip
PRODUCTS = ("fprop", "dgrad", "wgrad")
WITH_UNREAD_PIXELS = ("pointwise_stride", "stride_beyond_filter")


def compare(
    subject: Subject, result: str, one: Case, t: Tensors, record: Callable, *, norm_counts: bool = True
) -> None:
    with launched() as names:
        got = oracle.run(result, t, one)
    error = oracle.check(result, got, t, one.spec, norm_counts=norm_counts)
    if norm_counts:
        record(names, result, subject.label(t.x.dtype), error.norm)


@pytest.mark.parametrize("kind", ["positive", "wide", "cancellation"])
@pytest.mark.parametrize(("subject", "dtype"), each_dtype(), ids=name_of)
@pytest.mark.parametrize("one", LAYERS, ids=case_id)
def test_kinds(one: Case, subject: Subject, dtype: torch.dtype, kind: str, record: Callable) -> None:
    forced = subject.on(one, dtype)
    t = make(forced, dtype, "cuda", kind)
    for result in subject.results:
        compare(subject, result, forced, t, record, norm_counts=kind == "positive")


@pytest.mark.parametrize(("subject", "dtype", "result"), each_result(results=PRODUCTS), ids=name_of)
@pytest.mark.parametrize("one", LAYERS, ids=case_id)
def test_denormal_inputs_are_not_flushed(
    one: Case, subject: Subject, dtype: torch.dtype, result: str, record: Callable
) -> None:
    """One operand denormal, the other large: the products are normal numbers, unless an input was taken as zero.

    In TF32 a denormal number has few bits: those that it would lose are cut off beforehand, so that none is lost.
    """
    forced = subject.on(one, dtype)
    t, lift = make(forced, dtype, "cuda", "denormal"), DENORMAL_PARTNER[dtype]
    t = t._replace(b=None, w=t.w * lift)
    if subject.label(dtype) == "tf32":
        t = t._replace(x=cut_to_tf32(t.x), dy=cut_to_tf32(t.dy))
    if result == "wgrad":
        gen = generator(f"{one.name} partner", "cuda")
        t = t._replace(x=(values(tuple(t.x.shape), torch.float64, gen) * lift / 32).to(dtype))
    assert oracle.expected(result, t, forced.spec).value.abs().max() > torch.finfo(dtype).smallest_normal
    compare(subject, result, forced, t, record)


@pytest.mark.parametrize(("subject", "dtype", "result"), each_result(), ids=name_of)
@pytest.mark.parametrize("one", SPECIAL_LAYERS, ids=case_id)
def test_special_activations(one: Case, subject: Subject, dtype: torch.dtype, result: str) -> None:
    """NaN, +Inf and -Inf in x (fprop, wgrad) or dy (dgrad, bgrad) reach exactly the elements that sum over them."""
    forced = subject.on(one, dtype)
    t, want = special_activations(result, forced, dtype, "cuda")
    assert one.name in WITH_UNREAD_PIXELS or not want.value.isfinite().all()
    oracle.check(result, oracle.run(result, t, forced), t, forced.spec, want=want)


def touched(result: str, t: Tensors, one: Case, *, beyond_border: bool) -> torch.Tensor:
    """Where a special filter element (fprop, dgrad) or dy element (wgrad) takes part in the result.

    ``beyond_border`` also counts the products with elements outside the image: zeros by the definition of padding, but
    absent where a kernel skips them. 0 * Inf is NaN, so that both answers are legal there and nowhere else.
    """

    def mark(v: torch.Tensor) -> torch.Tensor:
        return (~v.isfinite()).double()

    flat = one.spec if not beyond_border else one.spec._replace(padding=(0, 0, 0, 0))
    ones = Tensors(torch.ones_like(t.x).double(), mark(t.w), None, torch.ones_like(t.dy).double())
    if result == "fprop":
        if beyond_border:
            top, bottom, left, right = one.spec.padding
            n, c, h, w = t.x.shape
            ones = ones._replace(x=ones.x.new_ones(n, c, h + top + bottom, w + left + right))
        return oracle.tap_sums("fprop", ones, flat) > 0
    if result == "dgrad":
        hit = oracle.tap_sums("dgrad", ones, one.spec) > 0
        return hit | hit.any(-1, keepdim=True).any(-2, keepdim=True) if beyond_border else hit
    hit = oracle.tap_sums("wgrad", ones._replace(dy=mark(t.dy)), one.spec) > 0
    return hit | hit.any(-1, keepdim=True).any(-2, keepdim=True) if beyond_border else hit


@pytest.mark.parametrize(("subject", "dtype", "result"), each_result(results=PRODUCTS), ids=name_of)
@pytest.mark.parametrize("one", SPECIAL_LAYERS, ids=case_id)
def test_special_filter_or_gradient(one: Case, subject: Subject, dtype: torch.dtype, result: str) -> None:
    """NaN and Inf in w (fprop, dgrad) or dy (wgrad) reach every element that they take part in, and no other one."""
    forced = subject.on(one, dtype)
    t = make(forced, dtype, "cuda")
    clean = oracle.expected(result, t, forced.spec)
    name = "dy" if result == "wgrad" else "w"
    special = with_special(getattr(t, name), generator(f"{one.name} filter", "cuda"))
    t = t._replace(**{name: store(special, one.storage if name == "dy" else one.w_storage)})
    got = oracle.run(result, t, forced)
    must, may = (touched(result, t, forced, beyond_border=beyond) for beyond in (False, True))
    assert must.any()
    assert not (got.isfinite() & must).any(), "a special value was lost"
    assert not (~got.isfinite() & ~may).any(), "a special value leaked"
    untouched = torch.where(may, clean.value.to(dtype), got)
    oracle.check(result, untouched, t, forced.spec, want=clean)


@pytest.mark.parametrize(
    ("subject", "dtype"), over(*product(computing("fprop"), (torch.float16, torch.float32))), ids=name_of
)
def test_sums_beyond_the_dtype_become_infinite(subject: Subject, dtype: torch.dtype) -> None:
    """A true sum above the largest number rounds to Inf, and a large intermediate sum in fp16 does not."""
    (one,) = pick("border_3x3")
    forced = subject.on(one, dtype)
    t = make(forced, dtype, "cuda")
    big = torch.finfo(dtype).max / 4
    t = t._replace(x=torch.full_like(t.x, big), w=torch.ones_like(t.w), b=None)
    assert oracle.run("fprop", t, forced).isposinf().all()
    if dtype == torch.float16:
        half = t.w.shape[1] // 2
        signs = torch.ones_like(t.w)
        signs[:, half:] = -1
        assert (oracle.run("fprop", t._replace(w=signs), forced) == 0).all()
