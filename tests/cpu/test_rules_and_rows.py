"""What the rules choose against the committed rows of the same layers: no family that lost, most that won clearly."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from haloconv.bench.suite import SUITES, load_suite
from haloconv.choose import rules
from haloconv.choose.buckets import read_layer
from haloconv.choose.records import Place, read_file, shipped_path
from haloconv.device import DeviceFacts
from haloconv.families import FAMILIES
from haloconv.problem import dense_request
from tools import readme_results
from tools.measured import facts_of, gpus, stood_in

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


def test_auto_keeps_away_from_what_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives a family for special layers what it won clearly. Where the ruled one was faster since, newer rows say.

    fp16 and bf16 are alike there: of one of them a newer row may be missing.
    """
    rows = list(ruled("suite", "latest", monkeypatch))
    assert any(row["ratio"] < 1 for row, _ in rows) and any(row["family"] == "halo_sm90" for row, _ in rows)
    for row, family in rows:
        clear = row["family"] != "direct" and row["ratio"] > 1.2
        if row["ratio"] < 1 and row["family"] == family and row["kernel"] != row["today"]:
            continue  # another kernel of the family lost
        if (row["ratio"] < 1 or clear) and not was_faster(family, row):
            about = f"{row['case']} {row['direction']} {row['precision']} {row['layout']}: {row['family']}"
            assert (family == row["family"]) == clear, f"{about} {row['ratio']}, now {family}"


def was_faster(family: str, row: dict) -> bool:
    """Whether a newer row of the family took less time on the same layer in the same layout and number of bytes.

    For tf32x3 one of full fp32, of any date: its families have no other.
    """
    folder = ROOT / "benchmarks" / "results" / "nvidia-h200"
    rows = (json.loads(line) for path in folder.glob("????-??-??-suite.jsonl") for line in path.open(encoding="utf-8"))
    halves, alike = {"fp16", "bf16"}, {row["precision"]}
    alike |= halves if row["precision"] in halves else set()
    return any(
        (each["case"], each["layout"], readme_results.family_of(each)) == (row["case"], row["layout"], family)
        and (
            (each["precision"] in alike and each["date"] > row["date"])
            or (row["precision"] == "tf32x3" and each["precision"] == "fp32")
        )
        and each["haloconv_ms"] < row["haloconv_ms"]
        for each in rows
    )


def test_auto_keeps_away_from_what_few_images_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives away most of what was won clearly: there PyTorch's search is a matter of luck."""
    rows = list(ruled("few_images", "latest-few_images", monkeypatch))
    assert [row["case"] for row, family in rows if row["ratio"] < 1 and family == row["family"]] == []
    won = [family == row["family"] for row, family in rows if row["ratio"] > 1.2]
    assert len(won) > 40 and sum(won) > 0.8 * len(won)


def test_auto_takes_other_convolutions_that_won(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows of an H100; none that lost there."""
    rows = list(ruled("fronts", "latest-fronts", monkeypatch, "nvidia-h100-80gb-hbm3"))
    assert [row["case"] for row, family in rows if row["ratio"] < 0.98 and family == row["family"]] == []
    assert sum(row["ratio"] < 0.98 for row, _ in rows) > 20
    won = [family == row["family"] for row, family in rows if row["ratio"] > 1.2]
    assert len(won) > 50 and sum(won) > 0.9 * len(won)


def test_no_shipped_record_is_of_before_a_kernel_that_rules_and_another_gpu_have_ahead() -> None:
    """Nothing says of a record which kernels were there when it was made: a newer one of an H100 does, and the rules.

    One of 2026-11-23 kept U-Net's first weight gradient on a kernel of 0.89 ms, an H100 takes 0.27 on the newer one.
    """
    newer = {Place(each.layer, each.size): each for each in read_file(shipped_path("NVIDIA H100 80GB HBM3")).records}
    found = []
    with stood_in(facts_of(next(gpu for gpu in gpus() if gpu["name"] == "NVIDIA H200"))):
        for old in read_file(shipped_path("NVIDIA H200")).records:
            new = newer.get(Place(old.layer, old.size))
            if new is None or new.date <= old.date or new.own in (None, old.own):
                continue
            problem = read_layer(old.layer, old.size)
            family = rules.by_rule(problem, CPU).family
            today = FAMILIES[family].configs(dense_request(problem, CPU))[0].kernel
            if today == new.own and (new.ratio or 0) > 1.1 * (old.ratio or 0):
                found.append((old.layer, old.own, today))
    assert found == []


def ruled(
    suite: str, latest: str, monkeypatch: pytest.MonkeyPatch, gpu: str = "nvidia-h200"
) -> Iterator[tuple[dict, str]]:
    """A GPU's rows of our families, and the family that takes each by rule on an H200.

    ``today`` is the kernel that this family runs the layer on, with tensors of the row's layout.
    """
    h200 = DeviceFacts("NVIDIA H200", "sm_90a", 132, (9, 0), 1 << 37, 232_448, "none")
    for name, module in list(sys.modules.items()):
        if name.startswith("haloconv.") and hasattr(module, "device_facts"):
            monkeypatch.setattr(module, "device_facts", lambda index: h200)
    cases = {case.name: case for case in load_suite(SUITES / f"{suite}.toml")}
    lines = (ROOT / "benchmarks" / "results" / gpu / f"{latest}.jsonl").read_text("utf-8").splitlines()
    for row in (row for row in map(json.loads, lines) if row["family"] != "aten"):
        problem = cases[row["case"]].problem(row["direction"], row["precision"], row["layout"])
        family = rules.by_rule(problem, torch.device("cuda", 0))[0]
        today = FAMILIES[family].configs(dense_request(problem, torch.device("cuda", 0)))[0].kernel
        yield row | {"family": readme_results.family_of(row), "today": today}, family
