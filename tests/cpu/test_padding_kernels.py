"""Padding modes on kernels of ours, in the emulator: exact, without a padded copy, where the choice is ours."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import haloconv
from haloconv import padding
from haloconv.bench.suite import Case
from haloconv.choose.choice import Choice
from haloconv.emulator import emulated_device
from haloconv.families.halo_sm90.conv import conv_edges
from haloconv.families.halo_sm90.conv.configs import split_tilings
from haloconv.families.halo_sm90.wgrad import wgrad_edges
from haloconv.tune.problems import problems_of
from tests import oracle
from tests.emulated import BY_NAME, Run, execute
from tests.exact import make_exact
from tests.launches import launched
from tests.padded import convolved, integers, with_integers

CASES: tuple[tuple[Any, dict[str, Any]], ...] = (
    (3, {"padding": 1, "padding_mode": "circular"}),
    ((3, 4), {"padding": (2, 1, 0, 3), "padding_mode": ("reflect", "circular"), "stride": (2, 1)}),
    ((2, 3), {"padding": "same", "padding_mode": ("zeros", "replicate"), "dilation": (1, 2), "groups": 2}),
)


@pytest.mark.parametrize(("taps", "options"), CASES)
def test_our_kernels_run_it_without_a_copy(
    taps: Any, options: dict[str, Any], emulator_cache: None, no_copy: list[str]
) -> None:
    torch.manual_seed(6)
    layer = with_integers(haloconv.Conv2d(4, 4, taps, **options, family="direct", strict=True, dtype=torch.float64))
    x = integers(2, 4, 9, 8).requires_grad_()
    want = convolved(x, layer)
    inputs = (x, layer.weight, layer.bias)
    expected = torch.autograd.grad(want.square().sum(), inputs)
    no_copy.clear()
    with emulated_device():
        for _ in range(2):
            y = layer(x)
            assert torch.equal(y, want)
        assert layer.choice().family == "direct" and "direct" in str(layer)
        found = torch.autograd.grad(y.square().sum(), inputs)
        assert torch.equal(layer(x[0]), want[0])
        function = haloconv.conv2d(
            *inputs, layer.stride, layer.padding, layer.dilation, layer.groups,
            padding_mode=layer.padding_mode, family="direct", activation="relu",
        )  # fmt: skip
        assert torch.equal(function, want.relu())
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True)) and no_copy == []


@pytest.mark.parametrize(
    ("args", "options", "family"),
    [
        ((3, 16, 3), {"padding": 1, "padding_mode": "circular", "stride": 2}, "halo_sm90"),
        ((8, 16, (3, 5)), {"padding": (1, 2), "padding_mode": "reflect"}, "halo_sm90"),
        ((32, 32, 5), {"padding": 2, "padding_mode": "replicate", "groups": 32}, "depthwise"),
    ],
)
def test_each_family_runs_interior_and_rims(
    args: Any, options: dict[str, Any], family: str, emulator_cache: None, no_copy: list[str]
) -> None:
    """In fp16: windows of dy, strips, and pixels in both memory orders."""
    torch.manual_seed(7)
    layer = haloconv.Conv2d(*args, **options, bias=False)
    exact = with_integers(layer).double()
    x = integers(1, args[0], 10, 12).requires_grad_()
    want = convolved(x, exact)
    dy = torch.randint(-1, 2, want.shape).double()
    expected = torch.autograd.grad(want, (x, exact.weight), dy)
    no_copy.clear()
    half = (
        copy.deepcopy(exact)
        .half()
        .to(memory_format=torch.channels_last if family == "depthwise" else torch.contiguous_format)
    )
    image = x.detach().half().requires_grad_()
    with emulated_device():
        y = half(image)
        found = torch.autograd.grad(y, (image, half.weight), dy.half())
        assert half.choice().family == family
    assert torch.equal(y.double(), want) and no_copy == []
    assert all(torch.equal(got.double(), gradient) for got, gradient in zip(found, expected, strict=True))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("modes", ["circular", ("reflect", "replicate"), ("zeros", "reflect")])
def test_weight_gradients_are_one_launch_without_strips(
    modes: Any, memory_format: torch.memory_format, emulator_cache: None, no_copy: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    torch.manual_seed(10)
    for kernel in (conv_edges, wgrad_edges):
        monkeypatch.setattr(kernel, "MOST_COST", math.inf)  # however slow
    options: dict[str, Any] = {"padding": (2, 1), "dilation": (2, 1), "padding_mode": modes, "bias": False}
    layer = with_integers(haloconv.Conv2d(16, 40, 3, dtype=torch.float16, **options))
    x = integers(2, 16, 9, 16, dtype=torch.float16).contiguous(memory_format=memory_format)
    exact = copy.deepcopy(layer).double()
    want = convolved(x.double(), exact)
    dy = torch.randint(-1, 2, want.shape).double().contiguous(memory_format=memory_format)
    (expected,) = torch.autograd.grad(want, exact.weight, dy)
    no_copy.clear()
    with emulated_device(), launched() as names:
        (found,) = torch.autograd.grad(layer(x), layer.weight, dy.half())
    assert names == {"halo_sm90/pack", "halo_sm90/conv_edges", "halo_sm90/wgrad_edges", "halo_sm90/wgrad_sum"}
    assert torch.equal(found.double(), expected) and no_copy == []


@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("mode", ["circular", "reflect"])
def test_training_saves_a_copy_of_an_image_that_is_not_small(
    mode: str, is_small: bool, emulator_cache: None, no_copy: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where PyTorch's convolution is chosen for zeros, and one launch of ours in the place of its padded copy."""
    torch.manual_seed(11)
    for kernel in (conv_edges, wgrad_edges):
        monkeypatch.setattr(kernel, "MOST_COST", math.inf)  # however slow
    monkeypatch.setattr(padding, "choose", lambda problem, device, family: Choice("aten", "a test"))
    monkeypatch.setattr(padding, "_job_of_form", padding._job_of_form.__wrapped__)
    monkeypatch.setattr(padding.Posed, "is_small", lambda self: is_small)
    layer = with_integers(haloconv.Conv2d(16, 40, 3, padding=1, padding_mode=mode, bias=False, dtype=torch.float16))
    x, exact = integers(2, 16, 9, 16, dtype=torch.float16), copy.deepcopy(layer).double()
    image, leaf = x.requires_grad_(), x.detach().double().requires_grad_()
    want = convolved(leaf, exact)
    dy = torch.randint(-1, 2, want.shape).double()
    expected = torch.autograd.grad(want, (leaf, exact.weight), dy)
    no_copy.clear()
    with emulated_device(), launched() as names:
        y = layer(image)
        found = torch.autograd.grad(y, (image, layer.weight), dy.half())
        with torch.no_grad():
            assert torch.equal(layer(image), y)  # inference is one launch in any case
    assert torch.equal(y.double(), want)
    assert all(torch.equal(got.double(), gradient) for got, gradient in zip(found, expected, strict=True))
    assert "halo_sm90/conv_edges" in names and ("halo_sm90/wgrad_edges" in names) is not is_small
    assert (no_copy == []) is not is_small


