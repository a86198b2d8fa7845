"""Write haloconv/choose/measured.json from the committed results: how far each rule is ahead, at least, and where.

python -m tools.measured     # benchmarks/gpus.json names the GPU models
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from haloconv.bench.results import latest_name, newest_rows, read_rows
from haloconv.bench.sample import read_case
from haloconv.bench.suite import SUITES, Case, load_suite
from haloconv.choose.measured import NOTHING_MEASURED, PATH, kind_of
from haloconv.choose.rules import by_rule
from haloconv.device import Device, DeviceFacts, arch_of, gpu_stem, set_stand_in, stand_in
from tools.readme_results import family_of

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("suite", "few_images", "pointwise", "fronts")
CPU = torch.device("cpu")
LEAST_DRAWS = 150
"""Random layers of the newest sample of a GPU model from which on rules hold there; fewer say little about them.

Nor does a sample in which ``auto`` held a rule back, because nothing of its kind was measured there, judge that rule.
"""


def gpus(root: Path = ROOT) -> list[dict]:
    """The GPU models with results, as ``benchmarks/gpus.json`` has them."""
    return json.loads((root / "benchmarks" / "gpus.json").read_text(encoding="utf-8"))


def facts_of(gpu: dict) -> DeviceFacts:
    """What rules and families ask of a GPU model."""
    capability = tuple(gpu["capability"])
    arch = arch_of(capability)
    return DeviceFacts(gpu["name"], arch, gpu["sm_count"], capability, 1 << 36, gpu["max_smem_bytes"], "none")


def _none(*_: object) -> NoReturn:
    raise RuntimeError("this GPU is only described: nothing runs on it")


@contextmanager
def stood_in(facts: DeviceFacts) -> Iterator[None]:
    """While active, CPU tensors count as that GPU's; nothing can be run on them."""
    before = stand_in()
    set_stand_in(Device(facts, load=_none, encode_tiled=_none))
    try:
        yield
    finally:
        set_stand_in(before)


def measured(root: Path = ROOT) -> dict[str, dict]:
    """What ``measured.json`` holds, by GPU model."""
    return {gpu["name"]: _entry(gpu, root) for gpu in gpus(root)}


def _entry(gpu: dict, root: Path) -> dict:
    least: defaultdict[str, float] = defaultdict(lambda: float("inf"))
    with stood_in(facts_of(gpu)):
        for row, case in rows_of(root, gpu_stem(gpu["name"])):
            problem = case.problem(row["direction"], row["precision"], row["layout"])
            ruling = by_rule(problem, CPU)
            if ruling.family == family_of(row) != "aten":
                kind = kind_of(ruling.rule, problem)
                least[kind] = min(least[kind], round(row["ratio"], 2))
    drawn = newest_rows(root / "benchmarks" / "results" / gpu_stem(gpu["name"]), "sample")
    held_back = any(NOTHING_MEASURED in str(row["reason"]) for row in drawn)
    sampled = len(drawn) >= LEAST_DRAWS and not held_back
    known = {"capability": gpu["capability"], "sm_count": gpu["sm_count"], "sampled": sampled}
    return known | {"least": dict(sorted(least.items()))}


def rows_of(root: Path, stem: str) -> Iterator[tuple[dict, Case]]:
    """Rows of single directions with a ratio, and their layers: those of suites, random ones, and chosen ones."""
    folder = root / "benchmarks" / "results" / stem
    for suite in NAMES:
        cases = {case.name: case for case in load_suite(SUITES / f"{suite}.toml")}
        rows: list[dict[str, Any]] = read_rows(folder / latest_name(suite))
        for row in rows:
            if row["direction"] != "step" and row["ratio"] is not None:
                yield row, cases[row["case"]]
    layers: list[dict[str, Any]] = [row for name in ("sample", "chosen") for row in newest_rows(folder, name)]
    for row in layers:
        if row["ratio"] is not None:
            yield row, read_case(row["case"])


def main() -> None:
    text = json.dumps(measured(), indent=1) + "\n"
    PATH.write_text(text, encoding="utf-8")
    sys.stdout.write(f"wrote {PATH}\n")


if __name__ == "__main__":
    main()
