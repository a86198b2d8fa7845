"""haloconv.conv2d on the CPU over every named case and over random layers: right, and as PyTorch has it."""

from __future__ import annotations

import inspect
import random
import re
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch

import haloconv
from haloconv import plan
from haloconv.families import FAMILIES
from tests import oracle
from tests.cases import CASES, DTYPES, FULL_CASES, Case, Tensors, case_id, make, pick, with_special
from tests.layers import random_layer, sized

ON_CPU = [c for c in CASES if c.name != "many_more_groups"]
"""65601 groups take PyTorch's CPU path minutes in low precision; the GPU tests have them."""


def call(one: Case, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, **extras: object) -> torch.Tensor:
    s = one.spec
    return haloconv.conv2d(x, w, b, s.stride, s.padding, s.dilation, s.groups, **extras)


def torchs_call(one: Case, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    s, (top, bottom, left, right) = one.spec, one.spec.padding
    if top == bottom and left == right:
        return torch.nn.functional.conv2d(x, w, b, s.stride, (top, left), s.dilation, s.groups)
    x = torch.nn.functional.pad(x, (left, right, top, bottom))
    return torch.nn.functional.conv2d(x, w, b, s.stride, 0, s.dilation, s.groups)


def forward_and_gradients(run: Callable, one: Case, t: Tensors) -> dict[str, torch.Tensor]:
    leaves = [v.detach().requires_grad_() for v in (t.x, t.w, t.b) if v is not None]
    y = run(one, leaves[0], leaves[1], leaves[2] if one.bias else None)
    return dict(zip(oracle.RESULTS, (y, *torch.autograd.grad(y, leaves, t.dy)), strict=False))


@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
@pytest.mark.parametrize("one", ON_CPU, ids=case_id)
def test_forward_and_gradients(one: Case, dtype: torch.dtype) -> None:
    """Right by the reference, or PyTorch's own bits: its CPU path in fp16 is not always within honest limits."""
    t = make(one, dtype)
    with oracle.Unchanged(t):
        ours = forward_and_gradients(call, one, t)
    theirs = forward_and_gradients(torchs_call, one, t) if dtype != torch.float64 else {}
    for result, got in ours.items():
        if result not in theirs or not oracle.same_bits(got, theirs[result]):
            oracle.check(result, got, t, one.spec)


@pytest.mark.parametrize("one", ON_CPU, ids=case_id)
def test_our_own_autograd(one: Case, own_autograd: None) -> None:
    t = make(one, torch.float64)
    for result, got in forward_and_gradients(call, one, t).items():
        oracle.check(result, got, t, one.spec)


@pytest.mark.parametrize("one", ON_CPU, ids=case_id)
def test_same_values_and_layout_as_torch(one: Case) -> None:
    """In float64, where both are exact to the last bits; the result lies in memory as PyTorch's does."""
    t = make(one, torch.float64)
    ours, theirs = call(one, t.x, t.w, t.b), torchs_call(one, t.x, t.w, t.b)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    if one.storage in ("contiguous", "channels_last") and one.w_storage == "contiguous":
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("result", oracle.RESULTS)
@pytest.mark.parametrize("one", ON_CPU, ids=case_id)
def test_raw_directions(one: Case, result: str) -> None:
    t = make(one, torch.float64)
    got = oracle.run(result, t, one)
    oracle.check(result, got, t, one.spec)
    if result == "dgrad" and one.storage in ("contiguous", "channels_last"):
        layout = torch.channels_last if one.storage == "channels_last" else torch.contiguous_format
        assert got.is_contiguous(memory_format=layout)


def test_random_layers() -> None:
    rng = random.Random(4)
    for i in range(150):
        layer = random_layer(rng, f"random {i}", largest_filter=9)
        one = sized(layer, rng.randint(0, 3), rng.randint(0, 12), rng.randint(0, 12))
        t = make(one, torch.float64)
        for result in oracle.RESULTS:
            oracle.check(result, oracle.run(result, t, one), t, one.spec)


@pytest.mark.parametrize("one", pick("border_3x3", "stride_mixed", "groups_odd", "four_sides"), ids=case_id)
def test_unbatched(one: Case) -> None:
    t = make(one, torch.float32)
    image = t.x[1]
    theirs = torchs_call(one, image, t.w, t.b)
    torch.testing.assert_close(call(one, image, t.w, t.b), theirs)
    assert call(one, image, t.w, t.b).dim() == 3


@pytest.mark.parametrize("family", ("auto", *FAMILIES))
def test_every_family_name_works_on_the_cpu(family: str) -> None:
    """A CPU tensor goes to PyTorch whatever the family is; only strict refuses that."""
    (one,) = pick("four_sides")
    t = make(one, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = call(one, t.x, t.w, t.b, family=family)
    oracle.check("fprop", got, t, one.spec)
    choice = plan.choose(one.problem(), torch.device("cpu"), family)
    assert choice.family == "aten" and choice.reason


def test_falling_back_warns_once_with_the_reason() -> None:
    x, w = torch.randn(1, 3, 8, 8), torch.randn(5, 3, 2, 7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            haloconv.conv2d(x, w, family="direct")
    ours = [str(one.message) for one in caught if "haloconv" in str(one.message)]
    assert len(ours) == 1 and "cpu" in ours[0].lower()


def test_auto_and_aten_are_silent_on_the_cpu() -> None:
    x, w = torch.randn(1, 3, 8, 8), torch.randn(5, 3, 3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        haloconv.conv2d(x, w)
        haloconv.conv2d(x, w, family="aten", strict=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.complex128], ids=str)
def test_dtypes_that_only_torch_computes(dtype: torch.dtype) -> None:
    x = (torch.randn(2, 3, 7, 8) * 5).to(dtype)
    w = (torch.randn(4, 3, 3, 3) * 5).to(dtype)
    torch.testing.assert_close(
        haloconv.conv2d(x, w, padding=1), torch.nn.functional.conv2d(x, w, padding=1), rtol=1e-5, atol=1e-4
    )


INDICES = (
    {"stride": np.int64(2)}, {"stride": torch.tensor(2)}, {"stride": (np.int64(2), 1)}, {"stride": [2, 3]},
    {"stride": torch.Size((2, 1))}, {"stride": (2,)}, {"padding": np.int32(1)}, {"padding": [1, 2]},
    {"padding": (torch.tensor(1), 0)}, {"dilation": np.int64(2)}, {"dilation": [1, 2]}, {"padding": "valid"},
    {"padding": "same"}, {"padding": "same", "dilation": [2, 1]}, {"stride": 2, "padding": "valid"},
)  # fmt: skip


@pytest.mark.parametrize("options", INDICES, ids=str)
def test_accepted_argument_forms(options: dict) -> None:
    """What PyTorch takes for an int or a pair is taken, and means the same."""
    gen = torch.Generator().manual_seed(1)
    x, w = (torch.randn(shape, generator=gen) for shape in ((2, 3, 9, 10), (4, 3, 3, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        want = torch.nn.functional.conv2d(x, w, **options)
    torch.testing.assert_close(haloconv.conv2d(x, w, **options), want)


def test_positional_arguments_are_torchs() -> None:
    x, w, b = torch.randn(2, 4, 9, 10), torch.randn(6, 2, 3, 3), torch.randn(6)
    args = (x, w, b, 2, 1, 2, 2)
    torch.testing.assert_close(haloconv.conv2d(*args), torch.nn.functional.conv2d(*args))
    named = {"input": x, "weight": w, "bias": b, "stride": 2, "padding": 1, "dilation": 2, "groups": 2}
    torch.testing.assert_close(haloconv.conv2d(**named), torch.nn.functional.conv2d(**named))


def test_four_sides_are_top_bottom_left_right() -> None:
    x = torch.ones(1, 1, 1, 1)
    w = torch.ones(1, 1, 1, 1)
    y = haloconv.conv2d(x, w, padding=(1, 2, 3, 4))
    want = torch.zeros(1, 1, 4, 8)
    want[0, 0, 1, 3] = 1
    assert torch.equal(y, want)


@pytest.mark.parametrize("one", pick("plain_3x3", "border_3x3", "four_sides", "groups_odd"), ids=case_id)
def test_special_inputs_stay_where_they_are(one: Case) -> None:
    t = make(one, torch.float32)
    t = t._replace(x=with_special(t.x, torch.Generator().manual_seed(2)))
    got = call(one, t.x, t.w, t.b)
    assert torch.equal(got.isfinite(), oracle.tap_sums("fprop", t, one.spec).isfinite())


@pytest.mark.parametrize("one", FULL_CASES[:3], ids=case_id)
@pytest.mark.parametrize("precision", ["ieee", "tf32", None])
def test_precision_does_not_matter_on_the_cpu(one: Case, precision: str | None) -> None:
    t = make(one, torch.float32)
    torch.testing.assert_close(call(one, t.x, t.w, t.b, precision=precision), torchs_call(one, t.x, t.w, t.b))


def test_plans_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    plan.clear_plans()
    monkeypatch.setattr(plan, "_PLAN_LIMIT", 4)
    w = torch.randn(2, 1, 3, 3)
    for width in range(5, 15):
        x = torch.randn(1, 1, 5, width)
        torch.testing.assert_close(haloconv.conv2d(x, w), torch.nn.functional.conv2d(x, w))
        assert 1 <= len(plan._plans) <= 4


def test_importing_patches_nothing_and_touches_no_gpu() -> None:
    assert torch.nn.functional.conv2d.__module__ != "haloconv.functional"
    assert torch.nn.Conv2d.forward.__module__ == "torch.nn.modules.conv"
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()


def test_the_docstrings_name_every_family_and_argument() -> None:
    """A new family, or a new argument, is not left out."""
    for name in FAMILIES:
        assert f'``"{name}"``' in haloconv.conv2d.__doc__
    for function in (haloconv.conv2d, haloconv.Conv2d):
        described = re.findall(r"^    (\w+): ", inspect.getdoc(function), re.MULTILINE)
        assert set(inspect.signature(function).parameters) <= set(described)
