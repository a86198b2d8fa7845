"""The benchmark suite: layers of real networks as data, and the tensors made from them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from haloconv.bench.cut_layer import CutLayer
from haloconv.bench.front_layer import OURS, FrontLayer, PatchLayer
from haloconv.bench.layer import Layer
from haloconv.layout import Layout
from haloconv.padding import as_modes
from haloconv.precision import Precision, PrecisionLabel, label_of
from haloconv.problem import DIRECTIONS, ZEROS, ConvSpec, Direction, Modes, PaddingMode, Pair, Problem, output_extent
from haloconv.report import Row

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PRECISIONS: dict[PrecisionLabel, tuple[torch.dtype, Precision]] = {
    "fp32": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "tf32x3": (torch.float32, "tf32x3"),
    "fp16": (torch.float16, "ieee"),
    "bf16": (torch.bfloat16, "ieee"),
    "fp64": (torch.float64, "ieee"),
}
"""The tensors' dtype and how fp32 products are formed, by precision label."""


SUITES = Path(__file__).resolve().parent / "suites"
"""The suites that come with the package, each a file ``NAME.toml``."""


class SuiteError(ValueError):
    """The suite file is wrong, or asks for something that it does not hold."""


@dataclass(frozen=True)
class Case:
    """One layer: ``input`` (N, C, H, W), ``filters`` K, ``filter`` (R, S), ``padding`` rows and columns per side.

    The padding may have four sides; ``padding_mode`` is that of haloconv.Conv2d. The image is cut along H into
    ``shards``, which run one after another. ``front`` names a function of torch.nn.functional beside conv2d that poses
    this problem: the baseline is PyTorch's of that name. A transposed one poses what it mirrors, so that ``input`` is
    its output; conv3d the product of images of one pixel, each a ``patch`` (T, R, S) of some channels.

    Raises TypeError for a front that there is not, and for a padding or a patch that it cannot have; ValueError for a
    mode that is none, and for shards that there are no rows for.
    """

    name: str
    input: tuple[int, int, int, int]
    filters: int
    filter: Pair
    stride: Pair = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    tags: tuple[str, ...] = ()
    about: str = ""
    padding_mode: PaddingMode | Modes = "zeros"
    shards: int = 1
    front: str = ""
    patch: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        as_modes(self.padding_mode)
        if not 1 <= self.shards <= self.input[2]:
            raise ValueError(f"{self.shards} shards of {self.input[2]} rows")
        if len(self.padding) not in (2, 4):
            raise TypeError(f"padding has two or four numbers, not {len(self.padding)}")
        top, bottom, left, right = self._sides
        if self.front and self.front not in OURS:
            raise TypeError(f"front is one of {', '.join(OURS)}, not {self.front!r}")
        if (self.front == "conv3d") != bool(self.patch):
            raise TypeError("front = 'conv3d' and patch go together")
        longer_left = self.front == "conv1d" and top == bottom and left >= right
        if self.front and not longer_left and (top, left) != (bottom, right):
            raise TypeError("of fronts only conv1d may be padded more on one side, its left")

    def problem(self, direction: Direction, precision: PrecisionLabel, layout: Layout) -> Problem:
        """One direction of the layer, without bias. ``precision`` is a key of PRECISIONS."""
        dtype, products = PRECISIONS[precision]
        return Problem(
            direction, *self.input, self.filters, *self.filter, self.stride, self._sides, self.dilation, self.groups,
            dtype=dtype, layout=layout, precision=products,
        )  # fmt: skip

    @property
    def _sides(self) -> tuple[int, int, int, int]:
        rows, columns, *others = self.padding
        return (rows, columns, others[0], others[1]) if others else (rows, rows, columns, columns)

    def layer(
        self, precision: PrecisionLabel, layout: Layout, family: str, device: torch.device, seed: int = 0
    ) -> Layer:
        """The layer with standard normal tensors, without bias. ``precision`` is a key of PRECISIONS.

        The weights are scaled so that outputs have about the variance of the inputs.
        """
        dtype, products = PRECISIONS[precision]
        generator = torch.Generator(device).manual_seed(seed)
        (n, c, h, w), (top, bottom, left, right) = self.input, self._sides
        fan_in = c // self.groups * self.filter[0] * self.filter[1]
        p, q = (
            output_extent(extent, both, taps, stride, dilation)
            for extent, both, taps, stride, dilation in zip(
                (h, w), (top + bottom, left + right), self.filter, self.stride, self.dilation, strict=True
            )
        )

        def normal(*shape: int) -> torch.Tensor:
            drawn = torch.promote_types(dtype, torch.float32)
            return torch.randn(*shape, generator=generator, device=device, dtype=drawn)

        x, dy = normal(n, c, h, w).to(dtype), normal(n, self.filters, p, q).to(dtype)
        weight = (normal(self.filters, c // self.groups, *self.filter) * fan_in**-0.5).to(dtype)
        spec = ConvSpec(self.stride, self._sides, self.dilation, self.groups, products, family)
        tensors = (x, weight, None, dy, spec)
        if self.patch:
            return PatchLayer(self.name, *tensors, patch=self.patch).with_layout(layout)
        if self.front:
            return FrontLayer(self.name, *tensors, front=self.front).with_layout(layout)
        modes = as_modes(self.padding_mode)
        if modes == ZEROS and self.shards == 1:
            return Layer(self.name, *tensors).with_layout(layout)
        return CutLayer(self.name, *tensors, modes=modes, shards=self.shards).with_layout(layout)


def case_of(entry: Mapping[str, Any]) -> Case:
    """The case of an entry of a file, whose tuples are lists. Raises TypeError for missing and unknown names, and as
    Case.
    """
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return Case(**values)


def find_suite(path: Path) -> Path:
    """The file, or that of the package's suite of this name: ``suite``, ``few_images``, ``fronts``, ``pointwise``,
    ``rims``, ``models``.

    Raises SuiteError if there is neither.
    """
    if path.is_file():
        return path
    shipped = {file.stem: file for file in sorted(SUITES.glob("*.toml"))}
    if str(path) not in shipped:
        names = ", ".join(shipped)
        raise SuiteError(f"{path}: there is no such file, and no suite of this name in the package: {names}")
    return shipped[str(path)]


def load_suite(path: Path) -> list[Case]:
    """The cases of a suite file, in its order.

    Raises SuiteError if the file cannot be read, is no TOML, or a case has a missing, unknown or doubled entry.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SuiteError(f"{path}: {error}") from error
    cases = []
    for entry in content.get("case", []):
        try:
            cases.append(case_of(entry))
        except (TypeError, ValueError) as error:
            raise SuiteError(f"{path}: case {entry.get('name', '?')}: {error}") from error
    names = [case.name for case in cases]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if not cases or doubled:
        raise SuiteError(f"{path}: {'cases ' + ', '.join(doubled) + ' stand twice' if doubled else 'there is no case'}")
    return cases


def select(cases: list[Case], names: Collection[str] = (), tags: Collection[str] = ()) -> list[Case]:
    """The cases with one of the names and one of the tags; an empty collection selects everything.

    Raises SuiteError if a name or a tag is unknown, or if no case has both.
    """
    known_tags = {tag for case in cases for tag in case.tags}
    unknown = [name for name in names if name not in {case.name for case in cases}]
    unknown += [tag for tag in tags if tag not in known_tags]
    if unknown:
        held = f"the cases {', '.join(case.name for case in cases)} and the tags {', '.join(sorted(known_tags))}"
        raise SuiteError(f"the suite has no {', '.join(unknown)}; it has {held}")
    chosen = [case for case in cases if (not names or case.name in names) and (not tags or set(tags) & set(case.tags))]
    if not chosen:
        raise SuiteError(f"none of the cases {', '.join(names)} has one of the tags {', '.join(tags)}")
    return chosen


def with_bytes(rows: list[Row], cases: list[Case]) -> list[Row]:
    """The rows, with the bytes of their problems where a record does not tell them and the suite knows the case."""
    known = {case.name: case for case in cases}
    return [_with_bytes(row, known[row.case]) if row.bytes is None and row.case in known else row for row in rows]


def _with_bytes(row: Row, case: Case) -> Row:
    directions = [each for each in DIRECTIONS if row.direction in ("step", each)]
    layout: Layout = "nhwc" if row.layout == "nhwc" else "nchw"
    return replace(row, bytes=sum(case.problem(each, label_of(row.precision), layout).bytes for each in directions))
