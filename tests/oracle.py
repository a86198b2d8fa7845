"""How the tests run a direction, what they compare it with, and the traps they lay around outputs.

The float64 reference, its error measure and the limits live in ``haloconv.reference``; this file adds a second,
independent reference written as plain sums over taps, poisoned and fenced allocations, and bitwise comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from pytest import MonkeyPatch
from torch.utils._python_dispatch import TorchDispatchMode

from haloconv import edges, plan, reference
from haloconv.epilogue import bias_and_scale
from haloconv.families.halo_sm90.conv import conv_edges
from haloconv.families.halo_sm90.wgrad import wgrad_edges
from haloconv.layout import Layout, neighbours_of, strides_of
from haloconv.padding import gradient_of_copy, padded_copy
from haloconv.precision import convolution_precision
from haloconv.problem import NO_EPILOGUE, ConvSpec, Direction, EdgeModes, Epilogue, Modes, Problem
from haloconv.reference import Error, Limits, Oracle
from tests.cases import DTYPE_NAMES, Case, Tensors
from tests.measured import MEASURED, MOMENTS, MOMENTS_IMAGES, MOMENTS_RESIDUAL, check_measured, run_measured

RESULTS = ("fprop", "dgrad", "wgrad", "bgrad")
RELU, SCALE_RELU, RESIDUAL_RELU, SCALE_RESIDUAL = "relu", "scale_relu", "residual_relu", "scale_residual"
EPILOGUES = {  # of fprop; dy is what is added
    RELU: Epilogue(activation="relu"),
    SCALE_RELU: Epilogue(True, "relu"),
    RESIDUAL_RELU: Epilogue(activation="relu", residual=True),
    SCALE_RESIDUAL: Epilogue(True, None, True),
}
_ADDED = {**EPILOGUES, **dict.fromkeys((MOMENTS_RESIDUAL, MOMENTS_IMAGES), Epilogue(residual=True))}
ACTIVATED = (RELU, SCALE_RELU)
EDGES: dict[str, tuple[Direction, EdgeModes]] = {  # what stands outside the image is other pixels of it
    "circular": ("fprop", ("circular", "circular")),
    "reflect_replicate": ("fprop", ("reflect", "replicate")),
    "zeros_circular": ("fprop", ("zeros", "circular")),
    "replicate_zeros": ("fprop", ("replicate", "zeros")),
    "circular_dgrad": ("dgrad", ("circular", "circular")),
    "zeros_circular_dgrad": ("dgrad", ("zeros", "circular")),
    "circular_wgrad": ("wgrad", ("circular", "circular")),
    "reflect_replicate_wgrad": ("wgrad", ("reflect", "replicate")),
    "zeros_circular_wgrad": ("wgrad", ("zeros", "circular")),
    "replicate_zeros_wgrad": ("wgrad", ("replicate", "zeros")),
    "halo_zeros": ("fprop", ("halo", "zeros")),  # rows that wrap, from a tensor of their own
    "halo_circular": ("fprop", ("halo", "circular")),
}
FORWARD = ("fprop", MOMENTS, *_ADDED, *(name for name, (direction, _) in EDGES.items() if direction == "fprop"))
_SCALES = (1.0, -2.0, 3.0, -1.0, 2.0)  # of one filter after the other: products with integers stay integers
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FENCE_BYTES = 4096
CPU_FLOPS = 5e7
EXACT_SUMS = 1 << 24
LOST_IN_TF32 = 0x1FFF  # the low bits of an fp32 number


def layout_of(storage: str) -> Layout:
    return "nhwc" if storage.startswith("channels_last") else "nchw"


def run(result: str, t: Tensors, one: Case) -> torch.Tensor:
    """One raw result of haloconv, below autograd: y, dx, dw or db, or y behind an epilogue."""
    if result == "fprop":
        return plan.fprop(t.x, t.w, t.b, one.spec)
    if result in MEASURED:
        return run_measured(result, t.x, t.w, t.b, t.dy, one.spec)
    if result in EPILOGUES:
        b, residual = third_operand(result, t), [t.dy] * EPILOGUES[result].residual
        return plan.plan_fprop(t.x, t.w, b, one.spec, EPILOGUES[result], *residual).run(t.x, t.w, b, *residual)
    if result in EDGES:
        return _run_edges(result, t, one)
    if result == "dgrad":
        return plan.dgrad(t.dy, t.w, tuple(t.x.shape), layout_of(one.storage), one.spec)
    if result == "wgrad":
        return plan.wgrad(t.dy, t.x, tuple(t.w.shape), layout_of(one.w_storage), one.spec)
    return plan.bgrad(t.dy, one.spec)


def _run_edges(result: str, t: Tensors, one: Case) -> torch.Tensor:
    direction, modes = EDGES[result]
    with MonkeyPatch.context() as patch:
        for kernel in (conv_edges, wgrad_edges):
            patch.setattr(kernel, "MOST_COST", math.inf)  # however slow
        if direction == "wgrad":
            of_w = edges.plan_wgrad(t.dy, t.x, tuple(t.w.shape), layout_of(one.w_storage), one.spec, modes)
            found = None if of_w is None else edges.run(of_w, t.dy, t.x)
        elif direction == "fprop":
            planned = edges.plan_fprop(t.x, t.w, t.b, one.spec, modes)
            found = None if planned is None else edges.run(planned, t.x, t.w, t.b, *halo_of(result, t, one.spec))
        else:
            found = edges.dgrad(t.dy, t.w, tuple(t.x.shape), layout_of(one.storage), one.spec, modes)
    assert found is not None, f"no kernel of {one.spec.family} runs {one.name} {result} in one launch"
    return found


def halo_of(result: str, t: Tensors, spec: ConvSpec) -> list[torch.Tensor]:
    """The halo that a result has, if any: what stands above and below where rows wrap, in the memory order of x."""
    if result not in EDGES or EDGES[result][1][0] != "halo":
        return []
    top, bottom = spec.padding[:2]
    rows = [*range(t.x.shape[2] - top, t.x.shape[2]), *range(bottom)]
    shape = (*t.x.shape[:2], len(rows), t.x.shape[3])
    return [t.x.new_empty_strided(shape, strides_of(shape, neighbours_of(t.x.stride()))).copy_(t.x[:, :, rows])]


def modes_of(result: str) -> Modes:
    """The padding modes of what stands outside the image."""
    rows, columns = EDGES[result][1]
    return "circular" if rows == "halo" else rows, columns


def _of_copy(result: str, t: Tensors, spec: ConvSpec) -> tuple[Direction, Tensors, ConvSpec]:
    """The direction, the tensors with a padded copy in the place of x, and what is left to do."""
    copy, left = padded_copy(t.x, spec, modes_of(result))
    return EDGES[result][0], t._replace(x=copy), left


def _folded(result: str, gradient: torch.Tensor, t: Tensors, spec: ConvSpec) -> torch.Tensor:
    return gradient_of_copy(gradient, tuple(t.x.shape), spec, modes_of(result))


def third_operand(result: str, t: Tensors) -> torch.Tensor | None:
    """What a forward adds: the bias (K,), or (K, 2) of bias and scale where the epilogue has a scale."""
    scales = result in _ADDED and _ADDED[result].scale
    return bias_and_scale(t.b, scale_of(t), t.x.dtype) if scales else t.b


def scale_of(t: Tensors) -> torch.Tensor:
    """(K,): what sums are multiplied by where the epilogue has a scale."""
    return torch.tensor(_SCALES, dtype=torch.float32, device=t.w.device).repeat(t.w.shape[0])[: t.w.shape[0]]


def _epilogued(result: str, t: Tensors, want: Oracle) -> Oracle:
    """The answer behind an epilogue, of that of the convolution without a bias, or with it where there is no scale."""
    (value, magnitude), epilogue = want, _ADDED[result]
    if epilogue.scale:
        b = t.w.new_zeros(len(t.w)) if t.b is None else t.b
        scale, bias = (each.to(value.dtype)[:, None, None] for each in (scale_of(t), b))
        value, magnitude = value * scale + bias, magnitude * scale.abs() + bias.abs()
    if epilogue.residual:
        value, magnitude = value + t.dy.to(value.dtype), magnitude + t.dy.to(value.dtype).abs()
    return Oracle(value if epilogue.activation is None else value.relu(), magnitude)


def expected(result: str, t: Tensors, spec: ConvSpec) -> Oracle:
    """The float64 answer, on the tensors' device.

    Small problems are computed on the CPU, where tests/cpu/test_reference.py holds it against ``tap_sums``.
    """
    if t.w.is_cuda and problem_of(result, t, spec).flops < CPU_FLOPS:
        answer = expected(result, t.each(torch.Tensor.cpu), spec)
        return Oracle(*(v.to(t.w.device) for v in answer))
    if result in ("fprop", MOMENTS):
        return reference.oracle_fprop(t.x, t.w, None if result == MOMENTS else t.b, spec)
    if result in _ADDED:
        b = None if _ADDED[result].scale else t.b
        return _epilogued(result, t, reference.oracle_fprop(t.x, t.w, b, spec))
    if result in EDGES:
        direction, of_copy, rest = _of_copy(result, t, spec)
        answer = expected(direction, of_copy, rest)
        return Oracle(*(_folded(result, each, t, spec) for each in answer)) if direction == "dgrad" else answer
    if result == "dgrad":
        return reference.oracle_dgrad(t.dy, t.w, tuple(t.x.shape), spec)
    if result == "wgrad":
        return reference.oracle_wgrad(t.dy, t.x, tuple(t.w.shape), spec)
    return reference.oracle_bgrad(t.dy)


def baseline(result: str, t: Tensors, spec: ConvSpec) -> torch.Tensor:
    """PyTorch's own answer in the tensors' dtype with TF32 off."""
    if result in EDGES:
        direction, of_copy, rest = _of_copy(result, t, spec)
        plain = baseline(direction, of_copy, rest)
        return _folded(result, plain, t, spec) if direction == "dgrad" else plain
    with torch.no_grad(), convolution_precision("ieee"):
        if result == "bgrad":
            return t.dy.sum((0, 2, 3))
        top, bottom, left, right = spec.padding
        x = torch.nn.functional.pad(t.x, (left, right, top, bottom))
        tail = (spec.stride, (0, 0), spec.dilation, False, (0, 0), spec.groups)
        if result in FORWARD:
            scales = result in _ADDED and _ADDED[result].scale
            y = torch.ops.aten.convolution(x, t.w, None if scales or result == MOMENTS else t.b, *tail)
            return y if result in ("fprop", MOMENTS) else _epilogued(result, t, Oracle(y, y)).value
        mask = [result == "dgrad", result == "wgrad", False]
        dx, dw, _ = torch.ops.aten.convolution_backward(t.dy, x, t.w, None, *tail, mask)
        h, w = t.x.shape[2:]
        return dx[:, :, top : top + h, left : left + w] if result == "dgrad" else dw


def problem_of(result: str, t: Tensors, spec: ConvSpec) -> Problem:
    direction: Direction = "fprop" if result in FORWARD else "dgrad" if "dgrad" in result else "wgrad"
    (n, c, h, w), (k, _, r, s), epilogue = t.x.shape, t.w.shape, _ADDED.get(result, NO_EPILOGUE)
    return Problem(
        direction, n, c, h, w, k, r, s, spec.stride, spec.padding, spec.dilation, spec.groups,
        bias=t.b is not None and direction == "fprop" and result != MOMENTS and not epilogue.scale,
        dtype=t.x.dtype, epilogue=epilogue,
        precision=spec.precision or "ieee" if t.x.dtype == torch.float32 else "ieee",
    )  # fmt: skip


def operands_of(result: str, t: Tensors) -> list[torch.Tensor]:
    """What the result's products are made of."""
    if "dgrad" in result:
        return [t.dy, t.w]
    if "wgrad" in result:
        return [t.dy, t.x]
    return [t.dy] if result == "bgrad" else [t.x, t.w]


