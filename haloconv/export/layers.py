"""Which convolutions a problem file's model runs, on which shapes, and which family computes each direction."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field, replace

import torch

from haloconv import plan
from haloconv.calls import noting_calls
from haloconv.choose.choice import Choice, choose
from haloconv.choose.rules import by_rule
from haloconv.device import device_facts
from haloconv.export.record import CPU, Forms, Recorder, Tape, bgrad_tape, tape_of
from haloconv.families import FAMILIES, UNIVERSAL
from haloconv.functional import make_spec
from haloconv.plan import layout_of
from haloconv.precision import Precision
from haloconv.problem import DIRECTIONS, ConvSpec, Direction, Problem
from haloconv.problem_file import (
    Inputs,
    ProblemFile,
    ProblemFileError,
    how_it_ended,
    map_tensors,
    tensors_in,
)

ROUTED = "PyTorch's own convolution is the choice here, and an exported file has kernels alone"


@dataclass
class Layer:
    """One convolution for inputs of one shape, its problem in each direction, and what was chosen and recorded.

    ``refusals`` says of directions why the family that was asked for does not take them.
    """

    name: str
    fprop: Problem
    spec: ConvSpec
    forms: Forms
    choices: dict[Direction, Choice] = field(default_factory=dict)
    tapes: dict[str, Tape] = field(default_factory=dict)
    refusals: dict[Direction, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[object, ...]:
        """What the exported file finds the layer by."""
        spec, problem = self.spec, self.fprop
        return (problem.x_shape, problem.w_shape, spec.stride, spec.padding, spec.dilation, spec.groups, problem.bias)

    @property
    def functions(self) -> dict[str, Tape]:
        """The tapes by the name of the C++ function that repeats them."""
        return {f"{self.name}_{direction}": tape for direction, tape in self.tapes.items()}


def layers_of(file: ProblemFile, precision: Precision | None) -> list[Layer]:
    """The layers of the file's model in the order in which they run, each form of input once.

    The model runs on tensors without memory; tensors of no dimension, which are mere numbers, keep theirs.

    Warns of convolutions of other kinds, which stay PyTorch's. Raises ProblemFileError if the model does not run there,
    if it runs no torch.nn.Conv2d, or one that pads with something else than zeros.
    """
    seen: list[tuple[str, torch.nn.Conv2d, torch.Tensor]] = []
    inputs = _without_memory(file)
    model = file.model().to("meta")
    convolutions = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Conv2d)}
    try:
        with noting_calls(convolutions, lambda *call: seen.append(call[:3])), torch.no_grad():
            model(*inputs)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ProblemFileError(f"{file.path}: Model's forward {how_it_ended(error)}") from error
    layers: dict[tuple[object, ...], Layer] = {}
    for name, module, x in seen:
        layer = _layer(file, name, module, x if x.dim() == 4 else x.unsqueeze(0), precision)
        layers.setdefault(layer.key, layer)
    left = _left_in(model)
    if not layers:
        others = f"; {left}" if left else ""
        raise ProblemFileError(
            f"{file.path}: no torch.nn.Conv2d ran in Model's forward, so there is nothing to export{others}"
        )
    if left:
        warnings.warn(f"haloconv: {file.path.name}: {left}", RuntimeWarning, stacklevel=3)
    taken: set[str] = set()
    for layer in layers.values():
        while layer.name in taken:
            layer.name += "_again"
        taken.add(layer.name)
    return list(layers.values())


def _left_in(model: torch.nn.Module) -> str:
    """The sentence about convolutions of kinds that an exported file has no kernels of; empty without such."""
    kinds = {name: type(each).__name__ for name, each in model.named_modules() if _is_left(each)}
    which = ", ".join(f"{name or 'the model'} ({kind})" for name, kind in kinds.items())
    verb = "stays" if len(kinds) == 1 else "stay"
    return f"{which} {verb} PyTorch's, for an exported file has kernels of Conv2d alone" if kinds else ""


def _is_left(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.conv._ConvNd) and not isinstance(module, torch.nn.Conv2d)


def _without_memory(file: ProblemFile) -> Inputs:
    """The file's inputs on the meta device, made there if all of them can be: at full size they may not fit memory."""
    try:
        with torch.device("meta"):
            inputs = file.inputs()
        if all(x.dim() for x in tensors_in(inputs)):
            return inputs
    except ProblemFileError:  # code that reads a number out of a tensor fails there
        pass
    return map_tensors(lambda x: x.to("meta") if x.dim() else x, file.inputs())


