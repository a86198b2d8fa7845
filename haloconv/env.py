"""The surroundings: every environment variable of the package, facts about GPUs, and the stamp put on measurements."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from haloconv.version import __version__

CACHE_DIR = "HALOCONV_CACHE_DIR"
CACHE = "HALOCONV_CACHE"
RECORDS_DIR = "HALOCONV_RECORDS_DIR"
TUNE = "HALOCONV_TUNE"
FROZEN = "HALOCONV_FROZEN"

VARIABLES = {
    CACHE_DIR: "folder of the kernel cache, instead of the user's cache folder",
    CACHE: "0 turns the kernel cache on disk off: every process compiles its own kernels",
    RECORDS_DIR: "folder of the tuning records, instead of the user's data folder",
    TUNE: "first-use: measure a layer of a new kind at its first call; unset: choose by records and rules at once",
    FROZEN: "1: tuning records are read only; nothing is measured and nothing is written",
}
"""Every environment variable that the package reads, with its meaning."""

_VARIABLES_OF_OTHERS = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_PATH",
    "NVIDIA_TF32_OVERRIDE",
    "XDG_CACHE_HOME",
    "LD_LIBRARY_PATH",
)
_DEFAULT_SMEM_BYTES = 48 * 1024
_SMEM_LIMIT_KIB = {70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99}
_SMEM_LIMIT_KIB |= {90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
_DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")


def cache_dir_override() -> Path | None:
    """The folder that HALOCONV_CACHE_DIR names, or None if it is unset or empty."""
    value = os.environ.get(CACHE_DIR, "")
    return Path(value).expanduser() if value else None


def disk_cache_enabled() -> bool:
    """False if HALOCONV_CACHE is ``0`` (or ``off``, ``no``, ``false``)."""
    return os.environ.get(CACHE, "1").strip().lower() not in ("0", "off", "no", "false")


def records_dir_override() -> Path | None:
    """The folder that HALOCONV_RECORDS_DIR names, or None if it is unset or empty."""
    value = os.environ.get(RECORDS_DIR, "")
    return Path(value).expanduser() if value else None


@cache
def tunes_at_first_use() -> bool:
    """True if HALOCONV_TUNE is ``first-use`` and records are not frozen. Read once in a process.

    Warns of a value that means nothing.
    """
    value = os.environ.get(TUNE, "").strip().lower()
    if value not in ("", "0", "off", "no", "false", "first-use"):
        warnings.warn(f"{TUNE}={value!r} means nothing; it may be first-use", RuntimeWarning, stacklevel=2)
    return value == "first-use" and not frozen()


@cache
def frozen() -> bool:
    """True if HALOCONV_FROZEN is set to anything but ``0``, ``off``, ``no`` or ``false``. Read once in a process."""
    return os.environ.get(FROZEN, "").strip().lower() not in ("", "0", "off", "no", "false")


def variables_in_force() -> dict[str, str]:
    """Every variable of the package with its value or ``not set``, and those of others that are set and matter here."""
    own = {name: os.environ.get(name, f"not set ({meaning})") for name, meaning in VARIABLES.items()}
    return own | {name: os.environ[name] for name in _VARIABLES_OF_OTHERS if name in os.environ}


def child_environment(**overrides: str) -> dict[str, str]:
    """The environment for a Python process that must find this very package, with some variables set anew."""
    package_root = str(Path(__file__).resolve().parent.parent)
    search_path = os.pathsep.join([package_root, os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": search_path, **overrides}


def gpus_hidden() -> bool:
    """True if CUDA_VISIBLE_DEVICES hides every GPU of the machine from this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")


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


class StandIn(NamedTuple):
    """What runs kernels on CPU tensors for the time being: its facts; ``load(source, smem_bytes)``, which gives an
    object with ``launch`` as jit.LoadedKernel has it; ``watch(run)``, which wraps a bound call to learn its tensors;
    ``encode_tiled``, which takes the place of jit.encode_tiled and gives the maps that its kernels read. ``keeps_time``
    if the times of its kernels mean anything.
    """

    facts: DeviceFacts
    load: Callable[..., Any]
    watch: Callable[..., Any]
    encode_tiled: Callable[..., bytes]
    keeps_time: bool = False


_stand_in: StandIn | None = None


def stand_in() -> StandIn | None:
    """What runs kernels on CPU tensors (haloconv.emulator sets it), or None: PyTorch alone does."""
    return _stand_in


def set_stand_in(device: StandIn | None) -> None:
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
    supported = _driver_cuda_name()
    return f"CUDA {supported}" if supported else "none"


def driver_cuda_version() -> int:
    """The newest CUDA that the driver supports, 1000 times major plus 10 times minor (13000); 0 without a driver."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return 0
    return 0 if failed else number.value


def _driver_cuda_name() -> str:
    """The same as ``"13.0"``; empty without a driver."""
    version = driver_cuda_version()
    return f"{version // 1000}.{version % 1000 // 10}" if version else ""


def environment_stamp() -> dict[str, str]:
    """Where and with what a measurement was taken; every value is a string, ``"none"`` where there is nothing."""
    has_gpu, software = torch.cuda.is_available(), software_stamp()
    return {
        "gpu": torch.cuda.get_device_name() if has_gpu else "none",
        "torch": software["torch"],
        "cudnn": software["cudnn"],
        "cuda_driver": _driver_cuda_name() or "none",
        "cuda_runtime": software["cuda_runtime"],
        "driver": software["driver"],
        "python": platform.python_version(),
        "haloconv": software["haloconv"],
        "commit": _commit() or "none",
        "date": now(),
    }


def software_stamp() -> dict[str, str]:
    """The versions that decide how fast things run; every value is a string, ``"none"`` where there is nothing."""
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "torch": torch.__version__,
        "cudnn": str(cudnn) if cudnn else "none",
        "cuda_runtime": torch.version.cuda or "none",
        "driver": driver_version(),
        "haloconv": __version__,
    }


def now() -> str:
    """The date and time in UTC."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _commit() -> str:
    """The commit of the checkout that holds the package, with ``-dirty`` after local changes; empty outside one.

    A copy of a checkout without its history may name its commit in ``build/commit``.
    """
    checkout = Path(__file__).resolve().parent.parent
    note = checkout / "build" / "commit"
    return _described(checkout) or (note.read_text(encoding="utf-8").strip() if note.exists() else "")


def _described(checkout: Path) -> str:
    """What git says of the folder's commit; empty if the folder is not the root of a checkout."""
    if not (checkout / ".git").exists():
        return ""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
