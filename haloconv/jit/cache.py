"""Compiled kernels on disk and in memory: one folder per key with the source, the cubin and a report about it.

What the emulator builds lies beside them, in a folder of its own (haloconv/emulator/build.py).

An entry is written under another name and renamed when it is complete, and every byte of it is checked when it is read:
a damaged entry is a miss. The folder belongs to its user alone, because what lies in it is run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from platformdirs import user_cache_path

from haloconv import env, logs
from haloconv.jit.compile import COMPILE_FLAGS, CompileError, Cubin, ToolchainError, compile_source, nvrtc_info
from haloconv.jit.locks import if_free, refuse_foreign
from haloconv.jit.locks import only_process as _only_process
from haloconv.jit.source import KernelSource
from haloconv.jit.upkeep import META as _META
from haloconv.jit.upkeep import PARTIAL_SUFFIX as _PARTIAL_SUFFIX
from haloconv.jit.upkeep import evict, failures, keep_failure, note_use

_FORMAT = 1
_SOURCE, _CUBIN = "source.cu", "kernel.cubin"
_KEY = re.compile(r"[0-9a-f]{64}")
_LOCK_SUFFIX = ".lock"
_EVICTION = "eviction"
_MODULE_SUFFIX, _CHECKSUM_SUFFIX = ".so", ".sha256"
_MOVES = 64  # attempts to put an entry into its place, of which others may spoil one each


class CacheStatistics(NamedTuple):
    """What this process did since it started: kernels compiled, and kernels read from the cache on disk."""

    compiles: int
    disk_hits: int


_in_memory: dict[str, Cubin] = {}
_key_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
_counts = {"compiles": 0, "disk_hits": 0}
_guard = threading.Lock()
_warned = False


def get_kernel(source: KernelSource, arch: str) -> Cubin:
    """The compiled form of ``source`` for ``arch``: from memory, else from disk, else compiled and kept in both.

    Safe from any number of threads and processes. A cache that cannot be written is reported once, as a RuntimeWarning.
    Kernels in the folders that are only read need no compiler.

    Raises CompileError or UnsupportedArchError if the source does not compile, ToolchainError without a compiler.
    """
    try:
        key = cache_key(source, arch)
    except ToolchainError:
        cubin = _precompiled(source, arch)
        if cubin is None:
            raise
        return cubin
    cubin = _in_memory.get(key)
    if cubin is None:
        with _guard:
            key_lock = _key_locks[key]
        with key_lock:
            cubin = _in_memory.get(key)
            if cubin is None:
                cubin = _in_memory[key] = _from_disk_or_compiler(key, source, arch)
    if _collected is not None:
        _collected[key] = (source, cubin)
    return cubin


def cache_key(source: KernelSource, arch: str, nvrtc: str | None = None) -> str:
    """The name of the entry: SHA-256 over the source and everything else that the cubin depends on.

    ``nvrtc`` is the compiler's version, by default that of the one in use.
    """
    parts = [str(_FORMAT), source.digest, arch, nvrtc or nvrtc_info()[0], *COMPILE_FLAGS]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


_collected: dict[str, tuple[KernelSource, Cubin]] | None = None


@contextmanager
def collecting() -> Iterator[dict[str, tuple[KernelSource, Cubin]]]:
    """Inside, every kernel that is asked for is collected by its key. One block at a time."""
    global _collected
    found: dict[str, tuple[KernelSource, Cubin]] = {}
    _collected = found
    try:
        yield found
    finally:
        _collected = None


def save_kernels(folder: Path, kernels: Mapping[str, tuple[KernelSource, Cubin]]) -> None:
    """Write kernels for HALOCONV_CACHE_DIR to read from there: whole entries, which every user may read.

    Raises OSError if they cannot be written.
    """
    root = folder / "kernels"
    root.mkdir(parents=True, exist_ok=True)
    for key, (source, cubin) in kernels.items():
        partial = root / f"{secrets.token_hex(8)}{_PARTIAL_SUFFIX}"
        try:
            _fill(partial, source, cubin)
            for path in (partial, *partial.iterdir()):
                path.chmod(0o755 if path.is_dir() else 0o644)
            _move_into_place(partial, root / key)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    root.chmod(0o755)


def cache_root() -> Path:
    """The folder of the entries: ``kernels`` under HALOCONV_CACHE_DIR, else under the user's own for haloconv."""
    return (env.cache_dir_override() or user_cache_path("haloconv", appauthor=False)) / "kernels"