def _layer(
    file: ProblemFile, name: str, module: torch.nn.Conv2d, x: torch.Tensor, precision: Precision | None
) -> Layer:
    if module.padding_mode != "zeros":
        raise ProblemFileError(
            f"{file.path}: {name} pads with padding_mode='{module.padding_mode}'; an exported layer pads with zeros"
        )
    arguments = (module.stride, module.padding, module.dilation, module.groups, module.kernel_size)
    spec = make_spec(*arguments, precision, "auto", False)
    forms = Forms(layout_of(x), layout_of(module.weight))
    bias = module.bias is not None
    shapes = (tuple(x.shape), tuple(module.weight.shape))
    problem = replace(plan.problem_of("fprop", *shapes, spec, x.dtype, forms.y), bias=bias)
    return Layer(re.sub(r"\W+", "_", name) or "model", problem, spec, forms)


def choose_on(gpu: torch.device, layer: Layer) -> None:
    """Note what is chosen for the layer on a GPU that is at hand: nothing may stand in for it."""
    for direction in DIRECTIONS:
        layer.choices[direction] = choose(layer.fprop.toward(direction), gpu)


def choose_and_record(layer: Layer, device: Recorder, family: str) -> None:
    """Settle the layer's choices, also where none was made on a GPU, and record its tapes.

    A ``family`` other than ``"auto"`` runs the directions it takes; of the others the layer's ``refusals`` tell.

    Raises ProblemFileError if no kernel of ours takes the layer.
    """
    for direction in DIRECTIONS:
        problem = layer.fprop.toward(direction)
        refusal = None if family == "auto" else FAMILIES[family].why_not(problem, CPU)
        if refusal is not None:
            layer.refusals[direction] = refusal
        wanted = family if refusal is None else "auto"
        choice = layer.choices[direction] = _choice(problem, layer.choices.get(direction), wanted)
        if choice.family == "aten":
            raise ProblemFileError(f"no kernel runs the layer {layer.name}: {choice.reason}")
        layer.tapes[direction] = tape_of(device, problem, choice, layer.forms)
    if layer.fprop.bias:
        layer.tapes["bgrad"] = bgrad_tape(device, layer.fprop, layer.forms)


def _choice(problem: Problem, chosen: Choice | None, family: str) -> Choice:
    """The family asked for, which takes the problem; of "auto" the one chosen, else the most special one of ours."""
    if family != "auto":
        return Choice(family, "asked for")
    chosen = Choice(*by_rule(problem, CPU)[:2]) if chosen is None else chosen
    if chosen.family != "aten":
        return chosen
    own = _own(problem)
    if own is None:
        return Choice("aten", FAMILIES[UNIVERSAL].why_not(problem, CPU) or "", refused=True)
    return Choice(own, f"{ROUTED} ({chosen.reason})")


def _own(problem: Problem) -> str | None:
    """The most special of our families; a weight gradient that none is special for goes to tensor cores if it can."""
    takes = [name for name in reversed(FAMILIES) if FAMILIES[name].why_not(problem, CPU) is None]
    takes.remove("aten")
    on_tensor_cores = [name for name in takes if FAMILIES[name].tensor_cores]
    return next(iter([*(on_tensor_cores if takes[:1] == [UNIVERSAL] else ()), *takes]), None)


def gpu_of(arch: str) -> torch.device | None:
    """The current GPU if it is of that architecture, else None."""
    if not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device()
    return torch.device("cuda", index) if device_facts(index).arch == arch else None
