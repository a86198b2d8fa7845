"""Building for the emulator: one runtime library, and one module per kernel, from the source that NVRTC would get.

Both are kept on disk under the hash of all that they depend on, beside the compiled kernels of real devices.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from filelock import FileLock

from haloconv import atomic, env
from haloconv.jit import CompileError, KernelSource
from haloconv.jit.cache import emulator_folder, prepare_root

INCLUDE_FOLDER = Path(__file__).resolve().parent / "include"
RUNTIME_FOLDER = Path(__file__).resolve().parent / "runtime"
SOURCE_NAME = "joined.cu"

_COMPILER = "g++"
_LEAST_VERSION = 11
_COMMON = ("-std=c++17", "-g1", "-fPIC", "-ffp-contract=off")
RUNTIME_FLAGS = (*_COMMON, "-O3", "-fno-semantic-interposition", "-Wall", "-Wextra")
"""How the runtime is compiled: without instrumentation."""
KERNEL_FLAGS = (
    *_COMMON,
    "-DHALOCONV_EMULATOR",
    "-fsanitize=thread",  # every access calls the runtime; the thread sanitizer's own library is never linked
    "--param=tsan-instrument-func-entry-exit=0",
    "-fsanitize=alignment,bounds-strict",  # what types promise; reported to the runtime as well
    "-fno-tree-sra",  # from here on: accesses stay as wide as the kernel writes them
    "-fno-tree-vectorize",
    "-fno-tree-slp-vectorize",
    "-fno-store-merging",
    "-fno-tree-loop-distribute-patterns",
    "-fno-optimize-sibling-calls",  # a call's return address is a place in its function
    "-fno-crossjumping",  # calls on different lines stay different
    "-fno-tree-tail-merge",
    "-fno-strict-aliasing",
    "-fno-extern-tls-init",
    "-fno-gnu-unique",
    "-fno-exceptions",
    "-fno-rtti",
    "-w",  # NVRTC judges the source; g++ would remark on pragmas that it does not know
)
"""How a kernel's source is compiled: each access is reported to the runtime."""
OPTIMISED = (
    "-O1",  # and two passes of -O2 that shorten runs: with all of them a build takes two thirds longer
    "-ftree-vrp",
    "-fthread-jumps",
    "-fira-algorithm=priority",  # registers given out quickly rather than well
    "-fira-region=one",
)
UNOPTIMISED = ("-O0",)
_RUNTIME_LINK_FLAGS = (
    "-shared",
    "-Wl,-Bsymbolic",
    "-Wl,--no-as-needed",  # kernel modules name no library: they find its functions where the runtime has loaded it
    "-pthread",
    "-ldl",
    "-lm",
)
_KERNEL_LINK_FLAGS = ("-shared", "-Bsymbolic", "--eh-frame-hdr")  # a given-up launch is unwound through the kernel
_BUILD_TIMEOUT_S = 600

_ENTRY = """
#line 1 "launch"
extern "C" __attribute__((no_sanitize("thread", "undefined"))) void hc_emu_entry(const void* const* arguments) {{
    hc::emu::call({entry}, arguments);
}}
"""

_level: tuple[str, ...] = OPTIMISED
_loaded: dict[str, ctypes.CDLL] = {}
_warned = False
_loading = threading.RLock()


def available() -> str | None:
    """None if the emulator can run here, else a sentence that says what is missing."""
    version = compiler_version()
    if not version:
        return f"the emulator builds kernels with {_COMPILER}, which is not installed"
    if int(version.split(".")[0]) < _LEAST_VERSION:
        return f"the emulator needs {_COMPILER} {_LEAST_VERSION} or newer; this is {version}"
    if os.name != "posix" or not Path("/proc/self/exe").exists():
        return "the emulator runs on Linux only"
    return None


@contextmanager
def optimisation(level: tuple[str, ...]) -> Iterator[None]:
    """Inside, kernels are built with the flags of ``level``: OPTIMISED, as without it, or UNOPTIMISED.

    Unoptimised, they are built in 0.6 of the time and run for 1.6 times as long: for those that run once or twice.
    """
    global _level
    before, _level = _level, level
    try:
        yield
    finally:
        _level = before


