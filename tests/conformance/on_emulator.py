"""Running a conformance case on the emulator."""

from __future__ import annotations

import numpy as np

from haloconv.emulator import Module, Region
from haloconv.emulator.tensor_map import encode_im2col, encode_tiled
from haloconv.jit import ArgumentBlock
from haloconv.jit.launch import LaunchShape
from tests.conformance.arguments import PARAMS_BYTES, packed
from tests.conformance.case import SENTINEL, Case, MapSpec, Setup

_ALIGNMENT = 256
_modules: dict[str, Module] = {}


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that starts at a multiple of 256 bytes, as device memory does."""
    storage = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -storage.ctypes.data % _ALIGNMENT
    copy = storage[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def empty_output(like: np.ndarray) -> np.ndarray:
    """An output before the kernel: every byte is SENTINEL."""
    return np.full(like.nbytes, SENTINEL, np.uint8).view(like.dtype).reshape(like.shape)


def encode(spec: MapSpec, address: int) -> bytes:
    """A tensor map of the emulator."""
    return (encode_im2col if spec.im2col else encode_tiled)(address=address, **spec.arguments)


def run(case: Case, setup: Setup, seed: int) -> tuple[np.ndarray, ...]:
    """The outputs under the schedule of ``seed``. Raises EmulatorError for what the emulator finds wrong."""
    source = case.source()
    if source.digest not in _modules:
        _modules[source.digest] = Module(source)
    inputs = [aligned(each) for each in setup.inputs]
    outputs = [aligned(empty_output(each)) for each in setup.expected]
    if setup.initial is not None:
        outputs[0][...] = setup.initial
    gave_up = aligned(np.zeros(4, np.uint32))
    block = ArgumentBlock(PARAMS_BYTES)
    given, made = ([each.ctypes.data for each in arrays] for arrays in (inputs, outputs))
    block.buffer[:] = list(packed(setup, given, made, gave_up.ctypes.data, encode))
    regions = [Region(each.ctypes.data, each.ctypes.data + each.nbytes, False) for each in inputs]
    regions += [Region(each.ctypes.data, each.ctypes.data + each.nbytes, True) for each in (*outputs, gave_up)]
    _modules[source.digest].run(
        LaunchShape(1, case.threads, case.smem_bytes), block.pointer_array_address, regions, seed, limit_s=30.0
    )
    assert not gave_up[0], f"{case.name}: a wait gave up"
    return tuple(outputs)
