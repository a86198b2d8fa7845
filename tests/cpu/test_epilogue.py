"""haloconv.conv2d with a scale and an activation: what PyTorch's operations give, in every mode and to any order."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import haloconv
from haloconv import plan
from haloconv.choose import choice
from haloconv.device import DeviceFacts
from haloconv.emulator import available, emulated_device
from haloconv.epilogue import bias_and_scale
from haloconv.export.record import recorder
from haloconv.families import FAMILIES
from haloconv.families.halo_sm90.pointwise import implicit_gemm
from haloconv.plan import plan_fprop
from haloconv.problem import ACTIVATIONS, NO_EPILOGUE, ConvSpec, Epilogue, Problem, dense_request

CPU, RELU = torch.device("cpu"), Epilogue(activation="relu")
CASES = {  # shapes of x and w, and arguments
    "padded": ((2, 6, 9, 7), (8, 6, 3, 3), {"padding": 1}),
    "four sides, dilated": ((1, 4, 12, 11), (6, 4, 2, 3), {"padding": (1, 0, 2, 3), "dilation": (1, 2)}),
    "grouped, strided": ((2, 6, 9, 7), (9, 2, 3, 3), {"groups": 3, "stride": 2, "padding": 1}),
    "one image": ((6, 9, 7), (8, 6, 3, 3), {}),
    "no image": ((0, 6, 9, 7), (8, 6, 3, 3), {}),
}


def _tensors(name: str, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict]:
    x_shape, w_shape, arguments = CASES[name]
    new = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=new, dtype=dtype) for shape in (x_shape, w_shape, w_shape[:1]))
    return x, w, b, arguments


def _ours(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, arguments: dict) -> torch.Tensor:
    return haloconv.conv2d(x, w, b, **arguments, activation="relu")


def _theirs(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, arguments: dict) -> torch.Tensor:
    return torch.relu(haloconv.conv2d(x, w, b, **arguments))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("storage", [torch.contiguous_format, torch.channels_last])
def test_relu_follows_the_convolution(name: str, has_bias: bool, storage: torch.memory_format) -> None:
    x, w, b, arguments = _tensors(name)
    if x.dim() == 4:
        x = x.contiguous(memory_format=storage)
    got, wanted = (run(x, w, b if has_bias else None, arguments) for run in (_ours, _theirs))
    assert torch.equal(got, wanted) and got.stride() == wanted.stride()
    assert got.numel() == 0 or (0 < (got == 0).sum() < got.numel()), "some sums are negative, some are not"


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_every_order(name: str, own_autograd: None) -> None:
    *leaves, arguments = _tensors(name)
    found = []
    for run in (_ours, _theirs):
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        y = run(*inputs, arguments)
        first = torch.autograd.grad(y, inputs, torch.ones_like(y).cumsum(-1), create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), inputs, allow_unused=True)
        found.append((y, *first, *second))
    for got, wanted in zip(*found, strict=True):
        assert (got is None) == (wanted is None) and (got is None or torch.allclose(got, wanted))


def test_nothing_but_y_is_kept_for_the_mask(own_autograd: None) -> None:
    x, w, b, arguments = _tensors("padded")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = _ours(x, w.requires_grad_(), b, arguments)
    assert sorted(tuple(each.shape) for each in kept) == sorted([tuple(x.shape), tuple(y.shape)])


def test_not_finite_sums_are_those_of_torch() -> None:
    x, w, b, arguments = _tensors("padded", torch.float32)
    x[0, 0, 4, 3], x[1, 2, 2, 2] = float("nan"), float("-inf")
    got, wanted = (run(x, w, b, arguments) for run in (_ours, _theirs))
    assert torch.allclose(got, wanted, equal_nan=True) and wanted.isnan().any() and wanted.isinf().any()


TRACED: dict[str, Callable] = {
    "vmap": lambda run, x, w: torch.func.vmap(lambda each: run(each, w, None, {}))(x),
    "jvp": lambda run, x, w: torch.func.jvp(lambda each: run(each, w, None, {}), (x,), (x.cos(),))[1],
    "grad": lambda run, x, w: torch.func.grad(lambda each: run(x, each, None, {}).sum())(w),
    "trace": lambda run, x, w: torch.jit.trace(lambda each: run(each, w, None, {}), (x,), check_trace=False)(2 * x),
    "fake": lambda run, x, w: torch.fx.experimental.proxy_tensor.make_fx(lambda each: run(each, w, None, {}))(x)(2 * x),
    "autocast": lambda run, x, w: _under_autocast(lambda: run(x.float(), w.float(), None, {})),
}


def _under_autocast(run: Callable) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return run()


@pytest.mark.parametrize("mode", TRACED)
def test_whatever_traces_or_transforms_sees_relu(mode: str) -> None:
    x, w, _, _ = _tensors("padded")
    got, wanted = (TRACED[mode](run, x, w) for run in (_ours, _theirs))
    assert got.dtype == wanted.dtype and torch.equal(got, wanted)


def test_a_plan_for_each_epilogue() -> None:
    x, w, b, _ = _tensors("padded")
    plain, activated = (plan_fprop(x, w, b, ConvSpec(), each) for each in (NO_EPILOGUE, RELU))
    assert plain is not activated and activated.problem.epilogue == RELU and str(activated.problem).endswith("relu")
    assert activated.problem.toward("dgrad") == plain.problem.toward("dgrad")
    assert str(Epilogue(True, "silu")) == "scale silu" and str(NO_EPILOGUE) == ""


SCALE = torch.linspace(-2, 2, 8, dtype=torch.float64)


def _composed(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, scale: torch.Tensor | None, name: str | None):
    y = nn.functional.conv2d(x, w, None if scale is not None else b, padding=1)
    if scale is not None:
        y = y * scale[:, None, None] + (0 if b is None else b[:, None, None])
    slopes = {"leaky_relu": {"negative_slope": 0.01}, "gelu_tanh": {"approximate": "tanh"}}
    function = getattr(nn.functional, "gelu" if name == "gelu_tanh" else name or "relu")
    return y if name is None else function(y, **slopes.get(name, {}))


@pytest.mark.parametrize("name", [None, *ACTIVATIONS])
@pytest.mark.parametrize("has_scale", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_epilogue_with_gradients(name: str | None, has_scale: bool, has_bias: bool, own_autograd: None) -> None:
    """As operations of PyTorch's, and as the operator that torch.compile is given, to the second order."""
    x, w, b, _ = _tensors("padded")
    given = [x, w, b if has_bias else None, SCALE if has_scale else None]
    leaves = [None if each is None else each.clone().requires_grad_() for each in given]
    want = _composed(*leaves, name)
    y = haloconv.conv2d(*leaves[:3], padding=1, scale=leaves[3], activation=name)
    third = bias_and_scale(leaves[2], leaves[3], x.dtype) if has_scale else leaves[2]
    values = ([1, 1], [1] * 4, [1, 1], 1, None, "auto", False)
    assert torch.allclose(y, want)
    found = [_two_orders(each, [leaf for leaf in leaves if leaf is not None]) for each in (y, want)]
    with torch.no_grad():
        assert torch.allclose(haloconv.conv2d(*given[:3], padding=1, scale=given[3], activation=name), want)
    if not has_scale:  # the operator takes bias and scale in fp32
        operator = torch.ops.haloconv.fprop_epilogue(leaves[0], leaves[1], third, None, has_scale, name, *values)
        assert torch.allclose(operator, want)
        found.append(_two_orders(operator, [leaf for leaf in leaves if leaf is not None]))
    for got in found[::2]:
        assert all(torch.allclose(one, other) for one, other in zip(got, found[1], strict=True))