def runtime_library() -> ctypes.CDLL:
    """The runtime, built if need be and loaded once per process. Raises RuntimeError if it cannot run here."""
    with _loading:
        if "runtime" not in _loaded:
            missing = available()
            if missing is not None:
                raise RuntimeError(missing)
            path = _built(_runtime_key(), _build_runtime)
            _loaded["runtime"] = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        return _loaded["runtime"]


def kernel_flags() -> tuple[str, ...]:
    """How kernels are compiled at present."""
    return (*KERNEL_FLAGS, *_level)


def kernel_module(source: KernelSource, flags: tuple[str, ...]) -> Path:
    """The module of ``source``, built if need be. Raises CompileError if g++ does not take the source."""
    runtime_library()
    parts = [_headers_digest(), compiler_version(), *flags, source.digest]
    return _built(_hash(parts), lambda path: _build_kernel(source, flags, path))


@cache
def compiler_version() -> str:
    """The version of g++ and the machine that it compiles for (``"12.2.0 x86_64-linux-gnu"``); empty without one."""
    if shutil.which(_COMPILER) is None:
        return ""
    return " ".join(map(_answer, ("-dumpfullversion", "-dumpmachine")))


@cache
def _link_tools() -> tuple[str, str]:
    """The linker that g++ starts, and its library of what machine code lacks, such as 128-bit division.

    Started directly, and without the libraries that g++ names, it takes 4 ms of a core and not 28.
    """
    return _answer("-print-prog-name=ld"), _answer("-print-libgcc-file-name")


def _answer(flag: str) -> str:
    """What g++ prints when it is asked with a flag."""
    return subprocess.run([_COMPILER, flag], capture_output=True, text=True, check=False).stdout.strip()


def _hash(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def _headers_digest() -> str:
    """The hash of the headers that kernels see, and so of what their sources are compiled with."""
    return _hash([file.name + file.read_text(encoding="utf-8") for file in sorted(INCLUDE_FOLDER.glob("*.h"))])


@cache
def _runtime_key() -> str:
    files = [file for file in sorted(RUNTIME_FOLDER.iterdir()) if file.suffix in (".cpp", ".h")]
    texts = [file.name + file.read_text(encoding="utf-8") for file in files]
    return _hash([_headers_digest(), compiler_version(), *RUNTIME_FLAGS, *_RUNTIME_LINK_FLAGS, *texts])


# --- the folder of what is built


@cache
def _private_folder() -> Path:
    """A folder that ends with the process, for when nothing may be kept."""
    folder = tempfile.TemporaryDirectory(prefix="haloconv-emulator-")
    atexit.register(folder.cleanup)  # which also keeps it
    return Path(folder.name)


def _folder() -> Path:
    if not env.disk_cache_enabled():
        return _private_folder()
    try:
        prepare_root()
        folder = emulator_folder()
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        _warn_once(error)
        return _private_folder()
    return folder


def _built(key: str, build: Callable[[Path], None]) -> Path:
    """``<folder>/<key>.so``: found intact, or built elsewhere and moved there in one step.

    Where it cannot be kept, on a full or read-only disk, it goes to a folder that ends with the process.
    """
    homes = [folder / f"{key}.so" for folder in (_folder(), _private_folder())]
    path = next(filter(_intact, homes), homes[0])
    if _intact(path):
        return path
    with ExitStack() as stack:
        try:
            stack.enter_context(FileLock(path.with_suffix(".lock"), timeout=_BUILD_TIMEOUT_S, mode=0o600))
        except (OSError, NotImplementedError) as error:  # a lock held for too long is an OSError, too
            _warn_once(error)
            path = homes[1]
        if not _intact(path):
            built = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="haloconv-emulator-")), "module.so")
            build(built)
            try:
                _keep(built, path)
            except OSError as error:
                _warn_once(error)
                path = homes[1]
                _keep(built, path)
    return path


