"""The surroundings: every environment variable of the package, and the stamp put on measurements."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import warnings
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

import torch

from haloconv.device import driver_cuda_name, driver_version
from haloconv.version import __version__

CACHE_DIR = "HALOCONV_CACHE_DIR"
CACHE = "HALOCONV_CACHE"
RECORDS_DIR = "HALOCONV_RECORDS_DIR"
TUNE = "HALOCONV_TUNE"
FROZEN = "HALOCONV_FROZEN"
CACHE_LIMIT = "HALOCONV_CACHE_LIMIT"
DISABLE = "HALOCONV_DISABLE"
LOGS = "HALOCONV_LOGS"

LOG_TOPICS = ("choice", "compile", "cache")

VARIABLES = {
    CACHE_DIR: "folder of the kernel cache, instead of the user's cache folder; more, as in PATH, are only read",
    CACHE: "0 keeps no compiled kernels on disk: every process compiles its own",
    RECORDS_DIR: "folder of the tuning records, instead of the user's data folder",
    TUNE: "first-use: measure a layer of a new kind at its first call; off: never; unset: if cudnn.benchmark is on",
    FROZEN: "1: tuning records are read only; nothing is measured and nothing is written",
    CACHE_LIMIT: "most bytes that compiled kernels take on disk, such as 500MB or 2GB; unset: no limit",
    DISABLE: "1: PyTorch's own convolution runs every layer, and accelerate changes nothing",
    LOGS: f"topics to log, of {','.join(LOG_TOPICS)}, or all; unset: nothing is logged",
}
"""Every environment variable that the package reads, with its meaning."""

_OFF = ("", "0", "off", "no", "false")

_VARIABLES_OF_OTHERS = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_PATH",
    "NVIDIA_TF32_OVERRIDE",
    "XDG_CACHE_HOME",
    "LD_LIBRARY_PATH",
)


def cache_dir_override() -> Path | None:
    """The first folder that HALOCONV_CACHE_DIR names, or None if it is unset or begins with a separator."""
    first, *_ = _cache_dirs()
    return first


def cache_dirs_to_read() -> list[Path]:
    """The folders that HALOCONV_CACHE_DIR names behind the first one: kernels are read from there, none is written."""
    return [each for each in _cache_dirs()[1:] if each is not None]


def _cache_dirs() -> list[Path | None]:
    names = os.environ.get(CACHE_DIR, "").split(os.pathsep)
    return [Path(name).expanduser() if name else None for name in names]


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def cache_limit_bytes() -> int | None:
    """The most bytes that compiled kernels may take on disk, as HALOCONV_CACHE_LIMIT says; None without a limit.

    Warns of a value that is no size.
    """
    value = os.environ.get(CACHE_LIMIT, "").strip()
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", value.lower())
    if found is not None:
        return int(float(found[1]) * _UNITS[found[2] or ""])
    if value:
        warnings.warn(
            f"{CACHE_LIMIT}={value!r} is no size, so that there is no limit; say bytes, or 500MB, 2GB, 1.5GiB",
            RuntimeWarning,
            stacklevel=2,
        )
    return None


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
    if value not in (*_OFF, "first-use"):
        warnings.warn(f"{TUNE}={value!r} means nothing; it may be first-use or off", RuntimeWarning, stacklevel=2)
    return value == "first-use" and not frozen()


@cache
def never_tunes() -> bool:
    """True if HALOCONV_TUNE is ``off`` (or ``0``, ``no``, ``false``), or records are frozen. Read once in a process."""
    value = os.environ.get(TUNE, "").strip().lower()
    return (value != "" and value in _OFF) or frozen()


@cache
def frozen() -> bool:
    """True if HALOCONV_FROZEN is set to anything but ``0``, ``off``, ``no`` or ``false``. Read once in a process."""
    return os.environ.get(FROZEN, "").strip().lower() not in _OFF


@cache
def disabled() -> bool:
    """True if HALOCONV_DISABLE is set to anything but ``0``, ``off``, ``no`` or ``false``. Read once in a process."""
    return os.environ.get(DISABLE, "").strip().lower() not in _OFF


def log_topics() -> tuple[str, ...]:
    """The topics that HALOCONV_LOGS names, all of them for ``all``. Warns of a topic that there is not."""
    words = [word.strip().lower() for word in os.environ.get(LOGS, "").split(",")]
    named = [word for word in words if word not in _OFF]
    unknown = [word for word in named if word not in (*LOG_TOPICS, "all")]
    if unknown:
        warnings.warn(
            f"{LOGS} names {', '.join(unknown)}; there are {', '.join(LOG_TOPICS)}, and all",
            RuntimeWarning,
            stacklevel=2,
        )
    return tuple(topic for topic in LOG_TOPICS if topic in named or "all" in named)


def variables_in_force() -> dict[str, str]:
    """Every variable of the package with its value or ``not set``, and those of others that are set and matter here."""
    own = {name: os.environ.get(name, f"not set ({meaning})") for name, meaning in VARIABLES.items()}
    return own | {name: os.environ[name] for name in _VARIABLES_OF_OTHERS if name in os.environ}


def child_environment(**overrides: str) -> dict[str, str]:
    """The environment for a Python process that must find this very package, with some variables set anew."""
    package_root = str(Path(__file__).resolve().parent.parent)
    search_path = os.pathsep.join([package_root, os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": search_path, **overrides}


def share_cores(processes: int) -> None:
    """Let Inductor compile in this process on its part of the cores, if so many share them; what is set stays so."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))


def gpus_hidden() -> bool:
    """True if CUDA_VISIBLE_DEVICES hides every GPU of the machine from this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")


def environment_stamp() -> dict[str, str]:
    """Where and with what a measurement was taken; every value is a string, ``"none"`` where there is nothing."""
    has_gpu, software = torch.cuda.is_available(), software_stamp()
    return {
        "gpu": torch.cuda.get_device_name() if has_gpu else "none",
        "torch": software["torch"],
        "cudnn": software["cudnn"],
        "cuda_driver": driver_cuda_name() or "none",
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