def repeats(operand: torch.Tensor) -> bool:
    """Whether one number stands in several places by construction: the tensor is expanded, or constant."""
    expanded = any(step == 0 and extent > 1 for extent, step in zip(operand.shape, operand.stride(), strict=True))
    return expanded or (operand.numel() > 0 and bool((operand == operand.flatten()[0]).all()))


def limits_of(result: str, t: Tensors, spec: ConvSpec, baseline_error: Error | None = None) -> Limits:
    """The limits for these very operands: what TF32 loses of them counts, and whether roundings repeat."""
    problem, operands = problem_of(result, t, spec), operands_of(result, t)
    again = any(repeats(each) for each in operands)
    if result == "bgrad":
        return reference.bgrad_limits(problem, baseline_error, repeats=again)
    rounds = t.x.dtype == torch.float32 and any((each.view(torch.int32) & LOST_IN_TF32).any() for each in operands)
    return reference.error_limits(problem, baseline_error, rounds_operands=rounds, repeats=again)


def check(
    result: str, got: torch.Tensor, t: Tensors, spec: ConvSpec, *, want: Oracle | None = None, norm_counts: bool = True
) -> Error:
    """Assert that a result is right within the limits of its dtype; returns the measured error.

    ``norm_counts`` False leaves the relative norm out: inputs made to cancel have no small relative error in any fp32
    sum, only a small one relative to the sum of absolute values. A result of ``aten`` may err
    as PyTorch's convolution does, which on CPUs rounds sums to 16 bits in between.
    """
    check_measured(result, got)
    want = expected(result, t, spec) if want is None else want
    assert got.shape == want.value.shape, f"{result}: shape {tuple(got.shape)}, expected {tuple(want.value.shape)}"
    assert got.dtype == t.w.dtype and got.device == t.w.device, f"{result}: {got.dtype} on {got.device}"
    problem = problem_of(result, t, spec)
    border = None if result == "bgrad" else reference.border_mask(problem, got.device)
    norm = {} if norm_counts else {"norm": math.inf}
    limits = limits_of(result, t, spec)._replace(**norm)
    error = reference.measure_error(got, want, limits, border)
    if not error.passed and got.dtype == torch.float32:
        theirs = reference.measure_error(baseline(result, t, spec), want, limits, border)
        limits = limits_of(result, t, spec, theirs)._replace(**norm)
        error = reference.measure_error(got, want, limits, border)
    if not error.passed and spec.family == "aten":
        limits = reference.raised(limits, reference.measure_error(baseline(result, t, spec), want, limits, border))
        error = reference.measure_error(got, want, limits, border)
    name = f"{result} {DTYPE_NAMES.get(got.dtype, got.dtype)}"
    assert error.passed, f"{name}: {error.first_bad}; {error}, limits {limits}, {problem}"
    return error


