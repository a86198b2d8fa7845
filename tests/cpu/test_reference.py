"""The float64 oracle and the judgement over errors."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from haloconv import reference
from haloconv.problem import ConvSpec, Problem
from tests.cases import DTYPE_NAMES

SPECS = {
    "plain": ConvSpec(),
    "padded and dilated": ConvSpec(padding=(2, 2, 4, 4), dilation=(2, 3)),
    "four-sided, strided, grouped": ConvSpec(stride=(2, 1), padding=(1, 0, 3, 2), groups=2),
    "rows left over by the stride": ConvSpec(stride=(3, 2), padding=(0, 1, 0, 0)),
}


def problem_for(spec: ConvSpec, direction: str = "fprop") -> Problem:
    return Problem(direction, 2, 4, 13, 17, 6, 3, 5, spec.stride, spec.padding, spec.dilation, spec.groups)


def tensors(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in (problem.x_shape, problem.w_shape, problem.y_shape)
    )


def tap_by_tap(x: torch.Tensor, w: torch.Tensor, problem: Problem) -> torch.Tensor:
    """The definition, one tap after the other, without any convolution of PyTorch."""
    top, bottom, left, right = problem.padding
    image = torch.zeros(problem.n, problem.c, problem.h + top + bottom, problem.w + left + right, dtype=x.dtype)
    image[:, :, top : top + problem.h, left : left + problem.w] = x
    y = torch.zeros(problem.y_shape, dtype=x.dtype)
    for r in range(problem.r):
        for s in range(problem.s):
            rows = slice(r * problem.dilation[0], None, problem.stride[0])
            cols = slice(s * problem.dilation[1], None, problem.stride[1])
            taken = image[:, :, rows, cols][:, :, : problem.p, : problem.q]
            for g in range(problem.groups):
                cs = slice(g * problem.c_per_group, (g + 1) * problem.c_per_group)
                ks = slice(g * problem.k_per_group, (g + 1) * problem.k_per_group)
                y[:, ks] += torch.einsum("nchw,kc->nkhw", taken[:, cs], w[ks, :, r, s])
    return y


@pytest.mark.parametrize("name", SPECS)
def test_fprop_is_the_definition(name):
    problem = problem_for(SPECS[name])
    x, w, _ = tensors(problem)
    b = torch.arange(6.0, dtype=torch.float64)
    oracle = reference.oracle_fprop(x, w, b, SPECS[name])
    torch.testing.assert_close(oracle.value, tap_by_tap(x, w, problem) + b[:, None, None], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(oracle.scale, tap_by_tap(x.abs(), w.abs(), problem) + b[:, None, None])


@pytest.mark.parametrize("name", SPECS)
def test_gradients_are_adjoint_to_fprop(name):
    """<dy, conv(x, w)> = <dgrad(dy, w), x> = <wgrad(dy, x), w> for any tensors."""
    problem = problem_for(SPECS[name])
    x, w, dy = tensors(problem)
    expected = (dy * tap_by_tap(x, w, problem)).sum()
    dx = reference.oracle_dgrad(dy, w, problem.x_shape, SPECS[name]).value
    dw = reference.oracle_wgrad(dy, x, problem.w_shape, SPECS[name]).value
    assert dx.shape == x.shape and dw.shape == w.shape
    torch.testing.assert_close((dx * x).sum(), expected, rtol=1e-12, atol=1e-10)
    torch.testing.assert_close((dw * w).sum(), expected, rtol=1e-12, atol=1e-10)


def test_bias_gradient():
    dy = torch.randn(2, 3, 4, 5)
    oracle = reference.oracle_bgrad(dy)
    torch.testing.assert_close(oracle.value, dy.double().sum((0, 2, 3)))
    torch.testing.assert_close(oracle.scale, dy.double().abs().sum((0, 2, 3)))


@pytest.mark.parametrize("name", SPECS)
def test_fprop_border_is_where_padding_is_read(name):
    """An output is inside exactly if setting the padding to one changes nothing, the outermost ring apart."""
    problem = problem_for(SPECS[name])
    top, bottom, left, right = problem.padding
    ones = torch.nn.functional.pad(torch.zeros(1, 1, problem.h, problem.w), (left, right, top, bottom), value=1.0)
    reads = (
        torch.nn.functional.conv2d(ones, torch.ones(1, 1, 3, 5), None, problem.stride, 0, problem.dilation)[0, 0] > 0
    )
    for ring in (reads[0], reads[-1], reads[:, 0], reads[:, -1]):
        ring[:] = True
    assert torch.equal(reference.border_mask(problem), reads)


@pytest.mark.parametrize("direction, shape", [("dgrad", (13, 17)), ("wgrad", (3, 5))])
def test_gradient_borders(direction, shape):
    mask = reference.border_mask(problem_for(ConvSpec(), direction))
    assert mask.shape == shape
    rim = 1 if direction == "wgrad" else 2
    assert mask[:rim].all() and mask[-rim:].all() and mask[:, :1].all()
    assert not mask[rim:-rim, 4:-4].any()


def oracle_of(*values: float) -> reference.Oracle:
    value = torch.tensor(values, dtype=torch.float64)
    return reference.Oracle(value, torch.full_like(value, 10.0))


TIGHT = reference.Limits(norm=1e-6, element=4e-6)


def test_exact_result_passes_with_zero_error():
    error = reference.measure_error(torch.tensor([1.0, -2.0, 3.0]), oracle_of(1, -2, 3), TIGHT)
    assert error == reference.Error(0.0, 0.0, 0.0, 0.0, None) and error.passed


def test_error_figures():
    border = torch.tensor([True, False, False])
    error = reference.measure_error(torch.tensor([1.0, -2.0, 3.5]), oracle_of(1, -2, 3), TIGHT, border)
    assert error.norm == pytest.approx(0.5 / math.sqrt(14))
    assert error.worst == error.interior_worst == pytest.approx(0.05)
    assert error.border_worst == 0.0
    assert error.first_bad == reference.BadElement((2,), 3.5, 3.0)


def test_first_bad_is_the_first_in_row_major_order():
    value = torch.zeros(2, 3, 4, 5, dtype=torch.float64)
    oracle = reference.Oracle(value, torch.ones_like(value))
    result = value.float()
    result[1, 2, 3, 4], result[1, 0, 2, 1] = 5.0, 0.25
    error = reference.measure_error(result, oracle, TIGHT)
    assert error.first_bad.coordinate == (1, 0, 2, 1)
    assert str(error.first_bad) == "at (1, 0, 2, 1): got 0.25, expected 0.0"


def test_many_small_errors_fail_by_the_norm():
    value = torch.ones(1000, dtype=torch.float64)
    oracle = reference.Oracle(value, 100 * value)
    result = (value + 1e-4).float()
    result[7] += 1e-4
    error = reference.measure_error(result, oracle, reference.Limits(norm=1e-5, element=1e-5))
    assert error.worst < 1e-5 < error.norm
    assert not error.passed and error.first_bad.coordinate == (7,)


@pytest.mark.parametrize("got", [math.nan, math.inf, -math.inf])
def test_non_finite_never_passes_for_a_finite_reference(got):
    error = reference.measure_error(torch.tensor([1.0, got]), oracle_of(1, 2), reference.Limits(1e30, 1e30))
    assert not error.passed and error.norm == error.worst == math.inf
    assert error.first_bad.coordinate == (1,)


@pytest.mark.parametrize("expected", [math.nan, math.inf, -math.inf])
def test_non_finite_passes_only_where_the_reference_has_the_same(expected):
    assert reference.measure_error(torch.tensor([1.0, expected]), oracle_of(1, expected), TIGHT).passed
    for other in {0.0, math.nan, math.inf, -math.inf} - {expected}:
        if math.isnan(other) and math.isnan(expected):
            continue
        assert not reference.measure_error(torch.tensor([1.0, other]), oracle_of(1, expected), TIGHT).passed


def test_overflow_of_the_narrow_dtype_is_expected():
    result = torch.tensor([1.0, math.inf], dtype=torch.float16)
    assert reference.measure_error(result, oracle_of(1, 1e6), TIGHT).passed


def test_one_smallest_subnormal_is_rounding():
    tiny = 2.0**-149
    oracle = reference.Oracle(
        torch.tensor([3.4 * tiny], dtype=torch.float64), torch.tensor([4 * tiny], dtype=torch.float64)
    )
    assert reference.measure_error(torch.tensor([3 * tiny]), oracle, TIGHT).passed
    assert not reference.measure_error(torch.tensor([5 * tiny]), oracle, TIGHT).passed


def test_products_that_underflow_lose_a_subnormal_each():
    """fp32 sums 36 of them; sums of fp16 are fp32, too, far from its smallest numbers."""
    problem = Problem("fprop", 1, 4, 9, 9, 4, 3, 3)
    for dtype, passes in ((torch.float32, 36), (torch.float16, 1)):
        tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        scale = torch.full((1,), 100 * tiny, dtype=torch.float64)
        oracle, limits = reference.Oracle(scale * 0, scale), reference.error_limits(replace(problem, dtype=dtype))
        allowed = torch.tensor([passes * tiny], dtype=dtype)
        assert reference.measure_error(allowed, oracle, limits._replace(norm=math.inf)).passed
        assert not reference.measure_error(allowed + tiny, oracle, limits._replace(norm=math.inf)).passed


def test_zero_scale_allows_nothing_but_zero():
    zero = torch.zeros(2, dtype=torch.float64)
    assert reference.measure_error(torch.zeros(2), reference.Oracle(zero, zero), TIGHT).passed
    assert not reference.measure_error(torch.tensor([0.0, 1e-20]), reference.Oracle(zero, zero), TIGHT).passed


def test_empty_results_pass_and_wrong_shapes_are_refused():
    empty = torch.zeros(0, 3, dtype=torch.float64)
    assert reference.measure_error(empty.float(), reference.Oracle(empty, empty), TIGHT).passed
    with pytest.raises(ValueError, match=r"\(2,\), the reference \(3,\)"):
        reference.measure_error(torch.zeros(2), oracle_of(1, 2, 3), TIGHT)


@pytest.mark.parametrize(
    "dtype, precision, norm",
    [
        (torch.float32, "tf32", 5e-4),
        (torch.float16, "ieee", 1e-3),
        (torch.bfloat16, "ieee", 8e-3),
        (torch.float64, "ieee", 1e-13),
    ],
)
def test_limits_by_precision(dtype, precision, norm):
    """36 products are fewer than 4 * 6 + 36 / 8: the bound of an element is that of the worst case, all of them."""
    problem = Problem("fprop", 1, 4, 9, 9, 4, 3, 3, dtype=dtype, precision=precision)
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    sums = unit * (32 + 4 * 6 + 36 / 8)
    element = sums + (2.0**-10 if precision == "tf32" else 0.0)
    assert reference.error_limits(problem)[:3] == pytest.approx((norm, element, torch.finfo(dtype).eps))
    assert reference.error_limits(problem, rounds_operands=False).element == pytest.approx(sums)
    assert reference.error_limits(problem, repeats=True).element == pytest.approx(element + unit * (36 - 24 - 4.5))


@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("extent", [1, 8, 64, 512])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float32, "ieee"), (torch.float32, "tf32"), (torch.float16, "ieee"), (torch.float64, "ieee")],
)
def test_no_element_may_err_by_more_than_four_times_the_norm(extent, direction, dtype, precision):
    """Where the sums are so long that their bound is of no use: |ref| is at most the scale.

    Where roundings repeat a norm's bound is, which grows as a random walk: an element may err by each of them.
    """
    problem = Problem(direction, 2, extent, 64, 64, extent, 3, 3, dtype=dtype, precision=precision)
    limits, again = (reference.error_limits(problem, repeats=repeats) for repeats in (False, True))
    assert 0 < limits.element <= 4 * limits.norm - limits.rounding
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    length = reference.reduction_length(problem)
    assert again.element == pytest.approx(unit * (32 + length) + (2.0**-10 if precision == "tf32" else 0.0))


@pytest.mark.parametrize(("filters", "value"), [(130, 0.9359), (400, 0.6282)])
def test_equal_products_in_one_register_pass_and_one_that_is_missing_does_not(filters: int, value: float) -> None:
    """dgrad of 3x3 filters of one channel, as depthwise_window sums it. Six of the nine taps meet inside of dy."""
    problem = Problem("dgrad", 1, 1, 5, 4, filters, 3, 3)
    dy, w = (torch.full(shape, each) for shape, each in ((problem.y_shape, value), (problem.w_shape, 0.3)))
    oracle = reference.oracle_dgrad(dy, w, problem.x_shape, ConvSpec())
    product, in_one = dy[0, 0, 0, 0].double() * w[0, 0, 0, 0].double(), torch.zeros(())
    for _ in range(6 * filters):
        in_one = (in_one.double() + product).float()
    result, at = oracle.value.float(), (0, 0, 2, 1)
    assert oracle.value[at] == pytest.approx(6 * filters * float(product))
    limits = reference.error_limits(problem, repeats=True)._replace(norm=math.inf)
    result[at] = in_one
    error = reference.measure_error(result, oracle, limits)
    assert error.passed and error.worst > reference.error_limits(problem).element
    result[at] = float(in_one - product)
    assert not reference.measure_error(result, oracle, limits).passed


A = Problem("fprop", 1, 32, 20, 40, 64, 5, 9, padding=(2, 2, 4, 4), dilation=(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fault", ["a missing tap", "a doubled pixel"])
def test_one_wrong_output_of_case_a_fails(dtype, fault):
    """A tap of 45, or a product of 1440, at one output of one filter: less than four times the norm's limit in bf16."""
    problem = replace(A, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    x, w = (torch.randn(s, generator=generator).to(dtype) for s in (problem.x_shape, problem.w_shape))
    spec = ConvSpec(padding=problem.padding, dilation=problem.dilation)
    oracle = reference.oracle_fprop(x, w, None, spec)
    right, limits = oracle.value.to(dtype), reference.error_limits(problem)
    assert reference.measure_error(right, oracle, limits).passed
    k, p, q = 7, 10, 20
    column = x[0, :, p - 2 + 2 * 2, q - 4 + 3 * 1].double()
    lost = column * w[k, :, 2, 1].double()
    change = -lost.sum() if fault == "a missing tap" else lost[lost.abs().argmax()]
    wrong = right.clone()
    wrong[0, k, p, q] = (oracle.value[0, k, p, q] + change).to(dtype)
    error = reference.measure_error(wrong, oracle, limits)
    assert error.norm < limits.norm or dtype == torch.float32
    assert not error.passed and error.first_bad.coordinate == (0, k, p, q)
    shows_anyway = dtype == torch.float32 or (dtype == torch.float16 and fault == "a missing tap")
    assert (error.worst > reference.ELEMENT_FACTOR * limits.norm) == shows_anyway


def test_precision_page_states_what_a_store_may_round():
    page = (Path(__file__).resolve().parents[2] / "docs" / "precision.md").read_text("utf-8")
    stated = dict(re.findall(r"^\| `(\w+)` \|.*\| `2\^-(\d+)` \|$", page, re.MULTILINE))
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()} | {"tf32": torch.float32}
    assert {name: 2.0 ** -int(digits) for name, digits in stated.items()} == {
        name: torch.finfo(dtype).eps for name, dtype in dtypes.items()
    }
    assert f"`sums + 2^{math.log2(reference.TF32_OPERANDS):.0f}`" in page


