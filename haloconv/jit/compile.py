"""Compiling, loading and launching: the only file that imports cuda-core and cuda-bindings, and only when needed.

Compiling needs no GPU and no driver. Loading and launching do, and are never tried without one.
"""

from __future__ import annotations

import ctypes
import io
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from haloconv.jit.source import KernelSource, Origin, is_marker

COMPILE_FLAGS = (
    "--std=c++17",
    "--device-as-default-execution-space",
    "--fmad=true",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--ptxas-options=-v",
)
"""How every kernel is compiled, beside its architecture: C++17, contraction to FMA, no fast math, a resource report."""

TENSOR_MAP_BYTES = 128
"""Size of a tensor map (CUtensorMap). Its place must be a multiple of 64 bytes."""

_TEXT_NAME = "joined.cu"
_DEFAULT_SMEM_BYTES = 48 * 1024
_INVALID_CONTEXT = 201
_importing = threading.Lock()


class CompileError(RuntimeError):
    """A kernel does not compile. The message shows the kernel, the line, the constants and NVRTC's log."""


class UnsupportedArchError(CompileError):
    """The NVRTC in use cannot compile for the architecture asked for."""


class ToolchainError(RuntimeError):
    """cuda-core, cuda-bindings or NVRTC is missing or broken. The message names the command that installs it."""


class DriverError(RuntimeError):
    """A call of the CUDA driver failed. The message has the driver's name and text of the error, and what was tried."""


class Resources(NamedTuple):
    """What ptxas reports for one entry: registers and spill and stack bytes per thread, smem per block."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    static_smem_bytes: int


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel: the image that the driver loads, and what the compiler reported about ``entry``.

    ``spill_bytes`` counts spill stores and loads of one thread. ``nvrtc`` is the version that compiled it (``"13.0"``).
    """

    image: bytes
    entry: str
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_smem_bytes: int
    nvrtc: str
    compile_ms: float


# --- compiling


def install_command() -> str:
    """The command that installs what compiling needs, for the CUDA version that PyTorch was built for."""
    extra = "cu12" if (torch.version.cuda or "13").startswith("12.") else "cu13"
    return f"pip install 'cuda-core[{extra}]>=1.2,<2'"


@cache
def nvrtc_info() -> tuple[str, str]:
    """Version (``"13.0"``) and path of the NVRTC library that compiles the kernels; loads it.

    Raises ToolchainError with the remedy if cuda-bindings or NVRTC is missing.
    """
    try:
        from cuda.bindings import nvrtc
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("nvrtc").abs_path or "unknown"
        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise ToolchainError(
            f"NVRTC, the CUDA run-time compiler, cannot be used ({error}): {install_command()}"
        ) from error
    if status:
        raise ToolchainError(f"NVRTC at {path} does not tell its version ({status.name}): {install_command()}")
    return f"{major}.{minor}", path


def compile_source(source: KernelSource, arch: str) -> Cubin:
    """Compile ``source`` for ``arch`` (such as ``"sm_90a"``). Works without a GPU and without a driver.

    Raises CompileError if the text does not compile, UnsupportedArchError if NVRTC does not know ``arch``,
    ToolchainError if the compiler is missing.
    """
    version, _ = nvrtc_info()
    _check_arch(arch, version)
    with _importing:  # two threads that import cuda-core at once break its loader
        try:
            from cuda.core import Program, ProgramOptions
        except (ImportError, RuntimeError) as error:
            raise ToolchainError(f"cuda-core cannot be used ({error}): {install_command()}") from error

    log = io.StringIO()
    start = time.perf_counter()
    try:
        program = Program(source.text, "c++", ProgramOptions(name=_TEXT_NAME, arch=arch, **_program_options(version)))
        image = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:
        raise CompileError(_explain(source, arch, version, str(error))) from error
    compile_ms = 1e3 * (time.perf_counter() - start)
    try:
        resources = parse_resources(log.getvalue(), source.entry)
    except ValueError as error:
        raise CompileError(_explain(source, arch, version, str(error))) from error
    return Cubin(image, source.entry, arch, *resources, nvrtc=version, compile_ms=compile_ms)


