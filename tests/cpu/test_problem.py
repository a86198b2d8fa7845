"""The arithmetic of a problem against PyTorch's shape inference and against counting by hand."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from haloconv.problem import ConvSpec, Problem, as_four_sides, as_pair, output_extent
from haloconv.roofline import needed_flops
from tests import oracle
from tests.cases import CASES, DTYPE_NAMES, Case, Tensors, case_id, make, pick
from tests.layers import random_layer, sized


def meta_shape(one: Case) -> tuple[int, ...]:
    problem = one.problem()
    (top, bottom, left, right), spec = one.spec.padding, one.spec
    x = torch.nn.functional.pad(torch.empty(problem.x_shape, device="meta"), (left, right, top, bottom))
    w = torch.empty(problem.w_shape, device="meta")
    return tuple(torch.nn.functional.conv2d(x, w, None, spec.stride, 0, spec.dilation, spec.groups).shape)


def test_output_extents_of_thousands_of_random_problems() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        one = sized(random_layer(rng), rng.randint(0, 5), rng.randint(0, 39), rng.randint(0, 39))
        assert one.problem().y_shape == meta_shape(one), one


@pytest.mark.parametrize("one", CASES, ids=case_id)
def test_output_extents_of_the_named_cases(one: Case) -> None:
    assert one.problem().y_shape == meta_shape(one)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.integers(1, 60), st.integers(0, 20), st.integers(1, 12), st.integers(1, 8), st.integers(1, 8))
def test_output_extent_counts_filter_positions(
    extent: int, padding: int, taps: int, stride: int, dilation: int
) -> None:
    """The extent is the number of starts at which the dilated filter ends inside the padded image."""
    starts = range(0, max(0, extent + padding), stride)
    fits = sum(start + dilation * (taps - 1) < extent + padding for start in starts)
    assert max(0, output_extent(extent, padding, taps, stride, dilation)) == fits


@pytest.mark.parametrize("one", [c for c in CASES if sum(c.extents) < 120], ids=case_id)
def test_flops_and_bytes_by_brute_force(one: Case) -> None:
    """Two flops for each product of the dense definition, padding included, for limits without it.

    Each element of each tensor once, and of x only those on which the outputs depend.
    """
    problem = one.problem()
    x = torch.ones(problem.x_shape, dtype=torch.float64)
    (top, bottom, left, right), spec = one.spec.padding, one.spec
    x = torch.nn.functional.pad(x, (left, right, top, bottom), value=1.0)
    w = torch.ones(problem.w_shape, dtype=torch.float64)
    products = torch.nn.functional.conv2d(x, w, None, spec.stride, 0, spec.dilation, spec.groups).sum().item()
    for direction in ("fprop", "dgrad", "wgrad"):
        assert problem.toward(direction).flops == 2 * products
    inside = torch.nn.functional.pad(torch.ones(problem.x_shape, dtype=torch.float64), (left, right, top, bottom))
    met = torch.nn.functional.conv2d(inside, w, None, spec.stride, 0, spec.dilation, spec.groups).sum().item()
    assert needed_flops(problem) == 2 * met
    leaf = torch.ones(problem.x_shape, dtype=torch.float64, requires_grad=True)
    padded = torch.nn.functional.pad(leaf, (left, right, top, bottom))
    torch.nn.functional.conv2d(padded, w, None, spec.stride, 0, spec.dilation, spec.groups).sum().backward()
    for dtype in DTYPE_NAMES:
        t = make(one, dtype)
        others = t.w.numel() + t.dy.numel()
        read, bias = int(leaf.grad.count_nonzero()), one.problem().k if one.bias else 0
        assert one.problem(dtype=dtype).bytes == (read + others + bias) * t.x.element_size()
        assert one.problem(dtype=dtype).toward("wgrad").bytes == (read + others) * t.x.element_size()
        gradient = one.problem(dtype=dtype).toward("dgrad")
        assert gradient.bytes == (t.x.numel() + others) * t.x.element_size() and not gradient.bias


@pytest.mark.parametrize(
    ("given", "sides"),
    [
        (3, (3, 3, 3, 3)), ((1, 2), (1, 1, 2, 2)), ([1, 2], (1, 1, 2, 2)), ((4,), (4, 4, 4, 4)),
        ((1, 2, 3, 4), (1, 2, 3, 4)), ([0, 1, 2, 0], (0, 1, 2, 0)), ("valid", (0, 0, 0, 0)),
    ],
)  # fmt: skip
def test_padding_forms(given: object, sides: tuple[int, ...]) -> None:
    assert as_four_sides(given, filter_extent=(3, 3), stride=(2, 2), dilation=(1, 1)) == sides


@pytest.mark.parametrize("r", range(1, 8))
@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_same_padding_is_torchs(r: int, dilation: int) -> None:
    """Shape and values of 'same', even filters included, where one side gets the extra pixel."""
    s = 9 - r
    x, w = torch.randn(2, 3, 11, 12, dtype=torch.float64), torch.randn(4, 3, r, s, dtype=torch.float64)
    sides = as_four_sides("same", filter_extent=(r, s), stride=(1, 1), dilation=(dilation, dilation))
    want = torch.nn.functional.conv2d(x, w, None, padding="same", dilation=dilation)
    spec = ConvSpec(padding=sides, dilation=(dilation, dilation))
    torch.testing.assert_close(oracle.tap_sums("fprop", Tensors(x, w, None, torch.empty_like(want)), spec), want)


@pytest.mark.parametrize(("given", "pair"), [(3, (3, 3)), ((1, 2), (1, 2)), ([4, 5], (4, 5)), ((6,), (6, 6))])
def test_pairs(given: object, pair: tuple[int, int]) -> None:
    assert as_pair(given, "stride") == pair


def test_problems_are_hashable_values() -> None:
    (one,) = pick("small_a")
    assert one.problem() == one.problem() and hash(one.problem()) == hash(one.problem())
    assert one.problem("dgrad") != one.problem("wgrad")
    assert one.problem(dtype=torch.float16) != one.problem(dtype=torch.float32)
    assert len({c.problem() for c in CASES if c.storage == c.w_storage == "contiguous"}) == sum(
        c.storage == c.w_storage == "contiguous" for c in CASES
    )


@pytest.mark.parametrize("one", CASES, ids=case_id)
def test_empty_problems_are_known(one: Case) -> None:
    assert one.problem().is_empty == (0 in one.extents)


def test_text_names_what_differs() -> None:
    texts = {str(c.problem(direction)) for c in CASES if c.storage == c.w_storage == "contiguous"
             for direction in ("fprop", "dgrad", "wgrad")}  # fmt: skip
    layers = {(c.extents, c.spec) for c in CASES if c.storage == c.w_storage == "contiguous"}
    assert len(texts) == 3 * len(layers)


@pytest.mark.parametrize(
    ("dtype", "precision", "label"),
    [
        (torch.float32, "ieee", "fp32"), (torch.float32, "tf32", "tf32"), (torch.float32, "tf32x3", "tf32x3"),
        (torch.float16, "ieee", "fp16"),
        (torch.bfloat16, "ieee", "bf16"), (torch.float64, "ieee", "fp64"),
    ],
)  # fmt: skip
def test_precision_labels(dtype: torch.dtype, precision: str, label: str) -> None:
    problem = Problem("fprop", 1, 1, 3, 3, 1, 3, 3, dtype=dtype, precision=precision)
    assert problem.precision_label == label