def test_what_is_rounded_at_the_store_is_no_error_of_the_sum():
    """The same difference passes beside a large result and fails beside a small one with as large a scale."""
    problem = Problem("fprop", 1, 4, 9, 9, 4, 3, 3, dtype=torch.bfloat16)
    value = torch.tensor([8.0, 0.25], dtype=torch.float64)
    oracle, limits = reference.Oracle(value, torch.full_like(value, 10.0)), reference.error_limits(problem)
    assert reference.measure_error(torch.tensor([8.0625, 0.25]).bfloat16(), oracle, limits).passed
    error = reference.measure_error(torch.tensor([8.0, 0.3125]).bfloat16(), oracle, limits)
    assert error.first_bad.coordinate == (1,) and error.worst == pytest.approx(0.00625)


@pytest.mark.parametrize("direction, length", [("fprop", 2 * 3 * 5), ("dgrad", 3 * 3 * 5), ("wgrad", 2 * 11 * 13)])
def test_ieee_limit_follows_the_reduction(direction, length):
    problem = Problem(direction, 2, 4, 13, 17, 6, 3, 5, groups=2)
    assert reference.error_limits(problem).norm == pytest.approx(5e-7 * math.sqrt(math.log2(length)))


def test_a_worse_baseline_widens_only_fp32_ieee():
    problem = Problem("fprop", 1, 4, 9, 9, 4, 3, 3)
    baseline = reference.Error(1e-5, 3e-5, 0.0, 3e-5, None)
    assert reference.error_limits(problem, baseline)[:2] == (2e-5, 6e-5)
    assert reference.error_limits(problem, baseline._replace(norm=0.0, worst=0.0)) == reference.error_limits(problem)
    assert reference.error_limits(problem, baseline._replace(norm=math.inf)) == reference.error_limits(problem)
    tf32 = Problem("fprop", 1, 4, 9, 9, 4, 3, 3, precision="tf32")
    assert reference.error_limits(tf32, baseline._replace(norm=1.0)).norm == 5e-4
    assert reference.bgrad_limits(tf32).norm < 1e-5


