"""Kernels of a model compiled before its first call, side by side, while a pass tells which convolutions there are."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from haloconv import env, logs, plan
from haloconv.choose.choice import choose, may_be_measured
from haloconv.choose.measuring import wanted
from haloconv.layout import Layout, is_channels_last, strides_of
from haloconv.plan import Noted, second_layout
from haloconv.problem import DIRECTIONS, ConvSpec, Direction, Request, TensorForm
from haloconv.profiling import calls_of

Inputs = torch.Tensor | Sequence[object] | Mapping[str, object]
"""What a model is called with: a tensor, a sequence of arguments, or a mapping of keyword arguments."""

PATIENCE_S = 2.0  # after which a line says what takes so long
_THREADS = 16


class _Task(NamedTuple):
    """Something to bind, once for each ``key``; ``request`` and ``layer`` say what for.

    ``finds``: calls find a plan by the key.
    """

    key: tuple[object, ...]
    layer: str
    request: Request
    call: Callable[[], object]
    finds: bool = False


class _Bound(NamedTuple):
    """What a task gave, or a sentence why it failed."""

    task: _Task
    result: object = None
    complaint: str = ""


def precompile(
    model: torch.nn.Module, example_inputs: Inputs, directions: Collection[Direction] | None = None
) -> tuple[str, ...]:
    """Choose and compile the kernels of the model's haloconv layers now, so that its first call finds them.

    One forward pass tells which convolutions there are. It runs on PyTorch's convolution, in evaluation mode and under
    the autocast in force, and leaves the model as it was. Kernels are compiled beside it and behind it, a thread for
    each core, 16 at most; if that takes longer than two seconds one line says so, to ``haloconv.compile`` where that
    topic is logged, else to a terminal. Layers that measure at their first use do so at their first call.

    Args:
        model: any module with layers of ours, on the device where it will run.
        example_inputs: what it is called with: a tensor, a sequence of arguments, or a mapping of keyword arguments, of
            the extents, dtype and memory order of later calls.
        directions: of ``"fprop"``, ``"dgrad"``, ``"wgrad"``; by default all in training mode where gradients are
            recorded, else ``"fprop"``. Gradients are those that a backward pass would ask for, on dense tensors.

    Returns:
        A sentence for each kernel that could not be compiled. Its layer meets the error at its call.

    Raises:
        ValueError: a direction is none. Whatever the model raises for its inputs.
    """
    trains = model.training and torch.is_grad_enabled()
    asked = (DIRECTIONS if trains else ("fprop",)) if directions is None else tuple(directions)
    check_directions(asked)
    if env.disabled():
        return ()
    args, kwargs = arguments_of(example_inputs)
    with _SideBySide(asked) as compilers:
        with plan.noting(compilers.hear), evaluating(model), torch.set_grad_enabled(asked != ("fprop",)):
            model(*args, **kwargs)
        bound = compilers.ended()
    for each in bound:
        if isinstance(each.result, plan.Plan) and each.task.finds:
            plan.keep(each.task.key, each.result)
    return tuple(each.complaint for each in bound if each.complaint)


def check_directions(directions: Collection[Direction]) -> None:
    """Raise ValueError for a direction that is none."""
    unknown = [each for each in directions if each not in DIRECTIONS]
    if unknown:
        raise ValueError(f"directions are some of {', '.join(DIRECTIONS)}, not {', '.join(map(str, unknown))}")


def arguments_of(example_inputs: Inputs) -> tuple[tuple[object, ...], dict[str, object]]:
    """Positional and keyword arguments."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs), {}


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, so that no running statistics change; afterwards as before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _tasks(noted: Noted, directions: Collection[Direction]) -> Iterator[_Task]:
    """What is to be bound for a call."""
    request, spec, layer = noted.request, noted.spec, noted.layer
    problem, device = request.problem, request.device
    if "fprop" in directions and not _is_measured_later(request, spec):
        yield _Task(noted.key, layer, request, partial(plan.bind, request, spec), finds=True)
    y_form = TensorForm(strides_of(problem.y_shape, request.result_layout), True)
    for direction in (one for one in noted.gradients if one in directions):
        asked = _gradient_request(request, direction, y_form)
        if not _is_measured_later(asked, spec):
            yield _Task((asked, spec), layer, asked, partial(plan.bind, asked, spec))
    if noted.bias_gradient and "wgrad" in directions:
        summed = (problem.dtype, problem.y_shape, y_form, device, spec.family)
        yield _Task(summed, layer, request, partial(plan.bind_bgrad_of, *summed))


def _gradient_request(fprop: Request, direction: Direction, y_form: TensorForm) -> Request:
    """The request of a gradient whose dy has the form of y."""
    problem, layout = fprop.problem.toward(direction), fprop.result_layout
    if direction == "dgrad":
        return Request(replace(problem, layout=layout), y_form, fprop.second, layout, fprop.device)
    x_layout: Layout = "nhwc" if is_channels_last(problem.x_shape, fprop.first.strides) else "nchw"
    return Request(replace(problem, layout=x_layout), y_form, fprop.first, second_layout(fprop), fprop.device)


def _is_measured_later(request: Request, spec: ConvSpec) -> bool:
    """Whether the first call measures: beside compilers, times would mean nothing."""
    if not wanted():
        return False
    return may_be_measured(choose(request.problem, request.device, spec.family), spec.family)


class _SideBySide:
    """Threads that bind what calls need, from when they are heard of; NVRTC works without Python's lock.

    No plan is kept meanwhile, so that the pass hears of every call. Leaving the block without ``ended`` gives up what
    has not begun.
    """

    def __init__(self, directions: Collection[Direction]) -> None:
        self.directions, self.begun_at = directions, time.monotonic()
        self.threads = min(_THREADS, os.cpu_count() or 1)
        self.pool = ThreadPoolExecutor(self.threads)
        self.running: dict[tuple[object, ...], Future[_Bound]] = {}

    def __enter__(self) -> _SideBySide:
        return self

    def __exit__(self, *raised: object) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)

    def hear(self, noted: Noted) -> None:
        """Bind what a call needs, unless another needs the same."""
        for task in _tasks(noted, self.directions):
            if task.key not in self.running:
                self.running[task.key] = self.pool.submit(_attempt, task)

    def ended(self) -> list[_Bound]:
        """What all have given, in the order of the calls; a line says so if that takes longer than PATIENCE_S."""
        running = list(self.running.values())
        done, waiting = wait(running, max(0.0, self.begun_at + PATIENCE_S - time.monotonic()))
        if waiting:
            at_once = f"{self.threads} at a time"
            _tell(f"choosing and compiling kernels: {len(done)} of {len(running)} are done, {at_once}")
        return [each.result() for each in running]


def _attempt(task: _Task) -> _Bound:
    device = task.request.device
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), calls_of(task.layer):
            return _Bound(task, task.call())
    except Exception as error:  # whatever it is, the layer's call raises it, too, where the user can see what for
        sentence = f"{task.layer or 'a layer'}: {task.request.problem}: {type(error).__name__}: {error}"
        logs.compile.info("not compiled ahead of the first call: %s", sentence)
        return _Bound(task, complaint=sentence)


def _tell(line: str) -> None:
    """One line where somebody looks: in the log of compilations, else on a terminal."""
    if logs.compile.isEnabledFor(logging.INFO):
        logs.compile.info(line)
    elif sys.stderr is not None and sys.stderr.isatty():
        print(f"haloconv: {line}", file=sys.stderr, flush=True)
