"""A whole model, swapped and as it was: its outputs and all its gradients, and the times of forward and of a step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from haloconv.bench.layer import baseline_flags
from haloconv.bench.trial import BASELINE, OURS, Budget, compared, measured
from haloconv.bench.values import (
    GRADIENT,
    Values,
    device_of,
    forward_call,
    image_layout,
    run_theirs,
    step_call,
    values_of,
    warmed,
)
from haloconv.families.closure import source_of
from haloconv.precision import Precision
from haloconv.problem_file import Inputs, how_it_ended, map_tensors, tensors_in
from haloconv.reference import BASELINE_FACTOR, ELEMENT_FACTOR, Limits, Oracle, cudnn_search, measure_error, raised
from haloconv.report import Row
from haloconv.report.networks import WHOLE
from haloconv.report.rows import RowPrecision, WholeDirection
from haloconv.tune.judge import UNLIMITED, complaint_about, relative_difference

DRAWS = 4
"""How many draws of inputs decide together about a model that seems wrong on the first."""

NO_DIGIT = 1.0
"""A relative error from which on nothing of a tensor is right: that of zeros."""

NO_TRUTH = "The model does not run in float64, so its outputs were compared with PyTorch's only."

NO_GRADIENT = "No output of the model has a gradient, so its training step was not checked."

ONE_DIGIT = 0.1
"""A limit from which on a tensor is hardly checked, which is then told."""


_RELUS = {
    *(torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_),
    *(torch.nn.functional.relu, torch.nn.functional.relu_),
}


@dataclass(frozen=True)
class Contest:
    """One model twice, ``ours`` with swapped convolutions and ``theirs`` without, and the inputs for both.

    ``precision`` is how PyTorch forms fp32 products for a fair race, ``"ieee"`` or ``"tf32"``; ``label`` is its name in
    tables. ``ran`` tells for ``forward`` and ``step`` the families in use, joined by ``+``, and their kernels, joined
    by `` + ``, if they are known.
    ``norm_limit`` is what the layers together may err. ``seed`` fixes random layers and the output gradients.
    ``surroundings`` makes the context in which our model runs. ``known`` keeps what PyTorch's model gave, where several
    of ours are set against it one after another.
    """

    ours: torch.nn.Module
    theirs: torch.nn.Module
    inputs: Inputs
    precision: Precision
    label: RowPrecision
    norm_limit: float
    ran: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    seed: int = 0
    surroundings: Callable[[], AbstractContextManager[object]] = nullcontext
    known: Known | None = None

    @property
    def device(self) -> torch.device:
        return device_of(self.inputs)


Known = dict[tuple[int, bool], tuple[Values, "Values | None"]]
"""The values of PyTorch's model and those in float64, by the draw's number and whether gradients are among them."""


class OursFailed(Exception):
    """Our model raised where PyTorch's did not; the message says what."""


def try_model(
    contest: Contest, name: str, budget: Budget, directions: Collection[WholeDirection] = ("forward", "step")
) -> tuple[list[Row], list[str]]:
    """The rows ``forward`` and ``step`` (forward and backward) of the model ``name``, and notes on how it was judged.

    What seems wrong on the given inputs is judged again on ``DRAWS`` draws together: one draw of PyTorch's error says
    little of what may be expected of a gradient of ten elements, and twice it is soon exceeded by chance.

    Gradients are those of the model with SiLU for ReLU and with batch statistics as constants. As it is, a rounding in
    16 bits switches some ReLU on or off, which no limit tells from a fault. What is timed is the step as it is.

    What our model raises is the complaint of a row without results. There is no row ``step`` of a model that has no
    gradient, and a note says so. A budget without runs times nothing. On a GPU the rows tell the peaks of memory, too.

    Raises ModelError if PyTorch's model raises.
    """
    rows: list[Row] = []
    notes: list[str] = []
    case = f"{name}{WHOLE}"
    with baseline_flags(contest.precision):
        for direction in directions:
            try:
                row, more = _tried(contest, case, direction, budget)
            except OursFailed as error:
                row, more = failed_row(contest, case, direction, str(error)), []
            rows += [] if row is None else [row]
            notes += [note for note in more if note not in notes]
    return rows, notes