def test_our_kernels_run_signals_without_a_copy(emulator_cache: None, no_copy: list[str]) -> None:
    torch.manual_seed(6)
    layer = with_integers(
        haloconv.Conv1d(4, 4, 5, padding=2, padding_mode="circular", family="direct", strict=True).double()
    )
    x = integers(2, 4, 20).requires_grad_()
    theirs = torch.nn.Conv1d(4, 4, 5, padding=2, padding_mode="circular", dtype=torch.float64)
    theirs.load_state_dict(layer.state_dict())
    want = theirs(x)
    expected = torch.autograd.grad(want.square().sum(), (x, *theirs.parameters()))
    no_copy.clear()
    with emulated_device():
        assert torch.equal(layer(x), want) and torch.equal(layer(x[0]), want[0])
        y = layer(x)
        assert layer.choice().family == "direct"
        found = torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True)) and no_copy == []


@pytest.mark.parametrize("family", ["auto", "aten", "direct"])
def test_the_choice_decides_between_rims_and_a_copy(family: str, emulator_cache: None, no_copy: list[str]) -> None:
    layer, x = haloconv.Conv2d(2, 2, 3, padding=1, padding_mode="reflect", family=family), torch.randn(1, 2, 6, 7)
    with emulated_device(), torch.no_grad():
        y = layer(x)
        assert (layer.choice().family == "aten") == (family == "aten") == bool(no_copy)
    torch.testing.assert_close(y, convolved(x, layer), rtol=1e-2, atol=1e-2)


