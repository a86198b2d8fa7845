"""Running conformance cases on a GPU, in a process of their own: a case that breaks its context ends only that process.

``python -m tests.conformance.on_gpu FOLDER NAME...`` runs the named cases in order and leaves ``FOLDER/NAME.npz`` (the
outputs) or ``FOLDER/NAME.error`` (a sentence) for each. ``run_all`` starts it, and again for the rest if it dies.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from haloconv.jit import ArgumentBlock, encode_tiled, get_kernel, load_kernel, nvrtc_info
from tests.conformance.arguments import MAP_BYTES, PARAMS_BYTES, packed
from tests.conformance.case import SENTINEL, Case, MapSpec, Setup
from tests.conformance.suite import BY_NAME

ARCH = "sm_90a"
COMPILE_THREADS = 8
ATTEMPT_S, TOTAL_S, ATTEMPTS = 60, 150, 6
"""Limits: of one process, of all of them, and how many are started."""

_CONTEXT_LOST = 3  # exit status: the last case left an error and broke the context

ROOT = Path(__file__).resolve().parents[2]


def run_all(names: Sequence[str], folder: Path) -> dict[str, tuple[np.ndarray, ...] | str]:
    """The outputs of each case, or a sentence that says why there are none. Needs a GPU of compute capability 9.0."""
    left, deadline, log = list(names), time.monotonic() + TOTAL_S, ""
    for _ in range(ATTEMPTS):
        limit = min(ATTEMPT_S, deadline - time.monotonic())
        if not left or limit <= 0:
            break
        log, explained = _attempt(left, folder, limit)
        done = [name for name in left if _found(name, folder)]
        if len(done) < len(left) and not explained:  # it died, or hung, in the first case that left nothing
            blamed = left[len(done)]
            (folder / f"{blamed}.error").write_text(f"the process ended or hung in this case: {log[-2000:]}")
        left = [name for name in left if not _found(name, folder)]
    return {name: _result(name, folder, log) for name in names}


def about() -> dict[str, str]:
    """Where the results of this machine come from."""
    return {"device": torch.cuda.get_device_name(), "nvrtc": nvrtc_info()[0]}


def _attempt(names: Sequence[str], folder: Path, limit_s: float) -> tuple[str, bool]:
    """One process over ``names``: what it printed, and whether it ended because of the last case that it left."""
    command = [sys.executable, "-m", "tests.conformance.on_gpu", str(folder), *names]
    try:
        done = subprocess.run(
            command, cwd=ROOT, timeout=limit_s, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except subprocess.TimeoutExpired as error:
        return f"no end after {limit_s:.0f} s; {error.output or ''}", False
    return done.stdout, done.returncode == _CONTEXT_LOST


def _found(name: str, folder: Path) -> bool:
    return (folder / f"{name}.npz").exists() or (folder / f"{name}.error").exists()


def _result(name: str, folder: Path, log: str) -> tuple[np.ndarray, ...] | str:
    if (folder / f"{name}.error").exists():
        return (folder / f"{name}.error").read_text()
    if not (folder / f"{name}.npz").exists():
        return f"not run: the processes before it ended too often. {log[-500:]}"
    with np.load(folder / f"{name}.npz") as file:
        return tuple(file[key] for key in sorted(file.files))


# --- inside the process


def _encode(spec: MapSpec, address: int) -> bytes:
    """A tensor map of the driver."""
    if not spec.im2col:
        return encode_tiled(address=address, **spec.arguments)
    from cuda.bindings import driver

    given = spec.arguments
    wide = [driver.cuuint64_t(value) for value in given["extents"]], [driver.cuuint64_t(v) for v in given["strides"]]
    steps = [driver.cuuint32_t(value) for value in given["element_strides"]]
    tail = (
        driver.CUtensorMapInterleave(0), driver.CUtensorMapSwizzle(given["swizzle"]), driver.CUtensorMapL2promotion(0),
        driver.CUtensorMapFloatOOBfill(given.get("out_of_bounds", 0)),
    )  # fmt: skip
    corners = list(given["lower_corner"]), list(given["upper_corner"])
    counts = given["channels_per_pixel"], given["pixels_per_column"]
    head = driver.CUtensorMapDataType(given["data_type"]), len(given["extents"]), address, *wide
    status, encoded = driver.cuTensorMapEncodeIm2col(*head, *corners, *counts, steps, *tail)
    if status:
        raise RuntimeError(f"the driver does not encode {given}: {status.name}")
    return ctypes.string_at(int(encoded.getPtr()), MAP_BYTES)


def _on_device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()).cuda()


def run(case: Case, setup: Setup) -> tuple[np.ndarray, ...]:
    """The outputs on the current GPU. Raises RuntimeError; after a fault the process is of no more use."""
    kernel = load_kernel(get_kernel(case.source(), ARCH), 0, case.smem_bytes)
    inputs = [_on_device(each) for each in setup.inputs]
    outputs = [torch.full((each.nbytes,), SENTINEL, dtype=torch.uint8, device="cuda") for each in setup.expected]
    gave_up = torch.zeros(4, dtype=torch.int32, device="cuda")
    given, made = ([each.data_ptr() for each in tensors] for tensors in (inputs, outputs))
    block = ArgumentBlock(PARAMS_BYTES)
    block.buffer[:] = list(packed(setup, given, made, gave_up.data_ptr(), _encode))
    stream = torch.cuda.current_stream().cuda_stream
    kernel.launch(1, case.threads, case.smem_bytes, stream, block.pointer_array_address)
    torch.cuda.synchronize()
    if int(gave_up[0]):
        raise RuntimeError("a wait gave up")
    pairs = zip(outputs, setup.expected, strict=True)
    return tuple(got.cpu().numpy().view(like.dtype).reshape(like.shape) for got, like in pairs)


def main() -> None:
    """Run the cases named on the command line; a fault of the GPU ends the process."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.cuda.init()
    sources = {case.source().digest: case.source() for case in (BY_NAME[name] for name in names)}
    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        for future in [pool.submit(get_kernel, source, ARCH) for source in sources.values()]:
            future.exception()  # the case that needs it says what is wrong
    for name in names:
        try:
            outputs = run(BY_NAME[name], BY_NAME[name].setup())
        except Exception as error:
            (folder / f"{name}.error").write_text(f"{type(error).__name__}: {error}")
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                sys.exit(_CONTEXT_LOST)
            continue
        arrays: dict[str, Any] = {str(index): each for index, each in enumerate(outputs)}
        np.savez(folder / f"{name}.partial", **arrays)
        (folder / f"{name}.partial.npz").rename(folder / f"{name}.npz")


if __name__ == "__main__":
    main()
