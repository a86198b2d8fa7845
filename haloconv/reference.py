"""What is right: the float64 convolution of the same tensors, and how far a result may stand from it.

Every answer comes with its ``scale``, the same convolution of absolute values. An element's error is measured against
its scale, so that cancellation neither hides a mistake nor accuses an honest sum.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from haloconv.problem import ConvSpec, Problem

IEEE_NORM = 5e-7
AS_IEEE = ("fp32", "tf32x3")  # precisions whose errors are those of fp32
NORM_LIMITS = {"tf32": 5e-4, "fp16": 1e-3, "bf16": 8e-3, "fp64": 1e-13}
ELEMENT_FACTOR = 4.0
TF32_OPERANDS = 2.0**-10  # what a product loses when both factors are rounded to 10 bits behind the point
BASELINE_FACTOR = 2.0
_ALL_PLANS = 0  # as torch.backends.cudnn.benchmark_limit counts them: no limit
_ELEMENTS_AT_ONCE = (
    1 << 27
)  # that are judged together: a gigabyte in float64, and a few times that for what is made of it


class Oracle(NamedTuple):
    """The float64 answer ``value`` and ``scale``, the same operation on absolute values. Same shape, same device."""

    value: torch.Tensor
    scale: torch.Tensor


class BadElement(NamedTuple):
    """One element that is out of its limit."""

    coordinate: tuple[int, ...]
    value: float
    expected: float

    def __str__(self) -> str:
        return f"at {self.coordinate}: got {self.value!r}, expected {self.expected!r}"


class Limits(NamedTuple):
    """The largest errors that pass: ``norm`` for the relative norm, and of every element
    |y - ref| <= element * scale + rounding * |ref| + underflow, which is one smallest subnormal number at least.
    """

    norm: float
    element: float
    rounding: float = 0.0
    underflow: float = 0.0


class Error(NamedTuple):
    """How far a result is from the oracle. All figures are relative; infinity where NaN or Inf stands in a wrong place.

    ``norm`` is |y - ref| / |ref|; ``worst`` is the largest |y - ref| / scale, and ``border_worst`` and
    ``interior_worst`` are the same apart. ``first_bad`` is None exactly if the result passes its limits.
    """

    norm: float
    worst: float
    border_worst: float
    interior_worst: float
    first_bad: BadElement | None

    @property
    def passed(self) -> bool:
        return self.first_bad is None


def oracle_fprop(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, spec: ConvSpec) -> Oracle:
    """The output (N, K, P, Q) for ``x`` (N, C, H, W), ``w`` (K, C/G, R, S) and ``b`` (K,) or None."""
    return _both(lambda x, w, *b: _fprop(x, w, b[0] if b else None, spec), x, w, *([] if b is None else [b]))


def oracle_dgrad(dy: torch.Tensor, w: torch.Tensor, x_shape: tuple[int, ...], spec: ConvSpec) -> Oracle:
    """The input gradient of shape ``x_shape`` (N, C, H, W) for ``dy`` (N, K, P, Q) and ``w`` (K, C/G, R, S)."""
    return _both(lambda dy, w: _dgrad(dy, w, x_shape, spec), dy, w)


def oracle_wgrad(dy: torch.Tensor, x: torch.Tensor, w_shape: tuple[int, ...], spec: ConvSpec) -> Oracle:
    """The weight gradient of shape ``w_shape`` (K, C/G, R, S) for ``dy`` (N, K, P, Q) and ``x`` (N, C, H, W)."""
    return _both(lambda dy, x: _wgrad(dy, x, w_shape, spec), dy, x)


def oracle_bgrad(dy: torch.Tensor) -> Oracle:
    """The bias gradient (K,) for ``dy`` (N, K, P, Q)."""
    return _both(lambda dy: dy.sum((0, 2, 3)), dy)


def _both(operation: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> Oracle:
    with torch.no_grad(), cudnn_search(False):
        upcast = [tensor.detach().to(torch.float64).contiguous() for tensor in tensors]
        value = operation(*upcast)
        return Oracle(value, operation(*[tensor.abs() for tensor in upcast]))


@contextmanager
def cudnn_search(on: bool) -> Iterator[None]:
    """Whether cuDNN tries all its plans on each new problem: worth its time before a race, not for one oracle.

    Works where ``torch.backends.disable_global_flags`` forbids to assign ``torch.backends.cudnn.benchmark``.
    """
    with _guard:
        _searches.append(on)
    before, limit = torch._C._get_cudnn_benchmark(), _benchmark_limit()
    torch._C._set_cudnn_benchmark(on)
    if limit is not None:
        torch._C._cuda_set_cudnn_benchmark_limit(_ALL_PLANS)
    try:
        yield
    finally:
        torch._C._set_cudnn_benchmark(before)
        if limit is not None:
            torch._C._cuda_set_cudnn_benchmark_limit(limit)
        with _guard:
            _searches.pop()


@contextmanager
def unsearched() -> Iterator[None]:
    """Inside, cuDNN takes its first guess, and a search of the same problem is made all the same later.

    PyTorch keeps the plan of a problem, guessed or searched, and never searches again (Conv_v8.cpp: run_single_conv).
    Its key has the deterministic flag, which is the other one inside. Under torch.use_deterministic_algorithms there
    is no other one: then cuDNN searches.
    """
    if torch.are_deterministic_algorithms_enabled():
        with cudnn_search(True):
            yield
        return
    before = torch._C._get_cudnn_deterministic()
    with cudnn_search(False):
        torch._C._set_cudnn_deterministic(not before)
        try:
            yield
        finally:
            torch._C._set_cudnn_deterministic(before)


_searches: list[bool] = []  # what is in force of cudnn_search, of all threads
_guard = threading.Lock()


def user_wants_search() -> bool:
    """Whether ``torch.backends.cudnn.benchmark`` is on, and not by ``cudnn_search``."""
    return not _searches and torch._C._get_cudnn_benchmark()


def _benchmark_limit() -> int | None:
    """How many plans cuDNN's search tries; None in a PyTorch without CUDA, which has no such limit."""
    get = getattr(torch._C, "_cuda_get_cudnn_benchmark_limit", None)
    return None if get is None else get()


