"""Whole networks eager, compiled, and compiled with a search, by PyTorch and on our kernels, and fused on these.

Each variant of a network is checked as whole.py checks a swapped model, against float64, and all are timed
against each other in one process. Nothing is tuned: ours run by the records that there are. What several variants are
set against, PyTorch's eager values and those in float64, is computed once.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, NamedTuple

import torch

from haloconv.accelerate import accelerate
from haloconv.backend import backend
from haloconv.bench.layer import baseline_flags
from haloconv.bench.networks.network import Effort, Setting, ignore
from haloconv.bench.networks.swapped import Autocast, Options, layers_of, placed
from haloconv.bench.networks.whole import Contest, OursFailed, judged, peak_bytes
from haloconv.bench.networks.workers import GpuLock
from haloconv.bench.results import ResultRow
from haloconv.bench.stale import backend_source
from haloconv.bench.suite import PRECISIONS
from haloconv.bench.targets import find_source
from haloconv.bench.trial import Budget, compared, gpu_name
from haloconv.bench.values import forward_call, step_call, warmed
from haloconv.families.closure import JOIN, kernels, source_of
from haloconv.fusion.fuse import fuse
from haloconv.jit.launch import Launch
from haloconv.precision import Precision
from haloconv.problem_file import how_it_ended
from haloconv.report.rows import WholeDirection
from haloconv.tune.timing import synchronize

RECOMPILATIONS = 64
"""How often Dynamo may compile a function that all variants share before it gives up and runs it eagerly."""

SEARCH = "max-autotune"
"""The mode that searches, which takes minutes for a network."""

CALLS: dict[WholeDirection, Callable[..., Callable[[], object]]] = {"forward": forward_call, "step": step_call}
"""Inference in evaluation mode, and a training step without its optimiser."""


class Variant(NamedTuple):
    """How a network runs. ``mode`` is that of torch.compile, empty without it; ``ours`` on haloconv's kernels.

    Eager layers of ours are swapped, and with ``fused``, in inference alone, run with what follows them. Compiled
    models are PyTorch's, given to the backend of haloconv.
    """

    ours: bool
    mode: str
    fused: bool = False

    def __str__(self) -> str:
        eager = "fused" if self.fused else "eager"
        return f"{'haloconv' if self.ours else 'PyTorch'} {self.mode.replace('default', 'compiled') or eager}"


VARIANTS = (
    *(Variant(ours, mode) for ours in (False, True) for mode in ("", "default", SEARCH)),
    Variant(True, "", fused=True),
)


@dataclass(frozen=True)
class Piece:
    """One network in one setting and direction, ``forward`` or ``step``: what has a row."""

    setting: Setting
    direction: WholeDirection

    def __str__(self) -> str:
        return f"{self.setting} {self.direction}"

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What its row is found by."""
        return self.setting.case.name, self.direction, self.setting.precision, self.setting.layout


def variants_of(direction: WholeDirection, effort: Effort) -> list[Variant]:
    """How the network is to run: without a search for the effort's sake, fused in inference alone."""
    searched = (each for each in VARIANTS if effort.search or each.mode != SEARCH)
    return [each for each in searched if direction == "forward" or not each.fused]


class CutShortError(Exception):
    """The time was up before all variants were compiled; the message says after which."""


@dataclass(frozen=True)
class PieceControl:
    """What is told while a piece runs, the lock of its GPU, and when no further variant is begun (``time.time()``)."""

    announce: Callable[[str], None] = ignore
    gpu: GpuLock = field(default_factory=GpuLock)
    deadline: float = math.inf


def try_piece(piece: Piece, effort: Effort, device: torch.device, control: PieceControl | None = None) -> ResultRow:
    """The row of a piece: its key, and under ``variants`` what each that the effort allows came to, by name.

    Of each ``ms`` (median) and ``spread``; ``first_call_s``, the first call with all that it compiles and searches,
    Inductor's folder being empty, and the ``graphs`` that it compiled; ``peak_bytes`` of device memory; ``error``
    against float64 and ``complaint``. What is not known is None. Inference compiled with a search is frozen, too.
    ``kernel`` names all kernels of ours that ran, ``source`` and ``backend`` are what `is_stale` asks for.

    Raises ModelError or TargetError if the model cannot be had or PyTorch's fails, OutOfMemoryError if it is too large,
    CutShortError if the time is up. All variants are timed against each other, so that no part counts by itself.
    """
    control = control or PieceControl()
    contest, training = _contest(piece.setting, device), piece.direction == "step"
    contest.theirs.train(training)
    found: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], object]] = {}
    launched: set[str] = set()
    with baseline_flags(contest.precision):
        output, arguments = warmed(contest.theirs, contest.inputs)
        for variant in variants_of(piece.direction, effort):
            if time.time() > control.deadline:
                raise CutShortError(f"after {len(found)} variants")
            control.announce(f"{piece}: {variant}")
            model = _made(variant, contest, training)
            call = _renewed(CALLS[piece.direction](model, output, arguments, contest.seed))
            with _compiling(variant, training, control.gpu):
                first = _first_call(call, device, control.gpu, launched)
                found[str(variant)] = {**first, **_checked(call, replace(contest, ours=model), piece.direction, first)}
            if "first_call_s" in first:
                calls[str(variant)] = call
        control.announce(f"{piece}: timing")
        for name, timing in compared(calls, device, effort.budget).items():
            found[name] |= {"ms": float(f"{timing.ms:.6g}"), "spread": float(f"{timing.spread:.6g}")}
    case, direction, precision, layout = piece.key
    row: ResultRow = {"case": case, "direction": direction, "precision": precision, "layout": layout, "variants": found}
    return row | _decided_by(launched, str(gpu_name(device)))


