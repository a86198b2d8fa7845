"""``python -m tools.host_costs``: two trees alternate, medians count, and what costs more is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import host_costs
from tools.host_costs import Cost, by_call, cost_of, is_worse


def row(what: str, ours: float, aten: float = 10.0) -> dict:
    return {"what": what, "haloconv_us": ours, "aten_us": aten}


def test_the_median_of_rounds_and_half_of_what_lies_between_quartiles() -> None:
    assert cost_of([row("a", us) for us in (9.0, 20.0, 10.0, 11.0, 8.0)]) == Cost(10.0, 1.0, pytest.approx(0.35))
    assert cost_of([row("a", 5.0, aten=20.0)]) == Cost(5.0, 0.25, 0.0)


def test_a_call_counts_that_every_round_has() -> None:
    assert set(by_call([[row("a", 1.0), row("b", 1.0)], [row("a", 1.0)]])) == {"a"}


@pytest.mark.parametrize(("ratio", "worse"), [(1.19, False), (1.21, True), (0.8, False)])
def test_worse_is_more_than_both_spreads(ratio: float, worse: bool) -> None:
    assert is_worse(Cost(1.0, ratio, 0.1), Cost(1.0, 1.0, 0.1)) is worse


@pytest.mark.parametrize("here_us", [10.0, 13.0])
def test_trees_alternate_and_what_is_costlier_here_is_named(
    here_us: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trees = []

    def rows(tree: Path) -> list[dict]:
        trees.append(tree)
        return [row("direct, inference", here_us if tree == host_costs.HERE else 10.0)]

    monkeypatch.setattr(host_costs, "rows_in", rows)
    code = host_costs.main([str(tmp_path), "2"])
    here, other = host_costs.HERE, tmp_path
    assert trees == [other, here, here, other]
    told = capsys.readouterr().out
    assert code == (1 if here_us > 10 else 0)
    assert f"Costlier here: {'direct, inference' if code else 'none'}." in told


def test_a_tree_that_writes_no_rows_is_an_error_with_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "haloconv").mkdir()
    (tmp_path / "haloconv" / "__init__.py").touch()
    (tmp_path / "haloconv" / "__main__.py").write_text("print('no GPU here')")
    with pytest.raises(SystemExit, match="no rows were written: no GPU here"):
        host_costs.rows_in(tmp_path)
