"""Records: what was measured for a problem, and which family it chose; one JSON file per GPU model.

The file is replaced in one step under a lock, so that racing processes lose nothing and nobody reads half of it. An
entry that cannot be read is a miss, reported once, and kept in a copy of the file. A record holds only on the GPU model
and for the kernels that it was measured on; other versions of PyTorch, cuDNN or the driver are noted, and reason enough
to measure again when asked to.
"""

from __future__ import annotations

import codecs
import itertools
import json
import math
import shutil
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from platformdirs import user_data_path

from haloconv import atomic, env
from haloconv.choose import formats
from haloconv.choose.buckets import Bucket, Size, bucket_of, layer_key, read_layer, size_of
from haloconv.device import DeviceFacts, gpu_stem
from haloconv.families import FAMILIES
from haloconv.families.base import Config
from haloconv.families.files import device_hash
from haloconv.problem import Problem, Request

FORMAT = 3
SHIPPED = Path(__file__).resolve().parent / "shipped"
_HEAD = f'{{"format": {FORMAT}, "records": ['
_LOCK_TIMEOUT_S = 60
_DAY = 10  # letters of a date


@dataclass(frozen=True, eq=False)
class Record:
    """One measured choice. Times are medians in ms, errors norms against float64. Compared by identity.

    ``family`` was chosen, with the config that ``kernel`` and ``config``, its key, name, and took ``ms``; ``own`` is
    the fastest kernel of ours, chosen or not, None if no result of ours was right. ``error`` and ``difference`` (from
    PyTorch's result) are those of what was chosen, ``error_limit`` is what passes; ``spread`` and ``runs`` are those of
    its times. ``source`` is the hash of the device code of ``own``, which decided also where PyTorch won; ``software``
    the versions in force.
    """

    layer: str
    size: Size
    bucket: Bucket
    family: str
    kernel: str
    config: str
    ms: float
    aten_ms: float
    own: str | None
    own_ms: float | None
    error: float
    aten_error: float
    error_limit: float
    difference: float
    spread: float
    runs: int
    source: str
    gpu: str
    sm_count: int
    software: dict[str, str]
    date: str

    @property
    def ratio(self) -> float | None:
        """How many times faster than PyTorch the fastest of our kernels is."""
        return self.aten_ms / self.own_ms if self.own_ms else None

    def why(self, size: Size, shipped: bool = False) -> str:
        """The sentence that reports give for the choice, for a problem of ``size``."""
        what = "tuned, as shipped" if shipped else "tuned"
        if self.own is None:
            outcome = "PyTorch, as none of ours takes it"
        elif self.family == "aten":
            outcome = f"PyTorch, as the fastest of ours, {self.own}, reaches {self.ratio:.2f}x"
        else:
            outcome = f"{self.ratio:.2f}x PyTorch"
        carried = "" if size == self.size else f", measured at {self.size}"
        return f"{what}: {outcome} on {self.date[:_DAY]}, {self.gpu}{carried}"

    def is_of(self, facts: DeviceFacts) -> bool:
        """Whether it was measured on this GPU model."""
        return (self.gpu, self.sm_count) == (facts.name, facts.sm_count)

    def holds_on(self, facts: DeviceFacts) -> bool:
        """Whether the record says anything here: the same GPU model, and kernels unchanged since."""
        return self.is_of(facts) and self.family in FAMILIES and self.source == device_hash(self.own or "aten")

    @property
    def is_current(self) -> bool:
        """Whether the software is still what it was measured with."""
        return self.software == env.software_stamp()


class Place(NamedTuple):
    """What a record is found by."""

    layer: str
    size: Size


def make_record(request: Request, family: str, config: Config, own: Config | None, **measured: float | None) -> Record:
    """The record of a measurement made now; ``measured`` are its numbers, by the names of the fields."""
    problem, facts = request.problem, request.facts
    numbers: dict[str, Any] = {name: _digits(value) for name, value in measured.items()}
    return Record(
        layer=layer_key(problem),
        size=size_of(problem),
        bucket=bucket_of(problem),
        family=family,
        kernel=config.kernel,
        config=config.key,
        own=None if own is None else own.kernel,
        source=device_hash("aten" if own is None else own.kernel),
        gpu=facts.name,
        sm_count=facts.sm_count,
        software=env.software_stamp(),
        date=env.now(),
        **numbers,
    )


def _digits(value: float | None) -> float | None:
    """Five digits of a figure; a count is kept."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def records_folder() -> Path:
    """The folder that HALOCONV_RECORDS_DIR names, else one in the user's data folder."""
    return env.records_dir_override() or user_data_path("haloconv", appauthor=False) / "records"


def records_path(gpu_name: str) -> Path:
    """The user's file for a GPU model. Files of earlier formats stay beside it, for earlier versions."""
    return records_folder() / f"{gpu_stem(gpu_name)}.v{FORMAT}.json"


