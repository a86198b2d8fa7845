"""Files of results: rows of a day, and the newest of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from haloconv.bench import results


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


def test_latest_keeps_the_newest_of_each(tmp_path):
    results.refresh_latest(tmp_path, [record("2026-11-20T10:00:00Z", ratio=1.0), record("2026-11-19", layout="nhwc")])
    results.refresh_latest(tmp_path, [record("2026-11-19T23:00:00Z", ratio=2.0)])
    results.refresh_latest(tmp_path, [record("2026-11-21T10:00:00Z", direction="dgrad", ratio=3.0)])
    path = results.refresh_latest(tmp_path, [record("2026-11-20T10:00:00Z", ratio=4.0)])
    found = {(row["direction"], row["layout"]): row["ratio"] for row in results.read_rows(path)}
    assert found == {("fprop", "nchw"): 4.0, ("fprop", "nhwc"): 1.0, ("dgrad", "nchw"): 3.0}


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
