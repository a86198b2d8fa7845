"""Short generated sections: samples, rates, costs and exported files, from files of results as they are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from haloconv.roofline import limit_ms
from tools import result_facts
from tools.result_tables import annotated, cell, counts, ranges, ratio_cell, ratios_of, summary, tally

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
    assert "1 of 2 below 0.95, 1 below 0.85; of 1 of 2 on our kernels 0 of 1 below 0.95" in text
    assert "at 0.50×: grouped 3x3 tf32 nchw fprop on `aten`" in text


def test_rates_show_the_fastest_row_beside_its_roofline(tmp_path: Path) -> None:
    write(tmp_path, "latest.jsonl", [ROW, {**ROW, "layout": "nhwc", "tflops": 440.0, "share": 1.1}])
    assert "| tf32 | 440 | 400 | 110 | A tf32 nhwc fprop | `halo_sm90` |" in result_facts.rates_section(tmp_path)


def test_costs_are_the_newest_of_each(tmp_path: Path) -> None:
    family = {"what": "halo_sm90", "sources": 3, "median_ms": 700.4, "worst_ms": 1400.0, "jobs": 4}
    first = {"what": "C wgrad", "compile_ms": 582.1}
    machine = {"gpu": "Some GPU", "commit": "abc1234"}
    older = {"what": "direct", "texts": 7, "median_ms": 1.0, "worst_ms": 2.0, "jobs": 4}  # as rows once said it
    rows = [{**family, "sources": 2, **machine}, {**older, **machine}, {**family, **machine}, {**first, **machine}]
    write(tmp_path, "2026-01-02-compile-time.jsonl", rows)
    call = {"what": "F.conv2d, no grad", "aten_us": 19.0, "haloconv_us": 12.8, **machine}
    write(tmp_path, "2026-01-01-host-cost.jsonl", [{**call, "haloconv_us": 29.0}, call])
    text = result_facts.costs_section(tmp_path)
    assert "3 sources of `halo_sm90` | median 700 ms, worst 1400 ms, 4 at a time | Some GPU | abc1234 |" in text
    assert "compiling the 7 sources of `direct`" in text
    assert "| compiling `C wgrad` | 582 ms |" in text and "2 sources" not in text
    assert "| host time of `F.conv2d, no grad` | PyTorch 19.0 us, haloconv 12.8 us |" in text
    assert "29.0 us" not in text


def test_exported_files_show_losses(tmp_path: Path) -> None:
    lines = ["== a", "output error", "forward   1.000 ms, PyTorch's 2.500 ms (tf32): 2.50 times as fast",
             "forward and backward   2.000 ms, PyTorch's 1.000 ms (tf32): 0.50 times as fast", ""]  # fmt: skip
    (folder_of(tmp_path) / "2026-01-02-export.txt").write_text("\n".join(lines), "utf-8")
    text = result_facts.export_section(tmp_path)
    assert "| a | tf32 | 2.500 → 1.000 (**2.50×**) | 1.000 → 2.000 (0.50×) | `2026-01-02-export.txt` |" in text


def test_faster_layout_counts_only_where_it_is_known() -> None:
    other = {**ROW, "layout": "nhwc", "aten_ms": 0.8, "ratio": 0.8}
    unknown = {**ROW, "direction": "dgrad", "aten_ms": None, "ratio": None}
    rows = annotated([ROW, other, unknown], {})
    assert [row["aten_best_ms"] for row in rows] == [0.8, 0.8, None]
    assert "faster layout: haloconv faster in 0, within 2 % in 0, slower in 2; median ratio 0.80×" in summary(rows)
    assert "faster layout" not in summary([ROW])
    assert summary([unknown]) == "1 measurements, none with PyTorch's time"


FULL = {**ROW, "aten_error": 3e-7, "error": 2e-4}  # PyTorch in full fp32, ours in TF32
FP32 = {**ROW, "precision": "fp32", "haloconv_ms": 4.0, "ratio": 0.9, "aten_error": 3e-7, "error": 3e-7}


def test_an_fp32_row_of_ours_counts_where_pytorch_computed_full_fp32() -> None:
    full, _ = annotated([FULL, FP32], {})
    assert full["aten_precision"] == "fp32" and full["counted_ms"] == 4.0 and ratios_of(full) == (0.5, 0.5)
    text = summary([full])
    assert text.startswith("1 measurements, haloconv faster in 0, within 2 % in 0, slower in 1; median ratio 0.50×")
    assert text.endswith("In 1 PyTorch computed full fp32 and haloconv TF32: its fp32 row counts in 1, 0 have none and "
                         "are not counted")  # fmt: skip
    assert tally([full])[2:] == [] and ratio_cell(full) == "**2.00×** †" and cell(full).endswith(" †")
    assert ranges([full])[2:] == ["| A | nchw | tf32 | – |"]


@pytest.mark.parametrize(
    "changes, counted",
    [
        ({"layout": "nhwc"}, None),  # that one is of another layout
        ({"passed": False}, None),
        ({}, 4.0),
    ],
)
def test_only_the_fp32_row_beside_it_counts(changes: dict, counted: float | None) -> None:
    full, other = annotated([FULL, {**FP32, **changes}], {})
    assert full["counted_ms"] == counted and other["counted_ms"] == (None if "passed" in changes else 4.0)
    assert (ratios_of(full) is None) is (counted is None)


def test_a_result_of_ours_that_is_accurate_counts_itself() -> None:
    both = annotated([{**FULL, "error": 3e-7}, {**FULL, "direction": "dgrad", "aten_error": 3e-4, "error": 3e-7}], {})
    assert [row["counted_ms"] for row in both] == [1.0, 1.0] and "PyTorch computed" not in summary(both)
    assert [cell(row).endswith("†") for row in both] == [True, False]


def test_failed_rows_are_said_and_not_counted() -> None:
    rows = annotated([ROW, {**ROW, "direction": "dgrad", "passed": False, "ratio": 99.0}], {})
    assert summary(rows).startswith(
        "2 measurements, haloconv faster in 1, within 2 % in 0, slower in 0; median ratio 2.0"
    )
    assert summary(rows).endswith("1 failed their checks")
    assert cell(rows[1]) == "FAILED" and ratio_cell(rows[1]) == "–"
    assert "| `halo_sm90` | 2 | 1 | 0 | 0 | 1 | 2.00× |" in tally(rows)[2]


def test_roofline_fractions_are_by_todays_ceilings() -> None:
    """Of a suite's layer by its problem, of another by the FLOP and bytes that the row tells, else as recorded."""
    case = result_facts.suite_cases()["A"]
    row = {**ROW, "gpu": "NVIDIA H200", "limit_ms": 9.9, "haloconv_ms": 2.0, "bytes": 43 * 10**8, "tflops": 1.0}
    of_suite, of_row, unknown = annotated([row, {**row, "case": "net.stem"}, {**row, "gpu": "Some GPU"}], {"A": case})
    limit = limit_ms(case.problem("fprop", "tf32", "nchw"), "NVIDIA H200")
    assert of_suite["share"] == pytest.approx(limit / 2.0) and of_row["share"] == pytest.approx(0.5)
    assert unknown["limit_ms"] == 9.9 and annotated([ROW], {})[0]["share"] == 0.5
    (step,) = annotated([{**row, "direction": "step"}], {"A": case})
    assert step["limit_ms"] > 2.9 * limit


