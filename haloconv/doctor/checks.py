"""What is tried on this machine, and the one remedy for each thing that does not work."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from haloconv import env, jit
from haloconv.device import device_facts, driver_cuda_version
from haloconv.doctor.facts import first_line
from haloconv.emulator.build import available, compiler_version
from haloconv.jit.cache import prepare_root
from haloconv.jit.compile import install_command

_PROBE = jit.KernelSource(
    kernel="probe",
    entry="probe",
    constants=(("THREADS", 64),),
    code="""// haloconv: writes factor * index, to see whether this machine compiles and launches
#define THREADS 64
struct Params {
    int* out;
    int factor;
};
extern "C" __global__ void __launch_bounds__(THREADS) probe(const Params params) {
    params.out[threadIdx.x] = params.factor * int(threadIdx.x);
}
""",
)
_PROBE_PARAMS = struct.Struct("@Pi4x")
_PROBE_THREADS = 64
_ARCH_WITHOUT_GPU = "sm_90a"


@dataclass(frozen=True)
class Check:
    """One thing that was tried. ``needed`` is False if this machine can do its work without it."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    needed: bool = True

    @property
    def verdict(self) -> str:
        if self.ok:
            return "ok"
        return "not ok" if self.needed else "not ok, not needed here"


def run_checks() -> list[Check]:
    """Try everything a convolution needs on this machine. Never raises."""
    has_gpu = torch.cuda.is_available()
    checks = [
        _check("PyTorch sees the GPU", _see_gpu, _install_torch()),
        _check("compile a kernel", _compile_probe, install_command(), needed=has_gpu),
        _check("keep kernels on disk", _use_cache, f'export {env.CACHE_DIR}="$HOME/haloconv"', needed=has_gpu),
        _check("g++ for the emulator", _find_compiler, _install_compiler(), needed=False),
    ]
    for index in range(torch.cuda.device_count() if has_gpu else 0):
        checks.append(_check(f"launch on cuda:{index}", partial(_launch_probe, index), UPDATE_DRIVER))
    return checks


UPDATE_DRIVER = "update the NVIDIA driver: https://www.nvidia.com/drivers"
_COMPILER_INSTALLERS = (
    ("apt-get", "sudo apt-get install g++"),
    ("dnf", "sudo dnf install gcc-c++"),
    ("zypper", "sudo zypper install gcc-c++"),
    ("pacman", "sudo pacman -S gcc"),
    ("apk", "sudo apk add g++"),
)
_TORCH_BUILDS = ((13000, "cu130"), (12080, "cu128"), (12060, "cu126"))


def _install_compiler() -> str:
    found = (command for tool, command in _COMPILER_INSTALLERS if shutil.which(tool))
    return next(found, "conda install -c conda-forge gxx")


def _install_torch() -> str:
    """The command that installs a PyTorch which the driver can run, or the driver's own remedy if it is too old."""
    supported = driver_cuda_version()
    build = next((name for least, name in _TORCH_BUILDS if supported >= least), None)
    if build is None:
        return UPDATE_DRIVER
    return f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{build}"


def _check(name: str, attempt: Callable[[], str], remedy: str, needed: bool = True) -> Check:
    try:
        return Check(name, True, attempt(), needed=needed)
    except jit.ToolchainError as error:
        return Check(name, False, first_line(error), install_command(), needed)
    except Exception as error:
        return Check(name, False, first_line(error), remedy, needed)


def _see_gpu() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} found"
    if Path("/dev/nvidiactl").exists() and not env.gpus_hidden():
        raise RuntimeError(f"this machine has an NVIDIA driver, but PyTorch {torch.__version__} cannot use it")
    return "there is none, and none is needed: every layer runs on the CPU"


def _find_compiler() -> str:
    missing = available()
    if missing is not None:
        raise RuntimeError(missing)
    return f"version {compiler_version()}"


def _compile_probe() -> str:
    archs = {device_facts(index).arch for index in range(torch.cuda.device_count())} or {_ARCH_WITHOUT_GPU}
    done = [jit.compile_source(_PROBE, arch) for arch in sorted(archs)]
    return ", ".join(f"{cubin.arch} in {cubin.compile_ms:.0f} ms" for cubin in done)


def _use_cache() -> str:
    if not env.disk_cache_enabled():
        return f"turned off by {env.CACHE}"
    attempt = prepare_root() / f"doctor-{os.getpid()}.lock"
    attempt.write_bytes(b"haloconv")
    attempt.unlink()
    return "the cache folder is writable and private"


def _launch_probe(index: int) -> str:
    factor = 3
    cubin = jit.compile_source(_PROBE, device_facts(index).arch)
    kernel = jit.load_kernel(cubin, index, 0)
    arguments = jit.ArgumentBlock(_PROBE_PARAMS.size)
    with torch.cuda.device(index):
        out = torch.zeros(_PROBE_THREADS, dtype=torch.int32, device="cuda")
        _PROBE_PARAMS.pack_into(arguments.buffer, 0, out.data_ptr(), factor)
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch(1, _PROBE_THREADS, 0, stream, arguments.pointer_array_address)
        wrong = out.cpu() != factor * torch.arange(_PROBE_THREADS, dtype=torch.int32)
    if wrong.any():
        raise RuntimeError(f"the kernel ran, but {int(wrong.sum())} of {_PROBE_THREADS} values are wrong")
    return "the result is right"
