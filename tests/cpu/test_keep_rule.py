"""Which kernels rows show to be needed beside each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from haloconv import emulator
from tools import keep_rule


def row(case: str, kernel: str, ms: float | None, date: str = "2026-01-01T00:00:00Z") -> dict[str, object]:
    """What the rule reads of a row."""
    key = {"case": case, "direction": "fprop", "precision": "fp16", "layout": "nchw"}
    return {**key, "kernel": kernel, "haloconv_ms": ms, "date": date, "passed": ms is not None}


def test_a_kernel_is_ahead_by_five_percent_of_all_others() -> None:
    layers = keep_rule.times_by_layer(
        [
            *(row("one", kernel, ms) for kernel, ms in (("f/a", 1.0), ("f/b", 1.05), ("f/c", 2.0))),
            *(row("two", kernel, ms) for kernel, ms in (("f/a", 1.0), ("f/b", 1.04))),
            row("alone", "f/c", 1.0),
        ]
    )
    assert keep_rule.rows_ahead(layers) == {"f/a": 1, "f/b": 0, "f/c": 0}
    assert keep_rule.table(layers)[1] == "one fprop fp16 nchw: 1000.0 us, a 1.00, b 1.05, c 2.00"


def test_an_older_architecture_has_fewer_kernels() -> None:
    rows = [
        row(case, kernel, ms) for case in ("one", "two") for kernel, ms in (("f/a", 1.0), ("f/b", 1.5), ("f/c", 2.0))
    ]
    layers = keep_rule.times_by_layer([*rows, row("alone", "f/c", 1.0)])
    assert keep_rule.rows_ahead(layers) == {"f/a": 2, "f/b": 0, "f/c": 0}
    assert keep_rule.rows_ahead(layers, lambda kernel, key: kernel != "f/a") == {"f/a": 0, "f/b": 2, "f/c": 0}
    assert keep_rule.rows_ahead(layers, lambda kernel, key: kernel == "f/c") == {"f/a": 0, "f/b": 0, "f/c": 2}


@pytest.mark.skipif(emulator.available() is not None, reason="no emulator: it stands in for other architectures")
def test_what_an_architecture_runs() -> None:
    layer = ("dw5_112", "fprop", "fp16", "nchw")
    kernels = ("depthwise/patch", "depthwise/band", "depthwise/march")
    taken = {
        arch: [keep_rule.runs_on(arch)(kernel, layer) for kernel in kernels] for arch in ("sm_90a", "sm_80", "sm_75")
    }
    assert taken == {"sm_90a": [True, True, True], "sm_80": [False, True, True], "sm_75": [False, False, True]}


@pytest.mark.skipif(emulator.available() is not None, reason="no emulator: it stands in for other architectures")
def test_every_kernel_is_needed_by_the_committed_rows() -> None:
    assert keep_rule.main() == 0


def test_the_newest_row_of_a_kernel_counts_and_failed_ones_do_not() -> None:
    rows = [
        row("one", "f/a", 3.0, "2026-01-02T00:00:00Z"),
        row("one", "f/a", 1.0),
        row("one", "f/a", None, "2026-01-03T00:00:00Z"),
    ]
    assert list(keep_rule.times_by_layer(rows).values()) == [{"f/a": 3.0}]


def test_a_kernel_that_no_row_needs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_rule, "FOLDER", tmp_path)
    monkeypatch.setattr(keep_rule, "OLDER", ())
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "2026-01-01-depthwise.jsonl").write_text("")
    assert keep_rule.main() == 0
    rows = (row("one", "f/a", 1.0), row("one", "f/b", 2.0))
    (tmp_path / "gpu" / "2026-01-01-depthwise.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert keep_rule.main() == 1


def test_a_kernel_is_needed_by_rows_of_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is ahead on no row of another GPU is not in the way; rows of two GPUs do not add up."""
    monkeypatch.setattr(keep_rule, "FOLDER", tmp_path)
    monkeypatch.setattr(keep_rule, "OLDER", ())

    def write(gpu: str, **ahead: int) -> None:
        (tmp_path / gpu).mkdir(exist_ok=True)
        rows = [
            row(f"{first} {number}", kernel, 1.0 if kernel == f"f/{first}" else 2.0)
            for first, count in ahead.items()
            for number in range(count)
            for kernel in ("f/a", "f/b")
        ]
        (tmp_path / gpu / "2026-01-01-depthwise.jsonl").write_text("\n".join(map(json.dumps, rows)))

    write("one", a=2, b=1)
    write("other", a=0, b=2)
    assert keep_rule.main() == 0
    write("other", a=1, b=1)
    assert keep_rule.main() == 1