def test_cudnn_search_is_put_back():
    before = torch.backends.cudnn.benchmark
    with reference.cudnn_search(not before):
        assert torch.backends.cudnn.benchmark is not before
    assert torch.backends.cudnn.benchmark is before


def test_large_results_are_judged_some_images_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are those of the whole tensor, and the first bad element is found in the right image."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(7, 3, 4, 5, generator=generator, dtype=torch.float64)
    oracle = reference.Oracle(value, value.abs() + 1)
    border = torch.zeros(4, 5, dtype=torch.bool)
    border[0] = True
    result = value.float()
    result[4, 1, 0, 3] += 0.25
    result[6, 2, 3, 4] += 1.0
    whole = [reference.measure_error(result, oracle, limits, border) for limits in (TIGHT, reference.Limits(0.0, 9.0))]
    monkeypatch.setattr(reference, "_ELEMENTS_AT_ONCE", 120)
    assert len(list(reference._parts(result, oracle, border))) == 4
    for error, limits in zip(whole, (TIGHT, reference.Limits(0.0, 9.0)), strict=True):
        again = reference.measure_error(result, oracle, limits, border)
        assert again.norm == pytest.approx(error.norm, rel=1e-12) and again[1:] == error[1:]
    assert whole[0].first_bad.coordinate == (4, 1, 0, 3) and whole[1].first_bad.coordinate == (6, 2, 3, 4)


