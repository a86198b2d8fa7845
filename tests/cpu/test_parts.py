"""Tests that hold one kernel alone: all run while it is new, each in one of three seeds once a stamp holds."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from haloconv.choose.trust import stamped
from haloconv.families.closure import kernels
from tests import parts
from tests.parts import PARTS, leave_out, waits

TESTS = Path(__file__).resolve().parents[1]
SEEDS = range(7, 7 + PARTS)


@pytest.fixture(autouse=True)
def _one_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "stamped", lambda: {"toy/seen": {}})


def _items(*kernels: str, count: int = 30) -> list[Any]:
    marks = [SimpleNamespace(args=(kernel,)) for kernel in kernels]
    return [SimpleNamespace(nodeid=f"test[{i}]", iter_markers=lambda name: marks) for i in range(count)]


def _config(every: bool, gone: list[Any]) -> Any:
    hook = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
    return SimpleNamespace(getoption=lambda name: {"--every-run": every}[name], hook=hook)


def test_each_test_of_a_kernel_that_was_seen_runs_in_one_of_four_seeds() -> None:
    for item in _items("toy/seen"):
        assert sum(not waits(item, seed) for seed in SEEDS) == 1


@pytest.mark.parametrize("kernels", [(), ("toy/new",), ("toy/seen", "toy/new")])
def test_tests_of_others_and_of_new_kernels_never_wait(kernels: tuple[str, ...]) -> None:
    assert not any(waits(item, seed) for item in _items(*kernels) for seed in SEEDS)


def test_what_waits_is_reported_as_deselected() -> None:
    items, gone = [*_items("toy/seen"), *_items(count=2)], []
    before = list(items)
    leave_out(_config(False, gone), items, 7)
    assert gone and [each for each in before if each in items or each in gone] == before
    assert not [each for each in gone if each in items]


def test_with_every_run_nothing_waits() -> None:
    items, gone = _items("toy/seen"), []
    leave_out(_config(True, gone), items, 7)
    assert len(items) == 30 and not gone


def test_marks_name_kernels_that_are_there() -> None:
    named = {
        name
        for path in TESTS.rglob("*.py")
        if path != Path(__file__).resolve()
        for name in re.findall(r'mark\.of_kernel\("([a-z0-9_/]+)"\)', path.read_text(encoding="utf-8"))
    }
    assert named and named <= set(kernels()) and stamped()
