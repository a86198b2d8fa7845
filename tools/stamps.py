"""Stamps: a file a family under benchmarks/verified, a line a kernel. families.closure says what a hash covers.

A stamp is of the GPU model that ran last; under ``also`` it keeps what others found on the same sources, and under
``same`` the hashes of former sources that were proven to be these (tools/carry.py).

``python -m tools.stamps`` writes haloconv/choose/stamped.json, which tells the package of the stamps that hold.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from haloconv.bench.stale import same_hashes
from haloconv.choose.trust import STAMPED, Stamped
from haloconv.env import child_environment
from haloconv.families.closure import (
    all_hashes,
    canonical_host,
    host_files,
    kernels,
    launched,
    stamp_hash,
    stamped_files,
)
from haloconv.families.files import device_hash
from haloconv.jit.source import SOURCE_ROOT

__all__ = ["all_hashes", "canonical_host", "host_files", "kernels", "launched", "stamp_hash", "stamped_files"]

ROOT = SOURCE_ROOT.parent
VERIFIED = ROOT / "benchmarks" / "verified"
PENDING = VERIFIED / "PENDING.md"
PENDING_LINE = re.compile(r"^[-*] `(?P<kernel>[\w/]+)` \((?P<date>\d{4}-\d{2}-\d{2})\): (?P<reason>.+)$", re.MULTILINE)


_ALSO = ("gpu", "torch", "checks", "exact_runs", "sanitizer_calls", "commit", "date")
"""What stays of the stamp of a GPU model when another one runs the same sources."""
_VERIFIED_ELSEWHERE = {"reduce": ("direct",)}
"""Families that nobody asks for by name and many launch: whose tests are enough to verify them."""
MOMENTS = "halo_sm90/moments"
_VERIFIED_ALONE = {MOMENTS: (MOMENTS,), "halo_sm90/moments_sum": (MOMENTS,)}
"""Kernels that no config of their family names, as they run where statistics are asked for: whose tests verify them."""


def kernel_families() -> list[str]:
    """The families that have device code of their own, chosen by name or launched by others."""
    return sorted({kernel.split("/")[0] for kernel in kernels()})


def tested_by(family: str) -> tuple[str, ...]:
    """The families whose tests verify a family's kernels: itself, or those of which it is only a part."""
    return _VERIFIED_ELSEWHERE.get(family, (family,))


def groups_of(kernel: str) -> tuple[str, ...]:
    """The groups of GPU tests that verify a kernel: a family's, or those of kernels that are verified alone."""
    return _VERIFIED_ALONE.get(kernel) or tested_by(kernel.split("/")[0])


def read_stamps(folder: Path = VERIFIED) -> dict[str, dict]:
    """The stamp of every kernel that has one: a file a family, a line a kernel."""
    found: dict[str, dict] = {}
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        found |= {f"{content['family']}/{name}": stamp for name, stamp in content["kernels"].items()}
    return found


def carried_hashes(folder: Path = VERIFIED) -> list[tuple[str, str, str]]:
    """Of each kernel whose stamp was carried: its name, the hash that a GPU run judged, and that of the code now."""
    stamps = read_stamps(folder).items()
    return [(kernel, each["carried_from"]["hash"], each["hash"]) for kernel, each in stamps if "carried_from" in each]


def with_others(new: dict, old: dict | None) -> dict:
    """The new stamp, with what the old one knows of the same sources: other GPU models, hashes of former sources."""
    if old is None or old["hash"] != new["hash"]:
        return new
    known = [*new.get("also", []), {key: old[key] for key in _ALSO if key in old}, *old.get("also", [])]
    others = {each["gpu"]: each for each in reversed(known) if each["gpu"] != new["gpu"]}
    also = {"also": [others[gpu] for gpu in sorted(others)]} if others else {}
    former = same_hashes(old) | same_hashes(new)
    return {**new, **also, **({"same": sorted(former)} if former else {})}


def gpus_of(stamp: dict) -> list[str]:
    """The GPU models that vouch for the sources of a stamp, sorted."""
    return sorted({stamp["gpu"], *(each["gpu"] for each in stamp.get("also", []))})


def write_stamps(stamps: dict[str, dict], folder: Path = VERIFIED) -> list[Path]:
    """Put stamps into their families' files; those of other kernels stay unless the kernel is gone. Gives the files."""
    before = read_stamps(folder)
    merged = {kernel: with_others(stamp, before.get(kernel)) for kernel, stamp in stamps.items()}
    whole = {kernel: stamp for kernel, stamp in (before | merged).items() if kernel in kernels()}
    written = []
    for family in sorted({kernel.split("/")[0] for kernel in {*stamps, *(before.keys() - whole.keys())}}):
        own = {kernel.split("/")[1]: whole[kernel] for kernel in sorted(whole) if kernel.split("/")[0] == family}
        path = folder / f"{family}.json"
        if not own:
            path.unlink()
            continue
        lines = ",\n".join(f'    "{name}": {json.dumps(stamp, sort_keys=True)}' for name, stamp in own.items())
        path.write_text(f'{{\n  "family": "{family}",\n  "kernels": {{\n{lines}\n  }}\n}}\n', encoding="utf-8")
        written.append(path)
    if folder == VERIFIED:
        write_stamped()
    return written


def stamped(stamps: dict[str, dict]) -> dict[str, Stamped]:
    """What choose/stamped.json holds: GPU models and device code of each kernel whose stamp is of today's sources."""
    return {
        kernel: {"gpus": gpus_of(stamp), "source": device_hash(kernel)}
        for kernel, stamp in sorted(stamps.items())
        if kernel in kernels() and stamp["hash"] == stamp_hash(kernel)
    }


def write_stamped(path: Path = STAMPED) -> None:
    """Write the list from the stamps."""
    path.write_text(json.dumps(stamped(read_stamps()), indent=1) + "\n", encoding="utf-8")


def environment_of(root: Path) -> dict[str, str]:
    """The environment for a Python process that must find the checkout at ``root`` first."""
    return child_environment(PYTHONPATH=str(root))


def pending() -> dict[str, str]:
    """Kernel -> "date: reason" for the kernels that PENDING.md names."""
    text = PENDING.read_text(encoding="utf-8") if PENDING.exists() else ""
    return {line["kernel"]: f"{line['date']}: {line['reason']}" for line in PENDING_LINE.finditer(text)}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    write_stamped()