def _symmetric(spec: ConvSpec) -> bool:
    top, bottom, left, right = spec.padding
    return top == bottom and left == right


def _padded(x: torch.Tensor, spec: ConvSpec) -> tuple[torch.Tensor, list[int]]:
    """The image and the symmetric padding that is left to PyTorch."""
    top, bottom, left, right = spec.padding
    if _symmetric(spec):
        return x, [top, left]
    return torch.nn.functional.pad(x, (left, right, top, bottom)), [0, 0]


def _fprop(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, spec: ConvSpec) -> torch.Tensor:
    x, pads = _padded(x, spec)
    y: torch.Tensor = torch.ops.aten.convolution(x, w, b, spec.stride, pads, spec.dilation, False, [0, 0], spec.groups)
    return y


def _backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, padding: list[int], spec: ConvSpec, mask: list[bool]
) -> tuple[torch.Tensor, ...]:
    gradients: tuple[torch.Tensor, ...] = torch.ops.aten.convolution_backward(
        dy, x, w, None, spec.stride, padding, spec.dilation, False, [0, 0], spec.groups, mask
    )
    return gradients


def _dgrad(dy: torch.Tensor, w: torch.Tensor, x_shape: tuple[int, ...], spec: ConvSpec) -> torch.Tensor:
    n, c, h, width = x_shape
    top, bottom, left, right = spec.padding
    if _symmetric(spec):
        return _backward(dy, dy.new_zeros(1).expand(x_shape), w, [top, left], spec, [True, False, False])[0]
    image = dy.new_zeros(1).expand(n, c, h + top + bottom, width + left + right)
    dx = _backward(dy, image, w, [0, 0], spec, [True, False, False])[0]
    return dx[:, :, top : top + h, left : left + width].contiguous()


def _wgrad(dy: torch.Tensor, x: torch.Tensor, w_shape: tuple[int, ...], spec: ConvSpec) -> torch.Tensor:
    image, padding = _padded(x, spec)
    return _backward(dy, image, dy.new_zeros(1).expand(w_shape), padding, spec, [False, True, False])[1]


