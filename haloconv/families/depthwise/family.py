"""The ``depthwise`` family: layers of one channel a group, with fp32 sums.

Threads march down rows in registers. Aligned rows in 16 bits run on Hopper's tensor cores, as do filter gradients in
16-bit channels_last; filters of more than 9 taps on aligned rows are staged in shared memory and run on older ones (16
bits) or in register tiles (fp32). On Hopper rows of neighbouring channels in fp32 land in shared memory, and planes
come as boxes where there are many taps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from haloconv import support
from haloconv.env import device_facts
from haloconv.families.base import MOST_CANDIDATES, BoundCall
from haloconv.families.depthwise import band as depthwise_band
from haloconv.families.depthwise import band_wgrad as depthwise_band_wgrad
from haloconv.families.depthwise import box as depthwise_box
from haloconv.families.depthwise import box_wgrad as depthwise_box_wgrad
from haloconv.families.depthwise import lanes as depthwise_lanes
from haloconv.families.depthwise import lanes_wgrad as depthwise_lanes_wgrad
from haloconv.families.depthwise import march as depthwise_march
from haloconv.families.depthwise import march_wgrad as depthwise_march_wgrad
from haloconv.families.depthwise import nhwc_wgrad_sum as depthwise_nhwc_wgrad_sum
from haloconv.families.depthwise import pairs as depthwise_pairs
from haloconv.families.depthwise import pairs_wgrad as depthwise_pairs_wgrad
from haloconv.families.depthwise import patch as depthwise_patch
from haloconv.families.depthwise import patch_wgrad as depthwise_patch_wgrad
from haloconv.families.depthwise import tile as depthwise_tile
from haloconv.families.depthwise import tile_sm90 as depthwise_tile_sm90
from haloconv.families.depthwise.march_form import DTYPES, Config, Form, best_config, good_configs, why_not
from haloconv.jit import KernelSource
from haloconv.layout import strides_of
from haloconv.problem import DIRECTIONS, Direction, Problem, TensorForm


class DepthwiseFamily:
    """Layers of one channel a group and few taps. fp32 products are formed in full precision, TF32 allowed or not."""

    name = "depthwise"

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        reason = support.why_not(problem, device)
        if reason is not None:
            return reason
        if problem.c_per_group != 1:
            return f"a group has {problem.c_per_group} channels; the depthwise kernels take one"
        if problem.dtype not in DTYPES:
            return f"the depthwise kernels do not take {problem.dtype}"
        return why_not(problem)

    def candidates(
        self, problem: Problem, first: TensorForm, second: TensorForm, result_layout: str, device: torch.device
    ) -> list[Way]:
        """The way that ``bind`` prefers first; of the march the configs that compute few idle columns."""
        march = depthwise_march_wgrad if problem.direction == "wgrad" else depthwise_march
        marches = good_configs(march.form_of(problem, first, second, result_layout))
        special = [Way(name) for name in _special_ways(problem, first, second, result_layout, device)]
        return [*special, *(Way("march", config) for config in marches)][:MOST_CANDIDATES]

    def bind(
        self,
        problem: Problem,
        first: TensorForm,
        second: TensorForm,
        result_layout: str,
        device: torch.device,
        config: Way | None = None,
    ) -> BoundCall:
        special = _special_ways(problem, first, second, result_layout, device) if config is None else []
        way = config or Way(next(iter(special), "march"))
        if way.name == "march":
            march = depthwise_march_wgrad if problem.direction == "wgrad" else depthwise_march
            return march.bind(problem, first, second, result_layout, device, way.config)
        special_ways = _SPECIAL_WGRAD if problem.direction == "wgrad" else _SPECIAL
        module = special_ways[way.name]
        return module.bind(problem, first, second, result_layout, device)


_SPECIAL = {
    "lanes": depthwise_lanes,
    "pairs": depthwise_pairs,
    "patch": depthwise_patch,
    "band": depthwise_band,
    "box": depthwise_box,
    "tile_sm90": depthwise_tile_sm90,
    "tile": depthwise_tile,
}  # best first, of fprop and dgrad
_SPECIAL_WGRAD = {
    "lanes": depthwise_lanes_wgrad,
    "patch": depthwise_patch_wgrad,
    "box": depthwise_box_wgrad,
    "band": depthwise_band_wgrad,
    "pairs": depthwise_pairs_wgrad,
}


@dataclass(frozen=True)
class Way:
    """One of the family's kernels; ``march`` with the config of a thread (None: the best)."""

    name: str
    config: Config | None = None

    def __str__(self) -> str:
        return self.name if self.config is None else f"{self.name} {self.config}"


def _special_ways(
    problem: Problem, first: TensorForm, second: TensorForm, result_layout: str, device: torch.device
) -> list[str]:
    """The kernels beside the march that take the problem, best first."""
    facts = device_facts(device.index)
    if problem.direction == "wgrad":
        return [name for name, way in _SPECIAL_WGRAD.items() if way.why_not(problem, first, second, facts) is None]
    return [name for name, way in _SPECIAL.items() if way.why_not(problem, first, result_layout, facts) is None]


