"""``haloconv bench --stale``: just what has rows that are not of today's sources runs again."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from haloconv.bench import results, stale
from haloconv.bench.suite import SUITES
from haloconv.cli.bench import command as bench
from haloconv.cli.bench import models as bench_models
from haloconv.cli.bench import suite as bench_suite
from haloconv.families.closure import source_of, stamp_hash
from tests.cpu.test_bench import CPU, QUICK, lines_of, order

KERNEL = "depthwise/band"
FRESH = {
    "case": "a", "direction": "fprop", "precision": "fp32", "layout": "nchw", "date": "2026-11-20T10:00:00Z",
    "family": "depthwise", "reason": "asked for", "kernel": KERNEL, "source": stamp_hash(KERNEL),
}  # fmt: skip


@pytest.mark.parametrize(
    "changes, late",
    [
        ({}, False),
        ({"source": "0" * 64}, True),
        ({"source": None}, True),
        ({"kernel": "depthwise/gone"}, True),
        ({"kernel": "aten", "source": source_of("aten")}, False),
        ({"kernel": f"{KERNEL} + aten", "source": source_of(f"{KERNEL} + aten")}, False),
        ({"kernel": f"{KERNEL} + aten", "source": f"{'0' * 64} + "}, True),
    ],
)
def test_a_row_is_stale_if_its_source_is_not_todays(changes: dict, late: bool) -> None:
    assert stale.is_stale({**FRESH, **changes}) is late


def test_rows_of_sources_that_were_carried_to_todays_are_fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As long as the stamp is that of today's sources: what it was carried from says nothing of others."""
    monkeypatch.setattr(stale, "VERIFIED", tmp_path / "now")
    stamp = {"hash": stamp_hash(KERNEL), "carried_from": {"hash": "judged", "between": ["moved"]}}
    for folder, changes in (("now", {}), ("later", {"hash": "other"})):
        (tmp_path / folder).mkdir()
        text = json.dumps({"family": "depthwise", "kernels": {"band": {**stamp, **changes}}})
        (tmp_path / folder / "depthwise.json").write_text(text)
    both = {"kernel": f"{KERNEL} + aten", "source": "moved + "}
    for row in ({**FRESH, "source": "judged"}, {**FRESH, "source": "moved"}, {**FRESH, **both}):
        assert not stale.is_stale(row)
    assert stale.is_stale({**FRESH, "source": "never"})
    monkeypatch.setattr(stale, "VERIFIED", tmp_path / "later")
    assert stale.is_stale({**FRESH, "source": "judged"}) and not stale.is_stale(FRESH)


def test_rows_of_compiled_networks_are_stale_where_records_of_their_own_gpu_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped = {gpu: tmp_path / f"{gpu}.json" for gpu in ("a", "b")}
    for path in shipped.values():
        path.write_text("before")
    monkeypatch.setattr(stale, "shipped_path", lambda gpu: shipped.get(gpu, tmp_path / "none"))
    stale.backend_source.cache_clear()
    key = {"variants": {}, "kernel": "aten", "source": source_of("aten")}
    rows = [{**key, "gpu": gpu, "backend": stale.backend_source(gpu)} for gpu in ("a", "b", "c")]
    shipped["b"].write_text("after")
    stale.backend_source.cache_clear()
    assert [stale.is_stale(row) for row in rows] == [False, True, False]


def test_rows_that_tell_no_source_are_stale() -> None:
    assert stale.is_stale({name: value for name, value in FRESH.items() if name not in ("source", "kernel")})


def test_stale_rows_run_again_as_they_ran() -> None:
    """In the directions that are stale, with the family or kernel that was asked for; auto chooses anew."""
    old = {**FRESH, "source": "0"}
    rows = [FRESH, {**old, "direction": "dgrad"}, {**old, "direction": "wgrad"}, {**old, "case": "b", "reason": "by"},
            {**old, "case": "c", "family": "gone"},
            {**old, "case": "d", "reason": stale.KERNEL_ASKED_FOR, "kernel": "depthwise/band"},
            {**old, "case": "e", "reason": stale.KERNEL_ASKED_FOR, "kernel": "depthwise/gone"}]  # fmt: skip
    assert stale.stale_settings(rows) == {
        ("a", "fp32", "nchw", "depthwise"): ["dgrad", "wgrad"],
        ("b", "fp32", "nchw", "auto"): ["fprop"],
        ("c", "fp32", "nchw", "auto"): ["fprop"],
        ("d", "fp32", "nchw", "depthwise/band"): ["fprop"],
        ("e", "fp32", "nchw", "auto"): ["fprop"],
    }


