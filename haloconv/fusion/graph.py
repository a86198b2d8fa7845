"""What follows a convolution in a graph and can be its epilogue: a batch norm in evaluation mode, the
addition of a residual, and an activation.

Each must be the only one that reads what is before it, and nothing but inputs of the graph may stand in between: so
nothing is written meanwhile, nobody misses the values in between, and of two convolutions whose sum it is the later one
gets an addition.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from haloconv.library import OPERATORS
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
_ACTIVATIONS: dict[
    Any, tuple[Activation, dict[str, tuple[Any, ...]]]
] = {  # by call: which, and what its other arguments may be
    **dict.fromkeys((torch.relu, torch.relu_, _aten.relu, _aten.relu.default, "relu", "relu_"), ("relu", {})),
    **dict.fromkeys((torch.sigmoid, _aten.sigmoid, _aten.sigmoid.default, "sigmoid", "sigmoid_"), ("sigmoid", {})),
    **dict.fromkeys((torch.tanh, _aten.tanh, _aten.tanh.default, "tanh", "tanh_"), ("tanh", {})),
    **dict.fromkeys((_aten.silu, _aten.silu.default), ("silu", {})),
    _functional.relu: ("relu", _IN_PLACE),
    _functional.silu: ("silu", _IN_PLACE),
    _functional.hardswish: ("hardswish", _IN_PLACE),
    _functional.leaky_relu: ("leaky_relu", {"negative_slope": (0.01,), **_IN_PLACE}),
}
_SUMS = (operator.add, torch.add, _aten.add, _aten.add.Tensor, "add")
_SUMS_IN_PLACE = (operator.iadd, _aten.add_, _aten.add_.Tensor, "add_")
_OF_ITS_OWN = (  # calls whose results are no views of tensors that others read
    *_NORMS,
    *(torch.conv2d, _aten.conv2d, _aten.conv2d.default, _aten.convolution, _aten.convolution.default),
    *(OPERATORS.fprop.default, OPERATORS.fprop_epilogue.default),
)
_GELUS = (_functional.gelu, torch._C._nn.gelu)
_GELU_KINDS: dict[str, Activation] = {"none": "gelu", "tanh": "gelu_tanh"}


class Fused(NamedTuple):
    """What becomes part of a convolution: its epilogue, and the nodes of it in their order, which are at least one.

    ``norm`` is the first of them if it is a batch norm, ``residual`` the other operand of an addition.
    """

    epilogue: Epilogue
    nodes: tuple[Node, ...]
    norm: Node | None
    residual: Node | None

    @property
    def last(self) -> Node:
        """The node that has the result."""
        return self.nodes[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """What is fused, in words."""
        scale, activation, residual, _ = self.epilogue
        return (*["batch norm"] * scale, *["addition"] * residual, *([activation] if activation else []))


def behind(node: Node, recording: bool, value_of: Callable[[Any], Any], waits: bool = False) -> Fused | None:
    """What follows the node of a convolution and can be part of it, or None.

    ``value_of(node)`` is what the compiler knows of a node's result. Where autograd is ``recording`` it may be an
    addition and ReLU, whose gradients are known from the result: others would have to keep or to compute again what
    they are given. With ``waits`` other nodes may stand in front of an addition, if they cannot write the image that is
    convolved: the convolution then runs after them.
    """
    nodes = [node]
    norm = None if recording else _next(node, value_of)
    if norm is not None and not _is_norm(norm, node):
        norm = None
    if norm is not None:
        nodes.append(norm)
    after = _next(nodes[-1], value_of)
    if after is None and waits:
        after = _awaited(node, nodes[-1], value_of)
    residual = None if after is None else _residual_of(after, nodes[-1], value_of)
    if after is not None and residual is not None:
        recording = value_of(after).requires_grad
        if recording and norm is not None:
            return Fused(Epilogue(True), (norm,), norm, None)
        nodes.append(after)
        after = _next(after, value_of)
    activation = None if after is None else _activation_of(after, nodes[-1])
    if activation is not None and (activation == "relu" or not recording):
        assert after is not None
        nodes.append(after)
    else:
        activation = None
    epilogue = Epilogue(norm is not None, activation, residual is not None)
    return Fused(epilogue, tuple(nodes[1:]), norm, residual) if any(epilogue) else None


def norm_arguments(norm: Node) -> dict[str, Any]:
    """The arguments of a batch norm by name."""
    return {**_NORM_DEFAULTS, **dict(zip(_NORMS[norm.target], norm.args, strict=False)), **norm.kwargs}


def is_norm_of_batch(node: Node) -> bool:
    """Whether the node is a batch norm by the statistics of what it is given."""
    return node.op == "call_function" and node.target in _NORMS and norm_arguments(node)["training"] is not False


def bias_and_scale_of_norm(
    mean: torch.Tensor, variance: torch.Tensor, tail: tuple[Any, Any], eps: float, bias: torch.Tensor | None
) -> torch.Tensor:
    """(K, 2) in fp32, what a batch norm with these statistics makes of sums (K filters) that lack ``bias`` yet.

    For compiled graphs: a stack would be no pointwise operation, and a kernel for each of its parts.
    """
    shift, scale = shift_and_scale_of_norm(mean, variance, tail, eps, bias)
    return torch.where(torch.arange(2, device=scale.device) == 0, shift[:, None], scale[:, None])


def shift_and_scale_of_norm(
    mean: torch.Tensor, variance: torch.Tensor, tail: tuple[Any, Any], eps: float, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two of `bias_and_scale_of_norm`, (K,) each.

    ``tail`` are its own factor and summand, (K,) or None each. y = (sums + bias - mean) / sqrt(variance + eps) * factor
    + summand, as torch.nn.functional.batch_norm has it.
    """
    factor, summand = tail
    scale = torch.rsqrt(variance.float() + eps)
    scale = scale if factor is None else scale * factor.float()
    shift = -mean.float() if bias is None else bias.float() - mean.float()
    shift = shift * scale if summand is None else torch.addcmul(summand.float(), shift, scale)
    return shift, scale


