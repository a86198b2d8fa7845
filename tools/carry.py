"""Carry stamps and shipped records over a change that changes no kernel: ``python -m tools.carry REVISION``.

A kernel's stamp moves over if nothing that a GPU sees changed since the revision: in the emulator's test runs that
launch it every launch has the same kernel, constants, grid, block, shared memory and arguments, and every CI source of
what they launch has the same code (comments and layout aside) or compiles to the same cubin. Kernels may have other
names and places: they are matched by what they are. Where a kernel has other constants than it had, what each run
launches of it is compiled, too, and must be the same code. A kernel that got new sources needs a stamp of its own; the
records of what it had carry over. ``--write`` changes benchmarks/verified and the shipped records; without it the proof
is printed alone.
``--records-of KERNEL`` carries a kernel's records alone, also of one that has no stamp yet: no run is made, and every
CI source of it must compile to code that is there now.
Exit code 1 if a kernel that was verified at the revision, or the records that were named, cannot be carried.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from haloconv.choose import formats
from haloconv.choose.records import SHIPPED
from tools import stamps
from tools.stamps import ROOT

CARRIED = Path(formats.__file__).with_name("carried.json")
_LIMIT_S = 1800


@dataclass(frozen=True)
class Fingerprint:
    """What ``tools.fingerprint`` wrote of a checkout: see there. ``root`` is the checkout."""

    root: Path
    sources: dict[str, list]
    tapes: dict[str, list]
    hashes: dict[str, str]
    device: dict[str, str]

    def digests(self, kernel: str) -> Counter:
        """How often each digest stands among the CI sources of a .cu file."""
        return Counter(digest for each in self.sources.values() for name, _, digest in each if name == kernel)

    @property
    def kernels(self) -> set[str]:
        """Every .cu file that has a CI source, by name."""
        return {name for each in self.sources.values() for name, _, _ in each}


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A work tree of the revision, for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="haloconv-carry-") as folder:
        place = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(place), revision], cwd=ROOT, check=True)
        try:
            yield place
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(place)], cwd=ROOT, check=True)


def taken(root: Path, *options: str) -> dict:
    """What ``tools.fingerprint`` of that checkout writes there, with this interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "fingerprint.json"
        command = [sys.executable, "-m", "tools.fingerprint", str(out), *options]
        subprocess.run(command, cwd=root, env=stamps.environment_of(root), check=True, timeout=_LIMIT_S, stdout=2)
        return json.loads(out.read_text(encoding="utf-8"))


def fingerprint_of(root: Path) -> Fingerprint:
    found = taken(root)
    return Fingerprint(root, found["sources"], found["tapes"], found["hashes"], found["device"])


def names_now(then: Fingerprint, now: Fingerprint) -> dict[str, str]:
    """The present name of every .cu file of the revision: its own, else that of a new file with the same sources."""
    gone, new = then.kernels - now.kernels, now.kernels - then.kernels
    found = {name: name for name in then.kernels & now.kernels}
    for name in sorted(gone):
        fitting = [other for other in sorted(new) if now.digests(other) == then.digests(name)]
        if len(fitting) == 1:
            found[name] = fitting[0]
    return found


def cubins_of(at: Fingerprint, kernel: str) -> Counter:
    """How often each code, by hash, stands among the cubins of a kernel's CI sources."""
    return Counter(_cubins(at.root, kernel))


@cache
def _cubins(root: Path, kernel: str) -> list[str]:
    return taken(root, "--cubins", kernel)["cubins"]


@cache
def launched_by(root: Path, kernel: str) -> dict[str, list[str]]:
    """The code of each launch of a .cu file, by hash, in each run of a checkout that launches it."""
    return taken(root, "--launched", kernel)["launched"]


def same_launches(run: str, then: Fingerprint, now: Fingerprint, names: dict[str, str]) -> bool:
    """Whether a run launches what it launched: the same kernels in the same way, of the same constants or code."""
    old, new = then.tapes[run], now.tapes[run]
    if [[names.get(each[0]), *each[2:]] for each in old] != [[each[0], *each[2:]] for each in new]:
        return False
    others = {(was[0], now_is[0]) for was, now_is in zip(old, new, strict=True) if was[1] != now_is[1]}
    return all(launched_by(then.root, was)[run] == launched_by(now.root, name)[run] for was, name in others)


def same_code(file: str, old: str, then: Fingerprint, now: Fingerprint, grows: bool = False) -> bool:
    """Whether a .cu file and what it was called compile to the same code, source by source.

    If it ``grows`` there may be more sources now: what they add is launched by no run of then.
    """
    if then.digests(old) == now.digests(file):
        return True
    before, after = cubins_of(then, old), cubins_of(now, file)
    return before <= after if grows else before == after


def changes(kernel: str, then: Fingerprint, now: Fingerprint, names: dict[str, str]) -> list[str]:
    """What a GPU would see of what changed in the runs that launch a kernel; empty if nothing.

    Those are the runs that launched it then, too. The code of every .cu file that they launch must be the same; others
    than the kernel's own may have got new sources. New runs of a new kernel, which needs a stamp of its own, say
    nothing of what they launch beside it.
    """
    before = {new: old for old, new in names.items()}
    if kernel not in before:
        return [f"{kernel} is new"]
    launched = {run: {names.get(launch[0]) for launch in tape} for run, tape in then.tapes.items()}
    for run, tape in now.tapes.items():
        if run in then.tapes or all(launch[0] in before for launch in tape):
            launched.setdefault(run, set()).update(launch[0] for launch in tape)
    runs = [run for run in sorted(launched) if kernel in launched[run]]
    files = sorted({kernel, *(launch[0] for run in runs for launch in now.tapes.get(run, []))})
    found = [f"{file} is new" for file in files if file not in before]
    known = [file for file in files if file in before]
    changed = [file for file in known if not same_code(file, before[file], then, now, grows=file != kernel)]
    found += [f"{file} compiles to other code" for file in changed]
    for run in runs:
        if run not in then.tapes or run not in now.tapes:
            found.append(f"{run} is {'gone' if run in then.tapes else 'new'}")
        elif not same_launches(run, then, now, names):
            found.append(f"{run} is launched differently")
    return found if runs else ["no run launches it"]


