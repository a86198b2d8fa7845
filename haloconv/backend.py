"""``torch.compile(model, backend="haloconv")``: Inductor, given a graph in which our operator stands for convolutions.

PyTorch finds the backend by an entry point of the package, without an import. Before AOTAutograd sees a graph, each 1-D
or 2-D convolution, transposed ones too, for which `haloconv.choose` picks a kernel of ours becomes an operator of ours,
which brings its gradients along; so do a batch norm, an addition and an activation behind it that our kernel applies
(fusion/graph.py).
Everything else stays Inductor's. A call is replaced only where that is known to change nothing but who computes it:
dtype, extents and strides of the result are compared with those that PyTorch's convolution has.
"""

from __future__ import annotations

import copy
import operator
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import torch

from haloconv import logs
from haloconv.choose.choice import choose_now
from haloconv.device import device_facts, has_facts
from haloconv.families import FAMILIES
from haloconv.fusion.channels_last import (
    LayoutError,
    bring_results_back,
    bring_to_channels_last,
    copy_of,
    note_values,
    propagated,
)
from haloconv.fusion.convolutions import (
    CONVOLUTIONS,
    arguments_of,
    form_of,
    is_convolution,
    is_transposed,
    mirrored_of,
    requests_of,
    spec_of,
    value_of,
)
from haloconv.fusion.enlarged import enlarge_by_views
from haloconv.fusion.graph import Fused, behind, bias_and_scale_of_norm, norm_arguments
from haloconv.fusion.group_norms import norms_by_channel
from haloconv.fusion.upsampled import OPTION, asked_by_option, convolve_before_upsampling, is_before_upsampling
from haloconv.problem import Problem, Request

OLDEST = (2, 6)
"""The first PyTorch whose compiler the backend is made for."""
_VECTOR_BYTES = 16
"""A thread's widest load. Of filters with fewer bytes of channels it has taps beside each other, in channels_last."""

_aten = torch.ops.aten
_PRODUCTS = (
    *(torch.nn.functional.linear, torch._C._nn.linear, _aten.linear, _aten.linear.default, torch.matmul, "matmul"),
    *(_aten.matmul, _aten.matmul.default, torch.mm, _aten.mm, _aten.mm.default, torch.bmm, _aten.bmm.default),
)


class Convolution(NamedTuple):
    """A convolution of a compiled graph. ``layer`` is the module that calls it, else the name of its node.

    ``replaced`` if it runs as haloconv's operator, for which ``reason`` then names each direction that the graph needs,
    the family that runs it, and why; else ``reason`` says why it stays PyTorch's. ``problem`` is the forward pass, None
    where it is not known, with what the choice was made for behind it; that of a transposed one is a ``dgrad``.
    ``fused`` names what behind it is part of it.
    """

    layer: str
    replaced: bool
    reason: str
    problem: Problem | None = None
    fused: tuple[str, ...] = ()


class _Backend:
    """What PyTorch calls with each graph. ``mode`` and ``options`` are those of torch.compile, for Inductor but one."""

    def __call__(
        self,
        graph: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """The compiled graph.

        Raises RuntimeError for a PyTorch that is too old, ValueError for our option, and what Inductor raises.
        """
        check_version(torch.__version__)
        options = dict(options or {})
        before_upsampling = asked_by_option(options.pop(OPTION, None))
        found = replace_convolutions(graph, options.get("layout_optimization", True), before_upsampling)
        inductor = torch._TorchCompileInductorWrapper(mode, options or None, None)
        if any(each.replaced for each in found):
            own = import_module("haloconv.fusion.lowered.passes")  # of Inductor, which takes seconds to import
            before = inductor.config.get(own.SETTING, getattr(import_module("torch._inductor.config"), own.SETTING))
            inductor.config[own.SETTING] = own.OwnPasses(before)  # as an option PyTorch 2.6 drops it
        compiled: Callable[..., Any] = inductor(graph, example_inputs)
        return compiled

    def reset(self) -> None:
        """What torch._dynamo.reset asks for: CUDA graphs of compiled functions are forgotten, as Inductor does it."""
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        if trees is not None:
            trees.reset_cudagraph_trees()


backend = _Backend()
"""The entry point."""


def check_version(version: str) -> None:
    """Raise RuntimeError if the PyTorch of this version is too old for the backend."""
    numbers = tuple(int(each) for each in version.split(".")[:2])
    if numbers < OLDEST:
        raise RuntimeError(
            f'torch.compile(backend="haloconv") needs PyTorch {".".join(map(str, OLDEST))} or newer, and this is '
            f"{version}. Call haloconv.accelerate(model) and compile it with PyTorch's own backend: its layers run our "
            "kernels there"
        )


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Convolution, ...]:
    """Every 1-D and 2-D convolution that torch.compile finds in a call of ``model``, and what the backend does with it.

    ``model`` is called with the other arguments, and traced as torch.compile does it; nothing is compiled. Gradients
    count where PyTorch records them: call it under torch.no_grad() to see what inference does.
    """
    return tuple(explain_options(model, args, kwargs, (None,)))