def _decided_by(launched: set[str], gpu: str) -> ResultRow:
    """The kernels among the names of .cu files that were launched, and the hashes of what decided the row."""
    kernel = JOIN.join(sorted(launched & {*kernels()})) or "aten"
    return {"kernel": kernel, "source": source_of(kernel), "backend": backend_source(gpu)}


def _contest(setting: Setting, device: torch.device) -> Contest:
    """PyTorch's model, for now on both sides, and what its layers may err together."""
    dtype, products = PRECISIONS[setting.precision]
    autocast = None if dtype == torch.float32 else dtype
    options = Options(device, products, "auto", 0, Budget(), None, autocast, setting.layout)
    torch.manual_seed(options.seed)
    source = find_source(setting.case.target, setting.case.batch, setting.case.pixels)
    model, inputs = placed(source.model(), source.inputs(), options)
    swapped = copy.deepcopy(model)
    layers = layers_of(setting.case.name, swapped, inputs, list(accelerate(swapped, precision=products)), options)
    limits = [layer.limits(step, None).norm for layer in layers for step in layer.steps]
    model = model if autocast is None else Autocast(model, autocast)
    precision: Precision = "tf32" if setting.precision == "tf32" else "ieee"
    return Contest(
        model, model, inputs, precision, setting.precision, len(layers) * max(limits), seed=options.seed, known={}
    )


def _made(variant: Variant, contest: Contest, training: bool) -> torch.nn.Module:
    """A copy of PyTorch's model that runs as the variant says. Its parameters keep their names."""
    model = copy.deepcopy(contest.theirs)
    inner = model.model if isinstance(model, Autocast) else model
    if variant.ours and not variant.mode:
        accelerate(inner)
        if variant.fused:
            fuse(inner)
    elif variant.mode:
        # not inner.compile(), which leaves a torch.nn.Sequential uncompiled without a word
        inner.forward = torch.compile(inner.forward, backend=backend if variant.ours else "inductor", mode=variant.mode)
    return model


@contextmanager
def _compiling(variant: Variant, training: bool, gpu: GpuLock) -> Iterator[None]:
    """Inside, Inductor finds nothing that was compiled before, and freezes the weights where it searches.

    Where it does not search, which is done on the GPU, its work is the host's, and the GPU is lent. Neither of its
    modules is imported before something is compiled: that takes seconds.
    """
    if not variant.mode:
        yield
        return
    frozen = variant.mode == SEARCH and not training
    config, utils = (import_module(f"torch._inductor.{name}") for name in ("config", "utils"))
    dynamo = import_module("torch._dynamo.config")
    lending = nullcontext() if variant.mode == SEARCH else _lending(gpu)
    limited = dynamo.patch(cache_size_limit=RECOMPILATIONS)
    with utils.fresh_inductor_cache(), config.patch(freezing=frozen), limited, lending:
        yield


@contextmanager
def _lending(gpu: GpuLock) -> Iterator[None]:
    """Inside, the GPU is lent to others while Inductor compiles a graph."""
    compiler: Any = torch._TorchCompileInductorWrapper
    compile_graph = compiler.__call__

    def lending(self: object, *args: Any, **kwargs: Any) -> object:
        with gpu.lent():
            return compile_graph(self, *args, **kwargs)

    compiler.__call__ = lending
    try:
        yield
    finally:
        compiler.__call__ = compile_graph


@contextmanager
def _noting_launches(names: set[str]) -> Iterator[None]:
    """Inside, the .cu files whose kernels are launched are noted by name."""
    launch: Any = Launch
    call = launch.__call__

    def noting(self: Launch, *pointers: int) -> None:
        names.add(self.source.kernel)
        call(self, *pointers)

    launch.__call__ = noting
    try:
        yield
    finally:
        launch.__call__ = call


def _renewed(call: Callable[[], object]) -> Callable[[], object]:
    """``call``, before which results of compiled models in CUDA graphs are given up: they are not of this call."""

    def renewed() -> object:
        torch.compiler.cudagraph_mark_step_begin()
        return call()

    return renewed


def _first_call(call: Callable[[], object], device: torch.device, gpu: GpuLock, launched: set[str]) -> dict[str, Any]:
    """The seconds of the first call, less those that others had the GPU, and its graphs; or what it raises."""
    began, waited_s, before = time.perf_counter(), gpu.waited_s, _graphs()
    try:
        with _noting_launches(launched):
            call()
            synchronize(device)
    except (KeyboardInterrupt, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        return {"complaint": how_it_ended(error)}
    seconds = time.perf_counter() - began - (gpu.waited_s - waited_s)
    return {"first_call_s": round(seconds, 3), "graphs": _graphs() - before}


def _checked(
    call: Callable[[], object], contest: Contest, direction: WholeDirection, first: dict[str, Any]
) -> dict[str, Any]:
    """What a row holds of a variant but for its first call and its times."""
    if "first_call_s" not in first:
        return {}
    peak = None if contest.device.type != "cuda" else peak_bytes(call, contest.ours, contest.inputs)
    try:
        row, notes = judged(contest, "", direction)
    except OursFailed as error:
        return {"error": None, "peak_bytes": peak, "complaint": str(error)}
    if row is None:
        return {"error": None, "peak_bytes": peak, "complaint": " ".join(notes)}
    error_norm = row.error if math.isfinite(row.error) else None
    return {"error": error_norm, "peak_bytes": peak, "complaint": row.complaint}


def forget_compiled() -> None:
    """Give up what Dynamo compiled in this process, and its CUDA graphs: the next piece finds none of it."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def _graphs() -> int:
    """How many graphs Dynamo has compiled in this process; 0 where it was not imported."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]