def _two_orders(y: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    first = torch.autograd.grad(y, leaves, y.detach().cos(), create_graph=True)
    return [*first, *torch.autograd.grad(sum(each.square().sum() for each in first), leaves[:2])]


@pytest.mark.parametrize("name", ["silu", None])
def test_the_operator_with_a_scale(name: str | None) -> None:
    x, w, b, _ = (each.float() if isinstance(each, torch.Tensor) else each for each in _tensors("padded"))
    leaves = [each.clone().requires_grad_() for each in (x, w, bias_and_scale(b, SCALE, torch.float32))]
    values = (None, True, name, [1, 1], [1] * 4, [1, 1], 1, None, "auto", False)
    y, pairs = torch.ops.haloconv.fprop_epilogue(*leaves, *values), leaves[2]
    want = _composed(leaves[0], leaves[1], pairs[:, 0], pairs[:, 1], name)
    for got, expected in zip(*(torch.autograd.grad(each, leaves, y.detach().cos()) for each in (y, want)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    torch.library.opcheck(torch.ops.haloconv.fprop_epilogue.default, (*leaves, *values))
    table = haloconv.decompositions()[torch.ops.haloconv.fprop_epilogue.default]
    torch.testing.assert_close(table(*leaves, *values), y)


@pytest.mark.parametrize(("name", "again"), [("relu", 0), ("silu", 1)])
def test_the_gradient_of_relu_computes_no_sums_again(name: str, again: int) -> None:
    """It is known from the result; every other activation asks for what it was given."""
    x, w, b, _ = _tensors("padded")
    seen: list[str] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    values = (None, False, name, [1, 1], [1] * 4, [1, 1], 1, None, "auto", False)
    y = torch.ops.haloconv.fprop_epilogue(x.requires_grad_(), w.requires_grad_(), b, *values)
    with Noting():
        torch.autograd.grad(y.sum(), (x, w))
    assert seen.count("haloconv::fprop") == again and seen.count("haloconv::dgrad") == 1, seen


def test_autocast_leaves_bias_and_scale_in_fp32() -> None:
    x, w, b, _ = (each.float() if isinstance(each, torch.Tensor) else each for each in _tensors("padded"))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        y = haloconv.conv2d(x, w, b, padding=1, scale=SCALE.float(), activation="silu")
    want = _composed(x, w, b, SCALE.float(), "silu")
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), want, rtol=0.05, atol=0.05)


LAYERS = {  # one for each kernel that has epilogues: shapes, and the kernel of the family before its stroke
    "conv": ((2, 6, 9, 7), (8, 6, 3, 3), "halo_sm90/conv"),
    "taps": ((2, 8, 9, 7), (8, 8, 3, 3), "halo_sm90/implicit_gemm"),
    "pointwise": ((2, 64, 8, 8), (64, 64, 1, 1), "halo_sm90/pointwise"),
    "planes": ((2, 32, 7, 7), (32, 32, 1, 1), "halo_sm90/pointwise_planes"),
    "few channels": ((2, 6, 9, 8), (8, 6, 3, 3), "halo_sm80/conv"),
}


@pytest.mark.skipif(available() is not None, reason=f"no emulator: {available()}")
@pytest.mark.parametrize("layer", LAYERS)
def test_kernels_apply_every_epilogue(layer: str, emulator_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x_shape, w_shape, kernel = LAYERS[layer]
    monkeypatch.setattr(implicit_gemm, "cycles", lambda *_: 0.0)  # ahead of conv where it takes the layer
    new = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=new) for shape in (x_shape, w_shape, w_shape[:1]))
    x = x.contiguous(memory_format=torch.channels_last if layer == "taps" else torch.contiguous_format)
    scale = torch.linspace(-2, 2, w_shape[0])
    padding = (w_shape[2] // 2,) * 4
    spec = ConvSpec(padding=padding, family=kernel.partition("/")[0], strict=True, precision="tf32")
    plan.clear_plans()
    with emulated_device():
        for name, has_scale in product((None, *ACTIVATIONS), (False, True)):
            third = bias_and_scale(b, scale, x.dtype) if has_scale else b
            bound = plan_fprop(x, w, third, spec, Epilogue(has_scale, name))
            want = haloconv.conv2d(x.double(), w.double(), b.double(), padding=padding, family="aten",
                                   scale=scale.double() if has_scale else None, activation=name)  # fmt: skip
            got = bound.run(x, w, third)
            assert bound.choice.kernel == kernel
            torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-2)
    plan.clear_plans()


