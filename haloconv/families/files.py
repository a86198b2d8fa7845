"""Which device files a kernel has, and the hash that ties a measurement to them.

A kernel is a pair of twins, ``families/<family>/<name>.py`` and ``<name>.cu``; its name is ``<family>/<name>``. Other
.cu files of the folder are launched beside it: they pack, sum or mend.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

from haloconv.jit.source import SOURCE_ROOT, family_sources

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PATH = re.compile(r"\s*#\s*(include|pragma\s+once)\b")


def kernels_of(family: str) -> list[str]:
    """The kernels of a family by name, ``halo_sm90/conv`` for one; none for ``aten``."""
    folder = SOURCE_ROOT / "families" / family
    return [f"{family}/{file.stem}" for file in sorted(folder.glob("*.cu")) if file.with_suffix(".py").exists()]


def device_files(kernel: str) -> list[Path]:
    """The kernel's .cu file, those of its folder launched beside it, and all headers; none if it is not ours."""
    family, folder = kernel.split("/")[0], SOURCE_ROOT / "families"
    if not (folder / f"{kernel}.cu").exists():
        return []
    names = [f"{family}/{file.stem}" for file in sorted((folder / family).glob("*.cu"))]
    beside = [name for name in names if name not in kernels_of(family)]
    return list(dict.fromkeys(file for name in (kernel, *beside) for file in family_sources(name)))


def canonical_device(text: str) -> str:
    """Device code without comments, blank lines, indentation, and the paths of what it includes."""
    code = _COMMENT.sub("", text.replace("\\\n", " "))
    lines = (" ".join(line.split()) for line in code.splitlines() if not _PATH.match(line))
    return "\n".join(line for line in lines if line)


def total_hash(texts: list[str]) -> str:
    """SHA-256, in hexadecimal, of texts in whatever order."""
    parts = sorted(hashlib.sha256(text.encode()).hexdigest() for text in texts)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def device_hash(kernel: str) -> str:
    """The hash of the kernel's device code, whatever its files are called; empty if there is none."""
    texts = [canonical_device(file.read_text(encoding="utf-8")) for file in device_files(kernel)]
    return total_hash(texts) if texts else ""
