"""``torch.compile(model, backend="haloconv")``: Inductor, given a graph in which our operator stands for convolutions.

PyTorch finds the backend by an entry point of the package, without an import. Before AOTAutograd sees a graph, each 1-D
or 2-D convolution, transposed ones too, for which `haloconv.choose` picks a kernel of ours becomes an operator of ours,
which brings its gradients along; so do a batch norm, an addition and an activation behind it that our kernel applies
(fusion/graph.py).
Everything else stays Inductor's. A call is replaced only where that is known to change nothing but who computes it:
dtype, extents and strides of the result are compared with those that PyTorch's convolution has.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensor

from haloconv import logs
from haloconv import plan as plans
from haloconv.arguments import Settings
from haloconv.choose.choice import choose_now
from haloconv.families import FAMILIES
from haloconv.functional import make_spec
from haloconv.fusion.graph import Fused, behind, bias_and_scale_of_norm, norm_arguments
from haloconv.layout import Layout, is_channels_last, strides_of
from haloconv.one_dimension import posed_row
from haloconv.problem import ConvSpec, Problem, Request, TensorForm
from haloconv.transposed import Transposed, posed_transposed

OLDEST = (2, 6)
"""The first PyTorch whose compiler the backend is made for."""

_aten = torch.ops.aten
_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_NAMES_OF_TRANSPOSED = (*_NAMES[:5], "output_padding", "groups", "dilation")
_NAMES_OF_CONVOLUTION = (*_NAMES[:6], "transposed", "output_padding", "groups")
_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1, "output_padding": 0}
_TRANSPOSED = (
    *(torch.conv_transpose1d, torch.conv_transpose2d, _aten.conv_transpose1d, _aten.conv_transpose1d.default),
    *(_aten.conv_transpose2d, _aten.conv_transpose2d.input),
)
_CALLS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys((torch.conv1d, _aten.conv1d, _aten.conv1d.default, _aten.conv1d.padding), _NAMES),
    **dict.fromkeys((torch.conv2d, _aten.conv2d, _aten.conv2d.default, _aten.conv2d.padding), _NAMES),
    **dict.fromkeys((_aten.convolution, _aten.convolution.default), _NAMES_OF_CONVOLUTION),
    **dict.fromkeys(_TRANSPOSED, _NAMES_OF_TRANSPOSED),
}
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


class _Form(NamedTuple):
    """A tensor as the compiler sees it, and its extents and strides in the call that is compiled, symbols replaced."""

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    tensor: torch.Tensor

    @property
    def layout(self) -> Layout:
        return "nhwc" if is_channels_last(self.shape, self.strides) else "nchw"

    @property
    def given(self) -> TensorForm:
        return TensorForm(self.strides, True)


class _Backend:
    """What PyTorch calls with each graph. ``mode`` and ``options`` are those of torch.compile, for Inductor."""

    def __call__(
        self,
        graph: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """The compiled graph. Raises RuntimeError for a PyTorch that is too old, and what Inductor raises."""
        check_version(torch.__version__)
        replace_convolutions(graph)
        inductor = torch._TorchCompileInductorWrapper(mode, options, None)
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
    found: list[Convolution] = []

    def collect(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found.extend(replace_convolutions(graph))
        return graph.forward

    torch.compile(model, backend=collect)(*args, **kwargs)
    return tuple(found)


def replace_convolutions(graph: torch.fx.GraphModule) -> list[Convolution]:
    """Replace the calls that our kernels are to run, in place. Every convolution of the graph; logs tell it, too.

    Graphs inside, such as those of torch.utils.checkpoint, are treated alike. A graph without such a call is untouched.
    """
    found = []
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            told = [_settle(node) for node in [*module.graph.nodes] if _is_convolution(node)]
            if any(each.replaced for each in told):
                module.recompile()
            found += told
    for each in found:
        state = "haloconv's operator" if each.replaced else "left to PyTorch"
        state += f" with {' and '.join(each.fused)}" if each.fused else ""
        logs.choice.info("torch.compile, %s: %s: %s", each.layer, state, each.reason)
    return found


def _is_convolution(node: torch.fx.Node) -> bool:
    """Whether the node calls a 1-D or 2-D convolution, be it transposed."""
    if node.op != "call_function" or node.target not in _CALLS:
        return False
    weight = _value(_given(node).get("weight"))
    return not (isinstance(weight, torch.Tensor) and weight.dim() not in (3, 4))


def _is_transposed(node: torch.fx.Node, given: dict[str, Any]) -> bool:
    return node.target in _TRANSPOSED or bool(given.get("transposed"))


def _given(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a call by name."""
    return {**_DEFAULTS, **dict(zip(_CALLS[node.target], node.args, strict=False)), **node.kwargs}


