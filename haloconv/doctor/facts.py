"""What this machine has, as far as convolutions care."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata

import torch

from haloconv import env, jit
from haloconv.choose.measured import is_measured
from haloconv.choose.measuring import wanted
from haloconv.choose.records import records_folder, shelf_of
from haloconv.device import device_facts, driver_version
from haloconv.emulator.build import available, compiler_version
from haloconv.jit.compile import install_command
from haloconv.version import __version__

Facts = dict[str, dict[str, str]]


def gather_facts() -> Facts:
    """Everything to show, as sections of names and values. Never raises: what cannot be found out says so."""
    return {
        "versions": {
            "haloconv": __version__,
            "Python": f"{platform.python_version()} ({sys.executable})",
            "PyTorch": f"{torch.__version__}, built for {_built_for()}",
            "cuDNN": _told(_cudnn_version),
            "cuda-core": _told(lambda: _installed("cuda-core")),
            "cuda-bindings": _told(lambda: _installed("cuda-bindings")),
            "NVRTC": _told(lambda: "{} from {}".format(*jit.nvrtc_info())),
            "NVIDIA driver": _told(driver_version),
            "emulator": _told(_emulator),
        },
        "GPUs": _gpus(),
        "cache": {
            "place": _told(lambda: str(jit.cache_root())),
            "size": _told(_cache_size),
            "only read": ", ".join(map(str, env.cache_dirs_to_read())) or "nothing",
        },
        "tuning": {"records in": _told(lambda: str(records_folder())), **_records()},
        "precision flags of PyTorch": _precision_flags(),
        "environment variables": env.variables_in_force(),
    }


def _told(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except Exception as error:
        return f"unknown: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its name; without a command that a check gives as its remedy."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.removesuffix(f": {install_command()}")


def _built_for() -> str:
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"


def _cudnn_version() -> str:
    return str(torch.backends.cudnn.version() or "none") if torch.backends.cudnn.is_available() else "none"


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _emulator() -> str:
    missing = available()
    return f"runs here, with g++ {compiler_version()}" if missing is None else f"does not run here: {missing}"


def _gpus() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {"none": "PyTorch sees no GPU; convolutions run on PyTorch's own CPU kernels"}
    return {f"cuda:{index}": _told(partial(_gpu, index)) for index in range(torch.cuda.device_count())}


def _gpu(index: int) -> str:
    facts = device_facts(index)
    memory = f"{facts.memory_bytes / 2**30:.0f} GiB"
    smem = f"{facts.max_smem_bytes // 1024} KiB of shared memory per block"
    return f"{facts.name}, {facts.arch}, {facts.sm_count} multiprocessors, {memory}, {smem}"


def _cache_size() -> str:
    entries, size_bytes = jit.cache_size()
    limit_bytes = env.cache_limit_bytes()
    limit = "" if limit_bytes is None else f" of at most {limit_bytes / 2**20:.1f} MiB"
    state = "" if env.disk_cache_enabled() else f" (turned off by {env.CACHE})"
    return f"{entries} entries, {size_bytes / 2**20:.1f} MiB{limit}{state}"


def _records() -> dict[str, str]:
    """How many tuning records hold on each GPU."""
    indices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {f"cuda:{index}": _told(partial(_held, index)) for index in indices}


def _held(index: int) -> str:
    gpu = device_facts(index)
    own, shipped = shelf_of(gpu).counts()
    mode = "read only" if env.frozen() else "measures at first use" if wanted() else "follows records"
    held = f"{own} of yours and {shipped} shipped ones hold here; {mode}"
    if is_measured(gpu):
        return held
    return (
        f"{held}; this GPU model was not sampled: without a record PyTorch runs what was not ahead here, nor far ahead "
        "on one that was"
    )


def _precision_flags() -> dict[str, str]:
    names = (
        "backends.cudnn.allow_tf32",
        "backends.cuda.matmul.allow_tf32",
        "backends.fp32_precision",
        "backends.cudnn.fp32_precision",
        "backends.cudnn.conv.fp32_precision",
        "backends.cuda.matmul.fp32_precision",
    )
    return {f"torch.{name}": _told(partial(_torch_flag, name)) for name in names}


def _torch_flag(name: str) -> str:
    value: object = torch
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            return "not in this PyTorch"
    return str(value)