def _file_to_read(path: Path) -> Path:
    """The file, else the one of the format before, from which its records are taken over."""
    older = path.with_name(path.name.replace(f".v{FORMAT}.", f".v{formats.BEFORE}."))
    return path if path.exists() or not older.exists() else older


def shipped_path(gpu_name: str) -> Path:
    """The file that comes with the package."""
    return SHIPPED / f"{gpu_stem(gpu_name)}.json"


_warned: set[Path] = set()


class Reading(NamedTuple):
    """The records of a file, and what of it could not be read; ``complaint`` is empty if it was read whole."""

    records: list[Record]
    complaint: str


def read_file(path: Path) -> Reading:
    """The records of a file of this or the format before; none if there is no file. Bad entries alone are left out."""
    try:
        data = _file_to_read(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return Reading([], "")
    except OSError as error:
        return Reading([], f"{type(error).__name__}: {error}")
    try:
        form, entries, damage = _entries(data)
        if form not in (FORMAT, formats.BEFORE):
            raise ValueError(f"its format is {form!r}, not {FORMAT}")
    except _DAMAGE as error:
        return Reading([], f"{type(error).__name__}: {error}")
    found: list[Record] = []
    faults: list[str] = []
    for entry in entries:
        try:
            found.append(parsed(formats.taken_over(entry) if form == formats.BEFORE else entry))
        except _DAMAGE as error:
            faults.append(f"{type(error).__name__}: {error}")
    faults = [damage, *faults] if damage else faults
    return Reading(found, f"all but {len(found)} of them, {faults[0]}" if faults else "")


_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)


def _entries(data: bytes) -> tuple[object, list[Any], str]:
    """Format and entries of a file's content; what is wrong with it as a whole, which is then read line by line.

    Some editors put a byte order mark in front.
    """
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        head, *lines = data.split(b"\n")
        if head != _HEAD.encode():
            raise
        whole = [_line(line) for line in lines]
        return FORMAT, [each for each in whole if each is not None], f"{type(error).__name__}: {error}"
    return content["format"], list(content["records"]), ""


def _line(line: bytes) -> object:
    """The entry of a line, or None if there is none."""
    with suppress(ValueError, RecursionError):
        return json.loads(line.strip().removesuffix(b",").decode("utf-8"))
    return None


def read_records(path: Path) -> list[Record]:
    """The records of a file, as ``read_file`` has them; what could not be read is warned of once."""
    return _read_and_warn(path).records


def _read_and_warn(path: Path) -> Reading:
    reading = read_file(path)
    if reading.complaint and path not in _warned:
        _warned.add(path)
        warnings.warn(
            f"tuning records in {path} are not used: {reading.complaint}. The next `haloconv tune` writes the file "
            "anew and keeps this one beside it, as .bak",
            RuntimeWarning,
            stacklevel=2,
        )
    return reading


def _keep_copy(path: Path) -> None:
    """Copy a damaged file beside itself, under a name that is free. Raises OSError."""
    names = (f"{path.name}{number or ''}.bak" for number in itertools.count())
    shutil.copyfile(path, next(copy for copy in map(path.with_name, names) if not copy.exists()))


def parsed(entry: dict[str, Any]) -> Record:
    """A record from JSON. Raises ValueError, KeyError or TypeError if it is none."""
    values = {field.name: entry[field.name] for field in fields(Record)}
    texts = [values[name] for name in ("layer", "family", "kernel", "config", "source", "gpu", "date")]
    numbers = [values[name] for name in ("error", "aten_error", "error_limit", "difference", "spread", "runs")]
    own, own_ms, software = values["own"], values["own_ms"], values["software"]
    sound = all(isinstance(text, str) for text in texts) and isinstance(software, dict)
    sound = sound and (own is None) == (own_ms is None) and (own is None or (isinstance(own, str) and own_ms > 0))
    sound = sound and all(isinstance(number, (int, float)) and math.isfinite(number) for number in numbers)
    sound = sound and all(math.isfinite(values[name] or 0) for name in ("ms", "aten_ms", "own_ms"))
    if not sound or not (values["aten_ms"] > 0 and values["ms"] > 0):
        raise ValueError(f"no record: {entry}")
    size, bucket = (tuple(map(int, values[name])) for name in ("size", "bucket"))
    return Record(**{**values, "size": Size(*size), "bucket": Bucket(*bucket), "sm_count": int(values["sm_count"])})