def emulator_folder() -> Path:
    """The folder of what the emulator builds: per key a module (``.so``) and its checksum."""
    return cache_root() / "emulator"


def clear_cache() -> int:
    """Forget every kernel, the emulator's too, on disk and in memory; kernels that plans already hold keep working.

    Returns how many entries were removed from disk; the emulator's runtime counts as one.
    """
    _in_memory.clear()
    removed = 0
    for path in _children(cache_root()):
        if _KEY.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
            removed += not path.exists()
        elif path.name.endswith(_PARTIAL_SUFFIX):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.endswith(_LOCK_SUFFIX):
            path.unlink(missing_ok=True)
    for path in failures(cache_root()):
        path.unlink(missing_ok=True)
    for path in _children(emulator_folder()):
        if path.suffix in (_MODULE_SUFFIX, _CHECKSUM_SUFFIX, _PARTIAL_SUFFIX, _LOCK_SUFFIX):
            with suppress(OSError):
                path.unlink()
                removed += path.suffix == _MODULE_SUFFIX
    return removed


def cache_size() -> tuple[int, int]:
    """How many entries the cache on disk has, the emulator's too, and how many bytes they take."""
    entries = [path for path in _children(cache_root()) if _KEY.fullmatch(path.name)]
    built = [path for path in _children(emulator_folder()) if path.suffix in (_MODULE_SUFFIX, _CHECKSUM_SUFFIX)]
    sizes = []
    for file in [*built, *(file for entry in entries for file in _children(entry))]:
        try:
            sizes.append(file.stat().st_size)
        except OSError:
            continue
    return len(entries) + sum(path.suffix == _MODULE_SUFFIX for path in built), sum(sizes)


def statistics() -> CacheStatistics:
    """The counters of this process. A kernel found in memory counts as neither."""
    with _guard:
        return CacheStatistics(**_counts)


def prepare_root() -> Path:
    """The folder of the entries, created if need be, readable and writable by its user only.

    Raises OSError if it cannot be made so, PermissionError if it belongs to others or they could have written to it.
    """
    root = cache_root()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_foreign(root)
    if os.name == "posix" and stat.S_IMODE(root.stat().st_mode) != 0o700:
        root.chmod(0o700)
    return root


# --- one entry


def _from_disk_or_compiler(key: str, source: KernelSource, arch: str) -> Cubin:
    if not env.disk_cache_enabled():
        return _compiled(source, arch)
    cubin = _read_entry(key, source) or _precompiled(source, arch)
    if cubin is not None:
        return cubin
    try:
        root = prepare_root()
    except OSError as error:
        _warn_once(error)
        return _compiled(source, arch)
    with _only_process(root / f"{key}{_LOCK_SUFFIX}"):
        cubin = _read_entry(key, source)
        if cubin is None:
            cubin = _compiled(source, arch)
            _write_entry(root / key, source, cubin)
    limit_bytes = env.cache_limit_bytes()
    if limit_bytes is not None:
        _evict(root, limit_bytes, key)
    return cubin


def _compiled(source: KernelSource, arch: str) -> Cubin:
    try:
        cubin = compile_source(source, arch)
    except CompileError as error:
        logs.compile.info("%s for %s does not compile: %s", source.kernel, arch, error)
        if env.disk_cache_enabled():
            keep_failure(cache_root(), f"{source.digest[:16]}-{arch}", str(error))
        raise
    _count("compiles")
    logs.compile.info("%s for %s in %.2f s by NVRTC %s", source.kernel, arch, cubin.compile_ms / 1e3, cubin.nvrtc)
    return cubin


def _evict(root: Path, limit_bytes: int, new: str) -> None:
    """Keep the entries within the limit, but for those of this process; one process at a time does it."""
    with _only_process(root / f"{_EVICTION}{_LOCK_SUFFIX}"):
        entries = [path for path in _children(root) if _KEY.fullmatch(path.name)]
        evict(entries, limit_bytes, {new, *_in_memory}, lambda name: if_free(root / f"{name}{_LOCK_SUFFIX}"))


