"""A whole model, swapped and as it was: its outputs and all its gradients, and the times of forward and of a step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from haloconv.bench.layer import baseline_flags
from haloconv.bench.trial import BASELINE, OURS, Budget, compared, measured
from haloconv.families.closure import source_of
from haloconv.plan import layout_of
from haloconv.precision import Precision
from haloconv.reference import BASELINE_FACTOR, ELEMENT_FACTOR, Limits, Oracle, cudnn_search, measure_error, raised
from haloconv.report import Row
from haloconv.tune.judge import UNLIMITED, complaint_about, relative_difference

Values = dict[str, torch.Tensor]

DRAWS = 4
"""How many draws of inputs decide together about a model that seems wrong on the first."""

NO_DIGIT = 1.0
"""A relative error from which on nothing of a tensor is right: that of zeros."""

NO_TRUTH = "The model does not run in float64, so its outputs were compared with PyTorch's only."

ONE_DIGIT = 0.1
"""A limit from which on a tensor is hardly checked, which is then told."""


_RELUS = {
    *(torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_),
    *(torch.nn.functional.relu, torch.nn.functional.relu_),
}


@dataclass(frozen=True)
class Contest:
    """The same model twice, ``ours`` with swapped convolutions and ``theirs`` without, and the inputs for both.

    ``precision`` is how PyTorch forms fp32 products for a fair race, ``"ieee"`` or ``"tf32"``; ``label`` is its name in
    tables, ``family`` the families in use, ``kernel`` their kernels joined by `` + `` where they are known.
    ``norm_limit`` is what the layers together may err. ``seed`` fixes random layers and the output gradients.
    ``surroundings`` makes the context in which our model runs.
    """

    ours: torch.nn.Module
    theirs: torch.nn.Module
    inputs: tuple[torch.Tensor, ...]
    precision: Precision
    label: str
    norm_limit: float
    family: str = ""
    kernel: str = ""
    seed: int = 0
    surroundings: Callable[[], AbstractContextManager] = nullcontext

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device


def try_model(
    contest: Contest, name: str, budget: Budget, directions: Collection[str] = ("forward", "step")
) -> tuple[list[Row], list[str]]:
    """The rows ``forward`` and ``step`` (forward and backward) of the model ``name``, and notes on how it was judged.

    What seems wrong on the given inputs is judged again on ``DRAWS`` draws together: one draw of PyTorch's error says
    little of what may be expected of a gradient of ten elements, and twice it is soon exceeded by chance.

    Gradients are those of the model with SiLU for ReLU and with batch statistics as constants. As it is, a rounding in
    16 bits turns some ReLU on or off, which no limit tells from a fault. What is timed is the step as it is.

    A budget without runs times nothing. On a GPU the rows tell the peaks of memory, too. Raises what the model raises.
    """
    notes = []
    with baseline_flags(contest.precision):
        rows = []
        for direction in directions:
            call, gradients = {"forward": _forward, "step": _step}[direction], direction == "step"
            first = _draw(contest, 0, gradients)
            if first.truth is None and NO_TRUTH not in notes:
                notes.append(NO_TRUTH)
            errors = _judge(*first.judged(), contest)
            if errors.complaint is not None:
                notes.append(f"{direction}: judged on {DRAWS} draws together, because on one {errors.complaint}")
                all_draws = _joined([first, *(_draw(contest, i, gradients) for i in range(1, DRAWS))])
                errors = _judge(*all_draws.judged(), contest)
            if errors.hardly_checked:
                notes.append(f"{direction}: PyTorch's own error leaves little to check of {errors.hardly_checked}")
            times = {}
            if budget.timed:
                calls = {BASELINE: call(contest.theirs, contest), OURS: call(contest.ours, contest)}
                times = compared(calls, contest.device, budget)
            peaks = {} if contest.device.type != "cuda" else _peaks(contest, call)
            rows.append(replace(_row(contest, f"{name} (model)", direction, errors, times), **peaks))
    return rows, notes


@dataclass(frozen=True)
class _Draw:
    """The values of both models on the same inputs, and in float64 (None if the model does not run there)."""

    ours: Values
    theirs: Values
    truth: Values | None

    def judged(self) -> tuple[Values, Values, Values]:
        """Ours, theirs and the truth, for which PyTorch's values stand where there is none."""
        return self.ours, self.theirs, self.truth or self.theirs


def _draw(contest: Contest, index: int, gradients: bool) -> _Draw:
    """Draw 0 has the given inputs; others have them mirrored, and other output gradients and random layers.

    With ``gradients`` the models are well conditioned, see `try_model`.
    """
    mirrored = [dim for bit, dim in ((1, -1), (2, -2)) if index & bit]
    inputs = tuple(x.flip(mirrored) if x.dim() == 4 else x for x in contest.inputs)
    contest = replace(contest, inputs=inputs, seed=contest.seed + 1000 * index)
    with _well_conditioned(contest) if gradients else nullcontext():
        theirs = values_of(contest.theirs, contest.inputs, contest.seed, gradients)
        with contest.surroundings():
            ours = values_of(contest.ours, contest.inputs, contest.seed, gradients)
        return _Draw(ours, theirs, _truth(contest, gradients))