def rounded_to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """The fp32 tensor with its finite elements rounded to TF32, 10 bits behind the point: to nearest, ties to even."""
    bits = tensor.contiguous().view(torch.int32)
    bits = (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF
    return torch.where(tensor.isfinite(), bits.view(torch.float32), tensor)


def border_mask(problem: Problem, device: torch.device | str = "cpu") -> torch.Tensor:
    """Which rows and columns of the direction's result count as border: a bool tensor over its last two extents.

    fprop: outputs whose taps reach into the padding. dgrad: pixels that not every tap meets. wgrad: the filter's rim.
    The outermost ring always counts.
    """
    rows = _border_axis(problem, 0, device)
    cols = _border_axis(problem, 1, device)
    return rows[:, None] | cols[None, :]


def _border_axis(problem: Problem, axis: int, device: torch.device | str) -> torch.Tensor:
    extent = (problem.h, problem.w)[axis]
    taps = (problem.r, problem.s)[axis]
    outputs = (problem.p, problem.q)[axis]
    before, stride, dilation = problem.padding[2 * axis], problem.stride[axis], problem.dilation[axis]
    reach = dilation * (taps - 1)
    if problem.direction == "fprop":
        first = torch.arange(outputs, device=device) * stride - before
        mask = (first < 0) | (first + reach >= extent)
    elif problem.direction == "dgrad":
        pixel = torch.arange(extent, device=device) + before
        mask = (pixel < reach) | (pixel > (outputs - 1) * stride)
    else:
        mask = torch.zeros(taps, dtype=torch.bool, device=device)
    mask[:1] = True
    mask[-1:] = True
    return mask


def reduction_length(problem: Problem) -> int:
    """How many products one element of the direction's result sums, at most."""
    if problem.direction == "fprop":
        return problem.c_per_group * problem.r * problem.s
    if problem.direction == "dgrad":
        return problem.k_per_group * problem.r * problem.s
    return problem.n * problem.p * problem.q


def error_limits(
    problem: Problem, baseline: Error | None = None, *, rounds_operands: bool = True, repeats: bool = False
) -> Limits:
    """The limits for a result of ``problem``. ``baseline``: the error of PyTorch with TF32 off, which may widen fp32's.

    ``rounds_operands`` False: TF32 loses nothing of the operands, which have no more bits. ``repeats``: an operand is
    constant or expanded, so that roundings repeat and add up.
    """
    length, label = reduction_length(problem), problem.precision_label
    rounded = TF32_OPERANDS if label == "tf32" and rounds_operands else 0.0
    norm = _ieee_norm(length) if label in AS_IEEE else NORM_LIMITS[label]
    limits = _limits(norm, length, problem.dtype, rounded, repeats)
    return limits if baseline is None or label not in AS_IEEE else raised(limits, baseline)


def bgrad_limits(problem: Problem, baseline: Error | None = None, *, repeats: bool = False) -> Limits:
    """The limits for the bias gradient: a sum without products, so that TF32 is no excuse."""
    length, is_fp32 = problem.n * problem.p * problem.q, problem.dtype == torch.float32
    norm = _ieee_norm(length) if is_fp32 else NORM_LIMITS[problem.precision_label]
    limits = _limits(norm, length, problem.dtype, 0.0, repeats)
    return limits if baseline is None or not is_fp32 else raised(limits, baseline)


def raised(limits: Limits, baseline: Error, factor: float = BASELINE_FACTOR) -> Limits:
    """The limits, or ``factor`` times the error of PyTorch's result where that is larger."""
    if not (math.isfinite(baseline.norm) and math.isfinite(baseline.worst)):
        return limits
    return limits._replace(
        norm=max(limits.norm, factor * baseline.norm), element=max(limits.element, factor * baseline.worst)
    )


def _ieee_norm(length: int) -> float:
    return IEEE_NORM * math.sqrt(math.log2(max(2, length)))


def _limits(norm: float, length: int, dtype: torch.dtype, rounded_operands: float, repeats: bool) -> Limits:
    """The norm's limit, and that of an element whose ``length`` products are summed in one accumulator.

    Roundings to nearest add up as a random walk, those of tensor cores, which cut bits off, steadily: an eighth of a
    unit for each product. A result is rounded once more when it is stored. docs/precision.md argues each term.
    """
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    rounding = torch.finfo(dtype).eps  # twice the unit of the result
    steps = length if repeats else min(length, 4 * math.sqrt(length) + length / 8)
    element = unit * (32 + steps) + rounded_operands
    sums = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    underflow = length * sums.smallest_normal * sums.eps  # products that are subnormal numbers lose their last bits
    most = element if repeats else min(element, ELEMENT_FACTOR * norm - rounding)  # the norm is one of a random walk
    return Limits(norm, most, rounding, underflow)


def measure_error(result: torch.Tensor, oracle: Oracle, limits: Limits, border: torch.Tensor | None = None) -> Error:
    """Compare ``result`` with the oracle, element by element. ``border`` is a mask from `border_mask`, or None.

    NaN and Inf must stand exactly where the oracle, rounded to the result's dtype, has them. A difference of one
    smallest subnormal of the dtype, or of ``limits.underflow``, is rounding, not error.

    Raises ValueError if the shapes differ.
    """
    if result.shape != oracle.value.shape:
        raise ValueError(f"the result has shape {tuple(result.shape)}, the reference {tuple(oracle.value.shape)}")
    if not result.numel():
        return Error(0.0, 0.0, 0.0, 0.0, None)
    parts = [_measured(*part, limits) for part in _parts(result.detach(), oracle, border)]
    top, bottom = math.hypot(*(part.top for part in parts)), math.hypot(*(part.bottom for part in parts))
    norm = 0.0 if top == 0 else top / bottom if bottom else math.inf
    worst = max(part.worst for part in parts)
    outside, inside = max(part.outside for part in parts), max(part.inside for part in parts)
    index = next((part.first_bad for part in parts if part.first_bad is not None), None)
    if index is None and not norm <= limits.norm:
        index = max(parts, key=lambda part: part.worst).worst_at
    return Error(norm, worst, outside, inside, None if index is None else _bad_element(index, result, oracle.value))


class _Part(NamedTuple):
    """The figures of some images. ``top`` and ``bottom`` are the norms of difference and reference; ``first_bad`` and
    ``worst_at`` are places in row-major order of the whole tensor, of the first element above its limit, if any, and of
    the worst one.
    """

    top: float
    bottom: float
    worst: float
    outside: float
    inside: float
    first_bad: int | None
    worst_at: int


def _parts(
    result: torch.Tensor, oracle: Oracle, border: torch.Tensor | None
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Result, answer, scale and border of some images at a time, because all that is made of them is float64."""
    if result.dim() == 0:
        yield 0, result, oracle.value, oracle.scale, border
        return
    rows = max(1, _ELEMENTS_AT_ONCE * result.shape[0] // result.numel())
    for first in range(0, result.shape[0], rows):
        some = slice(first, first + rows)
        part = border
        if border is not None and border.shape[0] > 1 and border.dim() == result.dim():
            part = border[some]
        start = first * (result.numel() // result.shape[0])
        yield start, result[some], oracle.value[some], oracle.scale[some], part


def _measured(
    start: int,
    result: torch.Tensor,
    expected: torch.Tensor,
    scale: torch.Tensor,
    border: torch.Tensor | None,
    limits: Limits,
) -> _Part:
    value = result.to(torch.float64)
    rounded = expected.to(result.dtype).to(torch.float64)
    info = torch.finfo(result.dtype)
    regular = value.isfinite() & rounded.isfinite()
    tiny = max(info.smallest_normal * info.eps, limits.underflow)
    difference = ((value - expected).abs_() - tiny).clamp_min_(0)
    same = (value == rounded) | (value.isnan() & rounded.isnan())
    difference = torch.where(regular, difference, torch.where(same, 0.0, math.inf))
    del rounded, same
    relative = _relative(difference, scale)
    top = torch.linalg.vector_norm(difference).item()
    bottom = torch.linalg.vector_norm(torch.where(regular, expected, 0.0)).item()
    worst, worst_at = relative.max().item(), int(relative.argmax())
    if border is None:
        inside, outside = worst, 0.0
    else:
        outside = torch.where(border, relative, 0.0).max().item()
        inside = torch.where(border, 0.0, relative).max().item()
    if limits.rounding:
        difference = torch.where(regular, (difference - limits.rounding * expected.abs()).clamp_min_(0), difference)
        relative = _relative(difference, scale)
    bad = (~(relative <= limits.element)).flatten()
    first_bad = start + int(bad.to(torch.uint8).argmax()) if bad.any() else None
    return _Part(top, bottom, worst, outside, inside, first_bad, start + worst_at)


def _relative(difference: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    relative = torch.where(difference > 0, difference / scale, 0.0)
    return torch.where(difference.isinf(), math.inf, relative)


def _bad_element(index: int, result: torch.Tensor, expected: torch.Tensor) -> BadElement:
    coordinate = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), result.shape))
    return BadElement(coordinate, result[coordinate].double().item(), expected[coordinate].item())
