"""What a family launches for a problem, written down instead of run: kernels, arguments, temporary memory.

A family is bound and called as on a GPU, but on the stand-in of this file and with tensors that have a place and no
memory. What it launches is the list that an exported file repeats.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from haloconv import plan
from haloconv.choose.choice import Choice, config_of
from haloconv.device import Device, DeviceFacts, set_stand_in, stand_in
from haloconv.families import FAMILIES
from haloconv.families.reduce.bgrad import bind_bgrad
from haloconv.jit import TENSOR_MAP_BYTES, KernelSource, Pixels
from haloconv.jit.launch import LaunchShape, ceil_to
from haloconv.jit.params import Field, params_of, size_of, unpacked
from haloconv.layout import Layout, strides_of
from haloconv.problem import Problem, Request, TensorForm

CPU = torch.device("cpu")
WORKSPACE = "workspace"

_PLACE_BITS = 44  # tensors are that far apart, so that an address tells the tensor and the byte in it
_ALIGNMENT = 256


class Address(NamedTuple):
    """A byte of a tensor: of an operand, of the result, or of the workspace."""

    tensor: str
    offset: int = 0


class MapRecord(NamedTuple):
    """What was asked of the driver's encoder of tensor maps."""

    data_type: int
    address: Address
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    pixels: Pixels | None = None


Value = int | float | Address | MapRecord | None

_Run = Callable[..., Any]
"""A bound call, which here gets tensors that have a place and no memory."""


class Argument(NamedTuple):
    """A field of a kernel's struct and what a launch puts there: None is a null pointer, or a map that is not read."""

    field: Field
    value: Value


class LaunchRecord(NamedTuple):
    """One launch. ``block`` holds the bytes of the struct as the family packed them, with stand-in addresses."""

    source: KernelSource
    shape: LaunchShape
    arguments: tuple[Argument, ...]
    block: bytes


class Clear(NamedTuple):
    """A tensor that is filled with zeros."""

    address: Address
    size_bytes: int


Step = LaunchRecord | Clear


@dataclass(frozen=True)
class Tape:
    """All that one direction of a problem does, in order. ``operands`` are the names of what it is called with."""

    operands: tuple[str, ...]
    result: str
    steps: tuple[Step, ...]
    workspace_bytes: int

    @property
    def launches(self) -> tuple[LaunchRecord, ...]:
        return tuple(step for step in self.steps if isinstance(step, LaunchRecord))


