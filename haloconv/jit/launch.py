"""A kernel bound to its launch: shape and scalars fixed, pointers and stream filled in at each call."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from haloconv.device import Device, device_facts, is_capturing, stand_in
from haloconv.jit.cache import get_kernel
from haloconv.jit.driver import TENSOR_MAP_BYTES, ArgumentBlock, LoadedKernel, load_kernel
from haloconv.jit.params import params_of, size_of
from haloconv.jit.source import KernelSource
from haloconv.jit.tensor_map import BoxMap, encode_tiled

_GRID_LIMIT, _MOST_CLUSTER = (1 << 31) - 1, 8
_ALIGNMENT, _MAP_ALIGNMENT = 8, 64
_KEPT_ENCODINGS = 64


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
        pixels = {} if m.pixels is None else {"pixels": m.pixels}
        address = pointer + m.offset
        encoded = self._encode(m.data_type, address, m.extents, m.strides, m.box, swizzle=m.swizzle, **pixels)
        if len(self) >= _KEPT_ENCODINGS:
            self.clear()
        self[pointer] = encoded
        return encoded


def _filler(layout: str, maps: list[BoxMap | None], encode: Callable[..., bytes]) -> Callable[..., None]:
    """What writes a call's maps and pointers into a buffer: ``fill(buffer, offset, *pointers)``."""
    pack = struct.Struct(layout).pack_into
    encodings = [(each.pointer, _Encodings(each, encode)) for each in maps if each is not None]
    if not encodings:
        return pack

    def fill(buffer: ctypes.Array[ctypes.c_ubyte], offset: int, *pointers: int) -> None:
        pack(buffer, offset, *[known[pointers[index]] for index, known in encodings], *pointers)

    return fill


def _device(device: torch.device) -> Device:
    """What runs kernels on tensors of the device: what stands in for a GPU on the CPU, else CUDA."""
    emulated = stand_in() if device.type == "cpu" else None
    if emulated is not None:
        return emulated
    facts, index = device_facts(device.index), device.index

    def load(source: KernelSource, smem_bytes: int) -> LoadedKernel:
        return load_kernel(get_kernel(source, facts.arch), index, smem_bytes)

    stream = torch._C._cuda_getCurrentRawStream
    return Device(facts, load, encode_tiled, stream=stream, keeps_time=True)


class LaunchShape(NamedTuple):
    """Blocks of a launch, threads of a block, bytes of its dynamic shared memory, and blocks of a cluster."""

    grid: int
    threads: int
    smem_bytes: int = 0
    cluster: int = 1


Value = int | float | Mapping[str, "Value"] | Sequence["Value"]
"""A scalar of a kernel's struct, the fields of an inner struct by name, or the elements of an array."""


def _flat(name: str, value: Value) -> Iterator[tuple[str, int | float]]:
    """Scalars as jit.params names them: ``cut.rows``, ``steps[1]``."""
    if isinstance(value, Mapping):
        for inner, each in value.items():
            yield from _flat(f"{name}.{inner}" if name else inner, each)
    elif isinstance(value, Sequence):
        for index, each in enumerate(value):
            yield from _flat(f"{name}[{index}]", each)
    else:
        yield name, value


class _Arguments(NamedTuple):
    """A kernel's struct: the format of its maps and pointers, which come first; the maps; the whole with its scalars.

    ``maps`` has None for a map that the kernel does not read.
    """

    lead: str
    maps: list[BoxMap | None]
    whole: bytes


