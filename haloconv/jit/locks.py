"""Who may touch a file of the kernel cache: locks between processes, and folders that nobody else could write to."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

_LOCK_TIMEOUT_S = 120


@contextmanager
def only_process(lock_path: Path) -> Iterator[None]:
    """Let one process at a time do something. Where locks do not work each does it for itself."""
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


@contextmanager
def if_free(lock_path: Path) -> Iterator[bool]:
    """Whether no process has the lock; if so it is held inside."""
    lock = FileLock(lock_path, timeout=0, mode=0o600)
    try:
        lock.acquire()
    except (OSError, NotImplementedError, Timeout):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def refuse_foreign(root: Path, or_root: bool = False) -> None:
    """Raise PermissionError if somebody else could have put a kernel into ``root``; OSError if it does not exist.

    ``or_root``: the system's superuser may have done so.
    """
    if os.name != "posix":
        return
    facts = root.stat()
    if facts.st_uid != os.getuid() and not (or_root and facts.st_uid == 0):
        raise PermissionError(f"{root} belongs to another user")
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{root} can be written by others; remove it, or chmod 700 it if you trust what is in it")
