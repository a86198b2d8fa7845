"""What a stamp vouches for: the kernel families and the hash of everything that decides what a family computes."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from haloconv.families import FAMILIES
from haloconv.jit.source import KERNEL_FOLDER, family_sources

ROOT = Path(__file__).resolve().parent.parent
HOST_FOLDER = ROOT / "haloconv" / "families"
VERIFIED = ROOT / "benchmarks" / "verified"
PENDING = VERIFIED / "PENDING.md"
PENDING_LINE = re.compile(r"^[-*] `(?P<family>\w+)` \((?P<date>\d{4}-\d{2}-\d{2})\): (?P<reason>.+)$", re.MULTILINE)


def kernel_families() -> list[str]:
    """The families that have device code of their own."""
    return sorted(name for name in FAMILIES if any(_belongs(file.stem, name) for file in KERNEL_FOLDER.glob("*.cu")))


def stamped_files(family: str) -> list[Path]:
    """``<family>`` and ``<family>_*`` on either side, the headers that the kernels include, and the launcher."""
    kernels = [file.stem for file in sorted(KERNEL_FOLDER.glob("*.cu")) if _belongs(file.stem, family)]
    host = [file for file in sorted(HOST_FOLDER.glob("*.py")) if _belongs(file.stem, family) or file.stem == "launch"]
    return list(dict.fromkeys([*(file for kernel in kernels for file in family_sources(kernel)), *host]))


def _belongs(stem: str, family: str) -> bool:
    """Whether a file is the family's: ``<family>`` or ``<family>_*``, and no longer name of a family fits."""
    fitting = [name for name in FAMILIES if stem == name or stem.startswith(f"{name}_")]
    return max(fitting, key=len, default=None) == family


def family_hash(family: str) -> str:
    """SHA-256, in hexadecimal, of the names and bytes of the family's files."""
    total = hashlib.sha256()
    for file in stamped_files(family):
        content = file.read_bytes()
        total.update(f"{file.name} {len(content)}\n".encode() + content)
    return total.hexdigest()


def all_hashes() -> dict[str, str]:
    return {family: family_hash(family) for family in kernel_families()}


def pending() -> dict[str, str]:
    """Family -> "date: reason" for the families that PENDING.md names."""
    text = PENDING.read_text(encoding="utf-8") if PENDING.exists() else ""
    return {line["family"]: f"{line['date']}: {line['reason']}" for line in PENDING_LINE.finditer(text)}