def parse_resources(log: str, entry: str) -> Resources:
    """The figures that ``ptxas -v`` reports for ``entry``, summed over the functions that it calls and that stay calls.

    Raises ValueError if the log has no complete report for the entry.
    """
    sections = re.split(r"^.*Compiling entry function '(\w+)'.*$", log, flags=re.MULTILINE)
    reports = dict(zip(sections[1::2], sections[2::2], strict=True))
    if entry not in reports:
        compiled = ", ".join(reports) or "none"
        raise ValueError(f'no entry "{entry}" (entries compiled: {compiled}); is it extern "C" __global__?')
    report = reports[entry]
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    used = re.search(r"Used (\d+) registers(.*)", report)
    if not frames or used is None:
        raise ValueError(f'incomplete report about the entry "{entry}":\n{report}')
    smem = re.search(r"(\d+)(?:\+\d+)? bytes smem", used.group(2))
    return Resources(
        registers=int(used.group(1)),
        spill_bytes=sum(int(stores) + int(loads) for _, stores, loads in frames),
        stack_bytes=sum(int(stack) for stack, _, _ in frames),
        static_smem_bytes=int(smem.group(1)) if smem else 0,
    )


def _program_options(version: str) -> dict[str, object]:
    """COMPILE_FLAGS in the words of cuda-core. NVRTC's own cache is off: its hits come without the resource report."""
    has_cache = tuple(map(int, version.split("."))) >= (12, 9)
    return {
        "std": "c++17",
        "device_as_default_execution_space": True,
        "fma": True,
        "ftz": False,
        "prec_div": True,
        "prec_sqrt": True,
        "ptxas_options": ["-v"],
        **({"no_cache": True} if has_cache else {}),
    }


def _check_arch(arch: str, version: str) -> None:
    number = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if number is None:
        raise UnsupportedArchError(f"'{arch}' is no architecture of the form sm_80 or sm_90a")
    supported = _supported_archs()
    if int(number.group(1)) in supported:
        return
    remedy = "an NVRTC of another CUDA version is needed"
    if int(number.group(1)) < min(supported):
        remedy += ": use a PyTorch for CUDA 12 and pip install 'cuda-core[cu12]>=1.2,<2'"
    known = " ".join(f"sm_{each}" for each in supported)
    raise UnsupportedArchError(f"NVRTC {version} does not compile for {arch} (it knows {known}); {remedy}")


@cache
def _supported_archs() -> tuple[int, ...]:
    from cuda.bindings import nvrtc

    status, archs = nvrtc.nvrtcGetSupportedArchs()
    if status:
        raise ToolchainError(f"NVRTC does not list its architectures ({status.name}): {install_command()}")
    return tuple(sorted(archs))


def _explain(source: KernelSource, arch: str, version: str, log: str) -> str:
    """A compiler's log as a message: the first error with the lines around it, the constants, and the whole log."""
    numbers = [int(number) for number in re.findall(rf"{re.escape(_TEXT_NAME)}\((\d+)\): (?:catastrophic )?error", log)]
    constants = " ".join(f"{name}={value}" for name, value in source.constants) or "none"
    place = _place(source, numbers[0]) if numbers else f"{source.kernel}.cu"
    numbered = rf"{re.escape(_TEXT_NAME)}\((\d+)\)"
    translated = re.sub(numbered, lambda match: str(_place(source, int(match.group(1)))), log)
    parts = [
        f"kernel '{source.kernel}' does not compile, at {place}",
        *(["", *_excerpt(source, numbers[0]), ""] if numbers else []),
        f"entry {source.entry} for {arch}, NVRTC {version}",
        f"constants: {constants}",
        "",
        translated.replace(_TEXT_NAME, f"{source.kernel}.cu").strip("\0 \n"),
    ]
    return "\n".join(parts)


def _place(source: KernelSource, line: int) -> Origin | str:
    return source.origin(line) or f"<constants of {source.kernel}>:{line}"


