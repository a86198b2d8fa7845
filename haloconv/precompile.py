"""Kernels of a model compiled before its first call, side by side: one pass tells which convolutions there are."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from haloconv import env, jit, logs, plan
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
    """Something to bind, once for each ``key``; ``request`` and ``layer`` say what for."""

    key: tuple[object, ...]
    layer: str
    request: Request
    call: Callable[[], object]


def precompile(
    model: torch.nn.Module, example_inputs: Inputs, directions: Collection[Direction] | None = None
) -> tuple[str, ...]:
    """Choose and compile the kernels of the model's haloconv layers now, so that its first call finds them.

    One forward pass tells which convolutions there are. It runs on PyTorch's convolution, in evaluation mode and under
    the autocast in force, and leaves the model as it was. Then all kernels are compiled side by side, a thread for each
    core, 16 at most; if that takes longer than two seconds one line says so, to ``haloconv.compile`` where that topic
    is logged, else to a terminal. Layers that measure at their first use do so at their first call.

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
    with _loading_compiler(), plan.noting() as noted, evaluating(model), torch.set_grad_enabled(asked != ("fprop",)):
        model(*args, **kwargs)
    tasks = {task.key: task for task in _tasks(noted, asked)}.values()
    return _side_by_side(sorted(tasks, key=_has_one_tap))


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
def _loading_compiler() -> Iterator[None]:
    """Inside, the compiler is loaded beside PyTorch's work on a GPU. What is missing shows where a kernel needs it."""

    def load() -> None:
        with suppress(jit.ToolchainError):
            jit.load_compiler()

    thread = threading.Thread(target=load, name="haloconv-compiler")
    if torch.cuda.is_initialized():
        thread.start()
    try:
        yield
    finally:
        if thread.ident is not None:
            thread.join()


def _has_one_tap(task: _Task) -> bool:
    """Kernels of layers with several taps take longest to compile, and begin first."""
    problem = task.request.problem
    return problem.r * problem.s == 1


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


def _tasks(noted: Sequence[Noted], directions: Collection[Direction]) -> Iterator[_Task]:
    """What is to be bound for these calls."""
    for each in noted:
        problem, spec, device, where = each.request.problem, each.spec, each.request.device, (each.layer, each.request)
        if "fprop" in directions and not _is_measured_later(each.request, spec):
            yield _Task(each.key, *where, partial(_keep_plan, each))
        y_form = TensorForm(strides_of(problem.y_shape, each.request.result_layout), True)
        for direction in (one for one in each.gradients if one in directions):
            request = _gradient_request(each.request, direction, y_form)
            if not _is_measured_later(request, spec):
                yield _Task((request, spec), each.layer, request, partial(plan.bind, request, spec))
        if each.bias_gradient and "wgrad" in directions:
            asked = (problem.dtype, problem.y_shape, y_form, device, spec.family)
            yield _Task(asked, *where, partial(plan.bind_bgrad_of, *asked))


def _keep_plan(noted: Noted) -> None:
    plan.keep(noted.key, plan.bind(noted.request, noted.spec))


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


def _side_by_side(tasks: Collection[_Task]) -> tuple[str, ...]:
    """Run the tasks in threads, for NVRTC works without Python's lock; what those say that failed."""
    if not tasks:
        return ()
    threads = min(_THREADS, os.cpu_count() or 1, len(tasks))
    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(_attempt, task) for task in tasks]
        try:
            done, waiting = wait(running, PATIENCE_S)
            if waiting:
                _tell(f"choosing and compiling kernels: {len(done)} of {len(running)} are done, {threads} at a time")
            complaints = [each.result() for each in running]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return tuple(each for each in complaints if each)


def _attempt(task: _Task) -> str:
    """Empty, or why it failed."""
    device = task.request.device
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), calls_of(task.layer):
            task.call()
    except Exception as error:  # whatever it is, the layer's call raises it, too, where the user can see what for
        sentence = f"{task.layer or 'a layer'}: {task.request.problem}: {type(error).__name__}: {error}"
        logs.compile.info("not compiled ahead of the first call: %s", sentence)
        return sentence
    return ""


def _tell(line: str) -> None:
    """One line where somebody looks: in the log of compilations, else on a terminal."""
    if logs.compile.isEnabledFor(logging.INFO):
        logs.compile.info(line)
    elif sys.stderr is not None and sys.stderr.isatty():
        print(f"haloconv: {line}", file=sys.stderr, flush=True)
