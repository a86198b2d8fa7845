"""What keeps the folder of compiled kernels useful: a limit to its size, and notes of what did not compile."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple

from haloconv import logs

META = "meta.json"
"""The file of an entry whose time of change says when the entry was last used."""

PARTIAL_SUFFIX = ".partial"
_FAILURES, _FAILURE_SUFFIX = "failures", ".log"
_MOST_FAILURES = 20


class _Entry(NamedTuple):
    last_used_ns: int
    size_bytes: int
    folder: Path


def note_use(entry: Path) -> None:
    """Remember that the entry was used now. Where that cannot be written it is forgotten."""
    with suppress(OSError):
        os.utime(entry / META)


def evict(
    entries: Collection[Path],
    limit_bytes: int,
    in_use: Collection[str],
    locked: Callable[[str], AbstractContextManager[bool]],
) -> list[Path]:
    """Remove the least recently used of ``entries`` until they take at most ``limit_bytes``; those that were removed.

    Entries whose names are ``in_use`` stay, and so do those that another process has locked: ``locked(name)`` gives
    whether the lock was free, and holds it. A process that has read an entry needs it no more.
    """
    known = sorted(each for each in map(_measured, entries) if each is not None)
    total_bytes, removed = sum(each.size_bytes for each in known), []
    for entry in known:
        if total_bytes <= limit_bytes:
            break
        if entry.folder.name in in_use:
            continue
        with locked(entry.folder.name) as is_free:
            if is_free and _remove(entry.folder):
                total_bytes -= entry.size_bytes
                removed.append(entry.folder)
                logs.cache.info("removed %s, least recently used, %d bytes", entry.folder, entry.size_bytes)
    if total_bytes > limit_bytes and logs.cache.isEnabledFor(logging.INFO):
        logs.cache.info("kernels in use take %d bytes, more than the limit of %d", total_bytes, limit_bytes)
    return removed


def _measured(folder: Path) -> _Entry | None:
    """None for an entry that another process removes meanwhile."""
    try:
        sizes = [file.stat().st_size for file in folder.iterdir()]
        return _Entry((folder / META).stat().st_mtime_ns, sum(sizes), folder)
    except OSError:
        return None


def _remove(folder: Path) -> bool:
    """Take the entry away in one step, so that no process finds half of it."""
    discarded = folder.with_name(f"{secrets.token_hex(8)}{PARTIAL_SUFFIX}")
    try:
        folder.rename(discarded)
    except OSError:
        return False
    shutil.rmtree(discarded, ignore_errors=True)
    return True


def keep_failure(root: Path, name: str, message: str) -> None:
    """Keep what a compiler said in ``root``, under the name of what it did not compile; only the newest few stay."""
    folder = root / _FAILURES
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / f"{name}{_FAILURE_SUFFIX}").write_text(f"{message}\n", encoding="utf-8")
        for old in failures(root)[_MOST_FAILURES:]:
            old.unlink(missing_ok=True)


def failures(root: Path) -> list[Path]:
    """What compilers said lately, the newest first."""
    try:
        found = [file for file in (root / _FAILURES).iterdir() if file.suffix == _FAILURE_SUFFIX]
        return sorted(found, key=lambda file: file.stat().st_mtime_ns, reverse=True)
    except OSError:
        return []
