"""Rows and what is made of them: figures, records and back, the terminal's table, JSON."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from haloconv.report import Report, Row, as_table, print_table

WIN = Row(
    case="A",
    direction="fprop",
    precision="fp32",
    layout="nchw",
    family="direct",
    reason="asked for",
    error=2.5e-7,
    aten_error=3e-7,
    error_limit=1.6e-6,
    difference=4e-7,
    aten_ms=16.0,
    haloconv_ms=10.0,
    spread=0.01,
    runs=12,
    flops=371_000_000_000,
    limit_ms=7.28,
    aten_best_ms=15.0,
)
LOSS = replace(WIN, direction="bgrad", haloconv_ms=20.0, flops=None, limit_ms=None, aten_best_ms=None)
FAILED = replace(WIN, case="<b>", complaint="first bad element at (0, 1): got nan, expected 1.0", error=math.inf)
ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "cudnn": "91900",
    "cuda_runtime": "13.0",
    "commit": "abc",
    "date": "2026-11-20T10:00:00Z",
}
RECORD_KEYS = set(
    [
        "case",
        "direction",
        "precision",
        "layout",
        "aten_ms",
        "haloconv_ms",
        "ratio",
        "spread",
        "limit_ms",
        "share",
        "error",
        "aten_error",
        "aten_best_ms",
        "ratio_best",
        "aten_precision",
        "family",
        "kernel",
        "config",
        "source",
        "gpu",
        "torch",
        "cudnn",
        "cuda",
        "commit",
        "date",
    ]
)


def report(*rows: Row) -> Report:
    return Report("a report", ENVIRONMENT, list(rows), ["a note"])


def text_of(rows, width=132) -> str:
    console = Console(width=width, file=io.StringIO())
    print_table(as_table(rows), console)
    return console.file.getvalue()


def test_figures():
    assert WIN.ratio == 1.6
    assert WIN.roofline_fraction == pytest.approx(0.728)
    assert WIN.tflops == pytest.approx(37.1)
    assert LOSS.ratio == 0.8 and LOSS.roofline_fraction is None and LOSS.tflops is None


def test_record_has_the_keys_of_result_files():
    record = WIN.record(ENVIRONMENT)
    assert record.keys() >= RECORD_KEYS
    assert record["ratio"] == 1.6 and record["share"] == 0.728 and record["cuda"] == "13.0"
    assert record["gpu"] == "NVIDIA H200" and record["passed"] is True


def test_records_tell_the_faster_layout_and_what_ran():
    ran = replace(WIN, kernel="direct/direct", config="run8", source="0a1b")
    record = ran.record(ENVIRONMENT)
    assert (record["aten_best_ms"], record["ratio_best"]) == (15.0, 1.5)
    assert (record["kernel"], record["config"], record["source"]) == ("direct/direct", "run8", "0a1b")
    assert Row.of_record(record).source == "0a1b" and Row.of_record(record).kernel == "direct/direct"
    unknown = LOSS.record(ENVIRONMENT)
    assert unknown["ratio_best"] is None and unknown["source"] is None


@pytest.mark.parametrize(
    "label, aten_error, computed",
    [("tf32", 3e-4, "tf32"), ("tf32", 9e-6, "fp32"), ("tf32", 1.1e-5, "tf32"), ("fp16", 1e-6, "fp16"),
     ("tf32", math.nan, "tf32")],
)  # fmt: skip
def test_what_pytorch_computed_is_read_off_its_error(label, aten_error, computed):
    row = replace(WIN, precision=label, aten_error=aten_error)
    assert row.aten_precision == row.record(ENVIRONMENT)["aten_precision"] == computed


def test_records_become_rows_again():
    whole = replace(WIN, bytes=5_000_000, count=3, aten_peak_bytes=100, haloconv_peak_bytes=104, complaint=None)
    for row in (WIN, LOSS, whole, replace(FAILED, error=1e-3)):
        back = Row.of_record(json.loads(json.dumps(row.record(ENVIRONMENT))))
        assert replace(back, flops=row.flops) == row
        assert back.tflops == pytest.approx(row.tflops) if row.tflops else back.tflops is None
    assert math.isnan(Row.of_record(FAILED.record(ENVIRONMENT)).error)
    with pytest.raises(KeyError):
        Row.of_record({"case": "A"})


def test_traffic_and_memory():
    row = replace(WIN, bytes=40_000_000, aten_peak_bytes=200, haloconv_peak_bytes=150)
    assert row.gbps == pytest.approx(4.0) and row.memory_ratio == 0.75
    assert WIN.gbps is None and WIN.memory_ratio is None
    text = text_of([row])
    assert "GB/s" in text and "0.75x" in text and "GB/s" not in text_of([WIN])


def test_alike_layers_are_counted():
    assert "times" not in text_of([WIN]).split() and "times" in text_of([WIN, replace(WIN, count=3)]).split()


def test_long_names_go_on_in_the_next_line():
    name = "layer" + "1" * 60
    lines = [line.split()[0] for line in text_of([replace(WIN, case=name)]).splitlines() if "1111" in line]
    assert "".join(lines) == name and len(lines) == 2


def test_infinite_errors_are_null_in_json():
    content = json.loads(report(WIN, FAILED).to_json())
    assert content["passed"] is False
    assert content["environment"] == ENVIRONMENT and content["notes"] == ["a note"]
    good, bad = content["rows"]
    assert good["error"] == 2.5e-7 and bad["error"] is None
    assert bad["complaint"] == FAILED.complaint


def test_a_report_passes_only_with_rows_that_all_pass():
    assert report(WIN, LOSS).passed
    assert not report().passed
    assert not report(WIN, FAILED).passed
    assert report(WIN, FAILED).complaints() == [f"<b> fprop: {FAILED.complaint}"]


def test_table_shows_wins_and_losses():
    text = text_of([WIN, LOSS, FAILED])
    lines = text.splitlines()
    win, loss, failed = (next(line for line in lines if mark in line) for mark in ("fprop", "bgrad", "<b>"))
    for cell in (
        "A",
        "direct",
        "fp32",
        "2.5e-07",
        "3.0e-07",
        "16.00",
        "15.00",
        "10.00",
        "1.60x",
        "37.1",
        "73%",
        "passed",
    ):
        assert cell in win
    assert "0.80x" in loss and "–" in loss
    assert "FAILED" in failed and "inf" in failed
    assert "…" not in text


def test_table_leaves_out_what_is_unknown():
    text = text_of([LOSS])
    assert "roofline" not in text and "TFLOP/s" not in text and "better" not in text
    assert "roofline" in text_of([WIN]) and "TFLOP/s" in text_of([WIN])


def test_layout_is_shown_where_it_matters():
    assert "nchw" not in text_of([WIN]) and "layout\n" not in text_of([LOSS])
    text = text_of([WIN, replace(WIN, layout="nhwc")])
    assert "nchw" in text and "nhwc" in text


def test_narrow_terminals_cut_nothing_off():
    assert text_of([WIN, FAILED], width=40) == text_of([WIN, FAILED], width=10)
    assert "passed" in text_of([WIN], width=40) and "…" not in text_of([WIN], width=40)


def test_reasons_are_grouped():
    reasons = report(WIN, LOSS, replace(WIN, case="B"), replace(WIN, case="C", family="aten", reason="dtype")).reasons()
    assert reasons == ["direct: asked for (A fprop, bgrad; B fprop)", "aten: dtype (C fprop)"]
