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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from haloconv import env
from haloconv.jit.compile import COMPILE_FLAGS, Cubin, compile_source, nvrtc_info
from haloconv.jit.source import KernelSource

_FORMAT = 1
_SOURCE, _CUBIN, _META = "source.cu", "kernel.cubin", "meta.json"
_KEY = re.compile(r"[0-9a-f]{64}")
_LOCK_SUFFIX, _PARTIAL_SUFFIX = ".lock", ".partial"
_MODULE_SUFFIX, _CHECKSUM_SUFFIX = ".so", ".sha256"
_LOCK_TIMEOUT_S = 120
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

    Raises CompileError or UnsupportedArchError if the source does not compile, ToolchainError without a compiler.
    """
    key = cache_key(source, arch)
    cubin = _in_memory.get(key)
    if cubin is not None:
        return cubin
    with _guard:
        key_lock = _key_locks[key]
    with key_lock:
        if key not in _in_memory:
            _in_memory[key] = _from_disk_or_compiler(key, source, arch)
        return _in_memory[key]


def cache_key(source: KernelSource, arch: str) -> str:
    """The name of the entry: SHA-256 over the text and everything else that the cubin depends on."""
    version, _ = nvrtc_info()
    parts = [str(_FORMAT), source.digest, arch, version, *COMPILE_FLAGS]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


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
    _refuse_foreign(root)
    if os.name == "posix" and stat.S_IMODE(root.stat().st_mode) != 0o700:
        root.chmod(0o700)
    return root


# --- one entry


def _from_disk_or_compiler(key: str, source: KernelSource, arch: str) -> Cubin:
    if not env.disk_cache_enabled():
        return _compiled(source, arch)
    cubin = _read_entry(key, source)
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
    return cubin


def _compiled(source: KernelSource, arch: str) -> Cubin:
    cubin = compile_source(source, arch)
    _count("compiles")
    return cubin


def _read_entry(key: str, source: KernelSource) -> Cubin | None:
    """The entry ``key``, or None if it is absent, damaged, or in a folder that others could have written to."""
    folder = cache_root() / key
    try:
        _refuse_foreign(folder.parent)
        meta_bytes = (folder / _META).read_bytes()
        image = (folder / _CUBIN).read_bytes()
        text = (folder / _SOURCE).read_bytes()
    except OSError:
        return None
    try:
        meta = json.loads(meta_bytes)
        report = meta["report"]
        intact = meta_bytes == _meta_bytes(report, image, text) and text == source.text.encode()
        cubin = Cubin(image=image, **report) if intact else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if cubin is not None:
        _count("disk_hits")
    return cubin


def _write_entry(folder: Path, source: KernelSource, cubin: Cubin) -> None:
    """Write the entry beside its place, then move it there in one step. A failure is reported once and is no error."""
    partial = folder.with_name(f"{secrets.token_hex(8)}{_PARTIAL_SUFFIX}")
    text = source.text.encode()
    report = {name: value for name, value in asdict(cubin).items() if name != "image"}
    contents = {_SOURCE: text, _CUBIN: cubin.image, _META: _meta_bytes(report, cubin.image, text)}
    try:
        partial.mkdir(mode=0o700)
        for name, content in contents.items():
            _write_file(partial / name, content)
        _move_into_place(partial, folder)
    except OSError as error:
        _warn_once(error)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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


def _meta_bytes(report: dict, image: bytes, text: bytes) -> bytes:
    """The content of meta.json: the compiler's report and a checksum over it, the image and the source."""
    canonical = json.dumps(report, sort_keys=True).encode()
    checksum = hashlib.sha256(b"\n".join([canonical, hashlib.sha256(image).digest(), hashlib.sha256(text).digest()]))
    return json.dumps({"report": report, "checksum": checksum.hexdigest()}, sort_keys=True, indent=1).encode() + b"\n"


def _write_file(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


# --- around the entries


@contextmanager
def _only_process(lock_path: Path) -> Iterator[None]:
    """Let one process at a time compile a key. Where locks do not work each compiles for itself."""
    lock = FileLock(lock_path, timeout=_LOCK_TIMEOUT_S, mode=0o600)
    try:
        lock.acquire()
    except (OSError, NotImplementedError, Timeout):
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _refuse_foreign(root: Path) -> None:
    """Raise PermissionError if somebody else could have put a kernel into ``root``; OSError if it does not exist."""
    if os.name != "posix":
        return
    facts = root.stat()
    if facts.st_uid != os.getuid():
        raise PermissionError(f"{root} belongs to another user")
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{root} can be written by others; remove it, or chmod 700 it if you trust what is in it")


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
