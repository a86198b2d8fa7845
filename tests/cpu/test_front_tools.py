"""The functions and layers beside conv2d with PyTorch's tools: traces, norms, batched gradients, odd arguments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.autograd.functional import hessian

import haloconv
from haloconv import arguments, three_dimensions
from haloconv.emulator import emulated_device
from haloconv.precision import convolution_precision, torch_precision
from tests.fronts import CALLS, POSED, call_id, front, operands

NAMES = ("conv1d", "conv3d", "conv_transpose1d", "conv_transpose2d")
ONE_EACH = [next(call for call in POSED if call[0] == name) for name in NAMES]
PATCHES = ("conv3d", (4, 5, 6), {"stride": (4, 5, 6)})
TRANSPOSED = [call for call in POSED if "transpose" in call[0] and call[2].get("stride")]
NORMS: dict[str, tuple[Callable, Callable]] = {
    "weight_norm": (torch.nn.utils.weight_norm, torch.nn.utils.remove_weight_norm),
    "spectral_norm": (torch.nn.utils.spectral_norm, torch.nn.utils.remove_spectral_norm),
}
"""The hooks, which put an attribute in the place of the parameter; those of parametrisations are in another file."""


def layer_of(call: tuple, dtype: torch.dtype = torch.float64) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Ours and PyTorch's, with the same parameters."""
    name, taps, options = call
    made = []
    for cls in (front(name).layer, front(name).torchs):
        torch.manual_seed(6)
        made.append(cls(4, 6, taps, **options, dtype=dtype))
    return made[0], made[1]


def image_of(call: tuple, *, larger: bool = False) -> torch.Tensor:
    """An input; or, of three images, a larger one."""
    x = operands(call)[0]
    gen = torch.Generator().manual_seed(8)
    extents = [2 * extent for extent in x.shape[2:]] if larger else x.shape[2:]
    return torch.randn(3 if larger else 2, 4, *extents, generator=gen, dtype=torch.float64)


