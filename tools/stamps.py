"""What a stamp vouches for: the kernel families and the hash of everything that decides what a family computes."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from haloconv.families import FAMILIES
from haloconv.families.kernel_files import belongs, kernel_files

ROOT = Path(__file__).resolve().parent.parent
HOST_FOLDER = ROOT / "haloconv" / "families"
VERIFIED = ROOT / "benchmarks" / "verified"
PENDING = VERIFIED / "PENDING.md"
PENDING_LINE = re.compile(r"^[-*] `(?P<family>\w+)` \((?P<date>\d{4}-\d{2}-\d{2})\): (?P<reason>.+)$", re.MULTILINE)


def kernel_families() -> list[str]:
    """The families that have device code of their own."""
    return sorted(name for name in FAMILIES if kernel_files(name))


def stamped_files(family: str) -> list[Path]:
    """``<family>`` and ``<family>_*`` on either side, the headers that the kernels include, and the launcher."""
    host = [file for file in sorted(HOST_FOLDER.glob("*.py")) if belongs(file.stem, family) or file.stem == "launch"]
    return list(dict.fromkeys([*kernel_files(family), *host]))


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
