"""haloconv.conv2d with an activation: the convolution and then torch.relu, in every mode and to any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import haloconv
from haloconv import plan
from haloconv.choose import choice
from haloconv.emulator import available, emulated_device
from haloconv.plan import plan_fprop
from haloconv.problem import ConvSpec

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


def test_a_plan_for_each_activation() -> None:
    x, w, b, _ = _tensors("padded")
    plain, activated = (plan_fprop(x, w, b, ConvSpec(), name) for name in (None, "relu"))
    assert plain is not activated and activated.problem.activation == "relu" and str(activated.problem).endswith("relu")
    assert activated.problem.toward("dgrad") == plain.problem.toward("dgrad")


@pytest.mark.skipif(available() is not None, reason=f"no emulator: {available()}")
@pytest.mark.parametrize("family", ["direct", "halo_sm90", "halo_sm80"])
def test_on_our_kernels(family: str, emulator_cache: None) -> None:
    x, w, b, _ = _tensors("padded", torch.float32)
    extras = {"family": family, "strict": True, "precision": None if family == "direct" else "tf32", "padding": 1}
    with emulated_device():
        plain = haloconv.conv2d(x, w, b, **extras)
        activated = haloconv.conv2d(x, w, b, **extras, activation="relu")
    assert torch.equal(activated, torch.relu(plain)) and (plain < 0).any()


@pytest.mark.skipif(available() is not None, reason=f"no emulator: {available()}")
@pytest.mark.parametrize(("family", "passes"), [("direct", 1), ("halo_sm90", 0)])
def test_a_kernel_that_activates_needs_no_pass(
    family: str, passes: int, monkeypatch: pytest.MonkeyPatch, emulator_cache: None
) -> None:
    x, w, b, _ = _tensors("padded", torch.float32)
    spec = ConvSpec(family=family, strict=True, precision="tf32" if family == "halo_sm90" else None)
    made, activated = [], plan._activated
    monkeypatch.setattr(plan, "_activated", lambda run: made.append(run) or activated(run))
    plan.clear_plans()
    with emulated_device():
        assert (plan_fprop(x, w, b, spec, "relu").run(x, w, b) >= 0).all()
    plan.clear_plans()
    assert len(made) == passes


def test_the_choice_is_that_of_the_layer_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records and rules know layers as they were measured, without an activation."""
    x, w, b, _ = _tensors("padded")
    asked, choose = [], choice.choose
    monkeypatch.setattr(choice, "choose", lambda problem, *rest: asked.append(problem) or choose(problem, *rest))
    plan.clear_plans()
    bound = plan_fprop(x, w, b, ConvSpec(), "relu")
    assert [each.activation for each in asked] == [None] and bound.problem == replace(asked[0], activation="relu")


@pytest.mark.parametrize("activation", ["gelu", "", 1, True])
def test_what_is_no_activation(activation: object) -> None:
    x, w, b, _ = _tensors("padded")
    with pytest.raises(ValueError, match=r"activation must be None or one of \('relu',\), not "):
        haloconv.conv2d(x, w, b, activation=activation)