def test_ties_are_within_two_per_cent() -> None:
    assert counts([1.021, 1.02, 1.0, 0.98, 0.979]) == (1, 3, 1)


def test_ranges_put_precisions_of_a_layer_in_one_line() -> None:
    rows = [ROW, {**ROW, "precision": "fp16", "ratio": 0.9, "share": 0.25}, {**ROW, "direction": "dgrad"}]
    assert ranges(rows)[2:] == ["| A | nchw | fp16, tf32 | 0.90 to 2.00×, 25 to 50 % | 2.00×, 50 % |"]


@pytest.mark.parametrize("kind", ["models", "compiled", "cold-start"])
def test_rows_of_whole_networks_are_not_among_those_of_layers(kind: str, tmp_path: Path) -> None:
    write(tmp_path, "latest.jsonl", [ROW])
    write(
        tmp_path,
        f"latest-{kind}.jsonl",
        [{name: ROW[name] for name in ("case", "direction", "precision", "layout", "date")}],
    )
    assert [row["case"] for row in result_facts.suite_rows(folder_of(tmp_path))] == ["A"]


def test_compiled_networks_of_every_gpu_stand_in_one_table_and_what_was_not_searched_is_said(tmp_path: Path) -> None:
    def row(gpu: str, case: str, *modes: str, layout: str = "nchw", ours: float = 1.6) -> dict:
        sides = {f"PyTorch {mode}": 2.0 for mode in modes} | {f"haloconv {mode}": ours for mode in modes}
        variants = {name: {"ms": ms, "peak_bytes": 8} for name, ms in sides.items()}
        return {**ROW, "gpu": gpu, "case": case, "direction": "step", "layout": layout, "variants": variants}

    assert result_facts.networks_section(tmp_path) == result_facts.NO_RESULTS
    for gpu, case, *modes in (("NVIDIA H200", "unet", "compiled"), ("NVIDIA H100", "vae", "compiled", "max-autotune")):
        folder = tmp_path / "benchmarks" / "results" / gpu.lower().replace(" ", "-")
        folder.mkdir(parents=True)
        rows = [
            row(gpu, case, *modes),
            row(gpu, case, *modes, layout="nhwc", ours=1.0),
            row(gpu, "slow", *modes, ours=4),
        ]
        rows += [{**rows[0], "direction": "forward"}] if case == "unet" else []
        (folder / "latest-compiled.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows), "utf-8")
    text = result_facts.networks_section(tmp_path)
    assert "| network | GPU | forward tf32 | step tf32 |" in text
    assert "| unet | H200 | 2.00 → 1.60 (**1.25×**)† | 2.00 → 1.00 (**2.00×**) |" in text
    for gpu in ("H100", "H200"):
        assert f"| slow | {gpu} | – | 2.00 → 4.00 (0.50×)† |" in text
    assert "| vae |" in text and "without max-autotune on either side for slow, unet." in text
    whole = result_facts.compiled_section(tmp_path)
    assert "**NVIDIA H200**, 2026-01-02, without max-autotune on either side:" in whole
    assert "**NVIDIA H100**, 2026-01-02:" in whole