@pytest.mark.parametrize("call", [*ONE_EACH, *TRANSPOSED, CALLS[-1]], ids=call_id)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_layer_takes_larger_inputs(call: tuple, as_on_a_gpu: None, emulator_cache: None) -> None:
    """A program of torch.jit.trace computes extents where it runs; its gradients, too."""
    ours, theirs = layer_of(call)
    program = torch.jit.trace(ours, image_of(call), check_trace=False)
    assert ("haloconv::" in str(program.graph)) == (call not in (PATCHES, CALLS[-1]))
    larger = image_of(call, larger=True)
    torch.testing.assert_close(program(larger), theirs(larger), rtol=1e-12, atol=1e-12)
    found = [torch.autograd.grad(each(larger).pow(2).sum(), each.weight)[0] for each in (program, theirs)]
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_of_one_frame_takes_several(as_on_a_gpu: None) -> None:
    frame = ("conv3d", (1, 3, 3), {"padding": (0, 1, 1)})
    (ours, theirs), x = layer_of(frame), image_of(frame)
    program = torch.jit.trace(ours, x[:, :, :1], check_trace=False)
    assert "haloconv::" in str(program.graph)
    torch.testing.assert_close(program(x), theirs(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("call", ONE_EACH, ids=call_id)
@pytest.mark.usefixtures("own_autograd", "as_on_a_gpu")
def test_gradients_of_several_outputs_at_once(call: tuple) -> None:
    """torch.autograd.grad(is_grads_batched=True), vmap over grad, and what vectorize=True makes of them."""
    one, tensors = front(call[0]), operands(call, batch=1)

    def several(function: Callable) -> list[torch.Tensor]:
        leaves = [each.clone().requires_grad_() for each in tensors]
        y = function(*leaves, **call[2])
        dys = torch.stack([torch.ones_like(y), y.detach()])
        found = [*torch.autograd.grad(y, leaves, dys, is_grads_batched=True, retain_graph=True)]
        found += torch.func.vmap(lambda dy: torch.autograd.grad(y, leaves, dy, retain_graph=True))(dys)
        first = torch.autograd.grad(y.pow(3).sum(), leaves[:2], create_graph=True)
        seconds = [torch.stack([each, 2 * each]).detach() for each in first]
        found += torch.autograd.grad(first, leaves[:2], seconds, is_grads_batched=True)
        _, w, b = tensors
        small = tensors[0][:, :, :3] if call[0] == "conv_transpose2d" else tensors[0]
        return [
            *found,
            hessian(lambda b: function(small, w, b, **call[2]).pow(2).sum(), b, vectorize=True),
        ]

    for got, want in zip(several(one.ours), several(one.theirs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_gradients_of_several_outputs_of_conv2d(own_autograd: None) -> None:
    x, w = torch.randn(2, 4, 5, 6, dtype=torch.float64), torch.randn(6, 4, 3, 3, dtype=torch.float64)
    for order in (torch.contiguous_format, torch.channels_last):
        found = []
        for function in (haloconv.conv2d, torch.nn.functional.conv2d):
            leaves = [each.contiguous(memory_format=order).requires_grad_() for each in (x.clone(), w.clone())]
            y = function(*leaves)
            dys = torch.stack([torch.ones_like(y), y.detach()])
            found.append(torch.autograd.grad(y, leaves, dys, is_grads_batched=True))
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("call", [PATCHES, ("conv3d", (2, 2, 2), {"stride": 2}), CALLS[7]], ids=call_id)
def test_volumes_are_compiled_inside_a_mode(call: tuple, as_on_a_gpu: None, fresh_dynamo: None) -> None:
    """Dynamo traces calls through the mode that torch.set_default_device and torch.device are."""
    tensors = operands(call)
    with torch.device("cpu"):
        compiled = torch.compile(lambda *given: haloconv.conv3d(*given, **call[2]), backend="eager", fullgraph=True)
        got = compiled(*tensors)
    torch.testing.assert_close(got, torch.nn.functional.conv3d(*tensors, **call[2]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("call", ONE_EACH, ids=call_id)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("swapped_first", [True, False])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_norms_by_hooks(call: tuple, kind: str, swapped_first: bool) -> None:
    """As vocoders have them: made before and after the swap, and removed again."""
    add, remove = NORMS[kind]
    models = [torch.nn.Sequential(layer_of(call)[1]) for _ in range(2)]
    x = image_of(call)
    for model in models:
        if swapped_first and model is models[0]:
            assert len(haloconv.accelerate(model)) == 1
        torch.manual_seed(3)
        add(model[0])
    if not swapped_first:
        assert len(haloconv.accelerate(models[0])) == 1
    for _ in range(2):
        found = [torch.autograd.grad(each(x).pow(2).sum(), [*each.parameters()]) for each in models]
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert models[0].state_dict().keys() == models[1].state_dict().keys()
    for model in models:
        remove(model[0])
    assert torch.equal(models[0](x), models[1](x)) and isinstance(models[0][0], front(call[0]).layer)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [1.0, True, (1.0,), (True,), "1", None], ids=repr)
def test_what_is_no_int_is_refused_after_a_call_with_the_int(name: str, value: object) -> None:
    """1.0 and True are 1 to a dict, and none to PyTorch."""
    one, call = front(name), next(each for each in ONE_EACH if each[0] == name)
    tensors = operands(call)
    dims = len(one.image)
    one.ours(*tensors, stride=1), one.ours(*tensors, stride=(1,)), one.ours(*tensors, stride=(1,) * dims)
    wrong = value * dims if isinstance(value, tuple) else value
    with pytest.raises(TypeError):
        one.theirs(*tensors, stride=wrong)
    with pytest.raises(TypeError):
        one.ours(*tensors, stride=wrong)


@pytest.mark.parametrize("ours_runs", [True, False])
def test_a_bias_of_another_dtype_where_pytorch_takes_it(ours_runs: bool) -> None:
    """PyTorch's "same" of a filter of even taps does."""
    x, w, b = torch.randn(2, 4, 9).double(), torch.randn(6, 4, 4).double(), torch.randn(6)
    want = torch.nn.functional.conv1d(x, w, b, padding="same")
    with emulated_device() if ours_runs else nullcontext():
        assert torch.equal(haloconv.conv1d(x, w, b, padding="same"), want)


@pytest.mark.parametrize("asked", ["ieee", "tf32"])
def test_what_pytorch_runs_is_at_the_precision_asked_for(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward and backward see the setting; outside, it is as before."""
    for module in (arguments, three_dimensions):
        monkeypatch.setattr(module, "follows_a_setting", lambda x, precision: precision is not None)
    seen: list[str] = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
            seen.append(torch_precision())
            return y.clone()

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            seen.append(torch_precision())
            return dy.clone()

    call = ("conv3d", (2, 2, 2), {"padding": 1})
    real, (x, w, b) = torch.conv3d, operands(call)
    monkeypatch.setattr(torch, "conv3d", lambda *given: Noting.apply(real(*given)))
    with convolution_precision("tf32" if asked == "ieee" else "ieee"):
        before = torch_precision()
        layer = haloconv.Conv3d(4, 6, 2, padding=1, precision=asked, dtype=torch.float64)
        for _ in range(2):
            layer(x).sum().backward()
        assert set(seen) == {asked} and torch_precision() == before
        with torch.no_grad():
            layer(x)
        assert seen[-1] == asked
        leaves = [each.clone().requires_grad_() for each in (x, w, b)]

        def twice(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            first = torch.autograd.grad(y.pow(3).sum(), leaves, create_graph=True)
            return *first, *torch.autograd.grad([each.pow(2).sum() for each in first], leaves)

        found = twice(haloconv.conv3d(*leaves, padding=1, precision=asked)), twice(real(*leaves, padding=1))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
