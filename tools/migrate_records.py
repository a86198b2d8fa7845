"""Bring shipped records into today's format: ``python -m tools.migrate_records REVISION [--write]``.

Records of the format before name a hash of all kernels of a family. It is read off the files of REVISION, the last one
of that format whose records held. Each kernel whose CI sources are the same now as they were there (or, with --compile,
their code) is entered, with its hash of today, in choose/carried.json under that hash, and under those of earlier
revisions (--earlier) whose records say the same; so users' own records hold, too. Others keep the hash that they had,
until tools.carry proves them the same. Then the shipped files are written anew.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

from haloconv.choose.records import FORMAT, SHIPPED, as_lines, read_file
from haloconv.families import OWN
from haloconv.families.files import device_hash, kernels_of
from tools.carry import CARRIED, Fingerprint, checkout, fingerprint_of, same_code
from tools.stamps import ROOT


def kernels_of_all() -> list[str]:
    """Every kernel of every family."""
    return [name for family in OWN for name in kernels_of(family)]


def same_kernels(then: Fingerprint, now: Fingerprint, compiling: bool) -> list[str]:
    """The kernels whose CI sources are what they were, or, if that may be tried, compile to the same code."""
    names = [name for name in kernels_of_all() if then.digests(name)]
    same = [name for name in names if then.digests(name) == now.digests(name)]
    others = [name for name in names if name not in same and compiling]
    return same + [name for name in others if same_code(name, name, then, now)]


def entries_of(revision: str, path: Path) -> dict[tuple, dict]:
    """The entries of a file, by layer and size, at a revision, wherever it stood there."""
    command = ["git", "ls-tree", "-r", "--name-only", revision]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    (place,) = [name for name in listed if name.endswith(f"/shipped/{path.name}")]
    command = ["git", "show", f"{revision}:{place}"]
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {(each["layer"], *each["size"]): each for each in json.loads(text)["records"]}


def earlier_hashes(revision: str, earlier: Iterable[str], path: Path) -> dict[str, set[str]]:
    """Each hash at the revision with those that the same measurements bore at earlier ones."""
    present = entries_of(revision, path)
    found = {each["kernels"]: {each["kernels"]} for each in present.values()}
    for other in earlier:
        for place, entry in entries_of(other, path).items():
            kept = present.get(place)
            if kept is not None and {**entry, "kernels": kept["kernels"]} == kept:
                found[kept["kernels"]].add(entry["kernels"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--earlier", action="append", default=[], help="revisions with the same measurements")
    parser.add_argument("--compile", action="store_true", help="compare the code of sources that changed")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    now = fingerprint_of(ROOT)
    with checkout(options.revision) as place:
        then = fingerprint_of(place)
        same = same_kernels(then, now, options.compile)
    known = sorted(then.kernels & set(kernels_of_all()))
    carried: dict[str, dict[str, str]] = {}
    for path in sorted(SHIPPED.glob("*.json")):
        older = earlier_hashes(options.revision, options.earlier, path)
        for family, digest in then.device.items():
            kernels = [name for name in known if name.split("/")[0] == family]
            kernels += [name for name in known if name.startswith("grouped") and family.startswith("halo_sm80")]
            for each in older.get(digest, {digest}):
                carried[each] = {name: device_hash(name) if name in same else digest for name in kernels}
    print(f"{len(same)} kernels are the same: {', '.join(same)}")
    if options.write:
        CARRIED.write_text(json.dumps(carried, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        for path in sorted(SHIPPED.glob("*.json")):
            records, complaint = read_file(path)
            if complaint:
                parser.error(f"{path.name} cannot be read whole: {complaint}")
            path.write_text(as_lines(records), encoding="utf-8")
            print(f"{path.name}: {len(records)} records in format {FORMAT}")


if __name__ == "__main__":
    main()