def _tried(contest: Contest, case: str, direction: WholeDirection, budget: Budget) -> tuple[Row | None, list[str]]:
    """One row, None if there is no gradient to judge, and notes on how it was judged."""
    row, notes = judged(contest, case, direction)
    if row is None:
        return None, notes
    call = {"forward": _forward, "step": _step}[direction]
    times = {}
    if budget.timed:
        calls = {BASELINE: call(contest.theirs, contest), OURS: call(contest.ours, contest)}
        times = compared(calls, contest.device, budget)
    peaks = {} if contest.device.type != "cuda" else _peaks(contest, call)
    return replace(row, **measured(times), **peaks), notes


def judged(contest: Contest, case: str, direction: WholeDirection) -> tuple[Row | None, list[str]]:
    """The row without times and memory, None if there is no gradient to judge, and notes, as of `try_model`.

    Raises ModelError if PyTorch's model raises, and OursFailed if ours does.
    """
    gradients = direction == "step"
    first = _draw(contest, 0, gradients)
    if gradients and not any(name.startswith(GRADIENT) for name in first.theirs):
        return None, [NO_GRADIENT]
    notes = [NO_TRUTH] if first.truth is None else []
    errors = _judge(*first.judged(), contest)
    if errors.complaint is not None and first.alike:
        notes.append(f"{direction}: judged on {DRAWS} draws together, because on one {errors.complaint}")
        all_draws = _joined([first, *(_draw(contest, i, gradients) for i in range(1, DRAWS))])
        errors = _judge(*all_draws.judged(), contest)
    if errors.hardly_checked:
        notes.append(f"{direction}: PyTorch's own error leaves little to check of {errors.hardly_checked}")
    if errors.unchecked:
        notes.append(f"{direction}: not compared, for no element is finite: {errors.unchecked}")
    return _row(contest, case, direction, errors), notes


@dataclass(frozen=True)
class _Draw:
    """The values of both models on the same inputs, and in float64 (None if the model does not run there)."""

    ours: Values
    theirs: Values
    truth: Values | None

    def judged(self) -> tuple[Values, Values, Values]:
        """Ours, theirs and the truth, for which PyTorch's values stand where there is none."""
        return self.ours, self.theirs, {**self.theirs, **(self.truth or {})}

    @property
    def alike(self) -> bool:
        """Whether both models give the same tensors, by name and shape."""
        shapes = [{name: tensor.shape for name, tensor in values.items()} for values in (self.ours, self.theirs)]
        return shapes[0] == shapes[1]


def _draw(contest: Contest, index: int, gradients: bool) -> _Draw:
    """Draw 0 has the given inputs; others have them mirrored, and other output gradients and random layers.

    With ``gradients`` the models are well conditioned, see `try_model`.
    """
    known = None if contest.known is None else contest.known.get((index, gradients))
    mirrored = [dim for bit, dim in ((1, -1), (2, -2)) if index & bit]
    inputs = map_tensors(lambda x: x.flip(mirrored) if x.dim() == 4 else x, contest.inputs)
    contest = replace(contest, inputs=inputs, seed=contest.seed + 1000 * index)
    what = "Model's training step" if gradients else "Model's forward"
    with ExitStack() as stack:
        if gradients:
            run_theirs(lambda: stack.enter_context(_well_conditioned(contest)), what)
        if known is None:
            theirs: Values = {}
            run_theirs(lambda: theirs.update(values_of(contest.theirs, contest.inputs, contest.seed, gradients)), what)
            known = theirs, _truth(contest, gradients)
        if contest.known is not None:
            contest.known[index, gradients] = known
        try:
            with contest.surroundings():
                ours = values_of(contest.ours, contest.inputs, contest.seed, gradients)
        except (KeyboardInterrupt, torch.cuda.OutOfMemoryError):
            raise
        except BaseException as error:
            raise OursFailed(f"haloconv's model {how_it_ended(error)}") from error
        return _Draw(ours, *known)