def write_records(path: Path, records: Iterable[Record], facts: DeviceFacts, *, drop_stale: bool = False) -> None:
    """Add the records to a file. Each replaces those of its place that hold on the device; all others stay.

    With ``drop_stale`` those of its place that were measured on earlier kernels go, too; without, they stay for earlier
    versions of haloconv, which may read the same file.

    Of a file that cannot be read whole a copy is kept, as ``.bak``.

    Safe from any number of processes. Raises OSError if the file cannot be written, filelock.Timeout if another process
    holds the lock for a minute, RuntimeError if records are frozen.
    """
    if env.frozen():
        raise RuntimeError(f"{env.FROZEN} is set: tuning records are read only")
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f"{path.name}.lock"), timeout=_LOCK_TIMEOUT_S):
        kept = {Place(new.layer, new.size): new for new in records}
        before = _read_and_warn(path)
        if before.complaint and path.exists():  # else what was read is a file of the format before, which stays
            _keep_copy(path)
        stay = [
            old
            for old in before.records
            if Place(old.layer, old.size) not in kept or not (drop_stale and old.is_of(facts) or old.holds_on(facts))
        ]
        atomic.write_text(path, as_lines([*stay, *kept.values()]))


def as_lines(records: Iterable[Record]) -> str:
    """What a file of the records holds: one line each, in their order."""
    lines = ",\n".join(json.dumps(asdict(each), allow_nan=False) for each in sorted(records, key=_order))
    return f"{_HEAD}\n{lines}\n]}}\n"


def _order(record: Record) -> tuple[object, ...]:
    return (record.layer, record.size, record.gpu, record.sm_count, record.source)


class Shelf:
    """The records that hold on one device: those made or read by this process, then those that come with the package.

    The files are read once, at the first question.
    """

    def __init__(self, facts: DeviceFacts) -> None:
        self.facts = facts
        self._own = _by_layer(read_records(records_path(facts.name)), facts)
        self._shipped = _by_layer(read_records(shipped_path(facts.name)), facts)

    def find(self, problem: Problem) -> tuple[Record, bool] | None:
        """The record for a problem and whether it came with the package, or None.

        The problem's own size is best, then the size nearest to it in its bucket.
        """
        layer = layer_key(problem)
        for records, shipped in ((self._own, False), (self._shipped, True)):
            known = records.get(layer)
            found = None if known is None else _nearest(known, problem)
            if found is not None:
                return found, shipped
        return None

    def exact(self, problem: Problem) -> Record | None:
        """The record of this process or this user for exactly this problem, if it is current."""
        record = self._own.get(layer_key(problem), {}).get(size_of(problem))
        return record if record is not None and record.is_current else None

    def add(self, records: Iterable[Record]) -> None:
        """Take over records that hold here, without writing them."""
        for layer, found in _by_layer(records, self.facts).items():
            self._own.setdefault(layer, {}).update(found)

    def keep(self, records: Iterable[Record]) -> None:
        """Take over records and write them; a file that cannot be written is warned of, the records hold all the same.

        Raises RuntimeError if records are frozen.
        """
        records = list(records)
        self.add(records)
        path = records_path(self.facts.name)
        try:
            write_records(path, records, self.facts)
        except (OSError, Timeout) as error:
            warnings.warn(
                f"tuning records cannot be written to {path}: {error}. They hold for this process alone; set "
                f"{env.RECORDS_DIR} to a folder that can be written",
                RuntimeWarning,
                stacklevel=2,
            )

    def counts(self) -> tuple[int, int]:
        """How many records of the user and how many shipped ones hold here."""
        return sum(map(len, self._own.values())), sum(map(len, self._shipped.values()))

    def discard(self, record: Record) -> None:
        """Forget a record that came with the package."""
        self._shipped.get(record.layer, {}).pop(record.size, None)


def _by_layer(records: Iterable[Record], facts: DeviceFacts) -> dict[str, dict[Size, Record]]:
    found: dict[str, dict[Size, Record]] = {}
    for record in records:
        if record.holds_on(facts):
            found.setdefault(record.layer, {})[record.size] = record
    return found


def _nearest(known: dict[Size, Record], problem: Problem) -> Record | None:
    size, bucket = size_of(problem), bucket_of(problem)
    if size in known:
        return known[size]
    near = [record for record in known.values() if record.bucket == bucket]
    pixels = size.n * size.h * size.w
    return min(near, key=lambda each: abs(each.size.n * each.size.h * each.size.w - pixels), default=None)


def stale_problems(facts: DeviceFacts) -> list[Problem]:
    """What was measured on this GPU model for kernels that have changed since, by the user or for a release."""
    found = [record for path in (records_path, shipped_path) for record in read_records(path(facts.name))]
    stale = (record for record in found if record.is_of(facts) and not record.holds_on(facts))
    return list(dict.fromkeys(read_layer(record.layer, record.size) for record in stale))


_shelves: dict[DeviceFacts, Shelf] = {}


def shelf_of(facts: DeviceFacts) -> Shelf:
    """The shelf of a device, made at the first question."""
    if facts not in _shelves:
        _shelves[facts] = Shelf(facts)
    return _shelves[facts]


def forget_shelves() -> None:
    """Read the files again at the next question."""
    _shelves.clear()
    _warned.clear()
