"""Scenarios of haloconv.tune in several processes on a fake GPU: what a rank finds goes to ``rankN.json``.

Each rank's clock favours another family, and each has a folder of records of its own beside that file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
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
from tests.tuned import Clock, FakeFamily, fake_device, favouring, only
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


def rank_0_chooses(on: Place) -> None:
    """Ranks hold different parts of a model."""
    with _fake_rank() as (found, clock):
        model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.Conv2d(8, 4, 1))
        x = torch.randn(2, 8, 12, 10)
        if dist.get_rank() == 2:
            model = model[:1]
        report = haloconv.tune(model, x, progress=False)
        families = [choose(each.problem, CPU).family for each in problems_of(model, x)]
        found.write_text(json.dumps([dist.get_rank(), families, len(report.rows), len(clock.rounds)]))
