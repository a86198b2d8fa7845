"""haloconv.functional_mode: calls of torch.nn.functional.conv2d are ours inside, with PyTorch's manners."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode

import haloconv
from haloconv import functional
from haloconv.emulator import available, emulated_device
from haloconv.problem import ConvSpec
from tests.usages import Place


def tensors(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(2)
    return tuple(torch.randn(shape, generator=gen).to(dtype) for shape in ((2, 4, 9, 11), (6, 2, 3, 2), (6,)))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ConvSpec]:
    """What is asked of each call that is ours."""
    specs: list[ConvSpec] = []
    real = functional.convolve

    def noted(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, spec: ConvSpec, *args: Any, **more: Any) -> Any:
        specs.append(spec)
        return real(x, w, b, spec, *args, **more)

    monkeypatch.setattr(functional, "convolve", noted)
    return specs


ARGUMENTS: dict[str, tuple[tuple, dict]] = {
    "defaults": ((), {"groups": 2}),
    "by position": ((None, (2, 1), (1, 0), (1, 2), 2), {}),
    "by name": ((), {"stride": 2, "padding": (2, 1), "dilation": 2, "groups": 2}),
    "same": ((), {"padding": "same", "groups": 2}),
}


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("function", [F.conv2d, torch.conv2d])
def test_the_function_is_ours_inside_and_pytorchs_again_after(function, arguments: str, served: list) -> None:
    (x, w, b), (args, options) = tensors(), ARGUMENTS[arguments]
    x.requires_grad_(), w.requires_grad_()
    want = function(x, w, *args, **options)
    with haloconv.functional_mode(precision="ieee"):
        y = function(input=x, weight=w, **options) if not args else function(x, w, *args, **options)
        F.relu(x)
    assert [spec.precision for spec in served] == ["ieee"]
    torch.testing.assert_close(y, want)
    for got, expected in zip(*(torch.autograd.grad(each.square().sum(), (x, w)) for each in (y, want)), strict=True):
        torch.testing.assert_close(got, expected)
    function(x, w, b, groups=2)
    assert len(served) == 1


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_layers_are_reached_whatever_their_forward(mode: str, served: list) -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    x, *_ = tensors(torch.float32)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode=mode), Standardised(4, 2, 3, stride=2))
    want = model(x)
    with haloconv.functional_mode():
        torch.testing.assert_close(model(x), want)
    assert [spec.stride for spec in served] == [(1, 1), (2, 2)]


def test_our_kernels_run_inside(emulator_cache: None) -> None:
    if available() is not None:
        pytest.skip(available())
    place = Place("cpu")  # its first layer has been built for the usages
    x, stem = place.image(), place.net().stem
    want = stem(x)
    with emulated_device(), haloconv.functional_mode(family="direct", strict=True):
        torch.testing.assert_close(stem(x), want, rtol=1e-5, atol=1e-5)


def test_strict_refuses_pytorchs_convolution() -> None:
    x, w, b = tensors()
    with pytest.raises(RuntimeError, match="on cpu; our kernels run on CUDA"), haloconv.functional_mode(strict=True):
        F.conv2d(x, w, b, groups=2)


def test_the_innermost_mode_holds_and_only_in_its_thread(served: list) -> None:
    x, w, b = tensors(torch.float32)

    def call() -> None:
        F.conv2d(x, w, b, groups=2)

    with haloconv.functional_mode(precision="ieee"):
        with haloconv.functional_mode(precision="tf32"):
            call()
        call()
        thread = threading.Thread(target=call)
        thread.start(), thread.join()
    assert [spec.precision for spec in served] == ["tf32", "ieee"]


def test_other_modes_see_what_they_would_see_without_ours(served: list) -> None:
    class Noting(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    x, w, b = tensors()
    with haloconv.functional_mode(), Noting():
        F.conv2d(x, w, b, groups=2)
    assert names == ["conv2d"] and len(served) == 1


def test_layers_of_ours_keep_their_settings(served: list) -> None:
    """Also those that PyTorch runs: their call of torch.conv2d is not asked about again."""
    x, *_ = tensors(torch.float32)
    layer = haloconv.Conv2d(4, 6, 3, family="aten")
    with haloconv.functional_mode(strict=True):
        first, second = layer(x), layer(x)
        assert haloconv.conv2d(x, layer.weight, layer.bias, family="aten").equal(first) and first.equal(second)
        first.square().sum().backward()
    assert [spec.family for spec in served] == ["aten"]


def test_autocast(served: list) -> None:
    x, w, b = tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        want = F.conv2d(x, w, b, groups=2)
        with haloconv.functional_mode():
            y = F.conv2d(x, w, b, groups=2)
    assert y.dtype == torch.bfloat16 and len(served) == 1
    torch.testing.assert_close(y, want)


def test_function_transforms(served: list) -> None:
    x, w, b = tensors()

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x[None], w, b, groups=2).square().sum()

    want = vmap(grad(loss), in_dims=(None, 0))(w, x)
    with haloconv.functional_mode():
        torch.testing.assert_close(vmap(grad(loss), in_dims=(None, 0))(w, x), want)
    assert served


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_compiled_functions(where: str) -> None:
    """Called in the mode, or with the mode in what is compiled; nothing breaks the graph."""
    x, w, b = tensors(torch.float32)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Any:
        graphs.append(graph)
        return graph.forward

    def plain() -> torch.Tensor:
        return F.conv2d(x, w, b, padding=1, groups=2).relu()

    def with_mode() -> torch.Tensor:
        with haloconv.functional_mode(precision="ieee"):
            return plain()

    torch._dynamo.reset()
    want = plain()
    if where == "inside":
        y = torch.compile(with_mode, fullgraph=True, backend=backend)()
    else:
        compiled = torch.compile(plain, fullgraph=True, backend=backend)
        with haloconv.functional_mode(precision="ieee"):
            y = compiled()
        assert torch.equal(compiled(), want) and "haloconv" not in str(graphs[1].graph)
    torch.testing.assert_close(y, want)
    assert "haloconv.fprop" in str(graphs[0].graph) and "ieee" in str(graphs[0].graph)
    torch._dynamo.reset()


REFUSED: dict[str, tuple[tuple, dict]] = {
    "four sides": ((), {"padding": (1, 1, 1, 1), "groups": 2}),
    "three sides": ((), {"padding": (1, 1, 1), "groups": 2}),
    "four sides by position": ((None, 1, (1, 1, 1, 1), 1, 2), {}),
    "unknown padding": ((), {"padding": "full", "groups": 2}),
    "unknown argument": ((), {"family": "direct", "groups": 2}),
    "stride": ((), {"stride": 0, "groups": 2}),
    "three strides": ((), {"stride": (1, 1, 1), "groups": 2}),
    "dilation": ((), {"dilation": 0, "groups": 2}),
    "groups": ((), {"groups": 3}),
    "bias": ((torch.zeros(3, dtype=torch.float64),), {"groups": 2}),
    "dtype": ((torch.zeros(6),), {"groups": 2}),
    "float stride": ((), {"stride": 2.0, "groups": 2}),
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_errors_are_pytorchs(arguments: str) -> None:
    (x, w, _), (args, options) = tensors(), REFUSED[arguments]
    with pytest.raises((RuntimeError, TypeError, ValueError)) as theirs:
        F.conv2d(x, w, *args, **options)
    with pytest.raises(theirs.type) as ours, haloconv.functional_mode():
        F.conv2d(x, w, *args, **options)
    assert str(ours.value) == str(theirs.value)


class Sized(torch.Tensor):
    """A tensor whose class decides what torch's functions do with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        return "its own" if func is torch.conv2d else super().__torch_function__(func, types, args, kwargs)


def test_tensor_classes_with_rules_of_their_own_keep_them(served: list) -> None:
    x, w, b = tensors()
    with haloconv.functional_mode():
        assert F.conv2d(x.as_subclass(Sized), w, b, groups=2) == "its own"
    with pytest.raises(RuntimeError, match="Sized has a __torch_function__"), haloconv.functional_mode(strict=True):
        F.conv2d(x.as_subclass(Sized), w, b, groups=2)
    assert not served


def test_plain_tensor_classes_are_served(served: list) -> None:
    class Named(torch.Tensor):
        pass

    x, w, b = tensors()
    with haloconv.functional_mode():
        y = F.conv2d(x.as_subclass(Named), nn.Parameter(w), b, groups=2)
    assert type(y) is Named and len(served) == 1


def test_wrong_options_are_refused() -> None:
    for options in ({"family": "none"}, {"precision": "fp8"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            haloconv.functional_mode(**options)