def _next(node: Node, value_of: Callable[[Any], Any]) -> Node | None:
    """The only node that reads this one, if it comes next and its result has the same form, else None."""
    if len(node.users) != 1:
        return None
    (user,), after = node.users, node.next
    while after is not user:
        if after.op not in ("placeholder", "get_attr"):
            return None
        after = after.next
    return user if _keeps_form(value_of(node), value_of(user)) else None


def _keeps_form(one: Any, other: Any) -> bool:
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return tensors and one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()


def _awaited(conv: Node, last: Node, value_of: Callable[[Any], Any]) -> Node | None:
    """The sum that alone reads ``last``, if what stands in between cannot write the image that is convolved.

    That is known if the image is a tensor of its own that a node made, and nothing in between reads it or what is
    derived from it.
    """
    user = next(iter(last.users), None)
    if user is None or len(last.users) != 1 or not (user.target in _SUMS or user.target in _SUMS_IN_PLACE):
        return None
    made = conv.args[0] if conv.args else None
    while isinstance(made, Node) and made.args and (made.target in _ACTIVATIONS or made.target in _SUMS_IN_PLACE):
        made = made.args[0]
    if not isinstance(made, Node) or not (made.target in (*_OF_ITS_OWN, *_SUMS) and "out" not in made.kwargs):
        return None
    derived, each, waiting = {made}, made.next, False
    while each is not user:
        if not derived.isdisjoint(each.all_input_nodes):
            if waiting:
                return None
            derived.add(each)
        waiting = waiting or each is last
        each = each.next
    return user if _keeps_form(value_of(last), value_of(user)) else None


def _is_norm(node: Node, before: Node) -> bool:
    """Whether the node is a batch norm by statistics that are inputs of the graph."""
    if node.op != "call_function" or node.target not in _NORMS:
        return False
    given = norm_arguments(node)
    statistics = [given.get("running_mean"), given.get("running_var")]
    others = [each for each in (given["weight"], given["bias"]) if each is not None]
    inputs = all(isinstance(each, Node) and each.op in ("placeholder", "get_attr") for each in (*statistics, *others))
    return inputs and given.get("input") is before and given["training"] is False and isinstance(given["eps"], float)


def _residual_of(node: Node, before: Node, value_of: Callable[[Any], Any]) -> Node | None:
    """What the node adds to the one before, if it is a tensor of the same form and nobody misses a sum in place."""
    in_place = node.target in _SUMS_IN_PLACE
    if node.op not in ("call_function", "call_method") or not (in_place or node.target in _SUMS):
        return None
    if len(node.args) != 2 or any((name, value) != ("alpha", 1) for name, value in node.kwargs.items()):
        return None
    first, second = node.args
    other = second if first is before else first
    if other is before or not isinstance(other, Node) or before not in (first, second):
        return None
    if in_place and first is other and not (other.target in _OF_ITS_OWN and len(other.users) == 1):
        return None
    return other if _are_alike(value_of(before), value_of(other)) else None


def _are_alike(one: Any, other: Any) -> bool:
    """Whether both are tensors of the same class, dtype, device, extents and strides, without a guard on symbols."""
    if not isinstance(one, torch.Tensor) or type(one) is not type(other):
        return False
    if (one.dtype, one.device, one.layout) != (other.dtype, other.device, other.layout):
        return False
    return [*map(_expression, (*one.shape, *one.stride()))] == [*map(_expression, (*other.shape, *other.stride()))]


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


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
