"""``haloconv doctor``: what this machine has, what works on it, and what to do about what does not."""

from __future__ import annotations

import json
import os
import platform
import struct
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from haloconv import env, jit
from haloconv.choose.records import records_folder, shelf_of
from haloconv.cli.output import Force, check_outputs, refusal, write_output
from haloconv.device import device_facts, driver_version
from haloconv.emulator.build import available, compiler_version
from haloconv.jit.cache import prepare_root
from haloconv.jit.compile import install_command
from haloconv.version import __version__

Facts = dict[str, dict[str, str]]

_PROBE = jit.KernelSource(
    kernel="probe",
    entry="probe",
    constants=(("THREADS", 64),),
    text="""// haloconv: writes factor * index, to see whether this machine compiles and launches
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


def doctor(
    clear_cache: Annotated[
        bool, typer.Option("--clear-cache", help="First remove every compiled kernel, the emulator's too.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the findings to FILE.")
    ] = None,
    force: Force = False,
) -> None:
    """Show what this machine has and what works on it. The exit code is 0 if everything it needs works."""
    console = Console()
    try:
        check_outputs({"--json": json_file}, force=force)
    except typer.BadParameter as error:
        raise refusal(error) from None
    if clear_cache:
        console.print(f"removed {jit.clear_cache()} entries from {jit.cache_root()}", soft_wrap=True)
    facts = gather_facts()
    checks = run_checks()
    healthy = all(check.ok or not check.needed for check in checks)
    _show(console, facts, checks, healthy)
    if json_file is not None:
        findings = {"healthy": healthy, "facts": facts, "checks": [asdict(check) for check in checks]}
        write_output(json_file, json.dumps(findings, indent=1) + "\n", console)
    raise typer.Exit(0 if healthy else 1)


# --- facts


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
        "cache": {"place": _told(lambda: str(jit.cache_root())), "size": _told(_cache_size)},
        "tuning": {"records in": _told(lambda: str(records_folder())), **_records()},
        "precision flags of PyTorch": _precision_flags(),
        "environment variables": env.variables_in_force(),
    }


def _told(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except Exception as error:
        return f"unknown: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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
    state = "" if env.disk_cache_enabled() else f" (turned off by {env.CACHE})"
    return f"{entries} entries, {size_bytes / 2**20:.1f} MiB{state}"


def _records() -> dict[str, str]:
    """How many tuning records hold on each GPU."""
    indices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {f"cuda:{index}": _told(partial(_held, index)) for index in indices}


def _held(index: int) -> str:
    own, shipped = shelf_of(device_facts(index)).counts()
    mode = "read only" if env.frozen() else "measures at first use" if env.tunes_at_first_use() else "follows records"
    return f"{own} of yours and {shipped} shipped ones hold here; {mode}"


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


# --- checks


def run_checks() -> list[Check]:
    """Try everything a convolution needs on this machine. Never raises."""
    has_gpu = torch.cuda.is_available()
    checks = [
        _check("PyTorch sees the GPU", _see_gpu, "install a PyTorch that is built for CUDA and fits the driver"),
        _check("compile a kernel", _compile_probe, install_command(), needed=has_gpu),
        _check(
            "keep kernels on disk",
            _use_cache,
            f"make the folder writable for you, or set {env.CACHE_DIR} to one that is",
            needed=has_gpu,
        ),
    ]
    for index in range(torch.cuda.device_count() if has_gpu else 0):
        remedy = f"update the NVIDIA driver, or match it: {install_command()}"
        checks.append(_check(f"launch on cuda:{index}", partial(_launch_probe, index), remedy))
    return checks


def _check(name: str, attempt: Callable[[], str], remedy: str, needed: bool = True) -> Check:
    try:
        return Check(name, True, attempt())
    except Exception as error:
        return Check(name, False, _first_line(error), remedy, needed)


def _see_gpu() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} found"
    if Path("/dev/nvidiactl").exists() and not env.gpus_hidden():
        raise RuntimeError(f"this machine has an NVIDIA driver, but PyTorch {torch.__version__} cannot use it")
    return "there is none, and none is needed: every layer runs on the CPU"


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


# --- showing


def _show(console: Console, facts: Facts, checks: list[Check], healthy: bool) -> None:
    for section, values in facts.items():
        table = Table(title=section, title_justify="left", title_style="bold", show_header=False, box=None)
        table.add_column(style="cyan", overflow="fold")
        table.add_column(overflow="fold")
        for name, value in values.items():
            table.add_row(Text(name), Text(value))
        console.print(table, "")
    table = Table(title="checks", title_justify="left", title_style="bold", show_header=False, box=None)
    for _ in range(3):
        table.add_column(overflow="fold")
    for check in checks:
        style = "green" if check.ok else "red" if check.needed else "yellow"
        remedy = f"\nremedy: {check.remedy}" if check.remedy and not check.ok else ""
        table.add_row(Text(check.verdict, style=style), Text(check.name), Text(check.detail + remedy))
    console.print(table, "")
    console.print(
        "everything that this machine needs works" if healthy else "something that this machine needs does not work",
        style="bold green" if healthy else "bold red",
    )
