"""The ``depthwise`` family: layers of one channel a group, on CUDA cores, with fp32 sums."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from haloconv import support
from haloconv.families import depthwise_march, depthwise_march_wgrad
from haloconv.families.base import MOST_CANDIDATES, BoundCall, TensorForm, strides_of
from haloconv.families.depthwise_march_form import (
    DTYPES,
    Config,
    Form,
    best_config,
    good_configs,
    why_not,
)
from haloconv.jit import KernelSource
from haloconv.problem import DIRECTIONS, Conv2dProblem


class DepthwiseFamily:
    """Layers of one channel a group and few taps. fp32 products are formed in full precision, TF32 allowed or not."""

    name = "depthwise"

    def why_not(self, problem: Conv2dProblem, device: torch.device) -> str | None:
        reason = support.why_not(problem, device)
        if reason is not None:
            return reason
        if problem.c_per_group != 1:
            return f"a group has {problem.c_per_group} channels; the depthwise kernels take one"
        if problem.dtype not in DTYPES:
            return f"the depthwise kernels do not take {problem.dtype}"
        return why_not(problem)

    def candidates(
        self, problem: Conv2dProblem, first: TensorForm, second: TensorForm, result_layout: str, device: torch.device
    ) -> list[Config]:
        """The config that ``bind`` prefers, then others of few idle columns."""
        way = depthwise_march_wgrad if problem.direction == "wgrad" else depthwise_march
        return good_configs(way.form_of(problem, first, second, result_layout))[:MOST_CANDIDATES]

    def bind(
        self,
        problem: Conv2dProblem,
        first: TensorForm,
        second: TensorForm,
        result_layout: str,
        device: torch.device,
        config: Config | None = None,
    ) -> BoundCall:
        way = depthwise_march_wgrad if problem.direction == "wgrad" else depthwise_march
        return way.bind(problem, first, second, result_layout, device, config)


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
    return list(sources.values())


def _representative_problems() -> Iterator[Conv2dProblem]:
    layers = (
        (torch.float32, "nchw", 3, 1, DIRECTIONS),
        (torch.float16, "nhwc", 3, 2, DIRECTIONS),
        (torch.bfloat16, "nchw", 5, 2, DIRECTIONS),
        (torch.float32, "nhwc", 5, 1, ("dgrad",)),
        (torch.float32, "nchw", 7, 1, ("fprop", "wgrad")),
        (torch.float16, "nhwc", 7, 1, ("fprop",)),
    )
    for dtype, layout, taps, stride, directions in layers:
        layer = {"c": 96, "k": 96, "groups": 96, "r": taps, "s": taps, "stride": (stride,) * 2}
        for direction in directions:
            yield Conv2dProblem(
                direction, n=2, h=56, w=56, padding=(taps // 2,) * 4, bias=direction == "fprop", dtype=dtype,
                layout=layout, **layer,
            )  # fmt: skip
