"""Which device files a kernel has, and the hash that ties a measurement to them.

A kernel is a pair of twins, ``<name>.py`` and ``<name>.cu``, in the folder of its family or in a folder of that; its
name is ``<family>/<name>``. Other .cu files of the family are launched beside it: they pack, sum or mend.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from haloconv.jit.source import SOURCE_ROOT, family_sources

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PATH = re.compile(r"\s*#\s*(include|pragma\s+once)\b")


def kernels_of(family: str) -> list[str]:
    """The kernels of a family by name, ``halo_sm90/conv`` for one; none for ``aten``."""
    return list(_cu_files(family)[0])


@cache
def _cu_files(family: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """By name, the .cu files of a family that are kernels, and those that are launched beside them."""
    files = sorted((SOURCE_ROOT / "families" / family).rglob("*.cu"), key=lambda file: file.stem)
    kernels = tuple(f"{family}/{file.stem}" for file in files if file.with_suffix(".py").exists())
    return kernels, tuple(name for file in files if (name := f"{family}/{file.stem}") not in kernels)


def device_files(kernel: str) -> list[Path]:
    """The kernel's .cu file, those of its family launched beside it, and all headers; none if it is not ours."""
    kernels, beside = _cu_files(kernel.split("/")[0])
    if kernel not in (*kernels, *beside):
        return []
    return list(dict.fromkeys(file for name in (kernel, *beside) for file in family_sources(name)))


def canonical_device(text: str) -> str:
    """Device code without comments, blank lines, indentation, and the paths of what it includes."""
    code = _COMMENT.sub("", text.replace("\\\n", " "))
    lines = (" ".join(line.split()) for line in code.splitlines() if not _PATH.match(line))
    return "\n".join(line for line in lines if line)


def total_hash(texts: list[str]) -> str:
    """SHA-256, in hexadecimal, of texts in whatever order."""
    return _joined_hash(hashlib.sha256(text.encode()).hexdigest() for text in texts)


def _joined_hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


@cache
def _file_hash(file: Path) -> str:
    """Hash of one device file's canonical source; kept, because many kernels include it."""
    return hashlib.sha256(canonical_device(file.read_text(encoding="utf-8")).encode()).hexdigest()


@cache
def device_hash(kernel: str) -> str:
    """The hash of the kernel's device code, whatever its files are called; empty if there is none."""
    parts = [_file_hash(file) for file in device_files(kernel)]
    return _joined_hash(parts) if parts else ""
