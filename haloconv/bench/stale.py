"""Rows that were not measured on today's sources, and what has to run again for them.

Sources that were proven to be the same kernel (``python -m tools.carry``) count as today's: stamps remember them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from haloconv.bench.results import BENCHMARKS, ResultRow
from haloconv.choose.records import shipped_path
from haloconv.families import FAMILIES
from haloconv.families.closure import JOIN, canonical, kernels, source_of
from haloconv.families.files import total_hash
from haloconv.jit.source import SOURCE_ROOT
from haloconv.layout import Layout
from haloconv.precision import PrecisionLabel, label_of
from haloconv.report.networks import network_name

VERIFIED = BENCHMARKS / "verified"
ASKED_FOR = "asked for"  # the reason of a choice that the user made
KERNEL_ASKED_FOR = "kernel asked for"  # the same of a row of one kernel (one_kernel.py)

_BACKEND = (
    *("choose", "fusion", "accelerate.py", "arguments.py", "autograd.py", "backend.py", "epilogue.py", "functional.py"),
    *("gradients.py", "library.py", "module.py", "moments.py", "plan.py"),
)


class LayerSetting(NamedTuple):
    """How a layer of a suite ran: ``family`` is the one asked for by name, or a kernel's name, or ``"auto"``."""

    case: str
    precision: PrecisionLabel
    layout: Layout
    family: str


def is_stale(row: ResultRow) -> bool:
    """Whether what decided the row's result has changed since, or the row does not say what it was."""
    kernel, source = str(row.get("kernel")), row.get("source")
    if source is None or kernel.count(JOIN) != str(source).count(JOIN):
        return True
    if "variants" in row and row.get("backend") != backend_source(str(row.get("gpu"))):
        return True
    parts = zip(kernel.split(JOIN), str(source).split(JOIN), strict=True)
    return any(then != source_of(each) and then not in same_sources(VERIFIED, each) for each, then in parts)


@cache
def backend_source(gpu_name: str) -> str:
    """The hash of what decides, beside kernels, how a compiled or fused network runs on a GPU model: which kernel is
    chosen for each layer, by rule or shipped record of that model, what is fused, and how it is called.
    """
    places = [SOURCE_ROOT / name for name in _BACKEND]
    files = [file for place in places for file in (sorted(place.rglob("*")) if place.is_dir() else [place])]
    code = [canonical(file) for file in files if file.suffix == ".py"]
    records = shipped_path(gpu_name)
    return total_hash([*code, records.read_text(encoding="utf-8") if records.is_file() else ""])


@cache
def same_sources(folder: Path, kernel: str) -> frozenset[str]:
    """Hashes of former sources of a kernel that were proven to be the present one, by the stamps in a folder."""
    family, _, name = kernel.partition("/")
    file = folder / f"{family}.json"
    stamp = json.loads(file.read_text(encoding="utf-8"))["kernels"].get(name, {}) if file.is_file() else {}
    return same_hashes(stamp) if stamp.get("hash") == source_of(kernel) else frozenset()


def same_hashes(stamp: dict[str, Any]) -> frozenset[str]:
    """Hashes of former sources that were proven to be those of a stamp."""
    origin = stamp.get("carried_from")
    carried = [origin["hash"], *origin.get("between", [])] if origin else []
    return frozenset([*carried, *stamp.get("same", [])])


def stale_settings(rows: Iterable[ResultRow]) -> dict[LayerSetting, list[str]]:
    """The directions of every setting that has stale rows, in the rows' order."""
    found: dict[LayerSetting, list[str]] = {}
    for row in rows:
        if is_stale(row):
            layout: Layout = "nhwc" if row["layout"] == "nhwc" else "nchw"
            setting = LayerSetting(str(row["case"]), label_of(str(row["precision"])), layout, _family_asked(row))
            found.setdefault(setting, []).append(str(row["direction"]))
    return found


def stale_networks(rows: Iterable[ResultRow]) -> dict[tuple[str, str, str], list[tuple[str, str]]]:
    """Name, precision and layout of every network that has stale rows, and the cases and directions of these."""
    found: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for row in rows:
        if is_stale(row):
            case, direction = str(row["case"]), str(row["direction"])
            setting = (network_name(case), str(row["precision"]), str(row["layout"]))
            found.setdefault(setting, []).append((case, direction))
    return found


def _family_asked(row: ResultRow) -> str:
    if row.get("reason") == KERNEL_ASKED_FOR and row["kernel"] in kernels():
        return str(row["kernel"])
    asked = row.get("reason") == ASKED_FOR and row["family"] in FAMILIES
    return str(row["family"]) if asked else "auto"