def _precompiled(source: KernelSource, arch: str) -> Cubin | None:
    """The kernel from the folders that are only read, whatever NVRTC compiled it; None if none has it."""
    for folder in env.cache_dirs_to_read():
        for version in _versions_in(folder / "kernels"):
            cubin = _read_entry(cache_key(source, arch, version), source, folder / "kernels")
            if cubin is not None:
                return cubin
    return None


@cache
def _versions_in(root: Path) -> tuple[str, ...]:
    """The NVRTC versions that compiled the entries of a folder, that in use first. Looked at once in a process."""
    found: dict[str, None] = {}
    with suppress(ToolchainError):
        found[nvrtc_info()[0]] = None
    for entry in _children(root):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            found[str(json.loads((entry / _META).read_bytes())["report"]["nvrtc"])] = None
    return tuple(found)


def _read_entry(key: str, source: KernelSource, read_only: Path | None = None) -> Cubin | None:
    """The entry ``key``, or None if it is absent, damaged, or in a folder that others could have written to.

    ``read_only`` is a folder that is only read, which may be the system's.
    """
    folder = (read_only or cache_root()) / key
    try:
        refuse_foreign(folder.parent, or_root=read_only is not None)
        meta_bytes = (folder / _META).read_bytes()
        image = (folder / _CUBIN).read_bytes()
        code = (folder / _SOURCE).read_bytes()
    except OSError:
        return None
    try:
        meta = json.loads(meta_bytes)
        report = meta["report"]
        intact = meta_bytes == _meta_bytes(report, image, code) and code == source.code.encode()
        cubin = Cubin(image=image, **report) if intact else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if cubin is not None:
        _count("disk_hits")
        if read_only is None:
            note_use(folder)
        logs.compile.info("%s for %s was compiled before", source.kernel, cubin.arch)
        logs.cache.info("read %s", folder)
    return cubin


def _write_entry(folder: Path, source: KernelSource, cubin: Cubin) -> None:
    """Write the entry beside its place, then move it there in one step. A failure is reported once and is no error."""
    partial = folder.with_name(f"{secrets.token_hex(8)}{_PARTIAL_SUFFIX}")
    try:
        _fill(partial, source, cubin)
        _move_into_place(partial, folder)
        logs.cache.info("wrote %s: %s for %s", folder, source.kernel, cubin.arch)
    except OSError as error:
        _warn_once(error)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fill(folder: Path, source: KernelSource, cubin: Cubin) -> None:
    """Make ``folder`` an entry."""
    code = source.code.encode()
    report = {name: value for name, value in asdict(cubin).items() if name != "image"}
    contents = {_SOURCE: code, _CUBIN: cubin.image, _META: _meta_bytes(report, cubin.image, code)}
    folder.mkdir(mode=0o700)
    for name, content in contents.items():
        _write_file(folder / name, content)


def _move_into_place(partial: Path, folder: Path) -> None:
    """Rename ``partial`` to ``folder``; what stood there was read as a miss, and is moved away first.

    An entry that another process puts there in between is as good as this one, and stays; a third process may move
    that away again before it is seen.
    """
    discarded = partial.with_name(f"{secrets.token_hex(8)}{_PARTIAL_SUFFIX}")
    with suppress(FileNotFoundError):
        folder.rename(discarded)
    shutil.rmtree(discarded, ignore_errors=True)
    for left in reversed(range(_MOVES)):
        try:
            partial.rename(folder)
            return
        except OSError:
            if folder.exists():
                return
            if not left:
                raise


def _meta_bytes(report: dict[str, Any], image: bytes, code: bytes) -> bytes:
    """The content of meta.json: the compiler's report and a checksum over it, the image and the source."""
    canonical = json.dumps(report, sort_keys=True).encode()
    checksum = hashlib.sha256(b"\n".join([canonical, hashlib.sha256(image).digest(), hashlib.sha256(code).digest()]))
    return json.dumps({"report": report, "checksum": checksum.hexdigest()}, sort_keys=True, indent=1).encode() + b"\n"


def _write_file(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


# --- around the entries


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _count(name: str) -> None:
    with _guard:
        _counts[name] += 1


def _warn_once(error: OSError) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        f"compiled kernels are not kept on disk: {error}. Each process compiles its own; set {env.CACHE_DIR} to a "
        f"folder that can be written, or {env.CACHE}=0 to silence this",
        RuntimeWarning,
        stacklevel=2,
    )
