"""What follows a convolution in a graph of torch.compile and can be its epilogue: a batch norm in evaluation mode, and
an activation.

Both must be the only ones that read what is before them, and nothing but inputs of the graph may stand in between: so
nothing is written meanwhile, and nobody misses the values in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from haloconv.problem import Activation, Epilogue

Node = torch.fx.Node

_aten = torch.ops.aten
_functional = torch.nn.functional
_NORM_ORDER = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
_NORMS: dict[Any, tuple[str, ...]] = {
    _functional.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    **dict.fromkeys((torch.batch_norm, _aten.batch_norm, _aten.batch_norm.default), _NORM_ORDER),
}
_NORM_DEFAULTS = {"weight": None, "bias": None, "training": False, "eps": 1e-5}
_IN_PLACE = {"inplace": (False, True)}
_ACTIVATIONS: dict[Any, tuple[Activation, dict[str, tuple]]] = {  # by call: which, and what its other arguments may be
    **dict.fromkeys((torch.relu, torch.relu_, _aten.relu, _aten.relu.default, "relu", "relu_"), ("relu", {})),
    **dict.fromkeys((torch.sigmoid, _aten.sigmoid, _aten.sigmoid.default, "sigmoid", "sigmoid_"), ("sigmoid", {})),
    **dict.fromkeys((torch.tanh, _aten.tanh, _aten.tanh.default, "tanh", "tanh_"), ("tanh", {})),
    **dict.fromkeys((_aten.silu, _aten.silu.default), ("silu", {})),
    _functional.relu: ("relu", _IN_PLACE),
    _functional.silu: ("silu", _IN_PLACE),
    _functional.hardswish: ("hardswish", _IN_PLACE),
    _functional.leaky_relu: ("leaky_relu", {"negative_slope": (0.01,), **_IN_PLACE}),
}
_GELUS = (_functional.gelu, torch._C._nn.gelu)
_GELU_KINDS: dict[str, Activation] = {"none": "gelu", "tanh": "gelu_tanh"}


class Fused(NamedTuple):
    """What becomes part of a convolution: its epilogue, the norm if there is one, and the node that has the result."""

    epilogue: Epilogue
    norm: Node | None
    last: Node

    @property
    def names(self) -> tuple[str, ...]:
        """What is fused, in words."""
        norm = () if self.norm is None else ("batch norm",)
        return norm if self.epilogue.activation is None else (*norm, self.epilogue.activation)


def behind(node: Node, recording: bool, value_of: Callable[[Any], Any]) -> Fused | None:
    """What follows the node of a convolution and can be part of it, or None.

    ``value_of(node)`` is what the compiler knows of a node's result. Where autograd is ``recording`` it may be ReLU
    alone, whose gradient is known from the result: others would have to keep or to compute again what they are given.
    """
    norm = None if recording else _next(node, value_of)
    if norm is not None and not _is_norm(norm, node):
        norm = None
    last = node if norm is None else norm
    after = _next(last, value_of)
    activation = None if after is None else _activation_of(after, last)
    if activation is None or (recording and activation != "relu"):
        after, activation = None, None
    if norm is None and after is None:
        return None
    return Fused(Epilogue(norm is not None, activation), norm, last if after is None else after)


def norm_arguments(norm: Node) -> dict[str, Any]:
    """The arguments of a batch norm by name."""
    return {**_NORM_DEFAULTS, **dict(zip(_NORMS[norm.target], norm.args, strict=False)), **norm.kwargs}


def bias_and_scale_of_norm(
    mean: torch.Tensor, variance: torch.Tensor, tail: tuple[Any, Any], eps: float, bias: torch.Tensor | None
) -> torch.Tensor:
    """(K, 2) in fp32, what a batch norm with these statistics makes of sums (K filters) that lack ``bias`` yet.

    ``tail`` are its own factor and summand, (K,) or None each. y = (sums + bias - mean) / sqrt(variance + eps) * factor
    + summand, as torch.nn.functional.batch_norm has it.
    """
    factor, summand = tail
    scale = torch.rsqrt(variance.float() + eps)
    scale = scale if factor is None else scale * factor.float()
    shift = -mean.float() if bias is None else bias.float() - mean.float()
    shift = shift * scale if summand is None else torch.addcmul(summand.float(), shift, scale)
    return torch.stack((shift, scale), 1)


def _next(node: Node, value_of: Callable[[Any], Any]) -> Node | None:
    """The only node that reads this one, if it comes next and its result has the same form, else None."""
    if len(node.users) != 1:
        return None
    (user,), after = node.users, node.next
    while after is not user:
        if after.op not in ("placeholder", "get_attr"):
            return None
        after = after.next
    one, other = value_of(node), value_of(user)
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    same = tensors and one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
    return user if same else None


def _is_norm(node: Node, before: Node) -> bool:
    """Whether the node is a batch norm by statistics that are inputs of the graph."""
    if node.op != "call_function" or node.target not in _NORMS:
        return False
    given = norm_arguments(node)
    statistics = [given.get("running_mean"), given.get("running_var")]
    others = [each for each in (given["weight"], given["bias"]) if each is not None]
    inputs = all(isinstance(each, Node) and each.op in ("placeholder", "get_attr") for each in (*statistics, *others))
    return inputs and given.get("input") is before and given["training"] is False and isinstance(given["eps"], float)


def _activation_of(node: Node, before: Node) -> Activation | None:
    """The activation that the node is of the one before, or None."""
    if node.op not in ("call_function", "call_method") or not node.args or node.args[0] is not before:
        return None
    rest = node.args[1:]
    if node.target in _GELUS:
        return _GELU_KINDS.get(str(rest[0] if rest else node.kwargs.get("approximate", "none")))
    activation, allowed = _ACTIVATIONS.get(node.target, (None, {}))
    given = {**dict(zip(allowed, rest, strict=False)), **node.kwargs}
    known = len(rest) <= len(allowed) and all(value in allowed.get(name, ()) for name, value in given.items())
    return activation if known else None