class _Smooth(TorchFunctionMode):
    """While active, SiLU stands for ReLU, whose derivative jumps."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        return torch.nn.functional.silu(args[0]) if func in _RELUS else func(*args, **(kwargs or {}))


def _normalisations(model: torch.nn.Module) -> list[_NormBase]:
    """The modules that normalise by the batch's statistics in training, and by those that they keep otherwise."""
    return [each for each in model.modules() if isinstance(each, _NormBase) and each.track_running_stats]


def _take_statistics(contest: Contest) -> None:
    """Let the normalisations of both models keep the statistics of PyTorch's model on the inputs, if it trains."""
    theirs, ours = _normalisations(contest.theirs), _normalisations(contest.ours)
    before = [each.momentum for each in theirs]
    if len(theirs) != len(ours) or not all(each.training for each in theirs):
        return
    for each in theirs:
        each.momentum = 1.0
    torch.manual_seed(contest.seed)
    with torch.no_grad():
        contest.theirs(*map_tensors(torch.clone, contest.inputs))
    for one, other, momentum in zip(theirs, ours, before, strict=True):
        one.momentum = momentum
        other.load_state_dict(one.state_dict())


@contextmanager
def _well_conditioned(contest: Contest) -> Iterator[None]:
    """Inside, both models are smooth, and normalise by statistics that they keep."""
    with _Smooth():
        _take_statistics(contest)
        normalisations = [*_normalisations(contest.theirs), *_normalisations(contest.ours)]
        before = [each.training for each in normalisations]
        try:
            for each in normalisations:
                each.training = False
            yield
        finally:
            for each, training in zip(normalisations, before, strict=True):
                each.training = training


def _joined(draws: Sequence[_Draw]) -> _Draw:
    """One draw whose tensors are those of all draws, stacked."""

    def stacked(values: Sequence[Values]) -> Values:
        known = [name for name in values[0] if all(name in each for each in values)]
        return {name: torch.stack([each[name] for each in values]) for name in known}

    truths = [draw.truth for draw in draws if draw.truth is not None]
    return _Draw(
        stacked([draw.ours for draw in draws]),
        stacked([draw.theirs for draw in draws]),
        stacked(truths) if len(truths) == len(draws) else None,
    )


def _truth(contest: Contest, gradients: bool) -> Values | None:
    """The values of the model in float64, or None if it does not run there. Raises OutOfMemoryError."""
    model = copy.deepcopy(contest.theirs).double()
    inputs = map_tensors(lambda x: x.double() if x.is_floating_point() else x, contest.inputs)
    try:
        with cudnn_search(False):
            return values_of(model, inputs, contest.seed, gradients)
    except (KeyboardInterrupt, torch.cuda.OutOfMemoryError):
        raise
    except BaseException:
        return None


def _peaks(contest: Contest, call: Callable[[torch.nn.Module, Contest], Callable[[], object]]) -> dict[str, Any]:
    """The fields of a Row that tell the most device memory that each side's call holds, model and inputs included."""
    return {
        "aten_peak_bytes": peak_bytes(call(contest.theirs, contest), contest.theirs, contest.inputs),
        "haloconv_peak_bytes": peak_bytes(call(contest.ours, contest), contest.ours, contest.inputs),
    }


def peak_bytes(call: Callable[[], object], model: torch.nn.Module, inputs: Inputs) -> int:
    """The most bytes that PyTorch's allocator holds during a warm call, with the model and its inputs, on a GPU."""
    device = device_of(inputs)
    call()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    own = sum(each.nbytes for each in (*model.parameters(), *model.buffers(), *tensors_in(inputs)))
    return torch.cuda.max_memory_allocated(device) - before + own


def _forward(model: torch.nn.Module, contest: Contest) -> Callable[[], object]:
    return forward_call(model, *warmed(model, contest.inputs), contest.seed)


def _step(model: torch.nn.Module, contest: Contest) -> Callable[[], object]:
    return step_call(model, *warmed(model, contest.inputs), contest.seed)