def _excerpt(source: KernelSource, line: int, around: int = 3) -> list[str]:
    """The lines of the joined text around ``line``, each with its place in its own file; an arrow marks the line."""
    lines = source.text.splitlines()
    nearby = range(max(1, line - around), min(len(lines), line + around) + 1)
    shown = [number for number in nearby if not is_marker(lines[number - 1])]
    places = {number: str(_place(source, number)) for number in shown}
    width = max(map(len, places.values()), default=0)
    return [f"{'-->' if at == line else '   '} {places[at]:<{width}} | {lines[at - 1]}" for at in shown]


# --- loading and launching


class LoadedKernel:
    """A kernel on one device, ready to launch. It stays loaded as long as the process lives."""

    __slots__ = ("_context", "_library", "_submit", "cubin", "device_index", "dynamic_smem_bytes", "handle")

    def __init__(self, cubin: Cubin, device_index: int) -> None:
        from cuda.bindings import driver

        self.cubin = cubin
        self.device_index = device_index
        self.dynamic_smem_bytes = _DEFAULT_SMEM_BYTES - cubin.static_smem_bytes
        self._submit = driver.cuLaunchKernel
        self._context = _primary_context(device_index)
        self._library = _driver_call("cuLibraryLoadData", cubin.image, [], [], 0, [], [], 0)
        self.handle = _driver_call("cuLibraryGetKernel", self._library, cubin.entry.encode())
        self._load_now()

    def _load_now(self) -> None:
        """Bring the code onto the device: the first launch would do it, and could not while a graph is captured."""
        from cuda.bindings import driver

        asks_for_code = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        _driver_call("cuCtxPushCurrent", self._context)
        try:
            _driver_call("cuFuncGetAttribute", asks_for_code, _driver_call("cuKernelGetFunction", self.handle))
        finally:
            _driver_call("cuCtxPopCurrent")

    def allow_dynamic_smem(self, dynamic_smem_bytes: int) -> None:
        """Let a launch ask for up to ``dynamic_smem_bytes`` of dynamic shared memory per block.

        Raises DriverError if the device has less.
        """
        if dynamic_smem_bytes <= self.dynamic_smem_bytes:
            return
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = _driver_call("cuDeviceGet", self.device_index)
        try:
            _driver_call("cuKernelSetAttribute", attribute, dynamic_smem_bytes, self.handle, device)
        except DriverError as error:
            wanted = f"{self.cubin.entry} wants {dynamic_smem_bytes} bytes of dynamic shared memory per block"
            raise DriverError(f"{wanted} on cuda:{self.device_index}: {error}") from error
        self.dynamic_smem_bytes = dynamic_smem_bytes

    def launch(self, grid_x: int, block_threads: int, smem_bytes: int, stream: int, params_address: int) -> None:
        """Queue ``grid_x`` blocks of ``block_threads`` threads on ``stream`` (a raw CUstream of this kernel's device).

        ``smem_bytes`` is dynamic shared memory per block; ``params_address`` is ArgumentBlock.pointer_array_address.

        Raises DriverError if the driver refuses the launch. An error inside the kernel shows at a later call.
        """
        error = self._submit(self.handle, grid_x, 1, 1, block_threads, 1, 1, smem_bytes, stream, params_address, 0)[0]
        if error:
            self._recover(error, grid_x, block_threads, smem_bytes, stream, params_address)

    def _recover(self, error: int, grid_x: int, block_threads: int, smem_bytes: int, stream: int, params: int) -> None:
        """Launch once more on a thread that has no context yet; raise any other error."""
        if error == _INVALID_CONTEXT:
            _driver_call("cuCtxSetCurrent", self._context)
            error = self._submit(self.handle, grid_x, 1, 1, block_threads, 1, 1, smem_bytes, stream, params, 0)[0]
        if error:
            raise DriverError(
                f"launch of {self.cubin.entry} ({self.cubin.arch}) on cuda:{self.device_index} failed with "
                f"{_error_text(error)}; {grid_x} blocks of {block_threads} threads, {smem_bytes} bytes of dynamic "
                f"shared memory, {self.cubin.static_smem_bytes} static, {self.cubin.registers} registers per thread"
            )


