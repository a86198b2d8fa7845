"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """``write_bytes`` of ``text`` in UTF-8.

    Characters without a place in UTF-8, as file names may hold them, are written as escapes.
    """
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, data: bytes) -> None:
    """Make ``data`` the whole content of the file; until it is complete the old content stays.

    It goes to a temporary file in the same folder, which takes the file's name (that of the file a symbolic link points
    to) and, of an older file, its permissions. Missing folders are made. Pipes and devices are written to as they are.

    Raises OSError if the file cannot be written; nothing is left behind then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        path.write_bytes(data)
        return
    target = Path(os.path.realpath(path))
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(13, "the file is read-only", str(path))
    partial = target.with_name(f".haloconv-{secrets.token_hex(8)}.partial")
    try:
        with open(partial, "xb") as file:
            file.write(data)
        if target.exists():
            shutil.copymode(target, partial)
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
