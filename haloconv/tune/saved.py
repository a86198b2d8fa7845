"""What was tuned as files for a container: the kernels that the layers run, and the records that choose them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from haloconv.choose.choice import choose, config_of
from haloconv.choose.records import records_path, shelf_of, write_records
from haloconv.device import device_facts
from haloconv.families import FAMILIES
from haloconv.families.reduce.bgrad import bind_bgrad
from haloconv.jit.cache import collecting, save_kernels
from haloconv.problem import dense_request
from haloconv.tune.problems import Posed


class Saved(NamedTuple):
    """How many kernels and how many records were written."""

    kernels: int
    records: int


def save(posed: Sequence[Posed], folder: Path) -> Saved:
    """Write the kernels that these problems run to ``folder/kernels``, and their records to ``folder/records``.

    ``HALOCONV_CACHE_DIR`` and ``HALOCONV_RECORDS_DIR`` read them there (docs/operations.md). What runs is bound anew,
    on operands that are dense and aligned; weight gradients bring the kernels of the bias's gradient along.

    Raises OSError if a file cannot be written, RuntimeError if records are frozen.
    """
    with collecting() as kernels:
        for each in posed:
            _bind(each)
    save_kernels(folder, kernels)
    written = 0
    for device in {each.device for each in posed}:
        facts = device_facts(device.index)
        found = (shelf_of(facts).find(each.problem) for each in posed if each.device == device)
        records = list(dict.fromkeys(record for record, _ in filter(None, found)))
        write_records(folder / "records" / records_path(facts.name).name, records, facts)
        written += len(records)
    return Saved(len(kernels), written)


def _bind(posed: Posed) -> None:
    request = dense_request(posed.problem, posed.device)
    choice = choose(posed.problem, posed.device)
    FAMILIES[choice.family].bind(request, config_of(choice, request))
    if posed.problem.direction == "wgrad" and not choice.refused:
        bind_bgrad(posed.problem.dtype, posed.problem.y_shape, request.first, posed.device)