class ArgumentBlock:
    """The single by-value struct argument of a kernel, in host memory that does not move.

    ``buffer`` has ``size_bytes`` bytes, starts at a multiple of ``alignment`` and suits ``struct.pack_into``.
    ``pointer_array_address`` is what cuLaunchKernel wants as ``kernelParams``. The driver copies the struct during the
    launch, so a block may be filled again right after it, but not by another thread before.
    """

    __slots__ = ("_pointers", "buffer", "pointer_array_address")

    def __init__(self, size_bytes: int, alignment: int = 64) -> None:
        storage = (ctypes.c_ubyte * (size_bytes + alignment))()
        offset = -ctypes.addressof(storage) % alignment
        self.buffer = (ctypes.c_ubyte * size_bytes).from_buffer(storage, offset)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.pointer_array_address = ctypes.addressof(self._pointers)


def encode_tensor_map(data_type: int, address: int, shape: tuple[Sequence[int], ...], modes: tuple[int, ...]) -> bytes:
    """What cuTensorMapEncodeTiled makes of ``shape`` (extents, strides, box, steps) and ``modes`` (interleave, swizzle,
    L2 promotion, fill). Raises DriverError.
    """
    from cuda.bindings import driver

    if not int(_driver_call("cuCtxGetCurrent")):  # on a thread that has launched nothing yet
        _driver_call("cuCtxSetCurrent", _primary_context(torch.cuda.current_device()))
    words = (driver.cuuint64_t, driver.cuuint64_t, driver.cuuint32_t, driver.cuuint32_t)
    lists = [[word(value) for value in values] for word, values in zip(words, shape, strict=True)]
    names = ("Interleave", "Swizzle", "L2promotion", "FloatOOBfill")
    enums = [getattr(driver, f"CUtensorMap{name}")(mode) for name, mode in zip(names, modes, strict=True)]
    kind = driver.CUtensorMapDataType(data_type)
    encoded = _driver_call("cuTensorMapEncodeTiled", kind, len(lists[0]), address, *lists, *enums)
    return ctypes.string_at(int(encoded.getPtr()), TENSOR_MAP_BYTES)


_loaded: dict[tuple[bytes, str, int], LoadedKernel] = {}
_loading = threading.Lock()


def load_kernel(cubin: Cubin, device_index: int, dynamic_smem_bytes: int) -> LoadedKernel:
    """``cubin`` on the CUDA device ``device_index``, allowed to use ``dynamic_smem_bytes`` per block. Loaded only once.

    Raises DriverError if there is no GPU, or if the driver does not take the image or the shared memory.
    """
    if not torch.cuda.is_available():
        raise DriverError(f"{cubin.entry} cannot be loaded: PyTorch sees no GPU")
    key = (cubin.image, cubin.entry, device_index)
    with _loading:
        kernel = _loaded.get(key)
        if kernel is None:
            kernel = _loaded[key] = LoadedKernel(cubin, device_index)
        kernel.allow_dynamic_smem(dynamic_smem_bytes)
    return kernel


@cache
def _primary_context(device_index: int) -> object:
    """The context that PyTorch uses on the device; retained for the life of the process."""
    _driver_call("cuInit", 0)
    return _driver_call("cuDevicePrimaryCtxRetain", _driver_call("cuDeviceGet", device_index))


def _driver_call(name: str, *arguments: object) -> object:
    """Call the driver's function ``name``; its result without the status. Raises DriverError if it fails."""
    from cuda.bindings import driver

    status, *results = getattr(driver, name)(*arguments)
    if status:
        raise DriverError(f"{name} failed with {_error_text(status)}")
    return results[0] if results else None


def _error_text(error: int) -> str:
    """``CUDA_ERROR_NAME (number: the driver's sentence)``, and the remedy where it is known."""
    from cuda.bindings import driver

    status = driver.CUresult(error)
    _, sentence = driver.cuGetErrorString(status)
    text = f"{status.name} ({int(error)}: {sentence.decode() if sentence else 'no description'})"
    unloadable = ("CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION")
    if status.name in unloadable:
        text += f"; NVRTC {nvrtc_info()[0]} may be newer than the driver: update the driver or {install_command()}"
    return text