def test_inference_of_small_images_is_one_launch_where_gradients_would_need_rims(
    emulator_cache: None, no_copy: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Posed.cut_on tells what is cut by a choice for zeros: here nothing, as where "auto" leaves images to a copy."""
    torch.manual_seed(8)
    layer = with_integers(haloconv.Conv2d(16, 24, 3, padding=1, padding_mode="circular", dtype=torch.float16))
    x, exact = integers(1, 16, 6, 8, dtype=torch.float16), copy.deepcopy(layer).double()
    want = convolved(x.double(), exact)
    monkeypatch.setattr(padding.Posed, "cut_on", lambda self, device: None)
    monkeypatch.setattr(padding.Posed, "is_small", lambda self: True)  # on a stand-in nothing is
    padding._job_of_form.cache_clear()
    no_copy.clear()
    with emulated_device():
        with torch.no_grad(), launched() as names:
            assert torch.equal(layer(x).double(), want)
            assert layer.choice().family == "halo_sm90"
        assert names == {"halo_sm90/pack", "halo_sm90/conv_edges"} and no_copy == []
        assert torch.equal(layer(x).double(), want) and no_copy != []
    padding._job_of_form.cache_clear()


def test_tuning_poses_the_image_as_our_kernels_see_it() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"))
    x = torch.randn(1, 2, 6, 7)
    assert [str(each.problem) for each in problems_of(model, x, ("fprop",))] == ["fprop 1,2,8,9 -> 4, 3x3 tf32 nchw"]
    with emulated_device():
        posed = [str(each.problem) for each in problems_of(model, x, ("fprop", "wgrad"))]
    assert posed == [f"{each} 1,2,6,7 -> 4, 3x3 p1,1,1,1 tf32 nchw" for each in ("fprop", "wgrad")]


def test_a_row_names_the_kernel_that_pads_by_itself(emulator_cache: None) -> None:
    case = Case("wraps", (1, 16, 6, 8), 8, (3, 3), padding=(1, 1), padding_mode="circular")
    for family, kernel in (("halo_sm90", "halo_sm90/conv_edges"), ("direct", "direct/direct")):
        layer = case.layer("fp16", "nchw", family, torch.device("cpu"))
        with emulated_device():
            assert [layer.ran(step).kernel for step in ("fprop", "dgrad")] == [kernel, kernel]
            assert layer.ran("wgrad").kernel == kernel.replace("conv_edges", "wgrad_edges")


@pytest.mark.parametrize("result", ["circular", "halo_circular"])
def test_partial_sums_of_split_k_wrap_too(result: str, emulator_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not among the emulator's runs, so that what stands in for a GPU run of the sum does not hang on it."""
    monkeypatch.setattr(
        conv_edges, "best_tilings", lambda form, storage, *_: tuple(t for t in split_tilings(form, storage))
    )
    run = Run("halo_sm90", BY_NAME["split_aligned"], torch.float32, result)
    exact = make_exact(run.forced, run.dtype, "cpu")
    oracle.check_exact(run.result, execute(run, exact, seed=0), exact, run.forced.spec)
