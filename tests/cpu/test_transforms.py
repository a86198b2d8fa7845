"""torch.func and forward-mode differentiation of haloconv.conv2d, on PyTorch's convolution and on our kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

import haloconv
from haloconv.emulator import available, emulated_device

ARGUMENTS = {
    "dense": {"padding": 1},
    "groups": {"groups": 2, "stride": (2, 1), "dilation": (1, 2)},
    "four sides": {"padding": (1, 0, 2, 1)},
}


def operands(kind: str, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Three of x (2, 4, 5, 6), w (6, 4/G, 3, 2) and b (6), stacked."""
    gen = torch.Generator().manual_seed(0)
    w_shape = (3, 6, 4 // ARGUMENTS[kind].get("groups", 1), 3, 2)
    return tuple(torch.randn(shape, generator=gen, dtype=dtype) for shape in ((3, 2, 4, 5, 6), w_shape, (3, 6)))


def convolutions(kind: str, family: str = "auto") -> tuple[Callable, Callable]:
    """Ours, and PyTorch's with the padding done apart."""
    arguments = ARGUMENTS[kind]
    padding = arguments.get("padding", 0)
    top, bottom, left, right = padding if isinstance(padding, tuple) else (padding,) * 4
    others = {name: value for name, value in arguments.items() if name != "padding"}

    def ours(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        return haloconv.conv2d(x, w, b, **arguments, family=family, strict=family != "auto")

    def theirs(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        return torch.conv2d(torch.nn.functional.pad(x, (left, right, top, bottom)), w, b, **others)

    return ours, theirs


def scalar(conv: Callable) -> Callable:
    return lambda *tensors: conv(*tensors).pow(3).sum()


def along(conv: Callable, *pairs: tuple[torch.Tensor, torch.Tensor]) -> tuple:
    """Value and tangent by dual numbers."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(conv(*(forward_ad.make_dual(*pair) for pair in pairs)))


def batched(which: tuple[bool, ...]) -> Callable:
    """Over the first dimension of some operands, with their gradients and tangents."""

    def run(conv: Callable, *operands: torch.Tensor) -> tuple:
        in_dims = tuple(0 if each else None for each in which)
        given = tuple(operand if each else operand[0] for operand, each in zip(operands, which, strict=True))
        ones = tuple(torch.ones_like(operand[0]) for operand in operands)
        return (
            vmap(conv, in_dims)(*given),
            vmap(grad(scalar(conv), (0, 1, 2)), in_dims)(*given),
            vmap(lambda *tensors: jvp(conv, tensors, ones), in_dims)(*given),
            vmap(grad(lambda *tensors: grad(scalar(conv), 1)(*tensors).square().sum(), (0, 1, 2)), in_dims)(*given),
            vmap(grad(lambda *tensors: grad(scalar(conv), 0)(*tensors).square().sum(), (0, 1, 2)), in_dims)(*given),
        )

    return run


TRANSFORMS: dict[str, Callable] = {
    "grad": lambda conv, x, w, b: grad(scalar(conv), (0, 1, 2))(x[0], w[0], b[0]),
    "vjp": lambda conv, x, w, b: vjp(conv, x[0], w[0])[1](conv(x[1], w[1])),
    "jvp": lambda conv, x, w, b: jvp(conv, (x[0], w[0], b[0]), (x[1], w[1], b[1])),
    "jvp of grad": lambda conv, x, w, b: jvp(grad(scalar(conv), (0, 1)), (x[0], w[0]), (x[1], w[1])),
    "dual numbers": lambda conv, x, w, b: along(conv, (x[0], x[1]), (w[0], w[1]), (b[0], b[1])),
    "one dual number": lambda conv, x, w, b: along(lambda x: conv(x, w[0]), (x[0], x[1])),
    "jacobian": lambda conv, x, w, b: jacrev(lambda w: conv(x[0], w).sum((2, 3)))(w[0]),
    "forward jacobian": lambda conv, x, w, b: jacfwd(lambda w: conv(x[0], w).sum((2, 3)))(w[0]),
    "hessian": lambda conv, x, w, b: hessian(lambda w: scalar(conv)(x[0, :1], w))(w[0]),
    "images": batched((True, False, False)),
    "filters": batched((False, True, False)),
    "images and filters": batched((True, True, True)),
    "bias": batched((False, False, True)),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_those_of_pytorchs_convolution(transform: str, kind: str) -> None:
    got, want = (tree_leaves(TRANSFORMS[transform](conv, *operands(kind))) for conv in convolutions(kind))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture
def kernels(emulator_cache: None) -> Iterator[None]:
    if available() is not None:
        pytest.skip(available())
    with emulated_device():
        yield


@pytest.mark.parametrize("transform", ["grad", "jvp", "dual numbers", "jvp of grad", "images and filters"])
def test_transforms_of_our_kernels(transform: str, kernels: None) -> None:
    """A kernel reads addresses: nothing of a transform may reach it. The family is forced, so that a refusal raises."""
    ours, theirs = convolutions("dense", "direct")
    inputs = operands("dense", torch.float32)
    got, want = (tree_leaves(TRANSFORMS[transform](conv, *inputs)) for conv in (ours, theirs))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-2)
