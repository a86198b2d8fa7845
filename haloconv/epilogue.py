"""What an Epilogue is in PyTorch's operations: for families whose kernels have none, for autograd, for what traces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from haloconv.problem import Activation, Epilogue

Tensor = torch.Tensor
Call = Callable[..., Tensor]

_functional = torch.nn.functional
_APPLIED: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky_relu": partial(_functional.leaky_relu, negative_slope=0.01),
    "silu": _functional.silu,
    "gelu": _functional.gelu,
    "gelu_tanh": partial(_functional.gelu, approximate="tanh"),
    "hardswish": _functional.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
_aten = torch.ops.aten


def _silu_backward(dy: Tensor, z: Tensor) -> Tensor:
    """PyTorch's own has no gradient."""
    sigmoid = torch.sigmoid(z)
    return dy * sigmoid * (1 + z * (1 - sigmoid))


_BACKWARD: dict[Activation, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda dy, z: _aten.threshold_backward(dy, z, 0),
    "leaky_relu": lambda dy, z: _aten.leaky_relu_backward(dy, z, 0.01, False),
    "silu": _silu_backward,
    "gelu": lambda dy, z: _aten.gelu_backward(dy, z),
    "gelu_tanh": lambda dy, z: _aten.gelu_backward(dy, z, approximate="tanh"),
    "hardswish": lambda dy, z: _aten.hardswish_backward(dy, z),
    "sigmoid": lambda dy, z: _aten.sigmoid_backward(dy, torch.sigmoid(z)),
    "tanh": lambda dy, z: _aten.tanh_backward(dy, torch.tanh(z)),
}


def activated(y: Tensor, activation: Activation | None) -> Tensor:
    """``y`` behind the activation."""
    return y if activation is None else _APPLIED[activation](y)


def activation_backward(dy: Tensor, z: Tensor, activation: Activation | None) -> Tensor:
    """The gradient of ``z``, of which ``activated(z)`` has the gradient ``dy``."""
    return dy if activation is None else _BACKWARD[activation](dy, z)


def bias_and_scale(bias: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """(K, 2) of (K,) each, in fp32 as fprop with a scale takes them; in fp64 for images of that ``dtype``."""
    dtype = torch.promote_types(dtype, torch.float32)
    shift = torch.zeros_like(scale) if bias is None else bias
    return torch.stack((shift.to(dtype), scale.to(dtype)), 1)


def scaled(y: Tensor, pairs: Tensor) -> Tensor:
    """(N, K, P, Q) times the scale of each filter, plus its bias, in the dtype of ``pairs``, which is (K, 2)."""
    bias, scale = (each.reshape(-1, 1, 1) for each in pairs.unbind(1))
    return torch.addcmul(bias, y.to(pairs.dtype), scale)


def applied(y: Tensor, b: Tensor | None, epilogue: Epilogue, residual: Tensor | None = None) -> Tensor:
    """y (N, K, P, Q) behind the epilogue, in y's dtype: a scale and what follows it in fp32, rounded once.

    ``b`` is (K, 2) if the epilogue has a scale; else what it adds is in y. ``residual`` is of y's shape; where autocast
    lets its dtype differ from y's, the result has the one that both are promoted to.
    """
    dtype = y.dtype if residual is None else torch.promote_types(y.dtype, residual.dtype)
    if epilogue.scale:
        assert b is not None
        y = scaled(y, b)
    return activated(y if residual is None else y + residual, epilogue.activation).to(dtype)


def followed(fprop: Call, epilogue: Epilogue) -> Call:
    """``fprop`` and then the epilogue, by PyTorch's kernels; a scale, an addition and ReLU in place."""
    if epilogue.scale and epilogue.activation in (None, "relu"):
        return lambda x, w, b, *residual: _scaled_in_place(fprop(x, w, None), b, epilogue, *residual)
    if epilogue.scale:
        return lambda x, w, b, *residual: applied(fprop(x, w, None), b, epilogue, *residual)
    rest = epilogue._replace(residual=False)
    if rest.activation == "relu":
        return lambda x, w, b, *residual: _added(fprop(x, w, b), *residual).relu_()
    return lambda x, w, b, *residual: applied(_added(fprop(x, w, b), *residual), None, rest)


def _scaled_in_place(y: Tensor, pairs: Tensor, epilogue: Epilogue, residual: Tensor | None = None) -> Tensor:
    """What ``applied`` gives, in y's memory: PyTorch's kernels read and write 16 bits, without a copy in fp32.

    With a residual the sum of both is formed in fp32 and rounded once.
    """
    bias, scale = (each.reshape(-1, 1, 1) for each in pairs.unbind(1))
    if residual is None:
        torch.addcmul(bias, y, scale, out=y)
    else:
        to = y if residual.dtype == y.dtype else y.to(torch.promote_types(y.dtype, residual.dtype))
        y = torch.add(torch.addcmul(bias, y, scale), residual, out=to)
    return y if epilogue.activation is None else y.relu_()


def in_one_pass(fprop: Call, epilogue: Epilogue) -> Call:
    """``fprop`` and one pass that moves what one kernel of a compiled graph moves for all of the epilogue: a stand-in
    for it in timing. Its values are others.
    """
    if epilogue.residual:
        return lambda x, w, b, residual: fprop(x, w, None if epilogue.scale else b).add_(residual)
    return lambda x, w, b: fprop(x, w, None if epilogue.scale else b).relu_()


def _added(y: Tensor, residual: Tensor | None = None) -> Tensor:
    return y if residual is None else y.add_(residual)


def biased(dgrad: Call) -> Call:
    """``dgrad`` and then the bias, by PyTorch's kernel, in place."""
    return lambda dy, w, b: dgrad(dy, w).add_(b.view(-1, 1, 1))
