"""A model with swapped convolutions: each that runs as a Layer, and the rows of its layers and of the whole of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from haloconv.accelerate import Acceleration
from haloconv.bench.emulation.emulated import EmulatedLayer, Emulation
from haloconv.bench.layer import LAYOUTS, Layer, Step
from haloconv.bench.networks.whole import Contest
from haloconv.bench.trial import Budget, tried_step
from haloconv.bench.values import ModelError, device_of, run_theirs
from haloconv.calls import noting_calls
from haloconv.changes import Swap
from haloconv.families.closure import JOIN
from haloconv.front import Front, Images
from haloconv.layout import Layout
from haloconv.module import Conv2d
from haloconv.plan import layout_of, result_layout
from haloconv.precision import Precision, label_of
from haloconv.precompile import evaluating
from haloconv.problem import ConvSpec, as_four_sides, output_extent
from haloconv.problem_file import Inputs, map_tensors, tensors_in
from haloconv.reference import unsearched
from haloconv.report import Row
from haloconv.subclasses import padding_of

Model = TypeVar("Model", bound=torch.nn.Module)


@dataclass(frozen=True)
class Options:
    """What the command line asked for. ``precision`` None follows PyTorch's TF32 setting.

    ``emulation`` is set if our side runs on the emulator. ``autocast`` is the dtype that both sides run in under
    torch.autocast, or None; ``layout`` the memory order of weights and images, None leaving them as they are.
    """

    device: torch.device
    precision: Precision | None
    family: str
    seed: int
    budget: Budget
    emulation: Emulation | None = None
    autocast: torch.dtype | None = None
    layout: Layout | None = None

    @property
    def model_precision(self) -> Precision | None:
        """How whole models form fp32 products: beside the emulator stands no PyTorch with TF32 to judge a model by."""
        return "ieee" if self.emulation is not None and self.precision is None else self.precision

    def in_layout(self, layout: Layout) -> Options:
        """These options with ``layout`` for their memory order."""
        return replace(self, layout=layout)


class Autocast(torch.nn.Module):
    """A model that runs under torch.autocast. float64 stays float64 there, which the reference needs."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, *inputs: object) -> object:
        with torch.autocast(device_of(inputs).type, self.dtype):
            return self.model(*inputs)


def placed(model: torch.nn.Module, inputs: Inputs, options: Options) -> tuple[torch.nn.Module, Inputs]:
    """Model and inputs on the device, and in the memory order if one is asked for.

    Raises ModelError if one of them is on the meta device.
    """
    order = None if options.layout is None else LAYOUTS[options.layout]
    for i, given in enumerate(inputs):
        if any(x.is_meta for x in tensors_in(given)):
            raise ModelError(f"get_inputs()[{i}] is on the meta device, which holds no numbers: make it on the CPU")
    if any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        raise ModelError("Model has parameters or buffers on the meta device, which holds no numbers")
    model, inputs = model.to(options.device), map_tensors(lambda x: x.to(options.device), inputs)
    if order is None:
        return model, inputs
    inputs = map_tensors(lambda x: x.to(memory_format=order) if x.dim() == 4 else x, inputs)
    return in_memory_format(model, order), inputs


def in_memory_format(model: Model, order: torch.memory_format) -> Model:
    """The model with its 4-D parameters in this memory order."""
    stored: Model = model.to(memory_format=order)  # type: ignore[call-overload]  # torch's stubs lack it
    return stored


def why_nothing_is_ours(acceleration: Acceleration) -> str | None:
    """Why no layer of a model is ours, or None if one is."""
    if acceleration.swaps or acceleration.already:
        return None
    reasons = dict.fromkeys(left.reason for left in acceleration.left)
    return "; ".join(reasons) or "it holds no torch.nn.Conv2d"


