"""Which kernel files belong to which family, and the hash that ties a measurement to them."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from haloconv.families import FAMILIES
from haloconv.jit.source import KERNEL_FOLDER, family_sources


def belongs(stem: str, family: str) -> bool:
    """Whether a file is the family's: ``<family>`` or ``<family>_*``, and no longer name of a family fits."""
    fitting = [name for name in FAMILIES if stem == name or stem.startswith(f"{name}_")]
    return max(fitting, key=len, default=None) == family


def kernel_files(family: str) -> list[Path]:
    """``<family>.cu``, ``<family>_*.cu`` and every header that they include; none for ``aten``."""
    kernels = [file.stem for file in sorted(KERNEL_FOLDER.glob("*.cu")) if belongs(file.stem, family)]
    return list(dict.fromkeys(file for kernel in kernels for file in family_sources(kernel)))


@cache
def kernel_hash(family: str) -> str:
    """SHA-256, in hexadecimal, of the names and bytes of the family's kernel files; empty for ``aten``."""
    files = kernel_files(family)
    total = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        total.update(f"{file.name} {len(content)}\n".encode() + content)
    return total.hexdigest() if files else ""
