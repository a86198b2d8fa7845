"""Scenarios of haloconv.distributed in four processes; what a rank found goes to ``rankN.json``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from tests.spatial_problems import Placements, assert_equal, draw
from tests.usages import Place

FOLDER = "SPATIAL_RANKS_FOLDER"
FUZZED = 300
OK = "as one process"
ROWS, COLUMNS = Shard(2), Shard(3)


def meshes() -> Iterator[tuple[str, DeviceMesh, Placements]]:
    """Every mesh that images are sharded over here; of two processes there are two side by side."""
    square, line = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns")), init_device_mesh("cpu", (4,))
    yield "2x2", square, (ROWS, COLUMNS)
    yield "2x1", square["rows"], (ROWS,)
    yield "1x2", square["columns"], (COLUMNS,)
    yield "1x4", line, (COLUMNS,)
    yield "4x1", line, (ROWS,)
    yield "2x2 of rows", square, (ROWS, ROWS)
    yield "images and rows", square, (Shard(0), ROWS)


def fuzzed() -> None:
    """Every seventh problem on the same mesh; every fifth with second gradients."""
    random, places = Random(0), list(meshes())
    for number in range(FUZZED):
        name, mesh, placements = places[number % len(places)]
        try:
            assert_equal(draw(random), mesh, placements, second=number % 5 == 0)
        except Exception as error:
            raise AssertionError(f"problem {number} on {name}") from error


SCENARIOS: dict[str, Callable[[], object]] = {"fuzzed": fuzzed}


def all_of_them(on: Place) -> None:
    """Each scenario in turn, in one process group: an error of one leaves the next one whole."""
    found, file = {}, Path(os.environ[FOLDER]) / f"rank{dist.get_rank()}.json"
    for name, scenario in SCENARIOS.items():
        begin = time.monotonic()
        try:
            said = scenario() or OK
        except Exception as error:
            causes = error if error.__cause__ is None else f"{error}: {error.__cause__!r}"
            said = f"{type(error).__name__}: {causes}"
        found[name] = (said, time.monotonic() - begin)
        file.write_text(json.dumps(found))
