"""The first call of a model in a process, timed from the start of the process. Run as a file, in a process of its own.

Reads an order from standard input and writes what it took to standard output, as its last line. What is imported when
is part of what is timed, so that the imports of this file are made in the order in which a user's program makes them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

BUILD = "build"
"""The phase that is not counted: finding the model, importing its library, and its random weights."""


class Phases:
    """The ms between marks, by name; ``began`` is the clock's time before the process was started."""

    def __init__(self, began: float, clock: Callable[[], float]) -> None:
        self.ms: dict[str, float] = {}
        self._last, self._clock = began, clock

    def mark(self, name: str) -> None:
        """A phase ends now."""
        now = self._clock()
        self.ms[name] = round((now - self._last) * 1e3, 1)
        self._last = now


def first_step(order: dict[str, Any], clock: Callable[[], float] = time.time) -> dict[str, Any]:
    """Build a model, run it once, and, if the order says so, train it for one step.

    The order has ``began``, ``ours`` (False: PyTorch's own convolution), ``training``, ``target``, ``batch``,
    ``pixels``, ``precision``, ``layout`` and ``device``. Gives ``phases_ms``, which are ``start`` (of the interpreter),
    ``torch``, ``haloconv`` (ours), ``build``, ``device`` (its context, and the weights there), ``accelerate`` (ours,
    kernels compiled), ``first output`` and ``step`` (training: backward and the optimiser); and how many kernels were
    compiled and found on disk. PyTorch searches in both cases (torch.backends.cudnn.benchmark).
    """
    phases = Phases(order["began"], clock)
    phases.mark("start")
    torch = import_module("torch")
    phases.mark("torch")
    haloconv = None
    if order["ours"]:
        haloconv = import_module("haloconv")
        phases.mark("haloconv")
    model, inputs, place, autocast = _built(order, torch)
    phases.mark(BUILD)
    model, inputs = place()
    model.train(order["training"])
    torch.backends.cudnn.benchmark = True
    _wait(torch, order)
    phases.mark("device")
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3) if order["training"] else None
    with torch.set_grad_enabled(order["training"]):
        with nullcontext() if autocast is None else torch.autocast(torch.device(order["device"]).type, autocast):
            if haloconv is not None:
                haloconv.accelerate(model, example_inputs=inputs)
                phases.mark("accelerate")
            output = model(*inputs)
            _wait(torch, order)
            phases.mark("first output")
        if optimiser is not None:
            tensors = import_module("haloconv.bench.values").output_tensors(output).values()
            sum(each.float().square().mean() for each in tensors).backward()
            optimiser.step()
            _wait(torch, order)
            phases.mark("step")
    counts = import_module("haloconv.jit").statistics()
    return {"phases_ms": phases.ms, "compiles": counts.compiles, "disk_hits": counts.disk_hits}


def _built(order: dict[str, Any], torch: Any) -> tuple[Any, Any, Callable[[], tuple[Any, Any]], Any]:
    """The model and its inputs on the CPU, what puts them on the device, and the dtype of autocast or None."""
    find_source = import_module("haloconv.bench.targets").find_source
    swapped, trial = import_module("haloconv.bench.networks.swapped"), import_module("haloconv.bench.trial")
    dtype, products = import_module("haloconv.bench.suite").PRECISIONS[order["precision"]]
    autocast = None if dtype == torch.float32 else dtype
    device = torch.device(order["device"])
    options = swapped.Options(device, products, "auto", 0, trial.Budget(0.0), None, autocast, order["layout"])
    torch.manual_seed(0)
    if autocast is None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = products == "tf32"
    source = find_source(order["target"], order["batch"], order["pixels"])
    model, inputs = source.model(), source.inputs()
    return model, inputs, lambda: swapped.placed(model, inputs, options), autocast


def _wait(torch: Any, order: dict[str, Any]) -> None:
    if order["device"].startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    print(json.dumps(first_step(json.load(sys.stdin))))