def _value(argument: object) -> Any:
    """What the compiler knows of a node's result: of a tensor its form, without data. Other arguments as they are."""
    if not isinstance(argument, torch.fx.Node):
        return argument
    return argument.meta.get("example_value", argument.meta.get("val"))


def _settle(node: torch.fx.Node) -> Convolution:
    """Replace one call, or say why not."""
    layer, given = _layer_of(node), _given(node)
    requests = _why_not(node, given) or _requests(node, given)
    if isinstance(requests, str):
        return Convolution(layer, False, requests)
    fused = None if _is_transposed(node, given) else behind(node, _value(node).requires_grad, _value)
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
    return node.op == "output" or node.target in _CALLS or node.target in _PRODUCTS


def _layer_of(node: torch.fx.Node) -> str:
    """The path in the model of the module that calls, as torch.compile notes it; else the name of the node."""
    modules = [*(node.meta.get("nn_module_stack") or {}).values()]
    return (modules and re.sub(r"^L\['\w+'\]\.?", "", modules[-1][0])) or node.name


def _why_not(node: torch.fx.Node, given: dict[str, Any]) -> str | None:
    """A sentence: what of a call is not as our operator needs it. None if nothing is."""
    unknown: list[object] = []
    torch.fx.map_arg([given[name] for name in (*_NAMES[3:], "output_padding")], unknown.append)
    if unknown:
        return "stride, padding, dilation or groups are known only when it runs"
    tensors = [_value(each) for each in (given["input"], given["weight"], given["bias"], node) if each is not None]
    if not all(isinstance(each, FakeTensor) and each.layout == torch.strided for each in tensors):
        return "a tensor of its is not dense, is of a class of its own, or is inside a transform of torch.func"
    return None


def _requests(node: torch.fx.Node, given: dict[str, Any]) -> list[Request] | str:
    """What our kernels would be asked for, fprop and the gradients that are wanted; or a sentence: why nothing is."""
    rank = _value(given["weight"]).dim()
    x, w, y = (_form_of(_value(each), rank) for each in (given["input"], given["weight"], node))
    if x is None or w is None or y is None:
        return "extents are known only when it runs"
    layout: Layout = "nhwc" if "nhwc" in (x.layout, w.layout) else "nchw"
    dense = strides_of(y.shape, layout)
    if any(extent > 1 and one != other for extent, one, other in zip(y.shape, dense, y.strides, strict=True)):
        return "PyTorch's result lies in memory in another order than ours would"
    if _is_transposed(node, given):
        return _transposed_requests(given, x, w, y)
    spec = _spec(given)
    if spec is None:
        return "its arguments are none of a convolution of ours"
    problem = plans.problem_of("fprop", x.shape, w.shape, spec, y.tensor.dtype, layout)
    problem = replace(problem, bias=given["bias"] is not None)
    device, form_y = x.tensor.device, TensorForm(dense, True)
    requests = [Request(problem, x.given, w.given, layout, device)]
    if y.tensor.requires_grad and x.tensor.requires_grad:
        requests.append(Request(problem.toward("dgrad"), form_y, w.given, layout, device))
    if y.tensor.requires_grad and w.tensor.requires_grad:
        to_dw = replace(problem.toward("wgrad"), layout=x.layout)
        requests.append(Request(to_dw, form_y, x.given, w.layout, device))
    return requests


