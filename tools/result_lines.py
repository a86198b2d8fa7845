"""Files of JSON lines in build/, to which a run adds what it found as it goes: one that is cut short loses nothing."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

from tools.stamps import carried_hashes


def append_line(path: Path, line: dict) -> None:
    """Add a line, whole, also where several processes write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line) + "\n")


def read_lines(paths: list[Path]) -> list[dict]:
    """The lines of the files that exist, file by file; the begin of a line that a dying process left is passed over.

    Hashes of sources that a stamp was carried from are told as the present ones: tools/carry.py has proven that they
    stand for the same code.
    """
    found = []
    for path in paths:
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                found.append(json.loads(text))
            except ValueError:
                continue
    carried = {(kernel, origin): digest for kernel, origin, digest in carried_hashes()}
    return [_with_present_hashes(line, carried) for line in found]


def _with_present_hashes(line: dict, carried: dict[tuple[str, str], str]) -> dict:
    if "hashes" not in line:
        return line
    return {**line, "hashes": {kernel: carried.get((kernel, old), old) for kernel, old in line["hashes"].items()}}
