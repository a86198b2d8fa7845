"""What choosing asks of measuring (choose/measuring.py): a look at a shipped record, and measuring at first use."""

from __future__ import annotations

import warnings

import torch

from haloconv.choose.buckets import layer_key, size_of
from haloconv.choose.choice import recorded
from haloconv.choose.measuring import ONE_AT_A_TIME, in_a_group
from haloconv.choose.records import shelf_of
from haloconv.device import is_capturing, stand_in
from haloconv.families.base import Config
from haloconv.problem import Request, dense_request
from haloconv.reference import unsearched
from haloconv.tune.judge import agrees_with_aten, on_poisoned_memory
from haloconv.tune.measure import ATEN, Candidate, bind, measure, operands_of, plain_surroundings, prepared

_untunable: dict[tuple[str, object], str] = {}


def complaint_about(request: Request, family: str, config: Config) -> str | None:
    """None if the config gives about PyTorch's result, else what it does; empty if there was no memory to see.

    Threads compile side by side, and compare one after another.
    """
    problem = request.problem
    try:
        ours, theirs = (bind(request, each) for each in (Candidate(family, config), ATEN))
        with ONE_AT_A_TIME, plain_surroundings(problem), unsearched():
            operands = operands_of(problem, request.device)
            expected = theirs(*operands)
            result = on_poisoned_memory(lambda: ours(*operands), expected)
            agrees = agrees_with_aten(problem, result, expected)
    except torch.cuda.OutOfMemoryError:
        return ""
    except Exception as error:  # whatever keeps it from running keeps it from being followed
        return f"{type(error).__name__}: {error}"
    return None if agrees else "its result is not PyTorch's"


def measure_now(request: Request) -> str | None:
    """Measure a problem that no record serves and keep the record. None if that was done, else why it was not."""
    problem, device = request.problem, request.device
    emulated = stand_in()
    if emulated is not None and not emulated.keeps_time:
        return "nothing is measured on an emulator"
    if is_capturing(device):
        return "nothing is measured while a CUDA graph is captured"
    if in_a_group():
        return "nothing is measured at first use under torch.distributed: call haloconv.tune(model, example_inputs)"
    if not _is_as_measured(request):
        return "activations are not dense, aligned and in one layout, as they are in measurements"
    with ONE_AT_A_TIME:
        found = recorded(problem, device)
        if found is not None and found.measured:
            return None
        key = (layer_key(problem), size_of(problem))
        if key not in _untunable:
            reason = _measure_and_keep(request)
            if reason is None:
                return None
            _untunable[key] = reason
        return _untunable[key]


def _is_as_measured(request: Request) -> bool:
    """Whether activations have the form that problems are measured in; strides of an extent of 1 say nothing."""
    problem, dense = request.problem, dense_request(request.problem, request.device)
    x, y = problem.x_shape, problem.y_shape
    shapes = {"fprop": (x, None), "dgrad": (y, None), "wgrad": (y, x)}[problem.direction]
    forms, measured = (request.first, request.second), (dense.first, dense.second)
    return all(
        shape is None
        or (form.aligned and all(n == 1 or a == b for n, a, b in zip(shape, form.strides, other.strides, strict=True)))
        for shape, form, other in zip(shapes, forms, measured, strict=True)
    )


def _measure_and_keep(request: Request) -> str | None:
    try:
        (entry,) = prepared([request.problem], request.device)
        outcome = measure(entry)
    except torch.cuda.OutOfMemoryError:
        return "there was no memory to measure with"
    shelf_of(request.facts).keep([outcome.record])
    for sentence in outcome.rejected:
        warnings.warn(f"haloconv: while tuning {request.problem}: {sentence}", RuntimeWarning, stacklevel=2)
    return None


def forget_failures() -> None:
    """Try again to measure what could not be measured."""
    _untunable.clear()
