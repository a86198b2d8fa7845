"""An exported file without a GPU: its C++ built by g++ on a stub of the CUDA runtime, its kernels run by the emulator.

The host functions are the file's own; each launch that they make is compared with the recorded one and handed to the
emulator. So what is tested is the whole file but for nvcc, pybind11 and the checks of devices.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from haloconv.emulator.device import EmulatedDevice, EmulatedKernel
from haloconv.emulator.tensor_map import encode_tiled
from haloconv.export.cpp import NamedKernel, named_kernels
from haloconv.export.layers import Layer
from haloconv.export.record import Address, Clear, LaunchRecord, MapRecord, Step, Tape
from haloconv.jit import Pixels
from haloconv.jit.params import params_of, unpacked

STUB = Path(__file__).resolve().parent / "cuda_stub"
STREAM = 0x5EED0
_BUILD = (
    "g++",
    "-std=c++17",
    "-O0",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wno-missing-braces",
    "-Wno-psabi",
    "-Werror",
    f"-I{STUB}",
)
_TYPES = {"i": "int", "I": "unsigned", "q": "int64_t", "f": "float", "Q": "void*", "128s": "TensorMap"}
_ENCODED_LISTS = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)


def load_text(text: str, name: str = "exported") -> types.ModuleType:
    """The exported file as a module; nothing is built."""
    module = types.ModuleType(name)
    exec(compile(text, f"{name}.py", "exec"), vars(module))
    return module


def build_host(module: types.ModuleType, kernels: Iterable[NamedKernel], folder: Path) -> ctypes.CDLL:
    """The file's host code built by g++ and loaded. Of the kernels it has the names and the structs that they take."""
    text = "\n".join([module.LAUNCHER, *map(_kernel_stub, kernels), module.LAUNCHES])
    (folder / "source.cpp").write_text(module.DECLARATIONS.join(["#include <cstdint>\n", text]), encoding="utf-8")
    compiled([*_BUILD, "source.cpp", "-o", "host.so"], folder)
    return ctypes.CDLL(str(folder / "host.so"))


def compiled(command: list[str], folder: Path) -> None:
    """Run a compiler in the folder, in English."""
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[:3000]


def _kernel_stub(kernel: NamedKernel) -> str:
    """A kernel that does nothing, of the same struct without inner ones: what follows one is aligned as it was."""
    members, end = "", 0
    for i, field in enumerate(params_of(kernel.source)):
        gap = next((f"alignas({each}) " for each in (8, 64) if end < field.offset == end + -end % each), "")
        members += f" {gap}{_TYPES[field.code]} _{i};"
        end = field.offset + struct.calcsize(field.code)
    return (
        f"namespace {kernel.namespace} {{\nstruct alignas(64) TensorMap {{ uint64_t opaque[16]; }};\n"
        f"struct Params {{{members} }};\nvoid {kernel.source.entry}(Params) {{}}\n}}"
    )


class _Callbacks(ctypes.Structure):
    _fields_ = [
        ("launch", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t, ctypes.c_uint,
                                    ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p))),
        ("allow", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)),
        ("fill", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_int64)),
        ("encode", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p,
                                    ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int))),
    ]  # fmt: skip


