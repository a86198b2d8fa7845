"""One device that runs kernels, CUDA's, an emulated one or one that records: facts, load, encode, launch, watch."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

_DEFAULT_SMEM_BYTES = 48 * 1024
_SMEM_LIMIT_KIB = {70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99}
_SMEM_LIMIT_KIB |= {90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
_DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class DeviceFacts:
    """What the planner needs to know about one GPU. Memory extents are in bytes.

    ``max_smem_bytes`` is the most shared memory a block may ask for. ``driver`` is the version of the NVIDIA driver, or
    the newest CUDA version that it supports where the driver does not tell.
    """

    name: str
    arch: str
    sm_count: int
    capability: tuple[int, int]
    memory_bytes: int
    max_smem_bytes: int
    driver: str


class Kernel(Protocol):
    """A loaded kernel."""

    def launch(self, grid_x: int, block_threads: int, smem_bytes: int, stream: int, params_address: int) -> None:
        """Queue ``grid_x`` blocks; ``params_address`` is that of an array with the address of each parameter."""

    def cluster_launch(
        self, grid_x: int, block_threads: int, smem_bytes: int, cluster: int
    ) -> Callable[[int, int], None]:
        """``launch`` with ``cluster`` neighbouring blocks as a cluster, of the stream and ``params_address``."""


def _as_it_is(run: Callable[..., Any]) -> Callable[..., Any]:
    return run


def _no_stream(index: int | None) -> int:
    return 0


class Device(NamedTuple):
    """What runs kernels on tensors of one torch.device.

    ``load(source, smem_bytes)`` gives a Kernel for blocks of so much dynamic shared memory. ``encode_tiled`` makes the
    tensor maps that its kernels read, with the arguments of jit.encode_tiled. ``watch(run)`` wraps a bound call, so
    that the device learns its tensors. ``stream(index)`` is the stream to launch on. ``keeps_time`` if the times of its
    kernels mean anything.
    """

    facts: DeviceFacts
    load: Callable[..., Kernel]
    encode_tiled: Callable[..., bytes]
    watch: Callable[[Callable[..., Any]], Callable[..., Any]] = _as_it_is
    stream: Callable[..., int] = _no_stream
    keeps_time: bool = False


_stand_in: Device | None = None


def stand_in() -> Device | None:
    """What runs kernels on CPU tensors (haloconv.emulator sets it), or None: PyTorch alone does."""
    return _stand_in


def set_stand_in(device: Device | None) -> None:
    """Let ``device`` run kernels on CPU tensors from now on; None ends it."""
    global _stand_in
    _stand_in = device
    device_facts.cache_clear()


def watched(run: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """``run``; on a stand-in for a GPU, which must know the tensors that kernels touch, wrapped by it."""
    emulated = stand_in() if device.type == "cpu" else None
    return run if emulated is None else emulated.watch(run)


def runs_kernels(device: torch.device) -> bool:
    """True if kernels can be launched on tensors of ``device``."""
    return device.type == "cuda" or (_stand_in is not None and device.type == "cpu")


def has_facts(device: torch.device) -> bool:
    """Whether the device's facts can be asked for: it runs kernels, and it is there."""
    return runs_kernels(device) and (device.type != "cuda" or torch.cuda.is_available())


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def gpu_stem(gpu_name: str) -> str:
    """A GPU's name in file names: ``NVIDIA H200`` is ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-")


@cache
def device_facts(index: int | None) -> DeviceFacts:
    """Facts about the CUDA device that PyTorch numbers ``index``; about the stand-in if it is None, as CPU tensors say.

    Raises what torch.cuda raises when there is no such device (RuntimeError or AssertionError).
    """
    if index is None and _stand_in is not None:
        return _stand_in.facts
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    return DeviceFacts(
        name=properties.name,
        arch=arch_of(capability),
        sm_count=properties.multi_processor_count,
        capability=capability,
        memory_bytes=properties.total_memory,
        max_smem_bytes=getattr(properties, "shared_memory_per_block_optin", 0) or max_smem_bytes_of(capability),
        driver=driver_version(),
    )


def arch_of(capability: tuple[int, int]) -> str:
    """The architecture that kernels are compiled for: ``"sm_90a"`` for (9, 0), plain ``"sm_XY"`` elsewhere."""
    major, minor = capability
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


def max_smem_bytes_of(capability: tuple[int, int]) -> int:
    """The most shared memory a block may ask for, from NVIDIA's table; 48 KiB for an unknown architecture."""
    major, minor = capability
    kib = _SMEM_LIMIT_KIB.get(10 * major + minor)
    return kib * 1024 if kib else _DEFAULT_SMEM_BYTES


def driver_version() -> str:
    """The NVIDIA driver's version (``"580.95.05"``), else the CUDA it supports (``"CUDA 13.0"``), else ``"none"``."""
    try:
        text = _DRIVER_VERSION_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)*)\s", text)
    if found:
        return found.group(1)
    supported = driver_cuda_name()
    return f"CUDA {supported}" if supported else "none"


def driver_cuda_version() -> int:
    """The newest CUDA that the driver supports, 1000 times major plus 10 times minor (13000); 0 without a driver."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return 0
    return 0 if failed else number.value


def driver_cuda_name() -> str:
    """The newest CUDA that the driver supports, as ``"13.0"``; empty without a driver."""
    version = driver_cuda_version()
    return f"{version // 1000}.{version % 1000 // 10}" if version else ""