@pytest.mark.skipif(available() is not None, reason=f"no emulator: {available()}")
@pytest.mark.parametrize("family", ["direct", "halo_sm90", "halo_sm80"])
def test_on_our_kernels(family: str, emulator_cache: None) -> None:
    x, w, b, _ = _tensors("padded", torch.float32)
    extras = {"family": family, "strict": True, "precision": None if family == "direct" else "tf32", "padding": 1}
    with emulated_device():
        plain = haloconv.conv2d(x, w, b, **extras)
        activated = haloconv.conv2d(x, w, b, **extras, activation="relu")
        scaled = haloconv.conv2d(x, w, b, **extras, scale=SCALE.float())
    assert torch.equal(activated, torch.relu(plain)) and (plain < 0).any()
    sums = plain - b[:, None, None]
    torch.testing.assert_close(scaled, sums * SCALE.float()[:, None, None] + b[:, None, None], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(available() is not None, reason=f"no emulator: {available()}")
@pytest.mark.parametrize(("family", "passes"), [("direct", 1), ("halo_sm90", 0), ("halo_sm80", 0)])
def test_a_kernel_that_has_epilogues_needs_no_pass(
    family: str, passes: int, monkeypatch: pytest.MonkeyPatch, emulator_cache: None
) -> None:
    x, w, b, _ = _tensors("padded", torch.float32)
    spec = ConvSpec(family=family, strict=True, precision=None if family == "direct" else "tf32")
    made, followed = [], plan.followed
    monkeypatch.setattr(plan, "followed", lambda *args: made.append(args) or followed(*args))
    plan.clear_plans()
    with emulated_device():
        assert (plan_fprop(x, w, b, spec, RELU).run(x, w, b) >= 0).all()
    plan.clear_plans()
    assert len(made) == passes


@pytest.mark.skipif(available() is not None, reason=f"no emulator: {available()}")
@pytest.mark.parametrize("family", ["depthwise", "depthwise_window"])
def test_depthwise_layers_are_followed_by_it(family: str, emulator_cache: None) -> None:
    x, w = torch.randn(1, 4, 6, 7), torch.randn(4, 1, 3, 3)
    extras = {"padding": 1, "groups": 4, "family": family, "strict": True}
    with emulated_device():
        plain, activated = haloconv.conv2d(x, w, **extras), haloconv.conv2d(x, w, **extras, activation="relu")
    assert (plain < 0).any() and torch.equal(activated, plain.relu())


def test_what_a_sum_of_parts_does_not_apply_is_not_split() -> None:
    """Few pixels of many channels are split over the channels, unless a scale or SiLU follows."""
    problem = Problem("fprop", 1, 512, 7, 7, 512, 3, 3, padding=(1,) * 4, bias=True, dtype=torch.float16)
    narrow = replace(problem, c=2048, r=1, s=1, padding=(0,) * 4, layout="nhwc")
    with recorder(DeviceFacts("NVIDIA H200", "sm_90a", 132, (9, 0), 141 << 30, 232_448, "none")):
        for one in (problem, narrow):
            asked = (RELU, Epilogue(activation="silu"), Epilogue(scale=True))
            keys = {each: _keys(replace(one, epilogue=each)) for each in asked}
            split = {each: sum(map(_is_split, found)) for each, found in keys.items()}
            assert split.pop(RELU) > 0 and set(split.values()) == {0}, keys


def _is_split(key: str) -> bool:
    """Whether a launch of its own adds the parts: blocks of a cluster add theirs themselves, and apply what follows."""
    return "splits1 " not in f"{key} " and not key.endswith("in_cluster")


def _keys(problem: Problem) -> list[str]:
    return [config.key for config in FAMILIES["halo_sm90"].configs(dense_request(problem, CPU))]


@pytest.mark.parametrize("page", ["compile.md", "fuse.md", "tuning.md"])
def test_a_page_names_the_families_whose_kernels_apply_it(page: str) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / page).read_text(encoding="utf-8")
    name = r"\[?`(\w+)`(?:\]\([\w/.]+\))?"
    found = re.search(rf"\bkernel of {name}(?:(?:, | or ){name})*", text)
    assert found and {name for name in FAMILIES if FAMILIES[name].has_epilogue} == set(re.findall(name, found[0]))