class Host:
    """The host functions of an exported file, callable as those that load_inline gives.

    ``run(launch, arguments_address)`` gets each recorded launch after its bytes have been compared with what the C++
    passed on. ``faults`` has a sentence for each difference.
    """

    def __init__(
        self, module: types.ModuleType, layers: list[Layer], folder: Path, run: Callable[[LaunchRecord, int], None]
    ) -> None:
        self._tapes = {name: tape for layer in layers for name, tape in layer.functions.items()}
        self._library = build_host(module, named_kernels(self._tapes), folder)
        self._run, self._allowed = run, 0
        self._waiting: list[Step] = []
        self._places: dict[str, int] = {}
        self._encoded: list[MapRecord] = []
        self._error: BaseException | None = None
        self.faults: list[str] = []
        self.launches = 0
        kinds: dict[str, Any] = {name: kind for name, kind, *_ in _Callbacks._fields_}
        handlers: dict[str, Callable[..., None]] = {
            "launch": self._launch,
            "allow": self._allow,
            "fill": self._fill,
            "encode": self._encode,
        }
        self._callbacks = _Callbacks(**{name: kinds[name](self._kept(each)) for name, each in handlers.items()})
        exported = _Callbacks.in_dll(self._library, "hc_callbacks")
        for name in kinds:
            setattr(exported, name, getattr(self._callbacks, name))

    def _kept(self, handler: Callable[..., None]) -> Callable[..., int]:
        """The handler as a callback that fails nowhere: nothing may be thrown through the C code between."""

        def call(*arguments: object) -> int:
            if self._error is None:
                try:
                    handler(*arguments)
                except BaseException as error:
                    self._error = error
            return 0

        return call

    def __getattr__(self, name: str) -> Callable[..., None]:
        tape: Tape = self.__dict__["_tapes"][name]
        names = (*tape.operands, tape.result, "workspace", "stream")
        function = getattr(self._library, f"_Z{len(name)}{name}{'l' * len(names)}")

        def call(*addresses: int) -> None:
            self._waiting, self._places = list(tape.steps), dict(zip(names, addresses, strict=True))
            function(*(ctypes.c_int64(each) for each in addresses))
            if self._error is not None:
                raise self._error
            if self._waiting:
                self.faults.append(f"{name} left {len(self._waiting)} steps out")

        return call

    def _place(self, address: Address | None) -> int:
        return 0 if address is None else self._places[address.tensor] + address.offset

    def _launch(self, *geometry: Any) -> None:
        wanted = self._waiting.pop(0)
        if not isinstance(wanted, LaunchRecord):
            raise AssertionError(f"a launch in the place of {wanted}")
        *shape, stream, arguments = geometry
        block = ctypes.string_at(arguments[0], len(wanted.block))
        self._compare(wanted, (*shape, stream), block)
        self.launches += 1
        self._run(wanted, ctypes.addressof(arguments.contents))

    def _compare(self, wanted: LaunchRecord, geometry: tuple[int, ...], block: bytes) -> None:
        about = wanted.source.entry
        if geometry != (*wanted.shape, STREAM):
            self.faults.append(f"{about}: blocks, threads, bytes, cluster, stream {geometry}")
        if wanted.shape.smem_bytes > max(48 << 10, self._allowed):
            self.faults.append(f"{about}: {wanted.shape.smem_bytes} bytes of shared memory without leave")
        self._allowed = 0
        fields = params_of(wanted.source)
        maps = [each.value for each in wanted.arguments if each.field.is_map and each.value is not None]
        if maps != self._encoded:
            self.faults.append(f"{about}: maps {self._encoded}, recorded {maps}")
        self._encoded = []
        recorded = unpacked(fields, wanted.block)
        for each, got, packed in zip(wanted.arguments, unpacked(fields, block), recorded, strict=True):
            if each.field.is_map:
                continue
            want = packed
            if each.field.is_pointer:
                assert each.value is None or isinstance(each.value, Address)
                want = self._place(each.value)
            if got != want:
                self.faults.append(f"{about}.{each.field.name} is {got!r}, recorded {want!r}")

    def _allow(self, smem_bytes: int) -> None:
        self._allowed = smem_bytes

    def _fill(self, first: int, value: int, size_bytes: int, stream: int) -> None:
        wanted = self._waiting.pop(0)
        if not isinstance(wanted, Clear) or (first, size_bytes) != (self._place(wanted.address), wanted.size_bytes):
            raise AssertionError(f"a fill in the place of {wanted}")
        if (value, stream) != (0, STREAM):
            self.faults.append(f"filled with {value} on stream {stream}")
        ctypes.memset(first, value, size_bytes)

    def _encode(self, to: int, kind: int, rank: int, address: int, lists: ctypes.Array, modes: ctypes.Array) -> None:
        """Of im2col there are corners, too, and a box is channels and pixels."""
        in_a_box = rank if lists[4] is None else 2
        counts = (rank, rank - 1, in_a_box, rank)
        extents, strides, box, steps = (
            tuple((word * count).from_address(place))
            for word, count, place in zip(_ENCODED_LISTS, counts, lists[:4], strict=True)
        )
        pixels = None
        if lists[4] is not None:
            lower, upper = (tuple((ctypes.c_int * 2).from_address(place)) for place in lists[4:6])
            pixels = Pixels(lower, upper, steps[1:3])
            assert (steps[0], steps[3]) == (1, 1), "im2col passes over channels or images"
        interleave, swizzle, promotion, fill = modes[:4]
        offset, tensor = min((address - place, name) for name, place in self._places.items() if place <= address)
        self._encoded.append(MapRecord(kind, Address(tensor, offset), extents, strides, box, swizzle, pixels))
        encoded = encode_tiled(
            kind, address, extents, strides, box, steps, interleave=interleave, swizzle=swizzle,
            l2_promotion=promotion, out_of_bounds=fill, pixels=pixels,
        )  # fmt: skip
        ctypes.memmove(to, encoded, len(encoded))


@contextmanager
def on_emulator(module: types.ModuleType, host: Host, device: EmulatedDevice, patch: pytest.MonkeyPatch) -> Iterator:
    """Inside, the file's layers take CPU tensors, and its launches go through ``host`` to the emulated device."""
    run = module.run

    def ready(tensor: torch.Tensor, name: str, shape: tuple, memory_format: torch.memory_format, layer: str) -> object:
        assert tuple(tensor.shape) == shape, name
        return tensor.detach().contiguous(memory_format=memory_format)

    def watched(layer: str, direction: str, operands: Iterable[torch.Tensor | None], *rest: object) -> object:
        for each in operands:
            if each is not None:
                device.expose(each)
        with device:
            return run(layer, direction, operands, *rest)

    class Current:
        cuda_stream = STREAM

    with patch.context() as inside:
        inside.setattr(module, "ready", ready)
        inside.setattr(module, "run", watched)
        inside.setattr(module, "extension", lambda: host)
        inside.setattr(torch.cuda, "device", lambda device: nullcontext())
        inside.setattr(torch.cuda, "current_stream", lambda device: Current)
        yield


def emulate(launch: LaunchRecord, arguments_address: int) -> None:
    """Run a launch on the emulated device in force, with the arguments at the address."""
    kernel = EmulatedKernel(launch.source, launch.shape.smem_bytes)
    kernel.cluster_launch(*launch.shape)(0, arguments_address)