def _keep(built: Path, path: Path) -> None:
    """Copy a module to its place, where nobody sees half of it. Raises OSError, and then leaves nothing there."""
    path.with_suffix(".sha256").write_text(_file_digest(built), encoding="ascii")
    atomic.write_bytes(path, built.read_bytes())


def _warn_once(error: Exception) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        f"what the emulator builds is not kept on disk: {error}. Each process builds its own; set {env.CACHE_DIR} to "
        f"a folder that can be written, or {env.CACHE}=0 to silence this",
        RuntimeWarning,
        stacklevel=2,
    )


def _intact(path: Path) -> bool:
    try:
        return path.with_suffix(".sha256").read_text(encoding="ascii") == _file_digest(path)
    except (OSError, ValueError):
        return False


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- compiling


def _run(command: list[str], folder: str | None = None) -> str:
    """Run a command; its messages, empty if it went well.

    They are UTF-8 whatever Python thinks of the locale, which libraries change: NVRTC 11 does.
    """
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=_BUILD_TIMEOUT_S, check=False)
    log = done.stderr.decode("utf-8", errors="replace")
    return (log or f"exit status {done.returncode}") if done.returncode else ""


def _build_runtime(path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="haloconv-emulator-") as folder:
        files = sorted(RUNTIME_FOLDER.glob("*.cpp"))
        objects = [f"{folder}/{file.stem}.o" for file in files]
        base = [_COMPILER, *RUNTIME_FLAGS, f"-I{INCLUDE_FOLDER}", "-c"]
        commands = [[*base, str(file), "-o", to] for file, to in zip(files, objects, strict=True)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            logs = "".join(pool.map(_run, commands))
        logs = logs or _run([_COMPILER, "-o", str(path), *objects, *_RUNTIME_LINK_FLAGS])
        if logs:
            raise CompileError(f"the emulator's runtime does not compile:\n{logs}")


def _build_kernel(source: KernelSource, flags: tuple[str, ...], path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="haloconv-emulator-") as folder:
        code = source.code + _ENTRY.format(entry=source.entry)
        Path(folder, SOURCE_NAME).write_text(code, encoding="utf-8")
        command = [_COMPILER, *flags, f"-I{INCLUDE_FOLDER}", "-include", "emulator.h", "-x", "c++"]
        if log := _run([*command, "-c", SOURCE_NAME, "-o", "kernel.o"], folder):
            raise CompileError(_explain(source, log))
        linker, helpers = _link_tools()
        if log := _run([linker, *_KERNEL_LINK_FLAGS, "kernel.o", helpers, "-o", str(path)], folder):
            raise CompileError(_explain(source, log))


def _explain(source: KernelSource, log: str) -> str:
    constants = " ".join(f"{name}={value}" for name, value in source.constants) or "none"
    translated = re.sub(rf"{re.escape(SOURCE_NAME)}:(\d+)", lambda found: place(source, int(found[1])), log)
    head = f"kernel '{source.kernel}' does not compile for the emulator\nentry {source.entry}, {_COMPILER}"
    return f"{head} {compiler_version()}\nconstants: {constants}\n\n{translated.strip()}"


def place(source: KernelSource, line: int) -> str:
    """``file:line`` of line ``line`` of the joined source."""
    return str(source.origin(line) or f"<constants of {source.kernel}>:{line}")


def places(source: KernelSource, module: Path, offsets: list[int]) -> dict[int, str]:
    """Where the kernel's machine code at each offset comes from, as ``file:line``; ``""`` where nothing tells.

    An inlined function outside the kernel's source counts as the line that calls it.
    """
    found = dict.fromkeys(offsets, "")
    tool = shutil.which("addr2line")
    if tool is None or not offsets:
        return found
    command = [tool, "-a", "-i", "-e", str(module), *(hex(offset) for offset in offsets)]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    offset = 0
    for line in lines:
        if line.startswith("0x"):
            offset = int(line, 16)
        elif not found.get(offset) and (match := re.search(rf"{re.escape(SOURCE_NAME)}:(\d+)", line)):
            found[offset] = place(source, int(match[1]))
    return found
