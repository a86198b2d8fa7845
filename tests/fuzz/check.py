"""Whether a draw is right: every config that the family offers, on exact integers and on random values, twice."""

from __future__ import annotations

import math

import torch
from pytest import MonkeyPatch

from haloconv import plan
from haloconv.device import watched
from haloconv.emulator import EmulatorError
from haloconv.families import FAMILIES
from haloconv.families.base import BoundCall, Config
from haloconv.families.halo_sm90.conv import conv_edges
from haloconv.families.halo_sm90.wgrad import wgrad_edges
from haloconv.families.reduce.bgrad import bind_bgrad
from haloconv.moments import FamilyWithMoments
from haloconv.problem import Request, TensorForm
from tests import oracle
from tests.cases import Case, Tensors
from tests.fuzz.draw import AUTO, REDUCE, Draw, machine, products_of
from tests.fuzz.front_check import check_front
from tests.fuzz.front_draw import FrontDraw
from tests.fuzz.operands import exact_operands, random_operands
from tests.fuzz.outcome import Checked, Failure
from tests.launches import launched
from tests.measured import MOMENTS, MOMENTS_IMAGES, check_measured, with_moments

MANY_PRODUCTS = 4096


def check(draw: Draw | FrontDraw, device: str) -> list[Checked] | Failure:
    """Run the draw with every config on offer; what was right, or the first failure. Empty if nothing is on offer."""
    if isinstance(draw, FrontDraw):
        return check_front(draw, device)
    config, checked = "", []
    try:
        exact = exact_operands(draw, device)
        values, want = random_operands(draw, device)
        for index in range(offers(draw, exact, device)):
            config = key_of(draw, exact, device, index)
            got, kernels = run(draw, exact, device, index, draw.seed)
            oracle.check_exact(draw.answer, got, exact, draw.spec)
            checked.append(Checked(kernels, "exact", 0.0))
            config = key_of(draw, values, device, index)
            (got, kernels), (again, _) = (run(draw, values, device, index, draw.seed + more) for more in (0, 1))
            error = oracle.check(draw.answer, got, values, draw.spec, want=want, norm_counts=False)
            assert oracle.same_bits(got, again), "a second run gave other bits"
            checked.append(Checked(kernels, "fuzz", error.norm if _norm_counts(draw) else 0.0))
    except (AssertionError, EmulatorError, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        first = next(iter(str(error).strip().splitlines()), "")
        found = f"; {error.findings[0]}" if isinstance(error, EmulatorError) else ""
        return Failure(draw, config, f"{type(error).__name__}: {first}{found}")
    return checked


def _norm_counts(draw: Draw) -> bool:
    """Whether the norm over a result's roundings is a statistic."""
    repeated = any(storage.startswith("expanded") for storage in (draw.first, draw.second))
    return draw.values in ("normal", "positive") and not repeated and products_of(draw) >= MANY_PRODUCTS


def run(draw: Draw, t: Tensors, device: str, index: int, seed: int) -> tuple[torch.Tensor, frozenset[str]]:
    """The result of one config, on poisoned memory between fences, and the kernels launched. No operand may change."""
    with machine(draw, device, seed), oracle.Unchanged(t), launched() as names:
        call = bound(draw, t, index)
        operands = _operands(draw, t)
        if device == "cpu":  # the emulator poisons and fences by itself
            return call(*operands), frozenset(names)
        with oracle.RedZones(device) as zones:
            result = call(*operands)
    zones.check()
    return result, frozenset(names)


def prepare(draw: Draw, device: str) -> None:
    """Compile and load what the draw needs: for threads, ahead of `check`."""
    t = exact_operands(draw, device)
    for index in range(offers(draw, t, device)):
        bound(draw, t, index)


def offers(draw: Draw, t: Tensors, device: str) -> int:
    """How many configs the family offers for the draw."""
    with machine(draw, device):
        return 1 if draw.family in (AUTO, REDUCE) else len(_candidates(draw, t))


def key_of(draw: Draw, t: Tensors, device: str, index: int) -> str:
    """The kernel and the key of a config, for a failure's sentence."""
    if draw.family in (AUTO, REDUCE):
        return draw.family
    with machine(draw, device):
        config = _candidates(draw, t)[index]
    return f"{config.kernel} {config.key}".strip()


def bound(draw: Draw, t: Tensors, index: int) -> BoundCall:
    """The bound call of one config: kernels are compiled and loaded."""
    device = t.x.device
    if draw.family == AUTO:
        storage = {"nhwc": "channels_last"}.get(draw.layout, "contiguous")  # of the gradients
        (n, c, h, w), (k, r, s) = draw.x, draw.filters
        one = Case("fuzz", "drawn at random", (n, c, h, w, k, r, s), draw.spec, storage=storage, w_storage=storage)
        return lambda *_: oracle.run(draw.answer, t, one)
    if draw.family == REDUCE:
        return watched(bind_bgrad(draw.dtype, draw.y_shape, _form(t.dy), device), device)
    family, request, config = FAMILIES[draw.family], _asked(draw, t), _candidates(draw, t)[index]
    run = watched(family.bind(request, config), device)
    if not (isinstance(family, FamilyWithMoments) and family.has_moments(request, config)):
        return run
    every = [MOMENTS, *([MOMENTS_IMAGES] if family.has_moments(request, config, per_image=True) else [])]
    measured = {name: watched(family.bind_moments(request, config, name == MOMENTS_IMAGES), device) for name in every}

    def both(*operands: torch.Tensor | None) -> torch.Tensor:
        """The result; those of the kernel that measures it have the same bits, and moments of all and each image are
        right."""
        y = run(*operands)
        for name, call in measured.items():
            with_its_own = with_moments(*call(*operands))
            assert oracle.same_bits(y, with_its_own), "the kernel that measures gives other bits"
            check_measured(name, with_its_own)
        return y

    return both


def _candidates(draw: Draw, t: Tensors) -> list[Config]:
    """What the family offers; nothing if it refuses the problem at this size or in this layout."""
    family, request = FAMILIES[draw.family], _asked(draw, t)
    with MonkeyPatch.context() as patch:
        for kernel in (conv_edges, wgrad_edges):
            patch.setattr(kernel, "MOST_COST", math.inf)  # however slow
        return family.configs(request) if family.why_not(request.problem, request.device) is None else []


def _asked(draw: Draw, t: Tensors) -> Request:
    """The request, as the plan makes it."""
    first, second = {"fprop": (t.x, t.w), "dgrad": (t.dy, t.w)}.get(draw.result, (t.dy, t.x))
    layout = plan.result_layout(first, second) if draw.result == "fprop" else draw.layout
    problem = draw.problem(plan.layout_of(second) if draw.result == "wgrad" else layout)
    return Request(problem, _form(first), _form(second), layout, first.device, draw.modes)


def _form(tensor: torch.Tensor) -> TensorForm:
    return TensorForm(tensor.stride(), tensor.data_ptr() % 16 == 0)


def _operands(draw: Draw, t: Tensors) -> tuple[torch.Tensor | None, ...]:
    halo = oracle.halo_of(draw.answer, t, draw.spec)
    forward = (t.x, t.w, oracle.third_operand(draw.answer, t), *[t.dy] * draw.has_residual, *halo)
    return {"fprop": forward, "dgrad": (t.dy, t.w), "wgrad": (t.dy, t.x), "bgrad": (t.dy,)}[draw.result]
