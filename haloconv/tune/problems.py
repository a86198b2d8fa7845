"""Which problems a model's convolutions pose for given inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from haloconv.backend import explain_options
from haloconv.calls import noting_calls
from haloconv.front import Front, Images
from haloconv.functional import make_spec
from haloconv.fusion.module import fused_calls
from haloconv.layer import Layer
from haloconv.library import autocast_dtype
from haloconv.module import Conv2d
from haloconv.padding import Posed as PosedCall
from haloconv.padding import as_modes, modes_in_use
from haloconv.plan import layout_of, result_layout
from haloconv.precision import Precision
from haloconv.precompile import Inputs, arguments_of, check_directions, evaluating
from haloconv.problem import DIRECTIONS, ConvSpec, Direction, Problem
from haloconv.problem_file import tensors_in
from haloconv.reference import unsearched
from haloconv.subclasses import OwnForward, padding_of, replacement

_MIRRORED: dict[Direction, Direction] = {"fprop": "dgrad", "dgrad": "fprop"}  # what a transposed layer's are


class Posed(NamedTuple):
    """One direction of one layer, and where it runs."""

    layer: str
    problem: Problem
    device: torch.device


def problems_of(
    model: torch.nn.Module, example_inputs: Inputs, directions: Collection[Direction] = DIRECTIONS
) -> list[Posed]:
    """The problems of every layer that is ours or would be, with ``family="auto"``, that a forward pass meets.

    ``example_inputs`` is what the model is called with: a tensor, a sequence of arguments, or a mapping of keyword
    arguments. The pass is made in evaluation mode, without a graph, under the autocast that is in force; the model is
    left as it was. Subclasses of torch.nn.Conv2d are ours to run where ``haloconv.accelerate`` has swapped them, or
    would without being asked; what one with a forward of its own convolves is not known. The gradient of an example
    input is a problem only if that input requires one. ``directions`` are those of layers: the forward pass of a
    transposed one is the problem ``dgrad``. Of what torch.compile gave, they are those of the model that it was given.

    Raises ValueError for a direction that is none, and what the model raises.
    """
    check_directions(directions)
    model = _uncompiled(model)
    args, kwargs = arguments_of(example_inputs)
    frozen_inputs = {tensor.data_ptr() for tensor in tensors_in((args, kwargs)) if not tensor.requires_grad}
    found: list[Posed] = []

    def note(name: str, module: torch.nn.Module, x: torch.Tensor, _: torch.Tensor) -> None:
        wanted = [each for each in directions if each != "dgrad" or x.data_ptr() not in frozen_inputs]
        posed = _problems(module, x, wanted) if isinstance(module, torch.nn.Conv2d) else _of_front(module, x, wanted)
        found.extend(Posed(name, problem, x.device) for problem in posed)

    layers = {name: module for name, module in model.named_modules() if _is_ours_to_run(module)}
    with noting_calls(layers, note), evaluating(model), torch.no_grad(), unsearched():
        model(*args, **kwargs)
    return list(dict.fromkeys(found))


def wholes_of(model: torch.nn.Module, example_inputs: Inputs) -> list[Posed]:
    """The forward passes of convolutions with what follows them, as ``haloconv.fuse`` left them in the model.

    Of a model that torch.compile gave they are those of its graphs, as its backend "haloconv" takes them: of inference
    in evaluation mode; in training mode as where gradients are recorded. Convolutions that the model's layers do not
    pose, as the backend brings them into another memory order or form, are among them even if nothing follows: also
    those of images that it enlarges last if it is asked to. The model is traced for that, and called in evaluation
    mode.

    Raises what the model raises.
    """
    (args, kwargs), inner = arguments_of(example_inputs), _uncompiled(model)
    if inner is not model:
        device = next((each.device for each in (*inner.parameters(), *inner.buffers())), torch.device("cpu"))
        with torch.set_grad_enabled(inner.training), evaluating(inner), unsearched():
            told = explain_options(inner, args, kwargs, (None, True))
        of_layers = {replace(each.problem, bias=False) for each in problems_of(inner, example_inputs, DIRECTIONS[:1])}
        posed = dict.fromkeys(Posed(each.layer, each.problem, device) for each in told if each.problem is not None)
        return [each for each in posed if replace(each.problem, bias=False) not in of_layers]
    found: list[Posed] = []
    calls, names = [*fused_calls(model)], {module: name for name, module in model.named_modules()}
    layers = {names[call.conv]: call.conv for call in calls}

    def note(name: str, module: torch.nn.Conv2d, x: torch.Tensor, _: torch.Tensor) -> None:
        for problem in _problems(module, x, DIRECTIONS[:1]):
            for epilogue in (each.chain.epilogue for each in calls if each.conv is module):
                whole = replace(problem, bias=problem.bias and not epilogue.scale, epilogue=epilogue)
                found.append(Posed(name, whole, x.device))

    with (
        noting_calls(layers, note),
        evaluating(model),
        torch.no_grad(),
        unsearched(),
    ):
        model(*args, **kwargs)
    return list(dict.fromkeys(found))


def _uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The model that torch.compile was given, if it gave this one."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, torch.nn.Module) else model


def _problems(module: torch.nn.Conv2d, x: torch.Tensor, directions: Collection[Direction]) -> Iterator[Problem]:
    """The problems of one call; none if a layer asks for a family by name."""
    w, spec = module.weight, _spec_of(module, x.shape[-2:])
    if spec.family != "auto":
        return
    if x.dim() == 3:
        x = x.unsqueeze(0)
    layout, modes = result_layout(x, w), modes_in_use(as_modes(module.padding_mode), spec.padding)
    posed = PosedCall(tuple(x.shape), tuple(w.shape), autocast_dtype(x), layout, spec, modes)
    for direction in directions:
        stored = layout_of(x) if direction == "wgrad" else layout
        bias = module.bias is not None and direction == "fprop"
        yield replace(posed.to_measure(direction, x.device), layout=stored, bias=bias)


def _of_front(module: torch.nn.Module, x: torch.Tensor, directions: Collection[Direction]) -> Iterator[Problem]:
    """The problems of one call of a layer beside Conv2d; none where it is no 2-D convolution."""
    ours: Any = replacement(module)
    layer: Any = module if isinstance(module, Front) else ours.from_torch(module)
    images = layer.posed(x) if layer.family == "auto" else None
    if not isinstance(images, Images):
        return
    forward = images.problem(autocast_dtype(x), layer.bias is not None)
    for direction in directions:
        yield forward.toward(_MIRRORED.get(direction, direction) if images.x_shape is not None else direction)


def _spec_of(module: torch.nn.Conv2d, image: Sequence[int]) -> ConvSpec:
    padding = padding_of(module, image)
    chosen: tuple[Precision | None, str, bool] = (None, "auto", False)
    if isinstance(module, Conv2d):
        chosen = (module.precision, module.family, module.strict)
    r, s = module.kernel_size
    return make_spec(module.stride, padding, module.dilation, module.groups, (r, s), *chosen)


def _is_ours_to_run(module: torch.nn.Module) -> bool:
    """Whether the module is a layer of ours, or one that ``haloconv.accelerate`` would make so."""
    if isinstance(module, Layer):
        return not isinstance(module, OwnForward)  # only its forward knows what it convolves
    return not isinstance(replacement(module), str)
