"""What follows a convolution in a graph and can be its epilogue: a batch norm in evaluation mode, an addition, and an
activation.

Each must be the only one that reads what is before it, and nothing but inputs of the graph may stand in between: so
nothing is written meanwhile, and nobody misses the values in between. In front of an addition there may be what makes
its other summand, as long as it cannot write the image that is convolved.
"""

from __future__ import annotations

import operator
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
_ADDITIONS = (operator.add, torch.add, _aten.add, _aten.add.Tensor, "add")
_ADDITIONS_IN_PLACE = (operator.iadd, _aten.add_, _aten.add_.Tensor, "add_")
_GELUS = (_functional.gelu, torch._C._nn.gelu)
_GELU_KINDS: dict[str, Activation] = {"none": "gelu", "tanh": "gelu_tanh"}


class Fused(NamedTuple):
    """What becomes part of a convolution: its epilogue, the norm if there is one, and the node that has the result.

    If there is an addition, ``residual`` is its other summand.
    """

    epilogue: Epilogue
    norm: Node | None
    last: Node
    addition: Node | None = None
    residual: Node | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What is fused, in words."""
        words = ("batch norm" if self.norm else "", "addition" if self.addition else "", self.epilogue.activation or "")
        return tuple(filter(None, words))


def behind(node: Node, recording: bool, value_of: Callable[[Any], Any], additions: bool = False) -> Fused | None:
    """What follows the node of a convolution and can be part of it, or None.

    ``value_of(node)`` is what the compiler knows of a node's result. Where autograd is ``recording`` it may be an
    addition and ReLU alone, whose gradients are known from the result: others would have to keep or to compute again
    what they are given. Without ``additions`` there is none.
    """
    norm = None if recording else _next(node, value_of)
    if norm is not None and not _is_norm(norm, node):
        norm = None
    last = node if norm is None else norm
    addition, residual = _addition_of(node, last, value_of) if additions else (None, None)
    last = last if addition is None else addition
    after = _next(last, value_of)
    activation = None if after is None else _activation_of(after, last)
    epilogue = Epilogue(norm is not None, activation, addition is not None)
    if activation is None or (recording and not epilogue.is_known_from_y):
        after, epilogue = None, epilogue._replace(activation=None)
    if not any(epilogue):
        return None
    return Fused(epilogue, norm, last if after is None else after, addition, residual)


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

    ``tail`` are its own factor and summand, (K,) or None each. y = (sums + bias - mean) / sqrt(variance + eps) * factor
    + summand, as torch.nn.functional.batch_norm has it.
    """
    factor, summand = tail
    scale = torch.rsqrt(variance.float() + eps)
    scale = scale if factor is None else scale * factor.float()
    shift = -mean.float() if bias is None else bias.float() - mean.float()
    shift = shift * scale if summand is None else torch.addcmul(summand.float(), shift, scale)
    return torch.stack((shift, scale), 1)


def _addition_of(conv: Node, last: Node, value_of: Callable[[Any], Any]) -> tuple[Node | None, Node | None]:
    """The node that adds something of the same form to the result so far, which it alone reads, and what it adds."""
    user = next(iter(last.users), None)
    if user is None or len(last.users) != 1 or user.op not in ("call_function", "call_method"):
        return None, None
    in_place = user.target in _ADDITIONS_IN_PLACE
    if not (in_place or user.target in _ADDITIONS) or len(user.args) != 2 or user.kwargs:
        return None, None
    summands = [each for each in user.args if isinstance(each, Node) and each is not last]
    if len(summands) != 1 or (in_place and user.args[0] is not last):
        return None, None
    alike = all(_have_same_form(value_of(last), value_of(each)) for each in (summands[0], user))
    return (user, summands[0]) if alike and _may_wait(conv, last, user) else (None, None)


def _may_wait(conv: Node, last: Node, user: Node) -> bool:
    """Whether nothing that runs after ``last`` and before ``user`` can write the image that is convolved.

    That is known if the image is a tensor that was made by a node, and none of these nodes reads that or what is
    derived from it.
    """
    between, each = [], last.next
    while each is not user:
        between += [] if each.op in ("placeholder", "get_attr") else [each]
        each = each.next
    made = conv.args[0] if conv.args else None
    while isinstance(made, Node) and made.op != "placeholder" and made.args and not _is_new(made):
        passes = made.target in _ACTIVATIONS or made.target in (*_GELUS, *_ADDITIONS_IN_PLACE)
        made = made.args[0] if passes else None
    if not between or not isinstance(made, Node) or not _is_new(made):
        return not between
    derived, each = {made}, made
    while each is not user:
        if not derived.isdisjoint(each.all_input_nodes):
            derived.add(each)
        each = each.next
    return derived.isdisjoint(between)


def _is_new(node: Node) -> bool:
    """Whether the result of the node is a tensor that no other node has, in whole or in part."""
    ours = getattr(node.target, "namespace", "") == "haloconv"
    makes = node.target in _NORMS or (node.target in _ADDITIONS and not node.kwargs)
    return ours or (node.op == "call_function" and makes)


def _next(node: Node, value_of: Callable[[Any], Any]) -> Node | None:
    """The only node that reads this one, if it comes next and its result has the same form, else None."""
    if len(node.users) != 1:
        return None
    (user,), after = node.users, node.next
    while after is not user:
        if after.op not in ("placeholder", "get_attr"):
            return None
        after = after.next
    return user if _have_same_form(value_of(node), value_of(user)) else None


def _have_same_form(one: Any, other: Any) -> bool:
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return tensors and one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()


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
