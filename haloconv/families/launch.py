"""A kernel bound to its launch: geometry and scalars fixed, pointers and stream filled in at each call."""

from __future__ import annotations

import struct

import torch

from haloconv.env import device_facts, stand_in
from haloconv.jit import ArgumentBlock, KernelSource, get_kernel, load_kernel

_GRID_LIMIT = (1 << 31) - 1


def _no_stream(index: int | None) -> int:
    return 0


class Launch:
    """``launch(*pointers)`` queues the kernel on the current stream of its device.

    Raises RuntimeError at construction if the grid is larger than a launch can hold or if a CUDA graph is being
    captured (compiling and loading belong before the capture).
    """

    __slots__ = (
        "_arguments",
        "_fill",
        "_free",
        "_grid",
        "_index",
        "_kernel",
        "_several_devices",
        "_smem_bytes",
        "_stream",
        "_threads",
    )

    def __init__(
        self,
        source: KernelSource,
        device: torch.device,
        grid: int,
        threads: int,
        smem_bytes: int,
        params_format: str,
        fields: tuple[int, ...],
    ) -> None:
        emulated = stand_in() if device.type == "cpu" else None
        if emulated is None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{source.entry} is not ready for this problem, and nothing is compiled or loaded while a CUDA graph "
                "is captured: warm up, that is, call the layer once with inputs of this form before the capture"
            )
        if grid > _GRID_LIMIT:
            raise RuntimeError(f"{source.entry} would need {grid} blocks; a launch holds at most {_GRID_LIMIT}")
        pointers, scalars = params_format[:2], params_format[2:]
        self._fill = struct.Struct(f"={pointers}").pack_into
        self._arguments = bytes(struct.calcsize(f"={pointers}")) + struct.pack(f"={scalars}", *fields)
        self._free: list[ArgumentBlock] = []
        self._index = device.index
        self._several_devices = torch.cuda.device_count() > 1
        self._grid, self._threads, self._smem_bytes = grid, threads, smem_bytes
        if emulated is None:
            self._stream = torch._C._cuda_getCurrentRawStream
            self._kernel = load_kernel(get_kernel(source, device_facts(device.index).arch), device.index, smem_bytes)
        else:
            self._stream = _no_stream
            self._kernel = emulated.load(source, smem_bytes)

    def __call__(self, *pointers: int) -> None:
        try:
            block = self._free.pop()  # a block serves one thread at a time
        except IndexError:
            block = self._new_block()
        self._fill(block.buffer, 0, *pointers)
        index = self._index
        if self._several_devices and torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                self._queue(block.pointer_array_address)
        else:
            self._queue(block.pointer_array_address)
        self._free.append(block)

    def _queue(self, arguments_address: int) -> None:
        stream = self._stream(self._index)
        self._kernel.launch(self._grid, self._threads, self._smem_bytes, stream, arguments_address)

    def _new_block(self) -> ArgumentBlock:
        size = (len(self._arguments) + 7) // 8 * 8
        block = ArgumentBlock(size)
        block.buffer[: len(self._arguments)] = self._arguments
        return block