def carried(stamp: dict, digest: str, revision: str) -> dict:
    """The stamp for the present hash; it remembers that of the GPU run, and those between, which rows may name."""
    origin = stamp.get("carried_from") or {"hash": stamp["hash"], "commit": stamp["commit"]}
    between = dict.fromkeys([*origin.get("between", []), stamp["hash"]]).keys() - {origin["hash"], digest}
    return {**stamp, "hash": digest, "carried_from": {**origin, "between": sorted(between), "through": revision}}


def with_records(then: Fingerprint, now: Fingerprint, names: dict[str, str]) -> set[str]:
    """The kernels whose records stay true: what was launched then is the same code, and what is new has no records."""
    return {new for old, new in names.items() if same_code(new, old, then, now, grows=True)}


def carry_records(then: Fingerprint, now: Fingerprint, names: dict[str, str], same: set[str]) -> int:
    """Give shipped records of kernels of the same code their present names and hashes; how many.

    choose/carried.json, which says so of records of the format before, follows. At a revision before kernels had hashes
    of their own, the hash is that of the family.
    """
    own_code = same & now.device.keys()  # a kernel that no family chooses, such as a sum, has no records
    hashes = {old: now.device[new] for old, new in names.items() if new in own_code}
    before = {old: then.device.get(old, then.device.get(old.split("/")[0])) for old in hashes}
    present = {old: new for old, new in names.items() if new in own_code}
    count = 0
    for path in sorted(SHIPPED.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        for record in content["records"]:
            own = record["own"]
            if own in hashes and record["source"] == before[own] != hashes[own]:
                record["source"], count = hashes[own], count + 1
            record["own"], record["kernel"] = (present.get(record[name], record[name]) for name in ("own", "kernel"))
        lines = ",\n".join(json.dumps(record, allow_nan=False) for record in content["records"])
        path.write_text(f'{{"format": {content["format"]}, "records": [\n{lines}\n]}}\n', encoding="utf-8")
    carried = json.loads(CARRIED.read_text(encoding="utf-8"))
    for kernels in carried.values():
        for own in kernels.keys() & hashes.keys():
            if kernels[own] in then.device.values():
                del kernels[own]
                kernels[present[own]] = hashes[own]
    CARRIED.write_text(json.dumps(carried, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return count


def device_hash_at(root: Path, kernel: str) -> str:
    """What a checkout's records of a kernel name as its source."""
    code = f"from haloconv.families.files import device_hash; print(device_hash({kernel!r}))"
    told = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=stamps.environment_of(root),
        check=True,
        capture_output=True,
        text=True,
    )
    return told.stdout.strip()


def carry_records_of(kernel: str, revision: str, write: bool) -> int:
    """The exit code, once the records of one kernel are carried, if its code is the same."""
    with checkout(revision) as place:
        before, after = (Counter(taken(root, "--cubins", kernel)["cubins"]) for root in (place, ROOT))
        hashes = [device_hash_at(root, kernel) for root in (place, ROOT)]
    print(f"{kernel}: {(before & after).total()} of {before.total()} CI sources compile to code that is there now")
    if not before <= after:
        return 1
    if write:
        then, now = (Fingerprint(ROOT, {}, {}, {}, {kernel: each}) for each in hashes)
        print(f"{carry_records(then, now, {kernel: kernel}, {kernel})} shipped records carried over")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="a revision whose kernels were verified")
    parser.add_argument("--write", action="store_true", help="write the stamps and the records that carry over")
    parser.add_argument(
        "--stamps", type=Path, metavar="FOLDER", help="stamps that were carried to the revision after it was committed"
    )
    parser.add_argument("--records-of", metavar="KERNEL", help="carry the shipped records of this kernel, and no stamp")
    options = parser.parse_args()
    if options.records_of:
        return carry_records_of(options.records_of, options.revision, options.write)
    command = ["git", "rev-parse", "--short=12", options.revision]
    revision = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    now = fingerprint_of(ROOT)
    with checkout(revision) as place:
        then = fingerprint_of(place)
        verified = stamps.read_stamps(options.stamps or place / "benchmarks" / "verified")
        names = names_now(then, now)
        outcome = {kernel: changes(kernel, then, now, names) for kernel in stamps.kernels()}
        olds = {new: old for old, new in names.items()}
        same = with_records(then, now, names)
    sources, launches = sum(map(len, now.sources.values())), sum(map(len, now.tapes.values()))
    print(f"{sources} CI sources, {len(now.tapes)} runs, {launches} launches against {revision}")
    moved, refused = {}, 0
    for kernel, found in outcome.items():
        old = olds.get(kernel, kernel)
        stamp = verified.get(old)
        if stamp is None or stamp["hash"] != then.hashes.get(old):
            said = "was not verified there"
        elif found:
            said, refused = found[0] + (f" (and {len(found) - 1} more)" if found[1:] else ""), refused + 1
        elif stamp["hash"] == now.hashes[kernel]:
            said = "unchanged"
        else:
            said, moved[kernel] = "same code, same launches", carried(stamp, now.hashes[kernel], revision)
        print(f"{kernel}: {said}")
    if options.write:
        stamps.write_stamps(moved)
        count = carry_records(then, now, names, same)
        print(f"{len(moved)} stamps and {count} shipped records carried over")
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main())