def test_the_choice_is_made_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it saves may decide: tests/cpu/test_wholes.py."""
    x, w, b, _ = _tensors("padded")
    asked, choose = [], choice.choose
    monkeypatch.setattr(choice, "choose", lambda problem, *rest: asked.append(problem) or choose(problem, *rest))
    plan.clear_plans()
    bound = plan_fprop(x, w, b, ConvSpec(), RELU)
    assert asked == [bound.problem] and bound.problem.epilogue == RELU and bound.problem.bias


@pytest.mark.parametrize("activation", ["relu6", "", 1, True])
def test_what_is_no_activation(activation: object) -> None:
    x, w, b, _ = _tensors("padded")
    with pytest.raises(ValueError, match=r"activation must be None or one of \('relu', .*\), not "):
        haloconv.conv2d(x, w, b, activation=activation)


@pytest.mark.parametrize(
    ("scale", "error", "says"),
    [
        (2.0, TypeError, "scale must be a Tensor or None, not float"),
        (torch.ones(3), RuntimeError, r"expected scale to be 8 floating-point numbers there, but got \[3\]"),
        (torch.ones(8, dtype=torch.int64), RuntimeError, "but got .* of torch.int64"),
    ],
)
def test_what_is_no_scale(scale: object, error: type[Exception], says: str) -> None:
    x, w, b, _ = _tensors("padded")
    with pytest.raises(error, match=says):
        haloconv.conv2d(x, w, b, scale=scale)
    with pytest.raises(RuntimeError, match="expected bias to be 1-dimensional"):
        haloconv.conv2d(x, w, torch.zeros(8, 2, dtype=x.dtype))
    with pytest.raises(RuntimeError, match=r"expected bias and scale as one fp32 tensor of size \[8, 2\]"):
        plan_fprop(x, w, b, ConvSpec(), Epilogue(scale=True))
