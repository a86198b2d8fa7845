"""What is asked: the extents, parameters and layout of one convolution, and the arithmetic that follows from them.

Every rule about output extents, padding forms and argument checking lives in this file and nowhere else.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch

from haloconv.device import DeviceFacts, device_facts
from haloconv.layout import Layout, strides_of
from haloconv.precision import Precision

Direction = Literal["fprop", "dgrad", "wgrad"]
DIRECTIONS: tuple[Direction, ...] = ("fprop", "dgrad", "wgrad")
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Activation = Literal["relu", "leaky_relu", "silu", "gelu", "gelu_tanh", "hardswish", "sigmoid", "tanh"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

Pair = tuple[int, int]
FourSides = tuple[int, int, int, int]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
PADDING_MODES: tuple[PaddingMode, ...] = get_args(PaddingMode)
Modes = tuple[PaddingMode, PaddingMode]
EdgeModes = tuple[Literal[PaddingMode, "halo"], PaddingMode]
"""What stands above and below an image, a padding mode or rows of another tensor; and what is left and right of it."""
"""Padding mode of the rows above and below an image, and of the columns at its left and right."""
ZEROS: Modes = ("zeros", "zeros")


class Epilogue(NamedTuple):
    """What becomes of a sum on its way out: y = activation(scale[k] * sum + bias[k] + residual), each part optional.

    With ``scale`` the third tensor of fprop is (K, 2) in fp32, bias and scale of each filter, in place of a bias (K,).
    With ``residual`` there is a fourth, of y's shape and dtype. ``compiled`` changes no result: it is set in compiled
    graphs, where PyTorch's side of a choice is the convolution and one kernel for all that follows, a bias too.
    """

    scale: bool = False
    activation: Activation | None = None
    residual: bool = False
    compiled: bool = False

    def __str__(self) -> str:
        parts = (self.scale and "scale", self.residual and "residual", self.activation, self.compiled and "compiled")
        return " ".join(part for part in parts if part)

    @property
    def is_known_from_y(self) -> bool:
        """Whether gradients need nothing but y: the activation is ReLU or none, and no gradient of a scale is asked."""
        return not self.scale and self.activation in (None, "relu")


NO_EPILOGUE = Epilogue()


class ConvSpec(NamedTuple):
    """Everything about a call that is not a tensor. Hashable, so that it can be part of a plan's key.

    ``padding`` is ``(top, bottom, left, right)`` in pixels. ``precision`` is None (follow PyTorch's TF32 setting),
    ``"ieee"``, ``"tf32"`` or ``"tf32x3"``. ``family`` is ``"auto"`` or the name of one family.
    """

    stride: Pair = (1, 1)
    padding: FourSides = (0, 0, 0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    precision: Precision | None = None
    family: str = "auto"
    strict: bool = False


def _met(extent: int, pad: int, outputs: int, stride: int, taps: int, dilation: int) -> int:
    """Input rows (columns) inside the image that some tap of some output meets."""
    starts = range(-pad, -pad + outputs * stride, stride)
    return len({at for start in starts for at in range(start, start + taps * dilation, dilation) if 0 <= at < extent})


@dataclass(frozen=True, slots=True)
class Problem:
    """One direction of one convolution: what is computed, not how.

    Extents follow the glossary: input ``N C H W``, filter ``K R S``, output ``P Q``. ``layout`` is ``"nchw"`` or
    ``"nhwc"`` (memory order of the activations). ``precision`` says how fp32 products are formed: ``"ieee"``,
    ``"tf32"`` or ``"tf32x3"``; it is ``"ieee"`` for every other dtype. A ``bias`` is (K,), and (C,) in dgrad, where it
    is that of a transposed layer.
    """

    direction: Direction
    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    stride: Pair = (1, 1)
    padding: FourSides = (0, 0, 0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    bias: bool = False
    dtype: torch.dtype = torch.float32
    layout: Layout = "nchw"
    precision: Precision = "ieee"
    epilogue: Epilogue = NO_EPILOGUE

    @property
    def p(self) -> int:
        return output_extent(self.h, self.padding[0] + self.padding[1], self.r, self.stride[0], self.dilation[0])

    @property
    def q(self) -> int:
        return output_extent(self.w, self.padding[2] + self.padding[3], self.s, self.stride[1], self.dilation[1])

    @property
    def c_per_group(self) -> int:
        return self.c // self.groups

    @property
    def k_per_group(self) -> int:
        return self.k // self.groups

    @property
    def x_shape(self) -> tuple[int, int, int, int]:
        return (self.n, self.c, self.h, self.w)

    @property
    def w_shape(self) -> tuple[int, int, int, int]:
        return (self.k, self.c_per_group, self.r, self.s)

    @property
    def y_shape(self) -> tuple[int, int, int, int]:
        return (self.n, self.k, self.p, self.q)

    @property
    def flops(self) -> int:
        """Multiplies and adds of the dense definition (two per tap, channel and output), the same in each direction."""
        return 2 * self.n * self.k * self.p * self.q * self.c_per_group * self.r * self.s

    @property
    def bytes(self) -> int:
        """Device-memory bytes if every tensor of the problem is read or written exactly once.

        Of x only pixels that some tap meets are read; dx is written as a whole.
        """
        top, _, left, _ = self.padding
        rows, cols = self.h, self.w
        if self.direction != "dgrad":
            rows = _met(self.h, top, self.p, self.stride[0], self.r, self.dilation[0])
            cols = _met(self.w, left, self.q, self.stride[1], self.s, self.dilation[1])
        x_elems = self.n * self.c * rows * cols
        w_elems = self.k * self.c_per_group * self.r * self.s
        y_elems = self.n * self.k * self.p * self.q
        biases = self.c if self.direction == "dgrad" else self.k
        others = (biases if self.bias else 0) + (y_elems if self.epilogue.residual else 0)
        return (x_elems + w_elems + y_elems + others) * self.dtype.itemsize

    @property
    def precision_label(self) -> str:
        """The precision as records and tables name it: ``fp64 fp32 tf32 tf32x3 fp16 bf16``."""
        if self.dtype == torch.float32:
            return "fp32" if self.precision == "ieee" else self.precision
        return {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}.get(self.dtype, str(self.dtype))

    @property
    def is_empty(self) -> bool:
        """True if some tensor has no elements, so that there is nothing to multiply."""
        return 0 in self.x_shape or 0 in self.w_shape or 0 in self.y_shape

    def toward(self, direction: Direction) -> Problem:
        """The problem of this layer in ``direction``: bias and epilogue take part in the forward pass alone."""
        if direction == self.direction:
            return self
        return replace(self, direction=direction, bias=False, epilogue=NO_EPILOGUE)

    def __str__(self) -> str:
        top, bottom, left, right = self.padding
        notes = [f"s{self.stride[0]}x{self.stride[1]}"] if self.stride != (1, 1) else []
        notes += [f"p{top},{bottom},{left},{right}"] if any(self.padding) else []
        notes += [f"d{self.dilation[0]}x{self.dilation[1]}"] if self.dilation != (1, 1) else []
        notes += [f"g{self.groups}"] if self.groups != 1 else []
        shape = f"{self.n},{self.c},{self.h},{self.w} -> {self.k}, {self.r}x{self.s}"
        notes += [self.precision_label, self.layout]
        return " ".join([self.direction, shape, *notes, *([str(self.epilogue)] if any(self.epilogue) else [])])


class TensorForm(NamedTuple):
    """What a plan may rely on about a tensor: strides in elements, and whether it starts at a multiple of 16 bytes."""

    strides: tuple[int, ...]
    aligned: bool


@dataclass(frozen=True, slots=True)
class Request:
    """What a kernel is asked for: a problem on tensors of these forms, on a device.

    ``first`` and ``second`` are the forms of (x, w) in fprop, (dy, w) in dgrad, (dy, x) in wgrad. ``result_layout`` is
    the memory order of y, dx or dw, which is dense. ``modes`` are the padding modes of rows and of columns; only a
    family that ``has_padding_modes`` is asked for others than zeros. With rows of a ``"halo"`` another tensor, dense
    and with the neighbours of the first, has the padded rows, above and then below: (N, C, top + bottom, W).
    """

    problem: Problem
    first: TensorForm
    second: TensorForm
    result_layout: Layout
    device: torch.device
    modes: EdgeModes = ZEROS

    @property
    def facts(self) -> DeviceFacts:
        return device_facts(self.device.index)

    @property
    def result_shape(self) -> tuple[int, int, int, int]:
        one = self.problem
        return {"fprop": one.y_shape, "dgrad": one.x_shape, "wgrad": one.w_shape}[one.direction]

    @property
    def result_strides(self) -> tuple[int, int, int, int]:
        """Strides of the result, in elements."""
        return strides_of(self.result_shape, self.result_layout)


def dense_request(problem: Problem, device: torch.device) -> Request:
    """The problem on dense, aligned tensors, all of the problem's layout."""
    shapes = {"fprop": (problem.x_shape, problem.w_shape), "dgrad": (problem.y_shape, problem.w_shape)}
    first, second = shapes.get(problem.direction, (problem.y_shape, problem.x_shape))
    one, other = (TensorForm(strides_of(shape, problem.layout), True) for shape in (first, second))
    return Request(problem, one, other, problem.layout, device)


def output_extent(extent: int, padding: int, taps: int, stride: int, dilation: int) -> int:
    """Output pixels along one axis; ``padding`` is the sum of both sides. May be zero or negative for bad problems.

    The formula of the torch.nn.Conv2d documentation.
    """
    return (extent + padding - dilation * (taps - 1) - 1) // stride + 1


def as_int(value: object, name: str) -> int:
    """``value`` as an int if torch would take it as one: anything with ``__index__`` but bool; else TypeError."""
    if type(value) in (int, torch.SymInt):
        return value  # type: ignore[return-value]
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"conv2d(): argument '{name}' must be an int or a tuple of ints, not {value!r}")
    return operator.index(value)


