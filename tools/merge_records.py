"""Take contributed measurements into the shipped records, if every row holds together.

python -m tools.merge_records FILE... [--check]     # files of `haloconv tune --submit FILE`; --check writes nothing

A row is refused if its record does not follow from its candidates' times, if its config is not one that the family
offers for the problem on that GPU, or if it was measured on other kernels than today's. Of a file with such a row
nothing is taken.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from haloconv.choose import records
from haloconv.choose.buckets import bucket_of, read_layer
from haloconv.choose.records import Record, write_records
from haloconv.choose.whole import HOST_MS, MARGIN, is_ahead
from haloconv.device import DeviceFacts, arch_of
from haloconv.families import FAMILIES
from haloconv.families.files import device_hash
from haloconv.problem import Problem, dense_request
from haloconv.tune.measure import Measured
from haloconv.tune.submission import Row, SubmissionError, read_rows
from haloconv.version import __version__
from tools.measured import stood_in

_CPU = torch.device("cpu")
_ROUNDED = 1e-4  # of a time: five digits are kept


def facts_of_row(row: Row) -> DeviceFacts:
    """The GPU that the row says. Raises ValueError or TypeError if it says none."""
    gpu = row.gpu
    capability: Any = gpu["capability"]
    major, minor = capability
    name, driver = str(gpu["name"]), str(gpu["driver"])
    sms, smem = int(str(gpu["sm_count"])), int(str(gpu["max_smem_bytes"]))
    return DeviceFacts(name, arch_of((major, minor)), sms, (major, minor), 1 << 36, smem, driver)


def complaint_about(row: Row) -> str | None:
    """What keeps a row out, or None."""
    return next(_complaints(row, row.record), None)


def _complaints(row: Row, record: Record) -> Iterator[str]:
    try:
        facts, problem = facts_of_row(row), read_layer(record.layer, record.size)
    except (ValueError, TypeError) as error:
        yield f"it names no GPU or no layer: {error}"
        return
    if (record.gpu, record.sm_count) != (facts.name, facts.sm_count):
        yield f"its record is of {record.gpu} with {record.sm_count} multiprocessors, the row of another GPU"
    if record.bucket != bucket_of(problem):
        yield f"its bucket is not that of {problem}"
    if record.software.get("haloconv") != __version__ or not record.software.get("driver"):
        yield f"it was measured with haloconv {record.software.get('haloconv')}, this is {__version__}"
    if record.source != device_hash(record.own or "aten"):
        yield f"it was measured on other kernels of {record.own} than today's: measure again"
    if record.error > record.error_limit:
        yield f"its error {record.error:.2e} is above the limit {record.error_limit:.2e}"
    yield from _of_candidates(row, record)
    yield from _of_configs(row, problem, facts)


def _of_candidates(row: Row, record: Record) -> Iterator[str]:
    """Whether the record is what the candidates' times come to."""
    final = [each for each in row.candidates if each.final]
    aten = [each for each in final if each.family == "aten"]
    if any(not (math.isfinite(each.ms) and each.ms > 0) for each in row.candidates):
        yield "a candidate has no time"
        return
    if len(aten) != 1 or not _close(aten[0].ms, record.aten_ms):
        yield "PyTorch's time is not that of its candidate"
        return
    if record.own is None or record.own_ms is None:
        if record.family != "aten":
            yield f"{record.family} was chosen, and none of ours was timed"
        return
    fastest = min((each for each in final if each.family != "aten"), key=lambda each: each.ms, default=None)
    if fastest is None or fastest.kernel != record.own or not _close(fastest.ms, record.own_ms):
        yield f"{record.own} is not the fastest candidate of ours"
        return
    chosen = fastest if is_ahead(fastest.ms, aten[0].ms, record.layer.split()[0]) else aten[0]
    if (chosen.family, chosen.kernel, chosen.config) != (record.family, record.kernel, record.config):
        near = min(abs(aten[0].ms - MARGIN * fastest.ms), abs(aten[0].ms - fastest.ms - HOST_MS))
        if near > _ROUNDED * aten[0].ms:
            yield f"its times choose {chosen.family} ({chosen.config}), not {record.family} ({record.config})"
    if not _close(chosen.ms, record.ms):
        yield "the time of what was chosen is not that of its candidate"


def _of_configs(row: Row, problem: Problem, facts: DeviceFacts) -> Iterator[str]:
    """Whether each candidate is one that its family offers there."""
    with stood_in(facts):
        for each in row.candidates:
            if not _is_offered(each, problem):
                yield f"{each.family} does not offer {each.kernel} ({each.config}) for {problem}"


def _is_offered(candidate: Measured, problem: Problem) -> bool:
    family = FAMILIES.get(candidate.family)
    if family is None or (candidate.family != "aten" and family.why_not(problem, _CPU) is not None):
        return False
    configs = family.configs(dense_request(problem, _CPU))
    return (candidate.kernel, candidate.config) in {(config.kernel, config.key) for config in configs}


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_ROUNDED)


def merge(paths: list[Path], write: bool = True) -> tuple[dict[str, int], list[str]]:
    """How many records each GPU model's shipped file took, and what was refused, a sentence a row.

    Nothing is written if anything was refused.
    """
    found: defaultdict[DeviceFacts, list[Record]] = defaultdict(list)
    refused = []
    for path in paths:
        try:
            rows = read_rows(path)
        except SubmissionError as error:
            refused.append(str(error))
            continue
        if not rows:
            refused.append(f"{path} has no row")
        for number, row in enumerate(rows, 1):
            complaint = complaint_about(row)
            if complaint is None:
                found[facts_of_row(row)].append(row.record)
            else:
                refused.append(f"{path}:{number}: {row.record.layer}: {complaint}")
    if refused:
        return {}, refused
    for facts, taken in found.items():
        if write:
            write_records(records.shipped_path(facts.name), taken, facts)
    return {facts.name: len(taken) for facts, taken in found.items()}, []


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="say what would be taken, write nothing")
    options = parser.parse_args(arguments)
    taken, refused = merge(options.files, not options.check)
    for name, count in taken.items():
        sys.stdout.write(f"{name}: {count} records {'would go' if options.check else 'went'} to the shipped ones\n")
    sys.stderr.writelines(f"REFUSED {line}\n" for line in refused)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