def check_exact(result: str, got: torch.Tensor, t: Tensors, spec: ConvSpec) -> None:
    """Assert that a result of integers is the reference, rounded once to the result's type. A zero has no sign here.

    Every partial sum must be exact in fp32, whatever the order: ``t`` holds integers with sums below 2^24.
    """
    check_measured(result, got)
    want = expected(result, t, spec)
    assert not want.scale.numel() or want.scale.max() < EXACT_SUMS, "these sums are not exact in fp32"
    assert got.shape == want.value.shape, f"{result}: shape {tuple(got.shape)}, expected {tuple(want.value.shape)}"
    assert got.dtype == t.w.dtype and got.device == t.w.device, f"{result}: {got.dtype} on {got.device}"
    rounded = want.value.round().to(got.dtype)
    wrong = (got != rounded).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        name = f"{result} {DTYPE_NAMES.get(got.dtype, got.dtype)}"
        raise AssertionError(
            f"{name}: {len(wrong)} of {got.numel()} sums of integers are wrong, the first at {at}: got "
            f"{got[at].item()}, expected {rounded[at].item()}; {problem_of(result, t, spec)}"
        )


# A second reference -------------------------------------------------------------------------------------------------


def tap_sums(result: str, t: Tensors, spec: ConvSpec) -> torch.Tensor:
    """The float64 answer as a sum over taps of matrix products of slices: no convolution routine takes part.

    fprop pads explicitly, so that a NaN or Inf in the filter meets the padding's zeros (0 * Inf = NaN).
    """
    if result == "bgrad":
        return t.dy.double().sum((0, 2, 3))
    if result in EDGES:
        direction, of_copy, rest = _of_copy(result, t, spec)
        sums = tap_sums(direction, of_copy, rest)
        return _folded(result, sums, t, spec) if direction == "dgrad" else sums
    (top, bottom, left, right), g = spec.padding, spec.groups
    n, c, h, w = t.x.shape
    k, cg, r, s = t.w.shape
    p, q = t.dy.shape[2:]
    x = torch.nn.functional.pad(t.x.double(), (left, right, top, bottom))
    x = x.reshape(n, g, c // g, h + top + bottom, w + left + right)
    filters, dy = t.w.double().reshape(g, k // g, cg, r, s), t.dy.double().reshape(n, g, k // g, p, q)
    y, dx, dw = torch.zeros_like(dy), torch.zeros_like(x), torch.zeros_like(filters)
    for i in range(r):
        for j in range(s):
            rows, cols = (slice(a * d, a * d + (m - 1) * st + 1, st) for a, d, m, st in (
                (i, spec.dilation[0], p, spec.stride[0]), (j, spec.dilation[1], q, spec.stride[1])))  # fmt: skip
            if result in FORWARD:
                y += torch.einsum("ngchw,gkc->ngkhw", x[..., rows, cols], filters[..., i, j])
            elif result == "dgrad":
                dx[..., rows, cols] += torch.einsum("ngkhw,gkc->ngchw", dy, filters[..., i, j])
            else:
                dw[..., i, j] = torch.einsum("ngkhw,ngchw->gkc", dy, x[..., rows, cols])
    if result in FORWARD:
        y = y.reshape(n, k, p, q)
        scales = result in _ADDED and _ADDED[result].scale
        y = y if scales or t.b is None or result == MOMENTS else y + t.b.double()[:, None, None]
        return y if result in ("fprop", MOMENTS) else _epilogued(result, t, Oracle(y, y)).value
    if result == "dgrad":
        return dx[..., top : top + h, left : left + w].reshape(n, c, h, w)
    return dw.reshape(k, cg, r, s)


# Bits ---------------------------------------------------------------------------------------------------------------


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a floating-point tensor, so that NaN equals NaN and 0 differs from -0."""
    return t.detach().contiguous().view(BITS[t.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def whole_storage(t: torch.Tensor) -> torch.Tensor:
    """A copy of every byte of a tensor's storage, the elements around a view included."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()).clone()


class Unchanged:
    """A context in which no byte of the given tensors' storages may change."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.tensors = [t for t in tensors if t is not None and t.numel()]

    def __enter__(self) -> None:
        self.before = [whole_storage(t) for t in self.tensors]

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            for t, before in zip(self.tensors, self.before, strict=True):
                assert torch.equal(whole_storage(t), before), f"an input of shape {tuple(t.shape)} was written to"


# Poison and red zones -----------------------------------------------------------------------------------------------

ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_permuted.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class RedZones(TorchDispatchMode):
    """While active, every uninitialised tensor on ``device`` starts as NaN and lies between two fences of known bytes.

    ``check`` asserts that no fence was touched and returns how many tensors were watched. The fences are multiples of
    512 bytes wide, so that the tensors are aligned as the caching allocator aligns them.
    """

    FENCE_VALUE = 0xA5

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device_type = torch.device(device).type
        self.blocks: list[tuple[torch.Tensor, int, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in ALLOCATIONS or out.device.type != self.device_type or not out.numel():
            return out
        span = 1 + sum((extent - 1) * step for extent, step in zip(out.shape, out.stride(), strict=True))
        used = span * out.element_size()
        block = torch.full((FENCE_BYTES + used + FENCE_BYTES,), self.FENCE_VALUE, dtype=torch.uint8, device=out.device)
        self.blocks.append((block, used, tuple(out.shape)))
        inside = block[FENCE_BYTES : FENCE_BYTES + used].view(out.dtype)
        inside.fill_(float("nan") if out.dtype.is_floating_point else 0x7B)
        return inside.as_strided(out.shape, out.stride())

    def check(self) -> int:
        for block, used, shape in self.blocks:
            for side, fence in (("before", block[:FENCE_BYTES]), ("after", block[FENCE_BYTES + used :])):
                hit = (fence != self.FENCE_VALUE).nonzero()
                assert not hit.numel(), f"a byte {side} the tensor of shape {shape} was written: offset {hit[0].item()}"
        return len(self.blocks)