def as_pair(value: object, name: str) -> Pair:
    """An int, or a sequence of one or two ints, as a pair.

    Raises TypeError if something else than ints is given and RuntimeError for a wrong number of them, as torch does.
    """
    if not isinstance(value, (tuple, list)):
        return (as_int(value, name),) * 2
    items = tuple(as_int(item, name) for item in value)
    if len(items) not in (1, 2):
        shown = f"{name}={list(items)}"
        raise RuntimeError(f"expected {name} to be a single integer value or a list of 2 values, but got {shown}")
    return items * 2 if len(items) == 1 else items  # type: ignore[return-value]


def as_four_sides(padding: object, *, filter_extent: Sequence[int] | None, stride: Pair, dilation: Pair) -> FourSides:
    """Any accepted form of padding as ``(top, bottom, left, right)`` in pixels.

    Accepted: an int, a pair ``(vertical, horizontal)``, four sides, ``"valid"``, ``"same"`` (the extra pixel goes to
    the bottom and the right, as in torch). Only ``"same"`` needs ``filter_extent``, the taps (R, S).

    Raises RuntimeError where torch does: an unknown string, ``"same"`` with a stride, a wrong number of values.
    """
    if isinstance(padding, str):
        if padding == "valid":
            return (0, 0, 0, 0)
        if padding != "same":
            raise RuntimeError(
                f"Invalid padding string: '{padding}'. Use 'valid', 'same', an int, a pair or four sides."
            )
        if stride != (1, 1):
            raise RuntimeError("padding='same' is not supported for strided convolutions")
        assert filter_extent is not None
        rows, cols = (d * (taps - 1) for d, taps in zip(dilation, filter_extent, strict=True))
        return (rows // 2, rows - rows // 2, cols // 2, cols - cols // 2)
    if isinstance(padding, (tuple, list)) and len(padding) == 4:
        return tuple(as_int(side, "padding") for side in padding)  # type: ignore[return-value]
    rows, cols = as_pair(padding, "padding")
    return (rows, rows, cols, cols)


def check_spec(spec: ConvSpec) -> None:
    """Refuse parameters that are wrong whatever the tensors are, with the exceptions that torch raises.

    A family's name is looked up where families are known (haloconv.families.check_family).
    """
    if min(spec.padding) < 0:
        raise RuntimeError("negative padding is not supported")
    if min(spec.stride) <= 0:
        raise RuntimeError("non-positive stride is not supported")
    if min(spec.dilation) <= 0:
        raise RuntimeError("dilation should be greater than zero")
    if spec.groups <= 0:
        raise RuntimeError("non-positive groups is not supported")
    if spec.precision not in (None, *PRECISIONS):
        raise ValueError(f"precision must be None or one of {PRECISIONS}, not {spec.precision!r}")


def check_ranks(x: torch.Tensor, w: torch.Tensor) -> None:
    """Refuse an input or a filter of the wrong number of dimensions. Raises RuntimeError."""
    if w.dim() != 4:
        raise RuntimeError(
            f"Expected {w.dim()}-dimensional input for {w.dim()}-dimensional weight of size {list(w.shape)}, but "
            f"conv2d takes a 4-dimensional weight (K, C / groups, R, S) and got input of size {list(x.shape)}"
        )
    if x.dim() not in (3, 4):
        raise RuntimeError(
            f"Expected 3D (unbatched) or 4D (batched) input to conv2d, but got input of size: {list(x.shape)}"
        )


def _check_scaled_bias(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> None:
    if b is None or tuple(b.shape) != (w.shape[0], 2) or b.dtype != torch.float32 or b.device != x.device:
        given = "None" if b is None else f"{list(b.shape)}, {b.dtype}, on {b.device}"
        raise RuntimeError(
            f"Given weight of size {list(w.shape)}, expected bias and scale as one fp32 tensor of size "
            f"{[w.shape[0], 2]} on {x.device}, but got {given}"
        )


def check_residual(residual: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a residual that is not of the result's shape, dtype and device. Raises RuntimeError."""
    if tuple(residual.shape) != tuple(shape) or residual.dtype != dtype or residual.device != device:
        raise RuntimeError(
            f"expected residual to be as the result, {list(shape)} of {dtype} on {device}, but got "
            f"{list(residual.shape)} of {residual.dtype} on {residual.device}: expand or convert it before the call"
        )


def check_tensors(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, spec: ConvSpec, *, has_scale: bool = False
) -> None:
    """Refuse tensors that torch.nn.functional.conv2d refuses, with the same exception type and the same facts.

    ``x`` is (N, C, H, W), ``w`` is (K, C/G, R, S), ``b`` is (K,) or None; with ``has_scale`` that of an Epilogue.
    """
    if has_scale:
        _check_scaled_bias(x, w, b)
        b = None
    check_spec(spec)
    check_ranks(x, w)
    for name, tensor in (("weight", w), ("bias", b)):
        if tensor is not None and (tensor.dtype != x.dtype or tensor.device != x.device):
            raise RuntimeError(
                f"Input type ({x.type()}, {x.device}) and {name} type ({tensor.type()}, {tensor.device}) "
                "should be the same"
            )
    n, c, h, width = x.shape
    k, c_per_group, r, s = w.shape
    if k < spec.groups or k % spec.groups:
        raise RuntimeError(
            f"Given groups={spec.groups}, expected weight to be at least {spec.groups} at dimension 0 and divisible by "
            f"{spec.groups}, but got weight of size {list(w.shape)} instead"
        )
    if c != c_per_group * spec.groups:
        raise RuntimeError(
            f"Given groups={spec.groups}, weight of size {list(w.shape)}, expected input{list(x.shape)} to have "
            f"{c_per_group * spec.groups} channels, but got {c} channels instead"
        )
    if b is not None and (b.dim() != 1 or b.shape[0] != k):
        raise RuntimeError(
            f"Given weight of size {list(w.shape)}, expected bias to be 1-dimensional with {k} elements, "
            f"but got bias of size {list(b.shape)} instead"
        )
    top, bottom, left, right = spec.padding
    padded = (h + top + bottom, width + left + right)
    reach = tuple(d * (taps - 1) + 1 for d, taps in zip(spec.dilation, (r, s), strict=True))
    if padded[0] < reach[0] or padded[1] < reach[1]:
        raise RuntimeError(
            f"Calculated padded input size per channel: ({padded[0]} x {padded[1]}). "
            f"Kernel size: ({reach[0]} x {reach[1]}). Kernel size can't be greater than actual input size"
        )
    if 0 in (c, h, width, r, s):
        raise RuntimeError(
            f"non-empty 3D or 4D input and weight expected (only the batch may be empty), but got input of size "
            f"{list(x.shape)} and weight of size {list(w.shape)}"
        )
