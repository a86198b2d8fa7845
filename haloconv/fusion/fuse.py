"""Let the modules of a model run convolutions with what follows them as one call, and back.

A module changes its class and stays the same object, as a layer does that haloconv.accelerate swaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from haloconv import env, logs
from haloconv.changes import Changes, Left, extents, shown, tell_disabled
from haloconv.choose.choice import DISABLED
from haloconv.fusion.call import FusedCall
from haloconv.fusion.module import Program, program_of, set_back, set_fused
from haloconv.reclass import own_class

_NO_FORWARD = (torch.nn.ModuleList, torch.nn.ModuleDict)
_CONTAINERS = (*_NO_FORWARD, torch.nn.Sequential)
_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.")  # modules whose classes' forwards reach other processes


class FusedChain(NamedTuple):
    """A convolution and what follows it, which ``module`` runs as one call in evaluation mode.

    ``names`` are those of the modules in the model, the convolution first; what functions do ``epilogue`` names alone:
    ``("batch norm", "relu")`` for one.
    """

    names: tuple[str, ...]
    module: torch.nn.Module
    epilogue: tuple[str, ...]
    call: FusedCall

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def expected(self) -> str:
        """What runs the convolution, as far as that is known: fully only after its first input."""
        return self.call.told()


@dataclass(frozen=True, repr=False)
class Fusion(Changes[FusedChain]):
    """What ``fuse`` did: a sequence of the chains; ``print`` shows them with all 2-D convolutions left, and why."""

    chains: tuple[FusedChain, ...]
    left: tuple[Left, ...]

    @property
    def _changed(self) -> tuple[FusedChain, ...]:
        return self.chains

    @property
    def summary(self) -> str:
        """One line of counts."""
        return f"{len(self.chains)} of {len(self.chains) + len(self.left)} convolutions fused with what follows them"

    def _lines(self) -> Iterator[tuple[str, str, str, str]]:
        """The table row by row: names, extents, what is fused, and what runs it or why nothing is."""
        for each in self.chains:
            prefix = each.name.removesuffix(each.call.chain.conv)
            names = (each.name, *(name.removeprefix(prefix) for name in each.names[1:]))
            yield shown(names), extents(each.call.conv), ", ".join(each.epilogue), each.expected
        for left in self.left:
            yield shown(left.names), extents(left.module), "left", left.reason


def fuse(model: torch.nn.Module) -> Fusion:
    """Let the modules of ``model`` run 2-D convolutions with what follows them as one call of ours, in place.

    What follows is a batch norm in evaluation mode and then an activation, one of those of haloconv.conv2d. It is part
    of the convolution where the forward of the module that calls both is traced by torch.fx and proven to do nothing
    else with what lies between; classes need not be known. A module that has such a forward changes its class and stays
    the same object, and an instance of its class: parameters, buffers, names of the state and hooks are untouched, and
    weights are not folded. ``haloconv.restore`` undoes it.

    At each call one of our kernels applies the epilogue if the choice for the tensors is one that can; else, in
    training mode, and where gradients are recorded of more than ReLU, the calls of the module's own forward run. Layers
    that haloconv.accelerate swapped keep their settings, be it before or after. Another call looks again at all.

    With HALOCONV_DISABLE=1 nothing is changed, and a warning says so once.
    """
    names = _names(model)
    convolutions = [each for each in names if isinstance(each, torch.nn.Conv2d)]
    if env.disabled():
        tell_disabled("fuse")
        return Fusion((), tuple(Left(names[each], each, DISABLED, True) for each in convolutions))
    programs = {each: program_of(each) for each in names if _may_call(each)}
    chains: list[FusedChain] = []
    reasons: dict[torch.nn.Module, list[str]] = {each: [] for each in convolutions}
    for module in names:
        set_back(module)
    for module, program in programs.items():
        if isinstance(program, str):
            continue
        if program.calls:
            set_fused(module, program)
        prefix = names[module][0]
        for call in program.calls:
            paths = tuple(_joined(prefix, path) for path in call.chain.modules)
            call.layer = paths[0]
            chains.append(FusedChain(paths, module, call.chain.words, call))
            reasons.pop(call.conv, None)
        for path, reason in program.left:
            reasons.get(module.get_submodule(path), []).append(reason)
    left = tuple(
        Left(names[conv], conv, told[0] if told else _why_not_called(conv, programs, names), True)
        for conv, told in reasons.items()
    )
    fusion = Fusion(tuple(chains), left)
    for name, _, state, reason in fusion._lines():
        logs.choice.info("haloconv.fuse, %s: %s: %s", name, state, reason)
    return fusion


def _names(model: torch.nn.Module) -> dict[torch.nn.Module, tuple[str, ...]]:
    """Every module of the model, with all the names that it has there."""
    names: dict[torch.nn.Module, tuple[str, ...]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names[module] = (*names.get(module, ()), name)
    return names


def _may_call(module: torch.nn.Module) -> bool:
    """Whether the module has a forward that is worth a trace: it has a convolution itself, or in a container."""
    wraps = own_class(module).__module__.startswith(_WRAPPERS)
    return _has_convolution(module) and not (wraps or isinstance(module, _NO_FORWARD))


def _has_convolution(module: torch.nn.Module) -> bool:
    inside = [*module.children()]
    held = (isinstance(each, _CONTAINERS) and _has_convolution(each) for each in inside)
    return any(isinstance(each, torch.nn.Conv2d) for each in inside) or any(held)


def _why_not_called(
    conv: torch.nn.Module,
    programs: dict[torch.nn.Module, Program | str],
    names: dict[torch.nn.Module, tuple[str, ...]],
) -> str:
    """The reason of a convolution that no forward calls that is known: that of the innermost one that is not."""
    unknown = [
        f"the forward of {shown(names[module])} {program}"
        for module, program in programs.items()
        if isinstance(program, str) and any(each is conv for each in module.modules())
    ]
    return unknown[-1] if unknown else "no module of the model calls it in its forward"


def _joined(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix else path