def _transposed_requests(given: dict[str, Any], x: _Form, w: _Form, y: _Form) -> list[Request] | str:
    """dgrad of the mirrored convolution, and the gradients that are wanted, its fprop and wgrad."""
    asked = _mirrored(given)
    if asked is None:
        return "output_padding is not below the stride, so that no convolution has this as its gradient"
    layout: Layout = "nhwc" if "nhwc" in (x.layout, w.layout) else "nchw"
    problem = plans.problem_of("dgrad", y.shape, w.shape, asked.spec, y.tensor.dtype, layout)
    device, form_y = x.tensor.device, TensorForm(strides_of(y.shape, layout), True)
    requests = [Request(problem, x.given, w.given, layout, device)]
    if y.tensor.requires_grad and x.tensor.requires_grad:
        requests.append(Request(problem.toward("fprop"), form_y, w.given, layout, device))
    if y.tensor.requires_grad and w.tensor.requires_grad:
        requests.append(Request(problem.toward("wgrad"), x.given, form_y, w.layout, device))
    return requests


def _spec(given: dict[str, Any]) -> ConvSpec | None:
    stride, padding, dilation, groups = (given[name] for name in _NAMES[3:])
    taps = _value(given["weight"]).shape[2:]
    if len(taps) == 1:
        return posed_row((stride, padding, dilation, groups), taps[0], Settings())
    return make_spec(stride, padding, dilation, groups, taps, None, "auto", False)


def _mirrored(given: dict[str, Any]) -> Transposed | None:
    arguments = tuple(given[name] for name in ("stride", "padding", "output_padding", "groups", "dilation"))
    return posed_transposed(arguments, _value(given["weight"]).dim() - 2, Settings())


def _form_of(tensor: Any, rank: int) -> _Form | None:
    """None if symbols in it stand for nothing yet. An image without a batch counts as a batch of one, and a signal as
    an image of one row: ``rank`` is the weight's. Adds no guard.
    """
    shape, strides = ([_number(each) for each in sizes] for sizes in (tensor.shape, tensor.stride()))
    if None in shape or None in strides:
        return None
    if tensor.dim() == rank - 1:
        shape, strides = [1, *shape], [shape[0] * strides[0], *strides]
    if rank == 3:
        shape, strides = [*shape[:2], 1, shape[2]], [*strides[:2], shape[2] * strides[2], strides[2]]
    return _Form(tuple(shape), tuple(strides), tensor)


def _number(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _replace(node: torch.fx.Node, given: dict[str, Any], fused: Fused | None) -> None:
    """Let our operator stand in the node's place, and in that of what is fused."""
    graph, x, w = node.graph, given["input"], given["weight"]
    last = node if fused is None else fused.last
    row, batched = _value(w).dim() == 3, _value(x).dim() == _value(w).dim()
    with graph.inserting_before(last):
        x = x if batched else graph.call_method("unsqueeze", (x, 0))
        residual = None if fused is None else fused.residual
        if residual is not None and not batched:
            residual = graph.call_method("unsqueeze", (residual, 0))
        if row:
            x, w = (graph.call_method("unsqueeze", (each, 2)) for each in (x, w))
            residual = None if residual is None else graph.call_method("unsqueeze", (residual, 2))
        if _is_transposed(node, given):
            y = _transposed_nodes(graph, x, w, node, given)
        else:
            spec: Any = _spec(given)
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
    asked: Any = _mirrored(given)
    rank, result, bias = _value(given["weight"]).dim(), _value(node), given["bias"]
    forms: Any = [_form_of(_value(each), rank) for each in (given["input"], given["weight"])]
    layout = "nhwc" if "nhwc" in [each.layout for each in forms] else "nchw"
    if _value(given["input"]).dtype != result.dtype:
        x, w = (graph.call_method("to", (each, result.dtype)) for each in (x, w))
    shape = asked.y_shape(forms[0].shape, forms[1].shape)
    sizes = _value(given["input"]).shape
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
    bias = bias if _value(bias).dtype == result.dtype else graph.call_method("to", (bias, result.dtype))
    return graph.call_function(torch.add, (y, graph.call_method("reshape", (bias, -1, 1, 1))))
