"""The graph of a module's own forward, by torch.fx, where it is all that the forward does.

A forward is Python: it may look at what a tracer does not have, and do what a graph does not hold. So it is traced
twice, with gradients and autocast off and on, and both graphs must be the same; and whatever a graph would hold as a
constant that need not be one is refused.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from haloconv.library import AUTOCAST_DEVICES

PLAIN = (torch.Tensor, torch.nn.Parameter)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _Refused(Exception):
    """What a forward does that a graph cannot stand for, as the end of a sentence."""


class _Value(torch.fx.Proxy):
    """What stands for a tensor. Inputs are tensors, for calls with anything else run the module's own forward; of what
    is computed the type is not known.
    """

    def _told_class(self) -> type:
        if self.node.op in ("placeholder", "get_attr"):
            return torch.Tensor
        raise _Refused("asks of what type something is that it computed, or keeps it in an attribute")

    __class__: Any = property(_told_class)


def _in_place(function: Callable[..., Any]) -> Callable[..., torch.fx.Proxy]:
    """The method for ``function``, such as operator.iadd: without it ``y += x`` would be traced as ``y = y + x``."""

    def method(self: torch.fx.Proxy, other: Any) -> torch.fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


for _name in (
    "add",
    "and",
    "floordiv",
    "lshift",
    "matmul",
    "mod",
    "mul",
    "or",
    "pow",
    "rshift",
    "sub",
    "truediv",
    "xor",
):
    setattr(_Value, f"__i{_name}__", _in_place(getattr(operator, f"i{_name}")))


class _Image(_Value):
    """An input that has four dimensions."""

    ndim = 4

    def dim(self) -> int:
        return 4


class _Tracer(torch.fx.Tracer):
    """``opens`` if modules inside are part of the graph with all that they do; else they are calls."""

    proxy_buffer_attributes = True

    def __init__(self, forward: Callable[..., Any], opens: bool) -> None:
        super().__init__()
        self._forward, self._opens, self._modes = forward, opens, _modes()

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        return _Image(node, self) if self._opens and node.op == "placeholder" else _Value(node, self)

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return not self._opens

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """What has a default keeps it."""
        arguments = [*inspect.signature(self._forward).parameters.values()][1:]
        needed = [each.name for each in arguments if each.default is each.empty and each.kind in _BY_POSITION]
        if any(each.default is each.empty and each.kind is each.KEYWORD_ONLY for each in arguments):
            raise _Refused("takes arguments by name alone")
        return self._forward, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in needed)]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.fx.Proxy):
            return a.node
        if type(a) in PLAIN and not _is_among(a, (*self.root.parameters(), *self.root.buffers())):
            raise _Refused("makes a tensor, or takes one that is no parameter or buffer of the module")
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        if _modes() != self._modes:
            raise _Refused("switches gradients or autocast on or off")
        return super().create_node(*args, **kwargs)


def graph_of(
    module: torch.nn.Module, forward: Callable[..., Any], opens: bool = False
) -> tuple[torch.fx.Graph | None, str]:
    """The graph of ``forward(module, ...)`` of tensors for all that has no default; else why there is none.

    Modules inside are calls of the graph; with ``opens`` they are part of it, and the inputs have four dimensions. The
    reason is the end of a sentence of which "its forward" is the subject.
    """
    before = _held_by(module)
    graphs = []
    for on in (True, False):
        try:
            with _modes_set(on), torch.random.fork_rng(devices=[]):
                graphs.append(_Tracer(forward, opens).trace(module))
        except _Refused as refused:
            return None, str(refused)
        except Exception as error:  # whatever a forward raises that is given no tensors
            return None, f"cannot be traced: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        finally:
            changed = _put_back(before)
        if changed:
            return None, "keeps something in an attribute"
    if str(graphs[0]) != str(graphs[1]):
        return None, "depends on whether gradients are recorded, on autocast, or on chance"
    return graphs[0], ""


def function_of(graph: torch.fx.Graph) -> Callable[..., Any]:
    """What the graph does, as a function of the module and of the graph's inputs."""
    code = graph.python_code("self")
    names = {**code.globals}
    exec(compile(code.src, "<the forward of a module that haloconv.fuse changed>", "exec"), names)
    forward: Callable[..., Any] = names.pop("forward")
    return forward


def _modes() -> tuple[Any, ...]:
    autocast = [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in AUTOCAST_DEVICES]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


@contextmanager
def _modes_set(on: bool) -> Iterator[None]:
    """Inside, gradients and autocast for every device are on, or all off."""
    before = [torch.is_autocast_enabled(each) for each in AUTOCAST_DEVICES]
    try:
        for device_type in AUTOCAST_DEVICES:
            torch.set_autocast_enabled(device_type, on)
        with torch.set_grad_enabled(on):
            yield
    finally:
        for device_type, enabled in zip(AUTOCAST_DEVICES, before, strict=True):
            torch.set_autocast_enabled(device_type, enabled)


def _is_among(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    return any(tensor is each for each in others)


def _held_by(module: torch.nn.Module) -> list[tuple[Any, Any]]:
    """The attributes of the module and of those inside it, and the collections among them, each with a copy."""
    attributes = [vars(each) for each in module.modules()]
    inside = [value for each in attributes for value in each.values() if isinstance(value, (dict, list, set))]
    return [(each, each.copy()) for each in (*attributes, *inside)]


def _put_back(held: list[tuple[Any, Any]]) -> bool:
    """Undo what was assigned since then; whether anything was."""
    changed = [(each, copy) for each, copy in held if _elements(each) != _elements(copy)]
    for each, copy in changed:
        each.clear()
        each.extend(copy) if isinstance(each, list) else each.update(copy)
    return bool(changed)


def _elements(held: Collection[Any]) -> list[tuple[Any, int]]:
    return [(key, id(value)) for key, value in (held.items() if isinstance(held, dict) else enumerate(held))]
