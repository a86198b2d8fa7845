"""A module whose forward runs convolutions with what follows them as one call, wherever that is the same.

Its class is one of ours above its own, and its forward the graph of its own forward, in which each chain of calls
(chains.py) is one (call.py). In training mode, with other arguments, and for whatever traces, compiles or
transforms, its own forward runs; so it does for good once a module was put in or taken out, or an attribute assigned.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, wraps
from threading import Lock
from typing import Any
from weakref import ref

import torch

from haloconv.functional import is_plain_call
from haloconv.fusion.call import FusedCall
from haloconv.fusion.chains import chains_of
from haloconv.fusion.forwards import PLAIN, function_of, graph_of
from haloconv.layer import NOT_SCRIPTED
from haloconv.reclass import change_class, name_of, own_class

_is_compiling = torch.compiler.is_compiling
_STATE = "_fused"  # the attribute with a module's Program; None where its own forward runs for good
_UNKNOWN = object()
_tracing = Lock()


class Program:
    """The forward of one module with its fused ``calls``; ``left`` has path and reason of each convolution in none."""

    def __init__(self, module: torch.nn.Module, graph: torch.fx.Graph) -> None:
        self._module, self.calls, self.left = ref(module), list[FusedCall](), list[tuple[str, str]]()
        held = [vars(each)["_modules"] for each in _opened(module, graph)]
        self._inside = [(each, [*each.values()]) for each in held]
        self._arity = sum(node.op == "placeholder" for node in graph.nodes)
        taken: set[torch.fx.Node] = set()
        for path, chain in [*chains_of(module, graph)]:
            if not isinstance(chain, str) and not taken.isdisjoint(chain.nodes):
                chain = chain.inner or "what follows it is part of another convolution"
            if isinstance(chain, str):
                self.left.append((path, chain))
            else:
                taken.update(chain.nodes)
                self.calls.append(FusedCall(module, chain, f"call_{len(self.calls)}"))
                self.calls[-1].put_into(graph, chain)
        self.forward = function_of(graph)

    def serves(self, module: torch.nn.Module, args: tuple[Any, ...]) -> bool:
        """Whether it is the module's forward for so many tensors. A replica of the module has its program too."""
        unchanged = all([[*held.values()] == inside for held, inside in self._inside])
        return len(args) == self._arity and module is self._module() and unchanged


def _opened(module: torch.nn.Module, graph: torch.fx.Graph) -> Iterator[torch.nn.Module]:
    """The module, and those inside it that hold what the graph calls, and are not called."""
    called = {module.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"}
    yield module
    waiting = [*module.children()]
    while waiting:
        each = waiting.pop()
        if each not in called:
            yield each
            waiting += each.children()


class FusedModule(torch.nn.Module):
    """What a module is that ``haloconv.fuse`` changed, above its own class ``original``."""

    original: type[torch.nn.Module]

    def __setattr__(self, name: str, value: Any) -> None:
        held = vars(self).get(name, _UNKNOWN)
        super().__setattr__(name, value)
        if name != "training" and held is not value and not isinstance(value, torch.Tensor):
            vars(self)[_STATE] = None

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        vars(self)[_STATE] = None

    def __prepare_scriptable__(self) -> torch.nn.Module:
        """What torch.jit.script asks for, to compile it instead: raises RuntimeError with the ways out."""
        raise RuntimeError(NOT_SCRIPTED)

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        """What copies and files get: the module's own class, and its state without what was derived from it."""
        reduced = super().__reduce_ex__(max(2, protocol))
        assert not isinstance(reduced, str)
        state = reduced[2]
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name != _STATE}
        made = reduced[:2] if "original" not in vars(type(self)) else (_made, (self.original,))
        return *made, state, *reduced[3:]

    def extra_repr(self) -> str:
        program = vars(self).get(_STATE)
        fused = [] if program is None else [f"fused: {call}" for call in program.calls]
        return "\n".join(filter(None, [super().extra_repr(), *fused]))


@cache
def _class_above(cls: Any) -> type[FusedModule]:
    """The class for modules of ``cls``, of which they remain instances."""

    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = not (self.training or kwargs or _is_compiling()) and is_plain_call()
        if plain and all([type(each) in PLAIN for each in args]):
            program = vars(self).get(_STATE, _UNKNOWN)
            if program is _UNKNOWN:
                program = _look_again(self)
            if program is not None and program.serves(self, args):
                return program.forward(self, *args)
        return cls.forward(self, *args, **kwargs)

    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made: type[FusedModule] = type(cls)(cls.__name__, (FusedModule, cls), body | {"original": cls, "forward": forward})
    return made


def _made(cls: Any) -> FusedModule:
    """A module without state, for copies and files."""
    above: Any = _class_above(cls)
    made: FusedModule = above.__new__(above)
    return made


def _look_again(module: torch.nn.Module) -> Program | None:
    """The program of a module that was copied, or read from a file: it is made at the first call."""
    with _tracing:
        program = program_of(module)
    found = None if isinstance(program, str) or not program.calls else program
    vars(module)[_STATE] = found
    return found


def program_of(module: torch.nn.Module) -> Program | str:
    """The forward of the module with fused calls; or the end of a sentence about it, why that is not known."""
    cls: Any = own_class(module)
    cls = cls.original if issubclass(cls, FusedModule) else cls
    reason = _why_no_class(module, cls)
    if reason is not None:
        return reason
    graph, reason = graph_of(module, cls.forward)
    return reason if graph is None else Program(module, graph)


def _why_no_class(module: torch.nn.Module, cls: Any) -> str | None:
    """None if a class of ours may stand above this one, else why not."""
    if isinstance(module, torch.jit.ScriptModule):
        return "was compiled by torch.jit"
    if "forward" in vars(module):
        return "is replaced on the instance"
    if module.training:
        return "runs in training mode: call eval() before fuse"
    if (cls.__reduce__, cls.__reduce_ex__) != (object.__reduce__, object.__reduce_ex__):
        return f"is that of a class, {name_of(cls)}, that is copied in a way of its own"
    return None


def set_fused(module: torch.nn.Module, program: Program) -> None:
    """Let the module run the program from now on."""
    cls: Any = own_class(module)
    if not issubclass(cls, FusedModule):
        change_class(module, cls, _class_above(cls))
    vars(module)[_STATE] = program


def set_back(module: torch.nn.Module) -> bool:
    """Make a fused module what it was, and say whether it was one; others are left."""
    cls: Any = own_class(module)
    if not issubclass(cls, FusedModule):
        return False
    change_class(module, cls, cls.original)
    vars(module).pop(_STATE, None)
    return True


def fused_calls(model: torch.nn.Module) -> Iterator[FusedCall]:
    """The calls that the fused modules of the model make, as long as their own forwards do not run for good."""
    for module in model.modules():
        if isinstance(module, FusedModule):
            program = vars(module).get(_STATE, _UNKNOWN)
            program = _look_again(module) if program is _UNKNOWN else program
            yield from [] if program is None else program.calls
