"""What of the compiled networks is still to be timed, what ends within a limit, and how processes share the rest."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from haloconv.bench.networks import workers
from haloconv.bench.networks.compiled import CutShortError, Piece, PieceControl, variants_of
from haloconv.bench.networks.network import Effort, NetworkCase, Setting
from haloconv.bench.networks.resume import expected_s, left_to_do
from haloconv.bench.networks.workers import Place, shared
from haloconv.bench.results import append_rows, newest_rows
from haloconv.bench.suite import SUITES
from haloconv.bench.trial import Budget
from haloconv.cli.bench import command as bench
from haloconv.cli.bench import compiled as verb
from haloconv.cli.bench.models import NetworkOrder
from haloconv.report.rows import WHOLE_DIRECTIONS
from tests.cpu.test_bench_compiled import CPU, MS, row_of

EFFORT = Effort(Budget(seconds=0.0, min_runs=1))
ENVIRONMENT = {"gpu": "a", "torch": "2", "cudnn": "9", "cuda_runtime": "13", "driver": "1", "commit": "b", "date": "x"}
PIECES = [
    Piece(Setting(NetworkCase(name, name), precision, "nhwc"), direction)
    for name in ("one", "two")
    for precision in ("bf16", "tf32")
    for direction in ("forward", "step")
]


def test_what_has_a_row_of_todays_sources_is_not_run_again() -> None:
    """Whatever the commit and the driver; of another GPU or PyTorch, or of other sources, it is."""
    pieces, quick = PIECES[:2], replace(EFFORT, search=False)
    variants = {str(each): {} for each in variants_of("forward", quick)}
    assert {*MS} - {*variants} == {"PyTorch max-autotune", "haloconv max-autotune"}
    row = {**row_of(pieces[0], variants), **ENVIRONMENT, "date": "2026-01-01"}
    whole = {**row, "variants": dict.fromkeys(MS, {})}
    for known in (row, whole):
        assert left_to_do(pieces, [known], ENVIRONMENT, quick) == pieces[1:]
    assert left_to_do(pieces, [row], ENVIRONMENT, EFFORT) == pieces
    assert left_to_do(pieces, [whole], ENVIRONMENT, EFFORT) == pieces[1:]
    for same in ({"commit": "c"}, {"driver": "2"}):
        assert left_to_do(pieces, [{**row, **same}], ENVIRONMENT, quick) == pieces[1:]
    for other in ({"gpu": "b"}, {"torch": "3"}, {"cudnn": "8"}, {"backend": "0"}, {"source": "0"}):
        assert left_to_do(pieces, [{**row, **other}], ENVIRONMENT, quick) == pieces


def timed(piece: Piece, seconds: float, date: str, searched: bool = True) -> dict:
    return {**row_of(piece, {}), "seconds": seconds, "date": date, "searched": searched}


def test_the_time_of_a_piece_is_that_of_its_last_run_or_of_those_most_like_it() -> None:
    one, one_step, one_tf32, *_, two_step = (PIECES[i] for i in (0, 1, 2, 5))
    rows = [timed(one, 100, "2026-01-02"), timed(one, 300, "2026-01-01"), timed(one_step, 400, "2026-01-01"),
            timed(one, 30, "2026-01-03", searched=False), {**row_of(one, {}), "date": "2026-01-04"}]  # fmt: skip
    assert expected_s(one, rows, EFFORT) == 100 and expected_s(one, rows, replace(EFFORT, search=False)) == 30
    assert expected_s(one_tf32, rows, EFFORT) == 300 and expected_s(two_step, rows, EFFORT) == 400
    assert expected_s(two_step, rows, replace(EFFORT, search=False)) == expected_s(one, [], EFFORT) == 0


def order(**changes: object) -> NetworkOrder:
    cases = [NetworkCase("one", "one"), NetworkCase("two", "two")]
    return replace(NetworkOrder(cases, ["bf16"], ["nhwc"], EFFORT, directions=["step"]), **changes)


def run(folder: Path, wanted: NetworkOrder) -> tuple[bool, str]:
    console = Console(width=200, file=io.StringIO())
    return verb.bench_compiled(wanted, [CPU], folder, console), " ".join(console.file.getvalue().split())


def test_what_cannot_end_within_the_limit_is_not_begun_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []

    def try_one(piece: Piece, effort: Effort, device: torch.device, control: PieceControl) -> dict:
        began.append(piece.setting.case.name)
        if piece.setting.case.name == "one" and control.deadline < time.time() + 1000:
            raise CutShortError("after 2 variants")
        return row_of(piece, dict.fromkeys(MS, {}))

    monkeypatch.setattr(verb, "try_piece", try_one)
    append_rows(tmp_path, verb.SUITE, [timed(PIECES[5], 700, "2026-01-01")])
    passed, text = run(tmp_path, order(limit_s=540.0))
    assert not passed and began == []  # the only known step took 700 s
    assert "LEFT one bf16 nhwc step: cut, 540 s of --limit are left, and it takes about 700 s" in text
    assert "LEFT two bf16 nhwc step: cut, 540 s of --limit are left, and it takes about 700 s" in text

    passed, text = run(tmp_path, order(limit_s=900.0))
    assert not passed and began == ["one", "two"]
    assert "LEFT one bf16 nhwc step: cut after 2 variants, --limit was used up" in text
    (cut,) = [json.loads(line) for path in tmp_path.glob("20*-compiled-cut.jsonl") for line in path.open()]
    assert cut["case"] == "one" and cut["seconds"] >= 0 and "variants" not in cut
    assert [row["case"] for row in newest_rows(tmp_path, verb.SUITE)] == ["two"]

    passed, text = run(tmp_path, order())
    assert passed and began == ["one", "two", "one"]  # two has its row


def test_rows_of_this_very_run_tell_what_still_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(verb, "time", type("Clock", (), {"time": staticmethod(lambda: now[0])}))

    def try_one(piece: Piece, *others: object) -> dict:
        now[0] += 400
        return row_of(piece, dict.fromkeys(MS, {}))

    monkeypatch.setattr(verb, "try_piece", try_one)
    passed, text = run(tmp_path, order(limit_s=540.0))
    assert not passed and now == [400.0]
    assert "LEFT two bf16 nhwc step: cut, 140 s of --limit are left, and it takes about 400 s" in text


def test_stale_rows_alone_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[Piece] = []
    fresh = dict.fromkeys(MS, {})
    monkeypatch.setattr(verb, "try_piece", lambda piece, *_: (began.append(piece), row_of(piece, fresh))[1])
    old = {**row_of(PIECES[0], fresh), "date": "2026-01-01T00:00:00Z", "backend": "0"}
    kept = [{**row_of(each, fresh), "date": "2026-01-01T00:00:00Z"} for each in (PIECES[1], PIECES[5])]
    append_rows(tmp_path, verb.SUITE, [old, *kept])
    both = order(only=bench._stale_rows(tmp_path, verb.SUITE), directions=["forward", "step"])
    passed, _ = run(tmp_path, both)
    assert passed and began == [PIECES[0]]
    nothing = replace(both, only=bench._stale_rows(tmp_path, verb.SUITE))
    passed, text = run(tmp_path, nothing)
    assert passed and began == [PIECES[0]] and "every row is of today's sources" in text
    assert bench._stale_rows(None, verb.SUITE) is None


def test_stale_rows_of_layers_may_be_asked_for_by_direction(tmp_path: Path) -> None:
    """So that one network's rows are divided over several processes."""
    rows = [("unet (model)", "step"), ("unet.head", "fprop"), ("unet.head", "wgrad")]
    known = {"precision": "bf16", "layout": "nhwc", "date": "2026-01-01T00:00:00Z"}
    append_rows(tmp_path, "models", [{**known, "case": case, "direction": direction} for case, direction in rows])
    words = bench.Words([], [], ["wgrad", "step"], None, None, "auto")
    found = bench._networks(SUITES / "models.toml", words, EFFORT, compiled=False, stale=tmp_path)
    assert found.only == {("unet", "bf16", "nhwc"): [rows[0], rows[2]]} and found.directions == WHOLE_DIRECTIONS
    every = bench._networks(SUITES / "models.toml", words._replace(directions=None), EFFORT, False, tmp_path)
    assert every.only == {("unet", "bf16", "nhwc"): rows}
    none = bench._networks(SUITES / "models.toml", words._replace(directions=["dgrad"]), EFFORT, False, tmp_path)
    assert none.only == {} and none.settings == []


def used(folder: Path, item: int, place: Place) -> tuple[str, int, bool]:
    """Have the place for a while, lend it in between, and tell when: by the clock that processes share."""
    with place.gpu:
        times = [time.time()]
        time.sleep(0.2)
        times.append(time.time())
        with place.gpu.lent():
            time.sleep(0.4)
        times.append(time.time())
        time.sleep(0.2)
        times.append(time.time())
    (folder / str(item)).write_text(json.dumps(times))
    return str(place.device), place.beside, place.gpu.waited_s >= 0


def test_processes_of_one_device_run_one_at_a_time_and_lend_it_meanwhile(tmp_path: Path) -> None:
    found = dict(shared(partial(used, tmp_path), range(4), [CPU], jobs=2))
    assert found == dict.fromkeys(range(4), ("cpu", 1, True))
    spans = []
    for item in range(4):
        first, lent, back, last = json.loads((tmp_path / str(item)).read_text())
        spans += [(first, lent), (back, last)]
    spans.sort()
    assert all(end <= start + 1e-3 for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


def test_one_device_and_one_job_need_no_process(tmp_path: Path) -> None:
    (found,) = shared(lambda item, place: (item, place), [7], [CPU])
    assert found[1] == (7, Place(CPU, workers.GpuLock()))
