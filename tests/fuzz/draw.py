"""What the fuzzer draws: a layer, sizes for it, and the form of every tensor. A draw is one line that replays it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from haloconv import plan
from haloconv.emulator import emulated_device
from haloconv.families import FAMILIES
from haloconv.families.halo_sm90.conv import conv_edges
from haloconv.families.halo_sm90.wgrad import wgrad_edges
from haloconv.layout import Layout
from haloconv.precision import Precision
from haloconv.problem import (
    NO_EPILOGUE,
    ZEROS,
    ConvSpec,
    Direction,
    EdgeModes,
    FourSides,
    Pair,
    Problem,
    dense_request,
    output_extent,
)
from tests import oracle
from tests.cases import DTYPE_NAMES, STORAGES
from tests.families import forms_tiles
from tests.layers import smallest_image

AUTO = "auto"  # the plan's own choice, through the plan: the only one that takes empty tensors
GROUPED = "grouped_sm90"  # takes few of the layers that are drawn for all
HALO_SM90, POINTWISE = "halo_sm90", 0.15  # has a kernel of 1x1 layers: how many are drawn for it
TAPS = 0.15  # and one of several taps where channels are neighbours
PADDED = 0.15  # and one of padding modes
REDUCE = "reduce"  # the bias gradient, which is a sum and no family's own
SUBJECTS = (*(name for name in FAMILIES if name != "aten"), REDUCE, AUTO)
PRECISIONS = ("fp32", "tf32", "tf32x3", "fp16", "bf16", "fp64")
KINDS = ("normal", "normal", "positive", "wide", "cancellation", "denormal", "special", "constant")
PLAIN: tuple[tuple[str, Layout], ...] = (("contiguous", "nchw"), ("channels_last", "nhwc"))
WORDS = ("str", "Layout")  # annotations of fields that are no numbers
ARCHS = ("sm_90a", "sm_90a", "sm_90a", "sm_80", "sm_86", "sm_75", "sm_120")  # shared memory differs
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()} | dict.fromkeys(("tf32", "tf32x3"), torch.float32)
_PRECISIONS: dict[str, Precision] = {"fp32": "ieee", "tf32": "tf32", "tf32x3": "tf32x3"}
_FORMS = 2  # combinations of storages on a layer, about: a kernel is compiled for each
_TRIES = 200  # layers drawn for a family before the next family


Extents = tuple[int, int, int, int]  # (N, C, H, W)
Filters = tuple[int, int, int]  # (K, R, S)


@dataclass(frozen=True)
class Draw:
    """One result of one problem on one family, with the form of every tensor.

    ``x`` is (N, C, H, W), ``filters`` (K, R, S). ``first`` and ``second`` name storages of (x, w) in fprop, (dy, w) in
    dgrad, (dy, x) in wgrad; ``layout`` is the memory order of dx or dw (that of y follows from x and w). ``values`` is
    the kind of random values. ``arch`` and ``sm_count`` are the emulated GPU's; on a GPU they mean nothing.
    """

    family: str
    result: str
    precision: str
    x: Extents
    filters: Filters
    stride: Pair = (1, 1)
    padding: FourSides = (0, 0, 0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    bias: bool = False
    epilogue: str = ""
    edges: str = ""
    first: str = "contiguous"
    second: str = "contiguous"
    layout: Layout = "nchw"
    values: str = "normal"
    seed: int = 0
    arch: str = "sm_90a"
    sm_count: int = 4

    def __str__(self) -> str:
        """The line that `parsed` reads: every field that is not its default."""
        return line_of(self)

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.precision]

    @property
    def answer(self) -> str:
        """The result by the name that `tests.oracle` gives it."""
        return self.edges or self.epilogue or self.result

    @property
    def has_residual(self) -> bool:
        return bool(self.epilogue) and oracle.EPILOGUES[self.epilogue].residual

    @property
    def spec(self) -> ConvSpec:
        """What a caller would say; fp32 products are formed as ``precision`` says, whatever PyTorch's setting."""
        family = "auto" if self.family in (AUTO, REDUCE) else self.family
        return ConvSpec(self.stride, self.padding, self.dilation, self.groups, _PRECISIONS.get(self.precision), family)

    @property
    def y_shape(self) -> tuple[int, int, int, int]:
        (n, _, h, w), (k, r, s) = self.x, self.filters
        (top, bottom, left, right), (down, across) = self.padding, self.stride
        rows = output_extent(h, top + bottom, r, down, self.dilation[0])
        return (n, k, rows, output_extent(w, left + right, s, across, self.dilation[1]))

    @property
    def w_shape(self) -> tuple[int, int, int, int]:
        k, r, s = self.filters
        return (k, self.x[1] // self.groups, r, s)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the first and of the second operand."""
        return {"fprop": (self.x, self.w_shape), "wgrad": (self.y_shape, self.x)}.get(
            self.result, (self.y_shape, self.w_shape)
        )

    @property
    def is_legal(self) -> bool:
        """Whether PyTorch takes it."""
        divides = self.groups >= 1 and self.x[1] % self.groups == 0 and self.filters[0] % self.groups == 0
        return divides and min(*self.x[1:], *self.filters, *self.y_shape[2:]) >= 1 and self._has_edges

    @property
    def modes(self) -> EdgeModes:
        """What stands outside the image, by rows and by columns."""
        return oracle.EDGES[self.edges][1] if self.edges else ZEROS

    @property
    def _has_edges(self) -> bool:
        """Whether the image has the pixels that its modes name."""
        most = {"reflect": 1, "circular": 0}  # by how much padding must be less than the extent
        sides = self.padding[:2], self.padding[2:]
        each = zip(oracle.modes_of(self.edges) if self.edges else ZEROS, sides, self.x[2:], strict=True)
        return all(max(side) + most[mode] <= extent for mode, side, extent in each if mode in most)

    def problem(self, layout: Layout) -> Problem:
        direction: Direction = "fprop" if self.result == "fprop" else "dgrad" if self.result == "dgrad" else "wgrad"
        problem = plan.problem_of(direction, self.x, self.w_shape, self.spec, self.dtype, layout)
        epilogue = oracle.EPILOGUES.get(self.epilogue, NO_EPILOGUE)
        return replace(problem, bias=self.bias and not epilogue.scale, epilogue=epilogue)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else str(value)


def line_of(draw: Any) -> str:
    """Every field of a dataclass that is not its default, in one line."""
    shown = ((each.name, getattr(draw, each.name), each.default) for each in fields(draw))
    return " ".join(f"{name}={_text(value)}" for name, value, default in shown if value != default)


def parsed(line: str, cls: type[Any] = Draw) -> Any:
    """The draw of a class that a line describes. Raises ValueError for a word that is no field, or a wrong value."""
    kinds = {each.name: each.type for each in fields(cls)}
    found: dict[str, object] = {}
    for word in line.split():
        name, _, text = word.partition("=")
        if name not in kinds:
            raise ValueError(f"{name!r} is no field of a draw")
        kind = kinds[name]
        numbers = tuple(int(each) for each in text.split(",")) if kind not in WORDS else ()
        single = bool(numbers[0]) if kind == "bool" else numbers[0] if kind == "int" else numbers
        found[name] = text if kind in WORDS else single
    return cls(**found)


# Layers -------------------------------------------------------------------------------------------------------------


def _filter(rng: random.Random) -> tuple[int, int]:
    """Taps by axis: mostly up to 7, square half of the time, now and then far more."""
    if rng.random() < 0.06:
        return rng.randint(1, 31), rng.randint(8, 31)
    r = rng.choice((1, 1, 2, 3, 3, 3, 4, 5, 7))
    return (r, r) if rng.random() < 0.5 else (r, rng.randint(1, 7))


def _many(rng: random.Random, most: int) -> int:
    """A number of channels: few, any, or a multiple of 8."""
    return rng.choice((rng.randint(1, 8), rng.randint(1, most), 8 * rng.randint(1, max(1, most // 8))))


def _channels(rng: random.Random, family: str) -> tuple[int, int, int]:
    """C, K and the number of groups; of a family for special layers mostly such as it takes."""
    kind = rng.choice(("dense", "dense", "dense", "grouped", "even groups", "depthwise"))
    if rng.random() < 0.97:
        depthwise = family in FAMILIES and FAMILIES[family].depthwise
        kind = "depthwise" if depthwise else "few channels" if family == GROUPED else kind
    if kind == "few channels":
        groups, each = rng.randint(2, 20), rng.choice((8, 16))
        return groups * each, groups * each, groups
    if kind == "dense":
        return _many(rng, 160), _many(rng, 160), 1
    if kind == "grouped":
        groups = rng.randint(2, 9)
        return groups * rng.randint(1, 20), groups * rng.randint(1, 20), groups
    if kind == "even groups":
        groups, each = rng.choice((2, 3, 4, 8)), rng.choice((4, 8, 8, 16, 32))
        return groups * each, groups * each, groups
    groups = rng.choice((rng.randint(2, 80), 8 * rng.randint(1, 10)))
    return groups, groups * rng.choice((1, 1, 1, 2, 3)), groups


def _layer(rng: random.Random, family: str) -> Draw:
    """A layer with the smallest image that it takes, for a family that may refuse it."""
    drawn = rng.random() if family == HALO_SM90 else 1.0
    pointwise, by_taps = drawn < POINTWISE, POINTWISE <= drawn < POINTWISE + TAPS
    c, k, groups = (_many(rng, 160), _many(rng, 160), 1) if pointwise else _channels(rng, family)
    if by_taps:
        c, k, groups = 8 * rng.randint(1, 20), 8 * rng.randint(1, 20), 1
    taps = (1, 1) if pointwise else _filter(rng)
    plain = pointwise or rng.random() < 0.4
    down, across = (1 if plain or taps[axis] > 7 else rng.choice((1, 1, 2, 3, 5)) for axis in (0, 1))
    dilation = (down, across)
    by, along = (rng.choice((1, 1, 2)),) * 2 if plain else (rng.choice((1, 1, 2, 3, 4, 5)) for _ in (0, 1))
    stride = (by, along)
    if family == GROUPED:
        dilation = stride = (1, 1)
    reach = [d * (extent - 1) for d, extent in zip(dilation, taps, strict=True)]
    same = (reach[0] // 2, reach[0] // 2, reach[1] // 2, reach[1] // 2)
    top, bottom, left, right = (rng.choice((0, rng.randint(0, max(1, reach[axis] + 1)))) for axis in (0, 0, 1, 1))
    padding = same if plain else (top, bottom, left, right)
    spec = ConvSpec(stride, padding, dilation, groups)
    h, w = smallest_image(spec, *taps)
    results = ("bgrad",) if family == REDUCE else ("fprop", "dgrad", "wgrad")
    result, precision = rng.choice(results), rng.choice(PRECISIONS)
    epilogues = (oracle.RELU, oracle.RESIDUAL_RELU) if precision == "fp64" else (*oracle.EPILOGUES,)  # a scale is fp32
    epilogue = rng.choice(epilogues) if result == "fprop" and rng.random() < 0.2 else ""
    edges = [name for name, (direction, _) in oracle.EDGES.items() if direction == result]
    padded = family == HALO_SM90 and edges and not epilogue and rng.random() < PADDED
    bias = result == "fprop" and rng.random() < 0.5
    layer = Draw(family, result, precision, (1, c, h, w), (k, *taps), stride, padding, dilation, groups, bias, epilogue)
    storage, layout = PLAIN[1] if by_taps else rng.choice(PLAIN)
    arch, sm_count = rng.choice(ARCHS), rng.choice((1, 3, 4, 4, 7))
    layer = replace(layer, first=storage, second=storage, layout=layout, arch=arch, sm_count=sm_count)
    return _with_edges(rng, layer, edges) if padded else layer


def _with_edges(rng: random.Random, layer: Draw, edges: list[str]) -> Draw:
    """The layer padded by modes, on an image that has the pixels they name; a gradient of as many outputs as inputs."""
    if layer.result == "dgrad":
        reach = [d * (taps - 1) for d, taps in zip(layer.dilation, layer.filters[1:], strict=True)]
        before = [rng.randint(0, each) for each in reach]
        padding = (before[0], reach[0] - before[0], before[1], reach[1] - before[1])
        layer = replace(layer, stride=(1, 1), padding=padding)
    n, c, h, w = layer.x
    h, w = (max(extent, 1 + max(layer.padding[i : i + 2])) for i, extent in ((0, h), (2, w)))
    return replace(layer, x=(n, c, h, w), edges=rng.choice(edges))


def _size(rng: random.Random, layer: Draw, most_work: int) -> Draw:
    """The layer on images of another size, that is small enough to be checked quickly."""
    _, c, h, w = layer.x
    while True:
        n = rng.choice((1, 1, 2, 3, rng.randint(1, 9)))
        rows, cols = rng.choice(
            ((0, 0), (rng.randint(0, 5), rng.randint(0, 5)), (rng.randint(0, 39), rng.randint(0, 39)),
             (rng.randint(0, 4), rng.randint(60, 300)), (rng.randint(60, 150), rng.randint(0, 4)))
        )  # fmt: skip
        if rng.random() < 0.4:
            cols += -(w + cols) % rng.choice((4, 8, 16))
        if layer.family == AUTO and rng.random() < 0.1:
            n = 0
        sized = replace(layer, x=(n, c, h + rows, w + cols))
        if work_of(sized) <= max(most_work, work_of(layer)):
            return sized


def products_of(draw: Draw) -> int:
    """Products that threads step through, or elements read where those are more.

    Of a result pixel all taps, in a strided dgrad those of its residue class, whether they meet an image or padding.
    """
    (n, k, p, q), (_, c, h, w) = draw.y_shape, draw.x
    _, c_each, r, s = draw.w_shape
    by_tap = n * (k // draw.groups) * c * h * w // (draw.stride[0] * draw.stride[1])
    return max(r * s * (by_tap if draw.result == "dgrad" else n * k * p * q * c_each), n * c * h * w)


def work_of(draw: Draw) -> int:
    """Products that are formed, about: tiles of tensor cores have 64 filters of one group, however few it has."""
    if not forms_tiles(draw.family) or draw.family == GROUPED:
        return products_of(draw)
    c_each, k_each = draw.x[1] // draw.groups, draw.filters[0] // draw.groups
    wide, deep = (c_each, k_each) if draw.result == "dgrad" else (k_each, c_each)
    filled = (-(-wide // 64) * 64) * (-(-deep // 16) * 16)
    terms = 3 if draw.precision == "tf32x3" else 1
    products = terms * products_of(draw) * filled // (wide * deep)
    return products // 4  # of which the emulator does four in the time of another


def _formed(rng: random.Random, draw: Draw, layer: Draw, keep: bool) -> Draw:
    """The draw with values and a seed, and with storages and a result layout: its own, the layer's, or any."""
    drawn = replace(draw, values=rng.choice(KINDS), seed=rng.randrange(1 << 16))
    if keep:
        return drawn
    names = (layer.first, layer.first, *STORAGES) if rng.random() < 0.5 else (layer.first,)
    layout = layer.layout if rng.random() < 0.7 else rng.choice(("nchw", "nhwc"))
    return replace(drawn, first=rng.choice(names), second=rng.choice(names), layout=layout)


# Draws --------------------------------------------------------------------------------------------------------------


@contextmanager
def machine(draw: Draw, device: str, seed: int = 0) -> Iterator[None]:
    """The GPU that the draw asks for, emulated on the CPU under one schedule; on a GPU that one."""
    emulated = emulated_device(seed, draw.sm_count, draw.arch) if device == "cpu" else nullcontext()
    with emulated:
        yield


def layers(rng: random.Random, device: str, families: tuple[str, ...], most_work: int) -> Iterator[Draw]:
    """Layers without end, families alternating. One that takes none on ``device`` is left out; all of them end this."""
    found = True
    while found:
        found = False
        for family in families:
            drawn = (_layer(rng, family) for _ in range(_TRIES))
            fitting = (each for each in drawn if each.is_legal and work_of(each) <= most_work and takes(each, device))
            if (layer := next(fitting, None)) is not None:
                found = True
                yield layer


def takes(layer: Draw, device: str) -> bool:
    """Whether the family takes the problem on the device (``"cpu"`` or ``"cuda"``), whatever its tensors' forms."""
    if not layer.is_legal:
        return False
    if layer.epilogue and not getattr(FAMILIES.get(layer.family), "has_epilogue", False):
        return False
    if layer.family in (AUTO, REDUCE):
        return layer.precision not in ("tf32", "tf32x3") or layer.family == AUTO
    family = FAMILIES[layer.family]
    with machine(layer, device):
        request = replace(dense_request(layer.problem(layer.layout), torch.device(device)), modes=layer.modes)
        kernel = wgrad_edges if layer.result == "wgrad" else conv_edges
        refused = layer.edges and kernel.why_not(request)
        return not refused and family.why_not(request.problem, request.device) is None


def sizes(rng: random.Random, layer: Draw, count: int, most_work: int) -> list[Draw]:
    """``count`` problems on one layer: several sizes, most of them on tensors of the same forms as the one before."""
    drawn: list[Draw] = []
    for _ in range(count):
        form = drawn[-1] if drawn else layer
        one = replace(_size(rng, layer, most_work), first=form.first, second=form.second, layout=form.layout)
        drawn.append(_formed(rng, one, layer, keep=bool(drawn) and rng.random() >= _FORMS / count))
    return drawn
