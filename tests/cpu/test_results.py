"""Files of results: rows of a day, and the newest of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from haloconv.bench import results
from haloconv.bench.suite import SUITES

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
LATEST = sorted((BENCHMARKS / "results").glob("*/latest*.jsonl"))


def record(date: str, **changes) -> dict:
    return {
        "case": "A",
        "direction": "fprop",
        "precision": "fp32",
        "layout": "nchw",
        "date": date,
        "ratio": 1.0,
        **changes,
    }


def test_latest_keeps_the_newest_of_each_whether_it_passed_or_not(tmp_path):
    """Never the best: a row that is slower or failed replaces a better one, and an older one replaces nothing."""
    day, next_day = record("2026-11-20T10:00:00Z", ratio=3.0), record("2026-11-21T10:00:00Z", ratio=0.5, passed=False)
    results.append_rows(tmp_path, "suite", [day, record("2026-11-20T09:00:00Z", layout="nhwc", ratio=1.0)])
    results.append_rows(tmp_path, "suite", [next_day])
    results.append_rows(tmp_path, "suite", [record("2026-11-20T08:00:00Z", ratio=9.0), {**next_day, "ratio": 0.4}])
    results.append_rows(tmp_path, "few_images", [record("2026-11-22", direction="dgrad")])
    path = results.refresh_latest(tmp_path, "suite")
    found = {(row["direction"], row["layout"]): (row["ratio"], row.get("passed")) for row in results.read_rows(path)}
    assert path.name == "latest.jsonl"
    assert found == {("fprop", "nchw"): (0.5, False), ("fprop", "nhwc"): (1.0, None)}


def test_latest_is_made_anew(tmp_path):
    """What stands in it by hand, or is in no dated file any more, goes."""
    results.append_rows(tmp_path, "few_images", [record("2026-11-20")])
    path = tmp_path / "latest-few_images.jsonl"
    path.write_text(json.dumps(record("2026-12-31", ratio=99.0)) + "\n")
    assert results.refresh_latest(tmp_path, "few_images") == path
    assert [row["ratio"] for row in results.read_rows(path)] == [1.0]


@pytest.mark.parametrize("path", LATEST, ids=lambda path: path.name)
def test_committed_latest_files_are_the_newest_of_the_dated_ones(path):
    what = path.stem.partition("-")[2] or results.MAIN_SUITE
    assert path.name == results.latest_name(what)
    assert results.read_rows(path) == results.newest_rows(path.parent, what), "run: python -m tools.readme_results"


def test_every_suite_has_its_latest_file():
    suites = {*(file.stem for file in SUITES.glob("*.toml")), "compiled", "cold-start"}
    for folder in (BENCHMARKS / "results").iterdir():
        dated = {path.stem[len("2026-11-20-") :] for path in folder.glob("????-??-??-*.jsonl")} & suites
        assert {path.name for path in LATEST if path.parent == folder} == {results.latest_name(each) for each in dated}
    assert len(LATEST) >= 3


def test_damaged_lines_are_dropped(tmp_path):
    path = tmp_path / "latest.jsonl"
    path.write_text('{"case": "A"\n[1]\n{"case": "A"}\n\n' + json.dumps(record("2026-11-20")) + "\n")
    assert results.read_rows(path) == [record("2026-11-20")]
    assert results.read_rows(tmp_path / "absent.jsonl") == []


def test_daily_file_grows(tmp_path):
    for _ in range(2):
        path = results.append_rows(tmp_path / "new", "suite", [record("2026-11-20T10:00:00Z")])
    assert path.name == "2026-11-20-suite.jsonl" and len(path.read_text().splitlines()) == 2
    with pytest.raises(ValueError, match="no row"):
        results.append_rows(tmp_path, "suite", [])


def test_folder_of_a_gpu():
    assert results.gpu_folder(Path("r"), "NVIDIA GeForce RTX 4090 (24 GB)") == Path("r/nvidia-geforce-rtx-4090-24-gb")