def layers_of(
    name: str, model: torch.nn.Module, inputs: Inputs, swaps: Sequence[Swap], options: Options
) -> list[Layer]:
    """Every swapped convolution that runs, with the input of its first call. Raises ModelError if the model fails.

    Layers are called ``name.module``, and ``name`` if the model has only one convolution. Convolutions that pose the
    same problems are one layer, whose ``count`` says how many they are. Calls without elements are left out, and those
    of 3-D layers that are no 2-D convolution.
    """
    inputs = map_tensors(torch.clone, inputs)  # the model may change them in place
    seen: dict[torch.nn.Module, torch.Tensor] = {}

    def note(_: str, module: Any, x: torch.Tensor, __: torch.Tensor) -> None:
        x = x.detach()
        if x.numel() and (not isinstance(module, Front) or isinstance(module.posed(x), Images)):
            seen.setdefault(module, x if x.dim() == module.weight.dim() else x.unsqueeze(0))

    swapped = {swap.name: swap.module for swap in swaps}
    with noting_calls(swapped, note), torch.no_grad(), evaluating(model), unsearched(), warnings.catch_warnings():
        if options.emulation is not None:  # no kernel of ours is meant to run in this pass
            warnings.filterwarnings("ignore", "haloconv: PyTorch's own convolution", RuntimeWarning)
        run_theirs(lambda: model(*inputs), "Model's forward")
    given = {x.data_ptr() for x in tensors_in(inputs)}
    many = len(swaps) > 1
    places: dict[tuple[object, ...], list[Swap]] = {}
    for swap in swaps:
        if swap.module in seen:
            places.setdefault(_problem_key(swap.module, seen[swap.module]), []).append(swap)
    layers = []
    for alike in places.values():
        first = alike[0]
        label, module, x = f"{name}.{first.name}" if many else name, first.module, seen[first.module]
        if not isinstance(module, Conv2d):
            layers.append(replace(front_layer_of(label, module, x, options), count=len(alike)))
            continue
        layer = layer_of(label, module, x, options)
        fed = all(seen[each.module].data_ptr() in given for each in alike)
        activation = seen[first.module].data_ptr() not in given
        layers.append(replace(layer, count=len(alike), fed=fed, activation=activation))
    return layers


def _problem_key(module: Any, x: torch.Tensor) -> tuple[object, ...]:
    """Equal exactly for modules whose problems are equal in every direction."""
    if isinstance(module, Front):
        images: Any = module.posed(x)
        form = (images.first.stride(), images.problem(x.dtype, module.bias is not None), images.w.stride())
        return type(module).__name__, *form, images.spec
    orders = layout_of(x), layout_of(module.weight)
    extents = tuple(x.shape), tuple(module.weight.shape), x.dtype, orders, module.bias is None
    padding = (padding_of(module, x.shape[-2:]), module.padding, module.padding_mode)
    return *extents, module.stride, *padding, module.dilation, module.groups


def front_layer_of(name: str, module: Any, x: torch.Tensor, options: Options) -> Layer:
    """A call that is a 2-D convolution on views as a Layer; of a transposed one the convolution that it mirrors.

    Its fprop is then the gradient of the input, and its dgrad the forward pass, without the bias.
    """
    images: Any = module.posed(x)
    dtype = options.autocast or x.dtype
    spec = images.spec._replace(precision=options.precision, family=options.family, strict=False)
    first, w = images.first.to(dtype), images.w.to(dtype)
    problem, layout = images.problem(dtype, module.bias is not None), result_layout(first, w)
    generator = torch.Generator(x.device).manual_seed(options.seed)
    shape = problem.y_shape if images.x_shape is None else images.x_shape
    other = torch.randn(shape, generator=generator, device=x.device).to(dtype)
    other = other.contiguous(memory_format=LAYOUTS[layout])
    if images.x_shape is not None:
        return Layer(f"{name} (mirrored)", other, w, None, first, spec, layout)
    bias = None if module.bias is None else module.bias.detach().to(dtype)
    return Layer(name, first, w, bias, other, spec, layout)