def explain_options(
    model: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], asked: Sequence[bool | None]
) -> list[Convolution]:
    """What `explain` tells, with each of these values of the option for images that are enlarged.

    The model is traced once.
    """
    found: list[Convolution] = []

    def collect(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        for value in asked[1:] if is_before_upsampling(graph) else ():
            copied = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
            found.extend(replace_convolutions(copied, before_upsampling=value))
        found.extend(replace_convolutions(graph, before_upsampling=asked[0]))
        return graph.forward

    torch.compile(model, backend=collect)(*args, **kwargs)
    return found


def replace_convolutions(
    graph: torch.fx.GraphModule, chooses_layout: bool = True, before_upsampling: bool | None = None
) -> list[Convolution]:
    """Replace the calls that our kernels are to run, in place. Every convolution of the graph; logs tell it, too.

    Graphs inside, such as those of torch.utils.checkpoint, are treated alike. A graph without such a call is untouched.
    With ``chooses_layout`` a graph that gains by it runs in channels_last, and there images are convolved before they
    are enlarged, if ``before_upsampling``, what the option says, allows it.
    """
    found = (chooses_layout and _settle_in_channels_last(graph, before_upsampling)) or _settle_all(graph)
    for each in found:
        state = "haloconv's operator" if each.replaced else "left to PyTorch"
        state += f" with {' and '.join(each.fused)}" if each.fused else ""
        logs.choice.info("torch.compile, %s: %s: %s", each.layer, state, each.reason)
    return found


def _settle_all(graph: torch.fx.GraphModule) -> list[Convolution]:
    """Every convolution of a graph and of those inside, settled; where one is ours images are enlarged by views."""
    found = []
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            told = [_settle(node) for node in [*module.graph.nodes] if is_convolution(node)]
            if any(each.replaced for each in told):
                enlarge_by_views(module)
                module.recompile()
            found += told
    return found


def _settle_in_channels_last(graph: torch.fx.GraphModule, before_upsampling: bool | None) -> list[Convolution]:
    """Every convolution, settled in a graph whose images are in channels_last, if that is faster for all of them.

    Logs tell it. Empty if the graph stays as it was.
    """
    forwards = [request for request, _ in _of_images(graph).values()]
    if not forwards or not all(_gains_by_channels_last(each) for each in forwards):
        return []
    try:
        copied, was = copy_of(graph), propagated(graph)
        upsampled = convolve_before_upsampling(copied, before_upsampling, was.all_written)
        if upsampled:
            note_values(copied, propagated(copied))
        read = {node: _read_in_channels_last(*asked) for node, asked in _of_images(copied).items()}
        bring_to_channels_last(copied, was, read)
        found = _settle_all(copied)
        if not any(each.replaced for each in found):
            return []
        norms = norms_by_channel(copied, value_of)
        bring_results_back(copied, was)
    except LayoutError as reason:
        logs.choice.info("torch.compile: images stay as they lie: %s", reason)
        return []
    graph.graph = copied.graph
    logs.choice.info(
        "torch.compile: inside of the graph, images of %d convolutions are in channels_last, %d of which are convolved "
        "before they are enlarged, and %d group norms are reduced by channel first", len(forwards), upsampled, norms
    )  # fmt: skip
    return found


def _of_images(graph: torch.fx.GraphModule) -> dict[torch.fx.Node, tuple[Request, dict[str, Any]]]:
    """The forward pass and the arguments of each convolution of batches of images that our kernels may be asked for."""
    found = {}
    for node in graph.graph.nodes:
        given = arguments_of(node) if is_convolution(node) else {}
        requests = requests_of(node, given) if given else ""
        if not isinstance(requests, str) and value_of(given["input"]).dim() == 4:
            found[node] = (requests[0], given)
    return found


def _read_in_channels_last(forward: Request, given: dict[str, Any]) -> list[torch.fx.Node]:
    """What a convolution is to read in channels_last: its image, and filters of few channels."""
    of_few_channels = forward.problem.c_per_group * forward.problem.dtype.itemsize < _VECTOR_BYTES
    return [given["input"], *([given["weight"]] if of_few_channels else [])]


def _gains_by_channels_last(forward: Request) -> bool:
    """Whether whole networks of such convolutions were measured ahead in channels_last (docs/compile.md#layout)."""
    problem = forward.problem
    gains = problem.dtype in (torch.float16, torch.bfloat16) or problem.precision == "tf32"
    return gains and has_facts(forward.device) and device_facts(forward.device.index).capability == (9, 0)


def _settle(node: torch.fx.Node) -> Convolution:
    """Replace one call, or say why not."""
    layer, given = _layer_of(node), arguments_of(node)
    requests = requests_of(node, given)
    if isinstance(requests, str):
        return Convolution(layer, False, requests)
    fused = None if is_transposed(node, given) else behind(node, value_of(node).requires_grad, value_of)
    requests[0] = _whole(requests[0], node, fused)
    chosen = [(each.problem.direction, choose_now(each, "auto")) for each in requests]
    ours = any(choice.family != "aten" for _, choice in chosen)
    if not FAMILIES[chosen[0][1].family].has_epilogue:
        fused = None
    if ours:
        _replace(node, given, fused)
    told = "; ".join(f"{direction}: {choice.family}, {choice.reason}" for direction, choice in chosen)
    return Convolution(layer, ours, told, requests[0].problem, () if fused is None else fused.names)


def _whole(forward: Request, node: torch.fx.Node, fused: Fused | None) -> Request:
    """What the choice is made for: the convolution, and what Inductor would need a kernel for that ours does not.

    That is so where somebody reads the result who cannot be part of that kernel. Else Inductor does what follows, and a
    bias too, in a kernel that it needs anyway: the convolution alone decides.
    """
    problem = forward.problem
    if problem.direction != "fprop" or not (problem.bias or fused):
        return forward
    if not any(_reads_memory(each) for each in (node if fused is None else fused.last).users):
        return replace(forward, problem=replace(problem, bias=False))
    if fused is None:
        return forward
    bias = problem.bias and not fused.epilogue.scale
    return replace(forward, problem=replace(problem, bias=bias, epilogue=fused.epilogue._replace(compiled=True)))


def _reads_memory(node: torch.fx.Node) -> bool:
    """Whether the node needs its operands in memory, so that Inductor's kernel for these ends with them."""
    return node.op == "output" or node.target in CONVOLUTIONS or node.target in _PRODUCTS


def _layer_of(node: torch.fx.Node) -> str:
    """The path in the model of the module that calls, as torch.compile notes it; else the name of the node."""
    modules = [*(node.meta.get("nn_module_stack") or {}).values()]
    return (modules and re.sub(r"^L\['\w+'\]\.?", "", modules[-1][0])) or node.name


def _replace(node: torch.fx.Node, given: dict[str, Any], fused: Fused | None) -> None:
    """Let our operator stand in the node's place, and in that of what is fused."""
    graph, x, w = node.graph, given["input"], given["weight"]
    last = node if fused is None else fused.last
    row, batched = value_of(w).dim() == 3, value_of(x).dim() == value_of(w).dim()
    with graph.inserting_before(last):
        x = x if batched else graph.call_method("unsqueeze", (x, 0))
        residual = None if fused is None else fused.residual
        if residual is not None and not batched:
            residual = graph.call_method("unsqueeze", (residual, 0))
        if row:
            x, w = (graph.call_method("unsqueeze", (each, 2)) for each in (x, w))
            residual = None if residual is None else graph.call_method("unsqueeze", (residual, 2))
        if is_transposed(node, given):
            y = _transposed_nodes(graph, x, w, node, given)
        else:
            spec: Any = spec_of(given)
            y = _fprop_node(graph, (x, w, given["bias"], residual), (*map(list, spec[:3]), *spec[3:]), fused)
        y = graph.call_method("squeeze", (y, 2)) if row else y
        y = y if batched else graph.call_method("squeeze", (y, 0))
    y.meta.update(last.meta)
    last.replace_all_uses_with(y)
    for gone in (*(() if fused is None else reversed(fused.nodes)), node):
        graph.erase_node(gone)


def _fprop_node(
    graph: torch.fx.Graph, tensors: tuple[Any, ...], spec: tuple[Any, ...], fused: Fused | None
) -> torch.fx.Node:
    """The call of our operator; of a batch norm's statistics it gets the bias and the scale that they come to."""
    x, w, b, residual = tensors
    if fused is None:
        return graph.call_function(torch.ops.haloconv.fprop.default, (x, w, b, *spec))
    if fused.norm is not None:
        own = norm_arguments(fused.norm)
        statistics = (own["running_mean"], own["running_var"], (own["weight"], own["bias"]), own["eps"], b)
        b = graph.call_function(bias_and_scale_of_norm, statistics)
    arguments = (x, w, b, residual, fused.epilogue.scale, fused.epilogue.activation, *spec)
    return graph.call_function(torch.ops.haloconv.fprop_epilogue.default, arguments)


def _transposed_nodes(graph: torch.fx.Graph, x: Any, w: Any, node: torch.fx.Node, given: dict[str, Any]) -> Any:
    """dgrad of the mirrored convolution and the bias, in the dtype of PyTorch's result, which autocast decides."""
    asked: Any = mirrored_of(given)
    rank, result, bias = value_of(given["weight"]).dim(), value_of(node), given["bias"]
    forms: Any = [form_of(value_of(each), rank) for each in (given["input"], given["weight"])]
    layout = "nhwc" if "nhwc" in [each.layout for each in forms] else "nchw"
    if value_of(given["input"]).dtype != result.dtype:
        x, w = (graph.call_method("to", (each, result.dtype)) for each in (x, w))
    shape = asked.y_shape(forms[0].shape, forms[1].shape)
    sizes = value_of(given["input"]).shape
    if any(isinstance(each, torch.SymInt) for each in sizes):
        n, h, width = (graph.call_method("size", (x, dim)) for dim in (0, 2, 3))
        steps, small = asked.spec.stride, asked.y_shape((1, 1, 0, 0), forms[1].shape)
        rows, columns = (
            graph.call_function(operator.add, (graph.call_function(operator.mul, (extent, step)), more))
            for extent, step, more in zip((h, width), steps, small[2:], strict=True)
        )
        shape = (n, shape[1], rows, columns)
    spec = (*map(list, asked.spec[:3]), *asked.spec[3:])
    y = graph.call_function(torch.ops.haloconv.dgrad.default, (x, w, list(shape), layout, *spec))
    if bias is None:
        return y
    bias = bias if value_of(bias).dtype == result.dtype else graph.call_method("to", (bias, result.dtype))
    return graph.call_function(torch.add, (y, graph.call_method("reshape", (bias, -1, 1, 1))))