def _arguments(source: KernelSource, values: Mapping[str, Value], maps: Mapping[str, BoxMap]) -> _Arguments:
    """The struct with these scalars, all of them, and those of its maps that the kernel reads.

    Raises TypeError if names are missing or unknown, struct.error if a scalar does not fit its type.
    """
    fields = params_of(source)
    places = [each for each in fields if each.is_map]
    pointers = [each for each in fields if each.is_pointer]
    scalars = {each.name: each for each in fields if not (each.is_map or each.is_pointer)}
    given = dict(_flat("", values))
    wrong = given.keys() ^ scalars.keys() | maps.keys() - {each.name for each in places}
    if wrong:
        raise TypeError(f"{source.entry} takes other fields: {', '.join(sorted(wrong))} are missing or unknown")
    if [*places, *pointers] != list(fields[: len(places) + len(pointers)]):
        raise TypeError(f"{source.entry} has maps or pointers behind its scalars")
    found = [maps.get(each.name) for each in places]
    lead = "".join(f"{TENSOR_MAP_BYTES}{'x' if each is None else 's'}" for each in found) + f"{len(pointers)}Q"
    alignment = _MAP_ALIGNMENT if places else _ALIGNMENT
    whole = bytearray(ceil_to(size_of(fields), alignment))
    for name, value in given.items():
        struct.pack_into(f"={scalars[name].code}", whole, scalars[name].offset, value)
    return _Arguments(f"={lead}", found, bytes(whole))


class Launch:
    """``launch(*pointers)`` queues the kernel on the current stream of its device.

    ``fields`` are the scalars of the kernel's struct by name, ``maps`` those of its tensor maps that it reads. A call
    takes the struct's pointers in their order. ``source`` is the kernel's. With ``pdl`` (programmatic dependent launch)
    the grid may begin as soon as every block of the kernel before it on the stream has said so or ended
    (LoadedKernel.pdl_launch).

    A call raises DriverError if the driver does not encode a map or refuses the launch.

    Raises RuntimeError at construction if the grid is larger than a launch can hold or if a CUDA graph is being
    captured (compiling and loading belong before the capture), TypeError if the fields are not those of the struct,
    ValueError if clusters are no whole part of the grid, have more than 8 blocks, or are asked for with ``pdl``.
    """

    __slots__ = (
        "_arguments",
        "_fill",
        "_free",
        "_index",
        "_kernel",
        "_pdl",
        "_several_devices",
        "_shape",
        "_stream",
        "_submits",
        "source",
    )

    def __init__(
        self,
        source: KernelSource,
        device: torch.device,
        shape: LaunchShape,
        fields: Mapping[str, Value],
        maps: Mapping[str, BoxMap] | None = None,
        pdl: bool = False,
    ) -> None:
        arguments = _arguments(source, fields, maps or {})
        if is_capturing(device):
            raise RuntimeError(
                f"{source.entry} is not ready for this problem, and nothing is compiled or loaded while a CUDA graph "
                "is captured: warm up, that is, call the layer once with inputs of this form before the capture"
            )
        self.source = source
        if shape.grid > _GRID_LIMIT:
            raise RuntimeError(f"{source.entry} would need {shape.grid} blocks; a launch holds at most {_GRID_LIMIT}")
        if shape.cluster > 1 and (shape.grid % shape.cluster or shape.cluster > _MOST_CLUSTER or pdl):
            raise ValueError(f"{source.entry}: no clusters of {shape.cluster} in {shape.grid} blocks, PDL: {pdl}")
        place = _device(device)
        self._fill = _filler(arguments.lead, arguments.maps, place.encode_tiled)
        self._arguments, self._shape, self._pdl = arguments.whole, shape, pdl
        self._free: list[ArgumentBlock] = []
        self._submits: dict[int, Callable[[int, int], None]] = {}  # of each block of arguments, with ``pdl``
        self._index = device.index
        self._several_devices = torch.cuda.device_count() > 1
        self._stream, self._kernel = place.stream, place.load(source, shape.smem_bytes)

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
        submit = self._submits.get(arguments_address)
        if submit is None:
            self._kernel.launch(*self._shape[:3], self._stream(self._index), arguments_address)
        else:
            submit(self._stream(self._index), arguments_address)

    def _new_block(self) -> ArgumentBlock:
        block = ArgumentBlock(len(self._arguments))
        ctypes.memmove(block.buffer, self._arguments, len(self._arguments))
        if self._shape.cluster > 1:
            self._submits[block.pointer_array_address] = self._kernel.cluster_launch(*self._shape)
        elif self._pdl and isinstance(self._kernel, LoadedKernel):
            self._submits[block.pointer_array_address] = self._kernel.pdl_launch(*self._shape[:3])
        return block


def ceil_to(value: int, multiple: int) -> int:
    """The least multiple that is not below ``value``."""
    return -(-value // multiple) * multiple