@dataclass(eq=False)
class _Placed:
    """A tensor with an address and no memory, with those methods of torch.Tensor that families call."""

    recorder: Recorder
    shape: tuple[int, ...]
    dtype: torch.dtype
    index: int
    device: torch.device = CPU

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        return self.index << _PLACE_BITS

    def is_contiguous(self) -> bool:
        return True

    def new_empty(self, shape: int | tuple[int, ...], dtype: torch.dtype | None = None) -> _Placed:
        return self.recorder.place(shape, dtype or self.dtype)

    def new_empty_strided(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> _Placed:
        return self.recorder.place(shape, self.dtype)

    def zero_(self) -> _Placed:
        self.recorder.steps.append((self, self.size_bytes))
        return self


@dataclass(frozen=True)
class _Kernel:
    """What Recorder.load gives; ``launch`` has the arguments of jit.LoadedKernel's."""

    recorder: Recorder
    source: KernelSource

    def launch(self, grid_x: int, block_threads: int, smem_bytes: int, stream: int, params_address: int) -> None:
        self._note(LaunchShape(grid_x, block_threads, smem_bytes), params_address)

    def cluster_launch(self, *shape: int) -> Callable[[int, int], None]:
        return lambda stream, params_address: self._note(LaunchShape(*shape), params_address)

    def _note(self, shape: LaunchShape, params_address: int) -> None:
        block = ctypes.c_void_p.from_address(params_address).value or 0
        packed = ctypes.string_at(block, size_of(params_of(self.source)))
        self.recorder.steps.append((self.source, shape, packed))


class Recorder(TorchFunctionMode):
    """A stand-in for a GPU of the given facts: tensors that are made get a place, launches and zeros are noted."""

    def __init__(self, facts: DeviceFacts) -> None:
        super().__init__()
        self.facts = facts
        self.steps: list[tuple[Any, ...]] = []
        self.placed: list[_Placed] = []
        self.maps: list[tuple[Any, ...]] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            return self.place(args[0], kwargs["dtype"])
        return func(*args, **(kwargs or {}))

    def place(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> _Placed:
        """A new tensor."""
        placed = _Placed(self, (shape,) if isinstance(shape, int) else tuple(shape), dtype, len(self.placed) + 1)
        self.placed.append(placed)
        return placed

    def load(self, source: KernelSource, smem_bytes: int) -> _Kernel:
        """A kernel whose launches are noted."""
        return _Kernel(self, source)

    def encode_tiled(
        self,
        data_type: int,
        address: int,
        *shape: Sequence[int],
        swizzle: int,
        pixels: Pixels | None = None,
    ) -> bytes:
        """Bytes that name the request, in place of a tensor map; ``shape`` is its extents, strides and box."""
        extents, strides, box = (tuple(each) for each in shape)
        self.maps.append((int(data_type), address, extents, strides, box, int(swizzle), pixels))
        return len(self.maps).to_bytes(TENSOR_MAP_BYTES, "little")


@contextmanager
def recorder(facts: DeviceFacts) -> Iterator[Recorder]:
    """Inside, CPU tensors are treated as living on a GPU of these facts, on which nothing runs.

    Plans are forgotten on entry and on exit. Raises RuntimeError inside another stand-in.
    """
    if stand_in() is not None:
        raise RuntimeError("another stand-in for a GPU is in force, such as the emulator's")
    device = Recorder(facts)
    plan.clear_plans()
    set_stand_in(Device(facts, device.load, device.encode_tiled))
    try:
        yield device
    finally:
        set_stand_in(None)
        plan.clear_plans()


@dataclass(frozen=True)
class Forms:
    """How the tensors of a layer are stored: ``"nchw"`` or ``"nhwc"``, all dense and at multiples of 16 bytes."""

    x: Layout
    w: Layout
    y: Layout = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "y", "nhwc" if "nhwc" in (self.x, self.w) else "nchw")


def tape_of(device: Recorder, problem: Problem, choice: Choice, forms: Forms) -> Tape:
    """What the chosen family does for the problem, with the chosen config if it offers it, else with its best."""
    shapes = {"x": (problem.x_shape, forms.x), "w": (problem.w_shape, forms.w), "y": (problem.y_shape, forms.y)}
    names = {"fprop": ("x", "w", "b"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}[problem.direction]
    first, second = (shapes[name.removeprefix("d")] for name in names[:2])
    stored = [TensorForm(strides_of(*each), True) for each in (first, second)]
    request = Request(problem, stored[0], stored[1], forms.w if problem.direction == "wgrad" else forms.y, CPU)
    run: _Run = FAMILIES[choice.family].bind(request, config_of(choice, request))
    operands: list[_Placed | None] = [device.place(shape, problem.dtype) for shape, _ in (first, second)]
    if problem.direction == "fprop":
        operands.append(device.place(problem.k, problem.dtype) if problem.bias else None)
    with device:
        result = run(*operands)
    return _finished(device, names, operands, {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}[problem.direction], result)


def bgrad_tape(device: Recorder, problem: Problem, forms: Forms) -> Tape:
    """What the bias gradient of a layer does."""
    form = TensorForm(strides_of(problem.y_shape, forms.y), True)
    run: _Run = bind_bgrad(problem.dtype, problem.y_shape, form, CPU)
    dy = device.place(problem.y_shape, problem.dtype)
    with device:
        result = run(dy)
    return _finished(device, ("dy",), [dy], "db", result)


def _finished(
    device: Recorder, names: tuple[str, ...], operands: list[_Placed | None], result_name: str, result: _Placed
) -> Tape:
    """The notes as a tape, with names for addresses; the recorder is ready for the next one."""
    places = {each.index: Address(name) for name, each in zip(names, operands, strict=True) if each is not None}
    places[result.index] = Address(result_name)
    workspace_bytes = 0
    for each in device.placed:
        if each.index not in places:
            places[each.index] = Address(WORKSPACE, workspace_bytes)
            workspace_bytes += ceil_to(each.size_bytes, _ALIGNMENT)

    def named(pointer: int) -> Address:
        place = places[pointer >> _PLACE_BITS]
        return Address(place.tensor, place.offset + pointer % (1 << _PLACE_BITS))

    steps = tuple(_step(note, named, device.maps) for note in device.steps)
    device.steps, device.placed, device.maps = [], [], []
    return Tape(names, result_name, steps, workspace_bytes)


def _step(note: tuple[Any, ...], named: Callable[[int], Address], maps: list[tuple[Any, ...]]) -> Step:
    if isinstance(note[0], _Placed):
        return Clear(named(note[0].data_ptr()), note[1])
    source, shape, block = note
    fields = params_of(source)
    arguments = []
    for each, packed in zip(fields, unpacked(fields, block), strict=True):
        value: Value
        if isinstance(packed, bytes):
            number = int.from_bytes(packed, "little")
            data_type, address, *rest = maps[number - 1] if number else (0, 0)
            value = MapRecord(data_type, named(address), *rest) if number else None
        elif each.is_pointer:
            value = named(int(packed)) if packed else None
        else:
            value = packed
        arguments.append(Argument(each, value))
    return LaunchRecord(source, shape, tuple(arguments), block)
