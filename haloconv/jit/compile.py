"""Compiling, which needs no GPU and no driver. Beside driver.py the only file that imports cuda-core and cuda-bindings,
and only when needed.
"""

from __future__ import annotations

import io
import re
import threading
import time
from dataclasses import dataclass
from functools import cache
from types import ModuleType
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

_SOURCE_NAME = "joined.cu"
_importing = threading.Lock()


class CompileError(RuntimeError):
    """A kernel does not compile. The message shows the kernel, the line, the constants and NVRTC's log."""


class UnsupportedArchError(CompileError):
    """The NVRTC in use cannot compile for the architecture asked for."""


class ToolchainError(RuntimeError):
    """cuda-core, cuda-bindings or NVRTC is missing or broken. The message names the command that installs it."""


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


def install_command() -> str:
    """The command that installs what compiling needs, for the CUDA version that PyTorch was built for: the README's."""
    extra = "gpu-cu12" if (torch.version.cuda or "13").startswith("12.") else "gpu"
    return f'pip install "haloconv[{extra},cli]"'


@cache
def nvrtc_info() -> tuple[str, str]:
    """Version (``"13.0"``) and path of the NVRTC library that compiles the kernels; loads it.

    Raises ToolchainError with the remedy if cuda-bindings or NVRTC is missing.
    """
    try:
        with _importing:
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


def _cuda_core() -> ModuleType:
    with _importing:  # two threads that import cuda-core at once break its loader
        try:
            import cuda.core as core
        except (ImportError, RuntimeError) as error:
            raise ToolchainError(f"cuda-core cannot be used ({error}): {install_command()}") from error
    module: ModuleType = core
    return module


def compile_source(source: KernelSource, arch: str) -> Cubin:
    """Compile ``source`` for ``arch`` (such as ``"sm_90a"``). Works without a GPU and without a driver.

    Raises CompileError if the source does not compile, UnsupportedArchError if NVRTC does not know ``arch``,
    ToolchainError if the compiler is missing.
    """
    version, _ = nvrtc_info()
    _check_arch(arch, version)
    core = _cuda_core()
    log = io.StringIO()
    start = time.perf_counter()
    try:
        options = core.ProgramOptions(name=_SOURCE_NAME, arch=arch, **_program_options(version))
        program = core.Program(source.code, "c++", options)
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
        remedy += ': use a PyTorch for CUDA 12 and pip install "haloconv[gpu-cu12,cli]"'
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
    numbers = [
        int(number) for number in re.findall(rf"{re.escape(_SOURCE_NAME)}\((\d+)\): (?:catastrophic )?error", log)
    ]
    constants = " ".join(f"{name}={value}" for name, value in source.constants) or "none"
    place = _place(source, numbers[0]) if numbers else f"{source.kernel}.cu"
    numbered = rf"{re.escape(_SOURCE_NAME)}\((\d+)\)"
    translated = re.sub(numbered, lambda match: str(_place(source, int(match.group(1)))), log)
    parts = [
        f"kernel '{source.kernel}' does not compile, at {place}",
        *(["", *_excerpt(source, numbers[0]), ""] if numbers else []),
        f"entry {source.entry} for {arch}, NVRTC {version}",
        f"constants: {constants}",
        "",
        translated.replace(_SOURCE_NAME, f"{source.kernel}.cu").strip("\0 \n"),
    ]
    return "\n".join(parts)


def _place(source: KernelSource, line: int) -> Origin | str:
    return source.origin(line) or f"<constants of {source.kernel}>:{line}"


def _excerpt(source: KernelSource, line: int, around: int = 3) -> list[str]:
    """The lines of the joined source around ``line``, each with its place in its own file; an arrow marks the line."""
    lines = source.code.splitlines()
    nearby = range(max(1, line - around), min(len(lines), line + around) + 1)
    shown = [number for number in nearby if not is_marker(lines[number - 1])]
    places = {number: str(_place(source, number)) for number in shown}
    width = max(map(len, places.values()), default=0)
    return [f"{'-->' if at == line else '   '} {places[at]:<{width}} | {lines[at - 1]}" for at in shown]
