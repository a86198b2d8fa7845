"""Short generated sections: samples, rates, costs and exported files, from files of results as they are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import result_facts
from tools.result_tables import counts, ranges, summary, with_faster_layout

ROW = {
    "case": "A", "direction": "fprop", "precision": "tf32", "layout": "nchw", "family": "halo_sm90", "aten_ms": 2.0,
    "haloconv_ms": 1.0, "ratio": 2.0, "share": 0.5, "tflops": 210.0, "gpu": "Some GPU", "commit": "abc1234",
    "date": "2026-01-02T03:04:05Z",
}  # fmt: skip


def folder_of(root: Path) -> Path:
    folder = root / "benchmarks" / "results" / "some-gpu"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write(root: Path, name: str, rows: list[dict]) -> None:
    (folder_of(root) / name).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


@pytest.mark.parametrize("section", ["sample_section", "rates_section", "costs_section", "export_section"])
def test_nothing_measured_is_said(section: str, tmp_path: Path) -> None:
    assert getattr(result_facts, section)(tmp_path) == result_facts.NO_RESULTS


def test_sample_is_the_newest_and_names_its_slowest(tmp_path: Path) -> None:
    write(tmp_path, "2026-01-01-sample.jsonl", [ROW])
    slow = {**ROW, "case": "grouped 3x3", "family": "aten", "ratio": 0.5}
    write(tmp_path, "2026-01-02-sample.jsonl", [ROW, slow])
    text = result_facts.sample_section(tmp_path)
    assert "2026-01-02-sample.jsonl`: 2 measurements, haloconv faster in 1, within 2 % in 0, slower in 1" in text
    assert "1 ran on our kernels" in text and "at 0.50×: grouped 3x3 tf32 nchw fprop on `aten`" in text


def test_rates_show_the_fastest_row_beside_its_roofline(tmp_path: Path) -> None:
    write(tmp_path, "latest.jsonl", [ROW, {**ROW, "layout": "nhwc", "tflops": 440.0, "share": 1.1}])
    assert "| tf32 | 440 | 400 | 110 | A tf32 nhwc fprop | `halo_sm90` |" in result_facts.rates_section(tmp_path)


def test_costs_are_the_newest_of_each(tmp_path: Path) -> None:
    family = {"what": "halo_sm90", "texts": 3, "median_ms": 700.4, "worst_ms": 1400.0, "jobs": 4}
    first = {"what": "C wgrad", "compile_ms": 582.1}
    machine = {"gpu": "Some GPU", "commit": "abc1234"}
    rows = [{**family, "texts": 2, **machine}, {**family, **machine}, {**first, **machine}]
    write(tmp_path, "2026-01-02-compile-time.jsonl", rows)
    call = {"what": "F.conv2d, no grad", "aten_us": 19.0, "haloconv_us": 12.8, **machine}
    write(tmp_path, "2026-01-01-host-cost.jsonl", [call])
    text = result_facts.costs_section(tmp_path)
    assert "3 sources of `halo_sm90` | median 700 ms, worst 1400 ms, 4 at a time | Some GPU | abc1234 |" in text
    assert "| compiling `C wgrad` | 582 ms |" in text and "2 sources" not in text
    assert "| host time of `F.conv2d, no grad` | PyTorch 19.0 us, haloconv 12.8 us |" in text


def test_exported_files_show_losses(tmp_path: Path) -> None:
    lines = ["== a", "output error", "forward   1.000 ms, PyTorch's 2.500 ms (tf32): 2.50 times as fast",
             "forward and backward   2.000 ms, PyTorch's 1.000 ms (tf32): 0.50 times as fast", ""]  # fmt: skip
    (folder_of(tmp_path) / "2026-01-02-export.txt").write_text("\n".join(lines), "utf-8")
    text = result_facts.export_section(tmp_path)
    assert "| a | tf32 | 2.500 → 1.000 (**2.50×**) | 1.000 → 2.000 (0.50×) | `2026-01-02-export.txt` |" in text


def test_faster_layout_counts_only_where_it_is_known() -> None:
    other = {**ROW, "layout": "nhwc", "aten_ms": 0.8, "ratio": 0.8}
    unknown = {**ROW, "direction": "dgrad", "aten_ms": None, "ratio": None}
    rows = with_faster_layout([ROW, other, unknown])
    assert [row["aten_best_ms"] for row in rows] == [0.8, 0.8, None]
    assert "faster layout: faster in 0, within 2 % in 0, slower in 2; median ratio 0.80×" in summary(rows)
    assert "faster layout" not in summary([ROW])
    assert summary([unknown]) == "1 measurements, none with PyTorch's time"


def test_ties_are_within_two_per_cent() -> None:
    assert counts([1.021, 1.02, 1.0, 0.98, 0.979]) == (1, 3, 1)


def test_ranges_put_precisions_of_a_layer_in_one_line() -> None:
    rows = [ROW, {**ROW, "precision": "fp16", "ratio": 0.9, "share": 0.25}, {**ROW, "direction": "dgrad"}]
    assert ranges(rows)[2:] == ["| A | nchw | fp16, tf32 | 0.90 to 2.00×, 25 to 50 % | 2.00×, 50 % |"]
