"""The suite of padding modes and shards: its cases are checked against float64, and a wrong one is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from haloconv import strips
from haloconv.bench import suite
from haloconv.bench.cut_layer import CutLayer
from haloconv.bench.trial import UNTIMED, Budget, try_step, try_training_step
from haloconv.cli.bench import suite as bench_suite
from haloconv.problem import DIRECTIONS
from tests.padded import cut_on_a_cpu

CPU = torch.device("cpu")
SMALL = suite.Case("small", (2, 4, 11, 9), 6, (3, 4), padding=(2, 1), dilation=(1, 2))
CASES = (
    replace(SMALL, padding_mode="circular"),
    replace(SMALL, padding_mode=("zeros", "reflect"), stride=(2, 1)),
    replace(SMALL, padding_mode=("replicate", "circular"), groups=2),
    replace(SMALL, shards=2),
    replace(SMALL, shards=3, padding_mode="circular", stride=(2, 2)),
)


def layer_of(case: suite.Case, layout: Any = "nchw") -> CutLayer:
    layer = case.layer("fp32", layout, "auto", CPU)
    assert isinstance(layer, CutLayer)
    return layer


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_every_direction_is_right_and_timed(case: suite.Case, layout: Any) -> None:
    with cut_on_a_cpu():
        layer = layer_of(case, layout)
        for direction in DIRECTIONS:
            row = try_step(layer, direction, UNTIMED)
            assert row.passed and row.case == "small" and row.layout == layout, row.complaint
            layer.timed(direction)()
        if case.shards == 1:
            assert try_training_step(layer, Budget(0.0, min_runs=1)).passed
    assert (case.shards > 1) == any("MB of others" in note for note in layer.notes)


@pytest.mark.parametrize(("what", "direction"), [("give", "dgrad"), ("packed_windows", "wgrad"), ("gathered", "fprop")])
@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_a_wrong_rim_is_found(case: suite.Case, what: str, direction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not given to pixels, outputs of another place, pixels of zeros."""
    of_others = strips._pixels
    wrong = {
        "give": lambda dx, *_: dx,
        "packed_windows": lambda dy, *rest: real(dy.flip(2), *rest),
        "gathered": lambda *args: None,
    }
    real = getattr(strips, what)
    monkeypatch.setattr(strips, what, wrong[what])
    if what == "gathered":
        monkeypatch.setattr(strips, "_pixels", lambda *args: of_others(*args) * 0)
    monkeypatch.setattr("haloconv.bench.cut_layer.give", wrong["give"])
    with cut_on_a_cpu():
        assert not try_step(layer_of(case), direction, UNTIMED).passed


def test_the_suite_has_what_the_bars_name() -> None:
    cases = {case.name: case for case in suite.load_suite(suite.find_suite(suite.SUITES / "rims.toml"))}
    for name, case in cases.items():
        plain = replace(case, name="", about="", tags=(), padding_mode="zeros", shards=1)
        beside = cases[
            "_".join(name.split("_")[:2]) + "_zeros" if case.shards == 1 and "_in_" not in name else f"{name[0]}_in_1"
        ]
        assert plain == replace(beside, name="", about="", tags=()), "the same layer without rims is timed beside it"
        if "modes" in case.tags:
            reach = [spread * (taps - 1) for spread, taps in zip(case.dilation, case.filter, strict=True)]
            assert [2 * pad for pad in case.padding] == reach, "same padding"
    main = {case.name: case for case in suite.load_suite(suite.find_suite(suite.SUITES / "suite.toml"))}
    for name in "AC":
        same = replace(main[name], name="", about="", tags=())
        assert same == replace(cases[f"{name}_in_1"], name="", about="", tags=())
        assert [cases[f"{name}_in_{count}"].shards for count in (2, 4)] == [2, 4]


@pytest.mark.parametrize(
    ("more", "message"), [('padding_mode = "wrap"', "padding_mode must be"), ("shards = 9", "9 shards of 7")]
)
def test_wrong_cases_are_refused(more: str, message: str, tmp_path: Any) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'[[case]]\nname = "a"\ninput = [1, 2, 7, 7]\nfilters = 2\nfilter = [3, 3]\n{more}\n')
    with pytest.raises(suite.SuiteError, match=message):
        suite.load_suite(path)


def test_rows_of_shards_have_no_step_and_a_note(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_suite, "environment_stamp", lambda: {"gpu": "none", "date": "2026-11-24", "commit": "0"})
    piece = bench_suite.Piece(CASES[3], "fp32", "nchw", "auto", ("fprop", "step"))
    console = Console(record=True, width=160)
    assert bench_suite.bench_suite(bench_suite.Order([piece], UNTIMED), CPU, tmp_path, console)
    text = console.export_text()
    assert "shards are timed direction by direction" in text and "MB of others in 1 messages" in text