def test_limits_are_raised_to_twice_pytorchs_error() -> None:
    limits = reference.Limits(1e-4, 1e-3)
    error = reference.Error(3e-4, 1e-4, 0.0, 1e-4, None)
    assert reference.raised(limits, error) == reference.Limits(6e-4, 1e-3)
    assert reference.raised(limits, error, 1.0) == reference.Limits(3e-4, 1e-3)
    assert reference.raised(limits, error._replace(norm=float("inf"))) == limits


def test_rounding_to_tf32_is_to_nearest_and_ties_to_even() -> None:
    step = 2.0**-10
    given = torch.tensor([1.0, 1 + step / 2, 1 + step * 1.5, 1 + step * 0.51, -1 - step * 0.49, 3e38, 1e-40])
    want = torch.tensor([1.0, 1.0, 1 + 2 * step, 1 + step, -1.0, 3e38, 1e-40])
    rounded = reference.rounded_to_tf32(given)
    torch.testing.assert_close(rounded, want, rtol=2.0**-11, atol=2.0**-137)
    assert torch.equal(rounded[:5], want[:5]) and not (rounded.view(torch.int32) & 0x1FFF).any()
    specials = torch.tensor([float("inf"), float("-inf"), float("nan")])
    torch.testing.assert_close(reference.rounded_to_tf32(specials), specials, equal_nan=True)