@dataclass(frozen=True)
class _Errors:
    """The worst figures over several tensors, the first complaint, and the tensors hardly or not checked."""

    norm: float
    aten_norm: float
    difference: float
    limit: float
    complaint: str | None
    hardly_checked: str = ""
    unchecked: str = ""


def _judge(ours: Values, theirs: Values, truth: Values, contest: Contest) -> _Errors:
    """Compare tensor by tensor with the truth; twice PyTorch's own, of all and of an element, is allowed.

    A gradient that is zero but for rounding (a bias before batch normalisation) is judged, but not the worst error.
    """
    worst, hardly_checked, unchecked = (0.0, 0.0, 0.0, min(contest.norm_limit, ONE_DIGIT)), [], []
    complaint = _other_tensors(ours, theirs)
    for name in (each for each in ours if each in theirs and ours[each].shape == theirs[each].shape):
        own, oracle = ours[name], _flat_oracle(truth[name])
        if not (oracle.value.isfinite().any() or own.isfinite().any()):
            unchecked.append(name)
            continue
        baseline = measure_error(theirs[name], oracle, UNLIMITED)
        norm_limit = _norm_limit(contest, baseline.norm)
        limits = raised(Limits(norm_limit, ELEMENT_FACTOR * norm_limit), baseline._replace(norm=0.0))
        error = measure_error(own, oracle, limits)
        if not error.passed and complaint is None:
            complaint = f"{name}: {complaint_about(error, limits)}"
        if norm_limit > ONE_DIGIT:
            hardly_checked.append(name)
        if baseline.norm < NO_DIGIT:
            worst = max(worst, (error.norm, baseline.norm, relative_difference(own, theirs[name]), norm_limit))
    if complaint is None and len(unchecked) == len(ours):
        complaint = "no tensor has a finite element, so nothing was compared"
    return _Errors(*worst, complaint, ", ".join(hardly_checked), ", ".join(unchecked))


def _other_tensors(ours: Values, theirs: Values) -> str | None:
    """The complaint about tensors that only one model gives, or that differ in shape; None if there is none."""
    for name in dict.fromkeys([*theirs, *ours]):
        shapes = [tuple(values[name].shape) if name in values else None for values in (ours, theirs)]
        if shapes[0] != shapes[1]:
            own, other = ("none" if shape is None else f"the shape {shape}" for shape in shapes)
            return f"{name}: haloconv's model gives {own}, PyTorch's {other}"
    return None


def _norm_limit(contest: Contest, baseline: float) -> float:
    """What a tensor may err where PyTorch's errs by ``baseline``: less than zeros do, unless PyTorch's does, too."""
    wanted = max(min(contest.norm_limit, ONE_DIGIT), BASELINE_FACTOR * baseline)
    return min(wanted, (NO_DIGIT + baseline) / 2) if baseline < NO_DIGIT else wanted


def _flat_oracle(truth: torch.Tensor) -> Oracle:
    """Every element is judged against the largest one: a whole model has no convolution of absolute values."""
    value = truth.to(torch.float64)
    largest = torch.linalg.vector_norm(value, float("inf")).item() if value.numel() else 0.0
    if not math.isfinite(largest):
        finite = value[value.isfinite()]
        largest = finite.abs().max().item() if finite.numel() else 1.0
    return Oracle(value, value.new_tensor(largest).expand(value.shape))


def _row(contest: Contest, case: str, direction: WholeDirection, errors: _Errors) -> Row:
    family, kernel = contest.ran.get(direction, ("", ""))
    return Row(
        case=case,
        direction=direction,
        precision=contest.label,
        layout=image_layout(contest.inputs),
        family=family,
        reason="",
        error=errors.norm,
        aten_error=errors.aten_norm,
        error_limit=errors.limit,
        difference=errors.difference,
        **measured({}),
        complaint=errors.complaint,
        kernel=kernel,
        source=source_of(kernel) if kernel else None,
    )


def failed_row(contest: Contest, case: str, direction: WholeDirection, complaint: str) -> Row:
    """The row of a model that has no result."""
    return _row(contest, case, direction, _Errors(math.inf, math.nan, math.inf, math.nan, complaint))
