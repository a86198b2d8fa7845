"""Calls of 1-D and 2-D convolutions in a graph of torch.compile, and what our kernels would be asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensor

from haloconv import plan as plans
from haloconv.arguments import Settings
from haloconv.functional import make_spec
from haloconv.layout import Layout, is_channels_last, strides_of
from haloconv.one_dimension import posed_row
from haloconv.problem import ConvSpec, Request, TensorForm
from haloconv.transposed import Transposed, posed_transposed

_aten = torch.ops.aten
_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_NAMES_OF_TRANSPOSED = (*_NAMES[:5], "output_padding", "groups", "dilation")
_NAMES_OF_CONVOLUTION = (*_NAMES[:6], "transposed", "output_padding", "groups")
_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1, "output_padding": 0}
_TRANSPOSED = (
    *(torch.conv_transpose1d, torch.conv_transpose2d, _aten.conv_transpose1d, _aten.conv_transpose1d.default),
    *(_aten.conv_transpose2d, _aten.conv_transpose2d.input),
)
CONVOLUTIONS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys((torch.conv1d, _aten.conv1d, _aten.conv1d.default, _aten.conv1d.padding), _NAMES),
    **dict.fromkeys((torch.conv2d, _aten.conv2d, _aten.conv2d.default, _aten.conv2d.padding), _NAMES),
    **dict.fromkeys((_aten.convolution, _aten.convolution.default), _NAMES_OF_CONVOLUTION),
    **dict.fromkeys(_TRANSPOSED, _NAMES_OF_TRANSPOSED),
}


class Form(NamedTuple):
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


def is_convolution(node: torch.fx.Node) -> bool:
    """Whether the node calls a 1-D or 2-D convolution, be it transposed."""
    if node.op != "call_function" or node.target not in CONVOLUTIONS:
        return False
    weight = value_of(arguments_of(node).get("weight"))
    return not (isinstance(weight, torch.Tensor) and weight.dim() not in (3, 4))


def is_transposed(node: torch.fx.Node, given: dict[str, Any]) -> bool:
    """Whether the convolution that the node calls is transposed."""
    return node.target in _TRANSPOSED or bool(given.get("transposed"))


def arguments_of(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a call by name."""
    return {**_DEFAULTS, **dict(zip(CONVOLUTIONS[node.target], node.args, strict=False)), **node.kwargs}


def value_of(argument: object) -> Any:
    """What the compiler knows of a node's result: of a tensor its form, without data. Other arguments as they are."""
    if not isinstance(argument, torch.fx.Node):
        return argument
    return argument.meta.get("example_value", argument.meta.get("val"))


def is_known_image(value: object) -> bool:
    """Whether it is a batch of images, none of them empty, whose extents and strides are numbers."""
    if not isinstance(value, torch.Tensor) or value.dim() != 4:
        return False
    return all(isinstance(each, int) for each in (*value.shape, *value.stride())) and value.numel() > 0


def replace_node(graph: torch.fx.Graph, node: torch.fx.Node, function: Any, arguments: tuple[Any, ...]) -> None:
    """Let a call of the function stand in the node's place; of its result the same is known."""
    with graph.inserting_before(node):
        replaced = graph.call_function(function, arguments)
    replaced.meta.update(node.meta)
    node.replace_all_uses_with(replaced)
    graph.erase_node(node)


def _why_not(node: torch.fx.Node, given: dict[str, Any]) -> str | None:
    """A sentence: what of a call is not as our operator needs it. None if nothing is."""
    unknown: list[object] = []
    torch.fx.map_arg([given[name] for name in (*_NAMES[3:], "output_padding")], unknown.append)
    if unknown:
        return "stride, padding, dilation or groups are known only when it runs"
    tensors = [value_of(each) for each in (given["input"], given["weight"], given["bias"], node) if each is not None]
    if not all(isinstance(each, FakeTensor) and each.layout == torch.strided for each in tensors):
        return "a tensor of its is not dense, is of a class of its own, or is inside a transform of torch.func"
    return None


def requests_of(node: torch.fx.Node, given: dict[str, Any]) -> list[Request] | str:
    """What our kernels would be asked for, fprop and the gradients that are wanted; or a sentence: why nothing is."""
    reason = _why_not(node, given)
    if reason is not None:
        return reason
    rank = value_of(given["weight"]).dim()
    x, w, y = (form_of(value_of(each), rank) for each in (given["input"], given["weight"], node))
    if x is None or w is None or y is None:
        return "extents are known only when it runs"
    layout: Layout = "nhwc" if "nhwc" in (x.layout, w.layout) else "nchw"
    dense = strides_of(y.shape, layout)
    if any(extent > 1 and one != other for extent, one, other in zip(y.shape, dense, y.strides, strict=True)):
        return "PyTorch's result lies in memory in another order than ours would"
    if is_transposed(node, given):
        return _transposed_requests(given, x, w, y)
    spec = spec_of(given)
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


def _transposed_requests(given: dict[str, Any], x: Form, w: Form, y: Form) -> list[Request] | str:
    """dgrad of the mirrored convolution, and the gradients that are wanted, its fprop and wgrad."""
    asked = mirrored_of(given)
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


def spec_of(given: dict[str, Any]) -> ConvSpec | None:
    """How a call that is not transposed convolves; None if its arguments are those of none of ours."""
    stride, padding, dilation, groups = (given[name] for name in _NAMES[3:])
    taps = value_of(given["weight"]).shape[2:]
    if len(taps) == 1:
        return posed_row((stride, padding, dilation, groups), taps[0], Settings())
    return make_spec(stride, padding, dilation, groups, taps, None, "auto", False)


def mirrored_of(given: dict[str, Any]) -> Transposed | None:
    """Whose gradient a transposed convolution is; None if that is none of ours."""
    arguments = tuple(given[name] for name in ("stride", "padding", "output_padding", "groups", "dilation"))
    return posed_transposed(arguments, value_of(given["weight"]).dim() - 2, Settings())


def form_of(tensor: Any, rank: int) -> Form | None:
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
    return Form(tuple(shape), tuple(strides), tensor)


def _number(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt) else size