def shipped_sources() -> list[KernelSource]:
    """One source per kernel text of a few layers that differ in what their threads hold, in each direction."""
    sources = {}
    for problem in _representative_problems():
        x, y = (TensorForm(strides_of(shape, problem.layout), True) for shape in (problem.x_shape, problem.y_shape))
        inner = problem.layout == "nhwc"
        form = Form(problem, y, x, inner) if problem.direction == "dgrad" else Form(problem, x, y, inner)
        way = depthwise_march_wgrad if problem.direction == "wgrad" else depthwise_march
        text = way.source(form, best_config(form))
        sources[text.digest] = text
    staged = (_staged_source(problem) for problem in _staged_problems())
    landed = (_landed_source(problem) for problem in _landed_problems())
    paired = (
        depthwise_pairs.source(one, config) for one in _paired_problems() for config in depthwise_pairs.configs(one)
    )
    paired_wgrad = (
        depthwise_pairs_wgrad.source(one, depthwise_pairs_wgrad.best_config(one)) for one in _paired_gradients()
    )
    return [*sources.values(), *staged, *landed, *paired, *paired_wgrad, *_sum_sources()]


def _sum_sources() -> list[KernelSource]:
    return [depthwise_nhwc_wgrad_sum.source(_layer("wgrad", dtype, "nhwc", 3, 1)) for dtype in DTYPES]


def _landed_source(problem: Problem) -> KernelSource:
    if problem.layout == "nhwc":
        lanes = depthwise_lanes_wgrad if problem.direction == "wgrad" else depthwise_lanes
        config = lanes.best_config(problem)
        assert config is not None
        return lanes.source(problem, config)
    if problem.dtype == torch.float32:
        return _fp32_landed_source(problem)
    if problem.direction == "wgrad":
        return depthwise_patch_wgrad.source(problem, depthwise_patch_wgrad.best_config(problem))
    return depthwise_patch.source(problem, depthwise_patch.best_config(problem))


def _fp32_landed_source(problem: Problem) -> KernelSource:
    if problem.direction != "wgrad" and problem.r * problem.s < depthwise_box.LEAST_TAPS:
        return depthwise_tile_sm90.source(problem, depthwise_tile_sm90.best_config(problem))
    boxes = depthwise_box_wgrad if problem.direction == "wgrad" else depthwise_box
    config = boxes.best_config(problem)
    assert config is not None
    return boxes.source(problem, config)


def _staged_source(problem: Problem) -> KernelSource:
    if problem.dtype == torch.float32:
        return depthwise_tile.source(problem, depthwise_tile.best_config(problem))
    if problem.direction != "wgrad":
        return depthwise_band.source(problem, depthwise_band.best_config(problem))
    config = depthwise_band_wgrad.best_config(problem)
    assert config is not None
    return depthwise_band_wgrad.source(problem, config)


def _representative_problems() -> Iterator[Problem]:
    layers = (
        (torch.float32, "nchw", 3, 1, DIRECTIONS),
        (torch.float16, "nhwc", 3, 2, DIRECTIONS),
        (torch.bfloat16, "nchw", 5, 2, DIRECTIONS),
        (torch.float32, "nhwc", 5, 1, ("dgrad",)),
        (torch.float32, "nchw", 7, 1, ("fprop", "wgrad")),
        (torch.float16, "nhwc", 7, 1, ("fprop",)),
    )
    for dtype, layout, taps, stride, directions in layers:
        yield from (_layer(direction, dtype, layout, taps, stride) for direction in directions)


def _staged_problems() -> Iterator[Problem]:
    """For the kernels that need compute capability 8.0."""
    for dtype, taps, directions in (
        (torch.float16, 5, DIRECTIONS),
        (torch.bfloat16, 7, ("fprop", "wgrad")),
        (torch.float32, 5, ("fprop",)),
        (torch.float32, 7, ("dgrad",)),
    ):
        yield from (_layer(direction, dtype, "nchw", taps, 1) for direction in directions)


def _landed_problems() -> Iterator[Problem]:
    """For the kernels that need compute capability 9.0."""
    for dtype, taps in ((torch.float16, 3), (torch.bfloat16, 5), (torch.float16, 7)):
        yield from (_layer(direction, dtype, "nchw", taps, 1) for direction in DIRECTIONS)
    for taps in (3, 5):
        yield from (_layer(direction, torch.float32, "nchw", taps, 1) for direction in ("fprop", "dgrad"))
    for taps, directions in ((5, ("wgrad",)), (7, DIRECTIONS)):
        yield from (_layer(direction, torch.float32, "nchw", taps, 1) for direction in directions)
    for taps in (3, 5, 7):
        yield from (_layer(direction, torch.float32, "nhwc", taps, 1) for direction in DIRECTIONS)


def _paired_gradients() -> Iterator[Problem]:
    """For filter gradients in channels_last, which need compute capability 9.0."""
    for dtype, taps in ((torch.float16, 3), (torch.bfloat16, 5), (torch.float16, 7)):
        yield _layer("wgrad", dtype, "nhwc", taps, 1)


def _paired_problems() -> Iterator[Problem]:
    for dtype, taps, direction in (
        (torch.float16, 3, "fprop"),
        (torch.bfloat16, 5, "fprop"),
        (torch.float16, 5, "dgrad"),
        (torch.bfloat16, 7, "fprop"),
    ):
        yield _layer(direction, dtype, "nhwc", taps, 1)


def _layer(direction: Direction, dtype: torch.dtype, layout: str, taps: int, stride: int) -> Problem:
    return Problem(
        direction, n=2, c=96, h=56, w=56, k=96, r=taps, s=taps, stride=(stride,) * 2, padding=(taps // 2,) * 4,
        groups=96, bias=direction == "fprop", dtype=dtype, layout=layout,
    )  # fmt: skip
