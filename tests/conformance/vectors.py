"""Committed vectors: what a GPU gave for each case, so that a machine without one holds the emulator to it.

A file has, for each case, the digest of its inputs, and its outputs or (for large ones) their digest; and it names the
cases that were run and gave no result, with the reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.conformance.case import FOLDER, Case, Setup, mismatch, same

PATH = FOLDER / "vectors" / "sm_90.npz"
PENDING = PATH.with_name("PENDING.md")
PENDING_LINE = re.compile(r"^- `(?P<case>\w+)` \((?P<date>\d{4}-\d{2}-\d{2})\): (?P<reason>.+)$\n?", re.MULTILINE)
MISSING = f"{PATH.name} is not committed: run `python -m tools.make_vectors` on a GPU of compute capability 9.0"

Outputs = tuple[np.ndarray, ...]


def digest(outputs: Outputs) -> str:
    """SHA-256 over the outputs; every NaN counts as the same one."""
    total = hashlib.sha256()
    for each in outputs:
        total.update(
            np.where(np.isnan(each), np.float32("nan"), each).tobytes() if each.dtype.kind == "f" else each.tobytes()
        )
    return total.hexdigest()


def record(results: Mapping[Case, Outputs | str], about: Mapping[str, str], path: Path = PATH) -> list[str]:
    """Write what a GPU gave, whether NumPy expects it or not; the complaints, one for each case that is not well.

    A case with a sentence instead of outputs is kept as missing, and costs the others nothing.
    """
    kept, missing, complaints = {}, {}, []
    for case, found in results.items():
        if isinstance(found, str):
            missing[case.name] = found.splitlines()[0]
            complaints.append(f"{case.name}: no result: {found}")
            continue
        setup = case.setup()
        kept[case] = (setup, found)
        if complaint := wrong(case, setup, found):
            complaints.append(complaint)
    save(path, kept, about, missing)
    return complaints


def save(
    path: Path,
    results: Mapping[Case, tuple[Setup, Outputs]],
    about: Mapping[str, str],
    missing: Mapping[str, str] | None = None,
) -> None:
    """Write the file, all of it or nothing; ``about`` says where the results come from, ``missing`` which have none."""
    arrays: dict[str, Any] = {
        "about": np.array(json.dumps(dict(about))),
        "missing": np.array(json.dumps(dict(missing or {}))),
    }
    for case, (setup, outputs) in results.items():
        arrays[f"{case.name}/inputs"] = np.array(setup.digest)
        if case.digest_only:
            arrays[f"{case.name}/digest"] = np.array(digest(outputs))
        else:
            arrays |= {f"{case.name}/{index}": each for index, each in enumerate(outputs)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.npz")
    np.savez_compressed(partial, **arrays)
    os.replace(partial, path)


def pending(path: Path = PENDING) -> dict[str, str]:
    """Case -> "date: reason" for the cases that no GPU has run yet, by the list that is committed."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return {line["case"]: f"{line['date']}: {line['reason']}" for line in PENDING_LINE.finditer(text)}


def no_longer_pending(cases: set[str], path: Path = PENDING) -> None:
    """Take these cases off the list."""
    if path.exists():
        text = path.read_text(encoding="utf-8")
        path.write_text(PENDING_LINE.sub(lambda line: "" if line["case"] in cases else line[0], text), encoding="utf-8")


class Vectors:
    """The committed file, opened. Raises OSError if there is none."""

    def __init__(self, path: Path = PATH) -> None:
        with np.load(path, allow_pickle=False) as file:
            self._arrays = {name: file[name] for name in file.files}

    def names(self) -> set[str]:
        """The cases that have vectors."""
        return {name.split("/")[0] for name in self._arrays if "/" in name}

    def missing(self) -> dict[str, str]:
        """The cases that gave no result on the GPU, and why."""
        return json.loads(str(self._arrays["missing"]))

    def complaint(self, case: Case, setup: Setup, outputs: Outputs) -> str:
        """How ``outputs`` of the emulator differ from the GPU's; empty if they agree.

        The same bits, or for sums of tensor cores no more apart than twice the case's tolerance.
        """
        if str(self._arrays[f"{case.name}/inputs"]) != setup.digest:
            return "the inputs are not those that the GPU had: make the vectors again"
        if case.digest_only:
            agrees = str(self._arrays[f"{case.name}/digest"]) == digest(outputs)
            return "" if agrees else "the digest of the outputs is not the GPU's"
        theirs = tuple(self._arrays[f"{case.name}/{index}"] for index in range(len(outputs)))
        return disagreement(setup, outputs, theirs)


def disagreement(setup: Setup, ours: Outputs, theirs: Outputs) -> str:
    """How two results of one case differ; empty if they agree. Each may err by the tolerance, to its own side."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if index == 0 and setup.tolerance is not None:
            agree = np.abs(a.astype(np.float64) - b.astype(np.float64)) <= 2 * setup.tolerance
        else:
            agree = same(a, b)
        if not agree.all():
            at = tuple(int(i) for i in np.argwhere(~agree)[0])
            return (
                f"output {index}: {int((~agree).sum())} of {agree.size} differ, first at {at}: {a[at]!r} and {b[at]!r}"
            )
    return ""


def wrong(case: Case, setup: Setup, outputs: Outputs) -> str:
    """How outputs differ from NumPy's; empty if they do not."""
    found = mismatch(setup, outputs)
    return f"{case.name}: {found}" if found else ""