def layer_of(name: str, module: Conv2d, x: torch.Tensor, options: Options) -> Layer:
    """The module's convolution of ``x`` (N, C, H, W) as a Layer, with standard normal output gradients.

    Tensors keep their order, as x and the weight may differ: then PyTorch copies, and so may we.
    """
    (stride_h, stride_w), (dilation_h, dilation_w), (r, s) = module.stride, module.dilation, module.kernel_size
    stride, dilation, taps = (stride_h, stride_w), (dilation_h, dilation_w), (r, s)
    if module.padding_mode == "zeros":
        padding = as_four_sides(padding_of(module, x.shape[-2:]), filter_extent=taps, stride=stride, dilation=dilation)
    else:
        x = torch.nn.functional.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
        padding = (0, 0, 0, 0)
    dtype = options.autocast or x.dtype
    spec = ConvSpec(stride, padding, dilation, module.groups, options.precision, options.family)
    rows = output_extent(x.shape[2], padding[0] + padding[1], r, stride[0], dilation[0])
    cols = output_extent(x.shape[3], padding[2] + padding[3], s, stride[1], dilation[1])
    generator = torch.Generator(x.device).manual_seed(options.seed)
    dy = torch.randn(x.shape[0], module.out_channels, rows, cols, generator=generator, device=x.device).to(dtype)
    bias = None if module.bias is None else module.bias.detach().to(dtype)
    x, weight = x.to(dtype), module.weight.detach().to(dtype)
    layout = result_layout(x, weight)
    return Layer(name, x, weight, bias, dy.contiguous(memory_format=LAYOUTS[layout]), spec, layout)


def try_layers(layers: Sequence[Layer], options: Options, announce: Callable[[str], None]) -> Iterator[Row]:
    """A row for every direction of every layer, each as it is done; ``announce`` hears of each before it starts."""
    for layer in layers:
        for step in layer.steps:
            announce(f"{layer.name} {step}")
            yield tried_step(on_device(layer, options), step, options.budget)


def on_device(layer: Layer, options: Options) -> Layer:
    """The layer as it runs: on the emulator if one is asked for."""
    return layer if options.emulation is None else EmulatedLayer.of(layer, options.emulation)


def what_ran(steps: Iterable[tuple[Layer, Step]]) -> tuple[str, str]:
    """The families of these steps of layers, joined by ``+``, and their kernels; no kernels where one is unknown."""
    steps = list(steps)
    families = dict.fromkeys(layer.choice(step).family for layer, step in steps)
    kernels = {layer.ran(step).kernel for layer, step in steps}
    return "+".join(families), JOIN.join(sorted(kernels)) if all(kernels) else ""


def contest_of(
    ours: torch.nn.Module,
    theirs: torch.nn.Module,
    inputs: Inputs,
    layers: Sequence[Layer],
    rows: Sequence[Row],
    options: Options,
) -> Contest:
    """The whole model with the families that run its layers, given the layers' rows.

    Beside the emulator the whole runs in another precision than single layers do (`Options.model_precision`), and so on
    other kernels. Together the layers may err by what each may, added up.
    """
    precision = options.model_precision
    layers = [on_device(replace(layer, spec=layer.spec._replace(precision=precision)), options) for layer in layers]
    steps = [(layer, step) for layer in layers for step in layer.steps]
    labels = {layer.problem(step).precision_label for layer, step in steps}
    limits = [Layer.limits(layer, step, None).norm for layer, step in steps]
    limits += [row.error_limit for row in rows if row.precision in labels and row.error_limit > 0]
    if options.autocast is not None:
        ours, theirs = Autocast(ours, options.autocast), Autocast(theirs, options.autocast)
    return Contest(
        ours,
        theirs,
        inputs,
        precision="tf32" if "tf32" in labels else "ieee",
        label=label_of(labels.pop()) if len(labels) == 1 else "mixed",
        norm_limit=len(layers) * max(limits),
        ran={"forward": what_ran(each for each in steps if each[1] == "fprop"), "step": what_ran(steps)},
        seed=options.seed,
        surroundings=options.emulation.device if options.emulation is not None else nullcontext,
    )
