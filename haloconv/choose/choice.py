"""What records say about a problem when a plan is made, and measuring at first use where the user asked for it.

A record of the user's own is believed because this machine verified it before it timed it. One that came with the
package is looked at first: its family must give about PyTorch's result for the very problem, once in a process.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Hashable
from typing import NamedTuple

import torch

from haloconv import env
from haloconv.choose.buckets import layer_key, size_of
from haloconv.choose.records import Record, shelf_of
from haloconv.families import FAMILIES
from haloconv.families.base import candidates_of, config_key
from haloconv.problem import Problem, TensorForm
from haloconv.tune.judge import agrees_with_aten, on_poisoned_memory
from haloconv.tune.measure import ATEN, Candidate, bind, forms_of, measure, operands_of, plain_surroundings, prepared

Forms = tuple[TensorForm, TensorForm]

_lock = threading.RLock()  # one measurement at a time: others would disturb it
_trusted: set[Record] = set()
_untunable: dict[tuple[str, object], str] = {}


class Found(NamedTuple):
    """A measured choice: the family, its config by key, and the reason for people."""

    family: str
    config: str
    reason: str


def recorded(problem: Problem, device: torch.device) -> Found | None:
    """The choice that records hold for a problem on a device, or None. Measures nothing."""
    if problem.is_empty or not _has_facts(device):
        return None
    shelf = shelf_of(env.device_facts(device.index))
    found = shelf.find(problem)
    if found is None:
        return None
    record, shipped = found
    if FAMILIES[record.family].why_not(problem, device) is not None:
        return None
    if shipped and not _is_trusted(record, problem, device):
        return None
    return Found(record.family, record.config, record.why(size_of(problem), shipped))


def config_named(
    key: str, family: str, problem: Problem, forms: Forms, result_layout: str, device: torch.device
) -> Hashable | None:
    """The config that a record names, if the family offers it for this problem and these tensors.

    Otherwise None, the model's best: a config that was measured at another size need not run, or be good, at this one.
    """
    if not key:
        return None
    offered = candidates_of(FAMILIES[family], problem, *forms, result_layout, device)
    return next((config for config in offered if config_key(config) == key), None)


def tune_now(problem: Problem, forms: Forms, device: torch.device) -> str | None:
    """Measure a problem that no record serves and keep the record. None if that was done, else why it was not."""
    emulated = env.stand_in()
    if emulated is not None and not emulated.keeps_time:
        return "nothing is measured on an emulator"
    if is_capturing(device):
        return "nothing is measured while a CUDA graph is captured"
    if in_a_group():
        return "nothing is measured at first use under torch.distributed: call haloconv.tune(model, example_inputs)"
    if not _is_as_measured(problem, forms):
        return "activations are not dense, aligned and in one layout, as they are in measurements"
    with _lock:
        if recorded(problem, device) is not None:
            return None
        key = (layer_key(problem), size_of(problem))
        if key not in _untunable:
            reason = _measure_and_keep(problem, device)
            if reason is None:
                return None
            _untunable[key] = reason
        return _untunable[key]


def _is_as_measured(problem: Problem, forms: Forms) -> bool:
    """Whether activations have the form that problems are measured in; strides of an extent of 1 say nothing."""
    x, y = problem.x_shape, problem.y_shape
    shapes = {"fprop": (x, None), "dgrad": (y, None), "wgrad": (y, x)}[problem.direction]
    return all(
        shape is None
        or (form.aligned and all(n == 1 or a == b for n, a, b in zip(shape, form.strides, dense.strides, strict=True)))
        for shape, form, dense in zip(shapes, forms, forms_of(problem), strict=True)
    )


def _measure_and_keep(problem: Problem, device: torch.device) -> str | None:
    try:
        outcome = measure(*prepared([problem], device), device)
    except torch.cuda.OutOfMemoryError:
        return "there was no memory to measure with"
    shelf_of(env.device_facts(device.index)).keep([outcome.record])
    for sentence in outcome.rejected:
        warnings.warn(f"haloconv: while tuning {problem}: {sentence}", RuntimeWarning, stacklevel=2)
    return None


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _has_facts(device: torch.device) -> bool:
    """Whether the device's facts can be asked for: it runs kernels, and it is there."""
    return env.runs_kernels(device) and (device.type != "cuda" or torch.cuda.is_available())


def in_a_group() -> bool:
    """Whether torch.distributed runs several processes."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _is_trusted(record: Record, problem: Problem, device: torch.device) -> bool:
    """Whether a record that came with the package may be followed; looked into at its first use."""
    if record.family == "aten" or record in _trusted:
        return True
    if is_capturing(device):
        return False
    with _lock:
        complaint = _look(record, problem, device)
        if complaint is None:
            _trusted.add(record)
            return True
        shelf_of(env.device_facts(device.index)).discard(record)
    if complaint:
        warnings.warn(
            f"haloconv: a shipped record is not followed: {record.family} for {problem}: {complaint}",
            RuntimeWarning,
            stacklevel=2,
        )
    return False


def _look(record: Record, problem: Problem, device: torch.device) -> str | None:
    """None if the family gives about PyTorch's result, else what it does; empty if there was no memory to see."""
    config = config_named(record.config, record.family, problem, forms_of(problem), problem.layout, device)
    try:
        with plain_surroundings(problem):
            ours, theirs = (bind(problem, each, device) for each in (Candidate(record.family, config), ATEN))
            operands = operands_of(problem, device)
            expected = theirs(*operands)
            result = on_poisoned_memory(lambda: ours(*operands), expected)
            agrees = agrees_with_aten(problem, result, expected)
    except torch.cuda.OutOfMemoryError:
        return ""
    except Exception as error:  # whatever keeps it from running keeps it from being followed
        return f"{type(error).__name__}: {error}"
    return None if agrees else "its result is not PyTorch's"


def forget_choices() -> None:
    """Look at shipped records again, and try again to measure what could not be measured."""
    _trusted.clear()
    _untunable.clear()
