"""Scenarios of haloconv.tune in several processes on a fake GPU: what a rank finds goes to ``rankN.json``.

Each rank's clock favours another family, and each has a folder of records of its own beside that file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import haloconv
from haloconv import env
from haloconv.choose import records
from haloconv.choose.choice import choose
from haloconv.device import set_stand_in
from haloconv.tune import measure
from haloconv.tune.problems import problems_of
from tests.tuned import FACTS, Clock, FakeFamily, fake_device, favouring, only
from tests.usages import Place

FOLDER = "TUNING_RANKS_FOLDER"
CPU = torch.device("cpu")
FAVOURITES = ("special", "direct", "aten")


@contextmanager
def _fake_rank() -> Iterator[tuple[Path, Clock]]:
    """This rank's file for what it finds, and its clock."""
    folder, rank = Path(os.environ[FOLDER]), dist.get_rank()
    with pytest.MonkeyPatch.context() as patch, only(FakeFamily("direct"), FakeFamily("special")):
        patch.setenv(env.RECORDS_DIR, str(folder / f"records{rank}"))
        patch.setattr(records, "SHIPPED", folder / "shipped")
        clock = Clock(favouring(FAVOURITES[rank]))
        patch.setattr(measure, "compare", clock)
        set_stand_in(fake_device())
        yield folder / f"rank{rank}.json", clock


def tunes(on: Place) -> None:
    """Every way to tune together, in one process group: what goes wrong in one leaves the next one whole."""
    with _fake_rank() as (found, clock):
        answers = {
            "chosen": _chosen(clock),
            "measuring": _error(lambda: _tune(clock, rank_0="the clock stopped")),
            "model": _error(lambda: _tune(clock, channels=8 if dist.get_rank() != 1 else 7)),
            "exit": _error(_tune_a_model_that_exits),
            "device": _error(_tune_without_a_gpu),
            "cpu": _without_any_gpu(),
            "other GPU": _on_another_gpu(clock),
        }
        found.write_text(json.dumps(answers))
        if dist.get_rank() == 1:
            os._exit(0)
        answers["ended"] = _error(lambda: _tune(clock))
        found.write_text(json.dumps(answers))


def _net(layers: int = 2) -> torch.nn.Sequential:
    both = torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.Conv2d(8, 4, 1)
    return torch.nn.Sequential(*both[:layers])


def _chosen(clock: Clock) -> list[object]:
    """Ranks hold different parts of a model."""
    model, x = _net(1 if dist.get_rank() == 2 else 2), torch.randn(2, 8, 12, 10)
    report = haloconv.tune(model, x, progress=False)
    families = [choose(each.problem, CPU).family for each in problems_of(model, x)]
    return [dist.get_rank(), families, len(report.rows), len(clock.rounds)]


def _tune(clock: Clock, channels: int = 8, rank_0: str = "") -> haloconv.report.Report:
    """Tune a model anew; ``rank_0`` is what rank 0's clock says instead of a time."""
    with pytest.MonkeyPatch.context() as patch:
        if rank_0 and dist.get_rank() == 0:
            patch.setattr(clock, "ms_of", lambda name: (_ for _ in ()).throw(OSError(rank_0)))
        return haloconv.tune(_net(), torch.randn(2, channels, 12, 10), again=True, progress=False)


def _tune_a_model_that_exits() -> None:
    """Rank 1's model calls sys.exit()."""
    model = _net()
    if dist.get_rank() == 1:
        model.register_forward_pre_hook(lambda *_: sys.exit(7))
    haloconv.tune(model, torch.randn(2, 8, 12, 10), again=True, progress=False)


def _tune_without_a_gpu() -> None:
    """Rank 0 alone has no GPU."""
    if dist.get_rank() == 0:
        set_stand_in(None)
    try:
        haloconv.tune(_net(), torch.randn(2, 8, 12, 10), again=True, progress=False)
    finally:
        set_stand_in(fake_device())


def _without_any_gpu() -> list[str]:
    set_stand_in(None)
    notes = haloconv.tune(_net(), torch.randn(2, 8, 12, 10), progress=False).notes
    set_stand_in(fake_device())
    return notes


def _on_another_gpu(clock: Clock) -> list[str]:
    """The last rank runs on a GPU of another model, of which rank 0's records say nothing."""
    if dist.get_rank() == 2:
        set_stand_in(fake_device(replace(FACTS, name="Other GPU")))
    notes = _tune(clock).notes
    set_stand_in(fake_device())
    return notes


def _error(call: Callable[[], object]) -> str:
    """The sentence that ``call()`` ends with."""
    try:
        call()
    except Exception as error:  # whatever a rank ends with
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