def test_networks_with_a_stale_row_run_again() -> None:
    old = {**FRESH, "source": None}
    rows = [{**FRESH, "case": "net (model)"}, {**old, "case": "net.stem.0"}, {**FRESH, "case": "other.stem"}]
    assert stale.stale_networks(rows) == {("net", "fp32", "nchw"): [("net.stem.0", "fprop")]}


def words(precision: str | None = None, layout: str | None = None) -> bench.Words:
    return bench._words("", "", None, precision, layout, "auto")


def suite_of(folder: Path) -> Path:
    path = folder / "suite.toml"
    path.write_text('[[case]]\nname = "b"\ninput = [1, 1, 4, 4]\nfilters = 1\nfilter = [1, 1]\n'
                    '[[case]]\nname = "a"\ninput = [1, 1, 4, 4]\nfilters = 1\nfilter = [1, 1]\n')  # fmt: skip
    return path


def test_the_order_of_stale_rows(tmp_path: Path) -> None:
    old = {**FRESH, "source": None}
    rows = [FRESH, {**old, "direction": "step"}, {**old, "precision": "fp16"}, {**old, "case": "b", "layout": "nhwc"},
            {**old, "case": "no more"}]  # fmt: skip
    results.append_rows(tmp_path, "suite", rows)
    results.refresh_latest(tmp_path, "suite")
    chosen = bench._layers(suite_of(tmp_path), words(), QUICK, None, tmp_path)
    assert {(str(piece), piece.directions, piece.family) for piece in chosen.pieces} == {
        ("b fp32 nhwc", ("fprop",), "depthwise"),
        ("a fp32 nchw", ("step",), "depthwise"),
        ("a fp16 nchw", ("fprop",), "depthwise"),
    }
    assert str(chosen.pieces[0]) == "b fp32 nhwc"
    some = bench._layers(suite_of(tmp_path), words(precision="fp16", layout="nchw"), QUICK, 1.0, tmp_path)
    assert [str(piece) for piece in some.pieces] == ["a fp16 nchw"] and some.limit_s == 1.0
    every = bench._layers(suite_of(tmp_path), words(), QUICK, None, None)
    assert [str(piece) for piece in every.pieces] == ["b fp32 nchw", "a fp32 nchw"]


def test_what_ran_again_is_stale_no_more(tmp_path: Path) -> None:
    assert bench_suite.bench_suite(order(directions=["fprop"]), CPU, tmp_path, Console(file=io.StringIO()))
    latest = lines_of(tmp_path / "latest.jsonl")
    assert stale.stale_settings(latest) == {} and stale.stale_settings([{**row, "source": None} for row in latest])
    out = Console(file=io.StringIO(), width=132)
    assert bench_suite.bench_suite(replace(order(), pieces=[]), CPU, tmp_path, out)
    assert "every row is of today's sources" in out.file.getvalue()


def test_the_limit_leaves_layers_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 10.0])
    monkeypatch.setattr(bench_suite, "time", type("Clock", (), {"monotonic": staticmethod(lambda: next(clock))}))
    out = Console(file=io.StringIO(), width=132)
    two = replace(order(directions=["fprop"], layouts=["nchw", "nhwc"]), limit_s=5.0)
    assert not bench_suite.bench_suite(two, CPU, tmp_path, out)
    assert [json.loads(line)["layout"] for line in (tmp_path / "latest.jsonl").open()] == ["nchw"]
    assert "LEFT 1 of 2 layers: --limit was used up" in out.file.getvalue()


def test_networks_are_cut_to_the_stale_ones() -> None:
    case = bench_models.NetworkOrder([], ["fp32"], ["nchw", "nhwc"], None)
    net = bench.load_networks(SUITES / "models.toml")[0]
    every = replace(case, cases=[net])
    assert len(every.settings) == 2
    only = replace(every, only={(net.name, "fp32", "nhwc"): [("a", "fprop")]})
    assert [(each.case.name, each.layout, rows) for each, rows in only.wanted.items()] == [
        (net.name, "nhwc", [("a", "fprop")])
    ]
    assert replace(every, only={}).settings == [] and every.wanted is None
