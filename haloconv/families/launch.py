"""A kernel bound to its launch: geometry and scalars fixed, pointers and stream filled in at each call."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch

from haloconv.env import device_facts, stand_in
from haloconv.jit import (
    TENSOR_MAP_BYTES,
    ArgumentBlock,
    BoxMap,
    KernelSource,
    encode_tiled,
    get_kernel,
    load_kernel,
)

_GRID_LIMIT = (1 << 31) - 1
_ALIGNMENT, _MAP_ALIGNMENT = 8, 64
_KEPT_ENCODINGS = 64


def _no_stream(index: int | None) -> int:
    return 0


class _Encodings(dict[int, bytes]):
    """A map's encodings by the pointer that they were made for; a pointer that is missing is encoded.

    They are kept because PyTorch's caching allocator hands out few addresses, again and again. At _KEPT_ENCODINGS all
    are forgotten, which costs less than knowing the oldest. Threads share them: each step is atomic, and a pointer that
    two threads miss at once is encoded twice.
    """

    __slots__ = ("_encode", "_map")

    def __init__(self, box_map: BoxMap, encode: Callable[..., bytes]) -> None:
        self._map, self._encode = box_map, encode

    def __missing__(self, pointer: int) -> bytes:
        m = self._map
        encoded = self._encode(m.data_type, pointer + m.offset, m.extents, m.strides, m.box, swizzle=m.swizzle)
        if len(self) >= _KEPT_ENCODINGS:
            self.clear()
        self[pointer] = encoded
        return encoded


def _filler(layout: str, maps: tuple[BoxMap | None, ...], encode: Callable[..., bytes]) -> Callable[..., None]:
    """What writes a call's maps and pointers into a buffer: ``fill(buffer, offset, *pointers)``."""
    pack = struct.Struct(layout).pack_into
    encodings = [(each.pointer, _Encodings(each, encode)) for each in maps if each is not None]
    if not encodings:
        return pack

    def fill(buffer: object, offset: int, *pointers: int) -> None:
        pack(buffer, offset, *[known[pointers[index]] for index, known in encodings], *pointers)

    return fill


class Launch:
    """``launch(*pointers)`` queues the kernel on the current stream of its device.

    The kernel's struct has the TensorMap of each of ``maps`` (None: one that the kernel does not read), then the
    pointers, then the scalars ``fields``, without gaps. ``params_format`` begins with the pointers (``"5Q"``); the
    scalars follow.

    A call raises DriverError if the driver does not encode a map or refuses the launch.

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
        maps: tuple[BoxMap | None, ...] = (),
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
        places = "".join(f"{TENSOR_MAP_BYTES}{'x' if each is None else 's'}" for each in maps)
        layout = f"={places}{pointers}"
        self._fill = _filler(layout, maps, encode_tiled if emulated is None else emulated.encode_tiled)
        arguments = bytes(struct.calcsize(layout)) + struct.pack(f"={scalars}", *fields)
        self._arguments = arguments + bytes(-len(arguments) % (_MAP_ALIGNMENT if maps else _ALIGNMENT))
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
        block = ArgumentBlock(len(self._arguments))
        block.buffer[:] = self._arguments
        return block