class _Smooth(TorchFunctionMode):
    """While active, SiLU stands for ReLU, whose derivative jumps."""

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
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
        contest.theirs(*contest.inputs)
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
        return {name: torch.stack([each[name] for each in values]) for name in values[0]}

    truths = [draw.truth for draw in draws if draw.truth is not None]
    return _Draw(
        stacked([draw.ours for draw in draws]),
        stacked([draw.theirs for draw in draws]),
        stacked(truths) if len(truths) == len(draws) else None,
    )


def values_of(model: torch.nn.Module, inputs: Sequence[torch.Tensor], seed: int, gradients: bool = True) -> Values:
    """The outputs, the gradients of the inputs and the gradients of the parameters, by name; or the outputs alone.

    The output gradients are standard normal, the same for every dtype.
    """
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    torch.manual_seed(seed)
    with torch.set_grad_enabled(gradients):
        outputs = _tensors(model(*leaves))
    _backward(outputs, seed)
    values = {name: tensor.detach() for name, tensor in outputs.items()}
    values |= {f"gradient of input {i}": x.grad for i, x in enumerate(leaves) if x.grad is not None}
    values |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return values


def _tensors(output: object) -> Values:
    """The floating-point tensors in a model's output, named ``output`` or ``output 0``, ``output 1``..."""
    leaves = [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    leaves = [leaf for leaf in leaves if leaf.is_floating_point()]
    return {"output" if len(leaves) == 1 else f"output {i}": leaf for i, leaf in enumerate(leaves)}


def _backward(outputs: Values, seed: int) -> None:
    roots = [tensor for tensor in outputs.values() if tensor.requires_grad]
    if roots:
        torch.autograd.backward(roots, [_normal(root, seed + i) for i, root in enumerate(roots)])


def _normal(like: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)


def _truth(contest: Contest, gradients: bool) -> Values | None:
    """The values of the model in float64, or None if it does not run there. Raises OutOfMemoryError."""
    model = copy.deepcopy(contest.theirs).double()
    inputs = [x.double() if x.is_floating_point() else x for x in contest.inputs]
    try:
        with cudnn_search(False):
            return values_of(model, inputs, contest.seed, gradients)
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):
        return None


def _peaks(contest: Contest, call: Callable[[torch.nn.Module, Contest], Callable[[], object]]) -> dict[str, Any]:
    """The fields of a Row that tell the most device memory that each side's call holds, model and inputs included."""
    return {
        "aten_peak_bytes": peak_bytes(call(contest.theirs, contest), contest.theirs, contest.inputs),
        "haloconv_peak_bytes": peak_bytes(call(contest.ours, contest), contest.ours, contest.inputs),
    }


def peak_bytes(call: Callable[[], object], model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> int:
    """The most bytes that PyTorch's allocator holds during a warm call, with the model and its inputs, on a GPU."""
    device = inputs[0].device
    call()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    own = sum(each.nbytes for each in (*model.parameters(), *model.buffers(), *inputs))
    return torch.cuda.max_memory_allocated(device) - before + own


def _forward(model: torch.nn.Module, contest: Contest) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return model(*contest.inputs)

    return call


def _step(model: torch.nn.Module, contest: Contest) -> Callable[[], object]:
    """Forward and backward as in training: gradients of the parameters, none of the inputs."""
    with torch.no_grad():
        gradients = [_normal(tensor, contest.seed) for tensor in _tensors(model(*contest.inputs)).values()]

    def call() -> None:
        pairs = zip(_tensors(model(*contest.inputs)).values(), gradients, strict=True)
        wanted = [(root, gradient) for root, gradient in pairs if root.requires_grad]
        if wanted:
            torch.autograd.backward([root for root, _ in wanted], [gradient for _, gradient in wanted])
        model.zero_grad(set_to_none=True)

    return call


@dataclass(frozen=True)
class _Errors:
    """The worst figures over several tensors, the first complaint, and the tensors of which little is checked."""

    norm: float
    aten_norm: float
    difference: float
    limit: float
    complaint: str | None
    hardly_checked: str = ""


def _judge(ours: Values, theirs: Values, truth: Values, contest: Contest) -> _Errors:
    """Compare tensor by tensor with the truth; twice PyTorch's own, of all and of an element, is allowed.

    A gradient that is zero but for rounding (a bias before batch normalisation) is judged, but not the worst error.
    """
    worst, complaint, hardly_checked = (0.0, 0.0, 0.0, min(contest.norm_limit, ONE_DIGIT)), None, []
    for name, own in ours.items():
        oracle = _flat_oracle(truth[name])
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
    return _Errors(*worst, complaint, ", ".join(hardly_checked))


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


def _row(contest: Contest, case: str, direction: str, errors: _Errors, times: dict) -> Row:
    return Row(
        case=case,
        direction=direction,
        precision=contest.label,
        layout=layout_of(contest.inputs[0]) if contest.inputs[0].dim() == 4 else "nchw",
        family=contest.family,
        reason="",
        error=errors.norm,
        aten_error=errors.aten_norm,
        error_limit=errors.limit,
        difference=errors.difference,
        **measured(times),
        complaint=errors.complaint,
        kernel=contest.kernel,
        source=source_of(contest.kernel) if contest.kernel else None,
    )
