"""Padding that wraps, mirrors or repeats: in one launch or by rims (haloconv.strips), else by a copy of x."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from haloconv import edges
from haloconv import plan as plans
from haloconv.autograd import is_recording
from haloconv.choose.choice import Choice, choose
from haloconv.device import stand_in
from haloconv.layout import Layout
from haloconv.precision import torch_precision
from haloconv.problem import (
    PADDING_MODES,
    ZEROS,
    ConvSpec,
    Direction,
    FourSides,
    Modes,
    Problem,
    Request,
    TensorForm,
    check_tensors,
)
from haloconv.rims import Cut, axis_of, cut_of
from haloconv.strips import Job, plan_at_once
from haloconv.support import why_not_elements

Tensor = torch.Tensor
_FEWEST_BYTES: dict[Layout, int] = {"nchw": 16 << 20, "nhwc": 8 << 20}
"""Bytes of x from which "auto" cuts. In rows of an NVIDIA H200 (2026-11-28, weight gradients of U-Net's layers in 16
bits) PyTorch's copies of 17 MB took 52 to 60 us in nchw, 71 to 115 us in nhwc. By the cost model of halo_sm90 the rims
of such a layer take two times 10 us, and their other seven launches may take about 5 us each; one launch needs none."""


def as_modes(padding_mode: object) -> Modes:
    """A name for both dimensions, or a pair (vertical, horizontal), as a pair. Raises ValueError for anything else."""
    modes: tuple[Any, ...] = tuple(padding_mode) if isinstance(padding_mode, (tuple, list)) else (padding_mode,) * 2
    if len(modes) != 2 or not all(each in PADDING_MODES for each in modes):
        names = f"one of {PADDING_MODES}, or two of them (vertical, horizontal)"
        raise ValueError(f"padding_mode must be {names}, not {padding_mode!r}")
    vertical, horizontal = modes
    return vertical, horizontal


def mode_of_layer(padding_mode: object) -> object:
    """What a layer keeps: a name, as PyTorch's does, which checks it, or a pair of two. Raises as ``as_modes``."""
    if isinstance(padding_mode, str):
        return padding_mode
    vertical, horizontal = as_modes(padding_mode)
    return vertical if vertical == horizontal else (vertical, horizontal)


def modes_in_use(modes: Modes, sides: FourSides) -> Modes:
    """The modes, but zeros, as good as any, for a dimension that is not padded. ``sides`` as in ConvSpec."""
    top, bottom, left, right = sides
    return modes[0] if top or bottom else "zeros", modes[1] if left or right else "zeros"


def padded_copy(x: Tensor, spec: ConvSpec, modes: Modes) -> tuple[Tensor, ConvSpec]:
    """x padded as PyTorch pads, and what is then left to do. Raises what torch.nn.functional.pad raises."""
    top, bottom, left, right = spec.padding
    vertical, horizontal = modes
    if vertical == horizontal:
        x = torch.nn.functional.pad(x, (left, right, top, bottom), vertical)
    elif vertical != "zeros":
        x = torch.nn.functional.pad(x, (0, 0, top, bottom), vertical)
    if horizontal not in (vertical, "zeros"):
        x = torch.nn.functional.pad(x, (left, right, 0, 0), horizontal)
    return x, _behind_copy(spec, modes)


def gradient_of_copy(gradient: Tensor, x_shape: tuple[int, ...], spec: ConvSpec, modes: Modes) -> Tensor:
    """The gradient of x (N, C, H, W), given that of its padded copy: each pixel's, summed over where it stands."""
    with torch.enable_grad():
        x = gradient.new_zeros(x_shape).requires_grad_()
        copy, _ = padded_copy(x, spec, modes)
    return torch.autograd.grad(copy, x, gradient)[0]


def _behind_copy(spec: ConvSpec, modes: Modes) -> ConvSpec:
    """What is left to do of a padded copy: zeros where there is another mode in the other dimension."""
    top, bottom, left, right = spec.padding
    rows = (top, bottom) if modes[0] == "zeros" else (0, 0)
    columns = (left, right) if modes[1] == "zeros" else (0, 0)
    return spec._replace(padding=(*rows, *columns))


class Posed(NamedTuple):
    """A convolution with padding of ``modes``: of x (N, C, H, W) and w (K, C/G, R, S), with a result in ``layout``."""

    x_shape: tuple[int, ...]
    w_shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    spec: ConvSpec
    modes: Modes

    def cut_on(self, device: torch.device) -> Cut | None:
        """Interior and rims, where they are to run on ``device``; None where a padded copy is to be convolved.

        That is where no output has all its taps inside the image, where the image with zeros around it would be
        PyTorch's to convolve, where it is small and "auto" chooses, and where PyTorch refuses so much padding.
        """
        cut = None if self.is_small() else self._cut()
        if cut is None or choose(self._problem("fprop", cut), device, self.spec.family).family == "aten":
            return None
        return cut

    def problem(self, direction: Direction, device: torch.device) -> Problem:
        """What is chosen for: the image with zeros around it where there are rims, else the padded copy."""
        return self._problem(direction, None if self.modes == ZEROS else self.cut_on(device))

    def to_measure(self, direction: Direction, device: torch.device) -> Problem:
        """What a choice hangs on: the image with zeros around it where there may be rims, else the padded copy."""
        refused = self.modes == ZEROS or self.is_small() or why_not_elements(self.dtype, device) is not None
        return self._problem(direction, None if refused else self._cut())

    def forward(self, strides: tuple[int, ...], w: Tensor, device: torch.device, bias: bool) -> Problem | Choice:
        """What a forward pass is chosen for, of an aligned x with these strides and of w; or what runs it at once.

        That is one launch where a padded copy would be convolved; with gradients of w not of small images.
        """
        problem = replace(self.problem("fprop", device), bias=bias)
        cut = self._cut() if self.spec.family == "auto" and self.modes != ZEROS else None
        if cut is None or cut.padded is None or self.cut_on(device) is not None:
            return problem
        if is_recording(w, w) and self.is_small():
            return problem
        at_once, spec = replace(self._problem("fprop", cut), bias=bias), self.spec._replace(padding=cut.padded.padding)
        request = Request(at_once, TensorForm(strides, True), plans.form_of(w), self.layout, device, self.modes)
        return edges.choice_of(request, spec, saves_copy=True) or problem

    def is_small(self) -> bool:
        """Whether "auto" leaves it to a copy. On a stand-in for a GPU, where nothing is fast, nothing is."""
        bytes_of_x = prod(self.x_shape) * self.dtype.itemsize
        return self.spec.family == "auto" and stand_in() is None and bytes_of_x < _FEWEST_BYTES[self.layout]

    def _cut(self) -> Cut | None:
        (_, _, *image), (_, _, *taps), spec = self.x_shape, self.w_shape, self.spec
        sides = spec.padding[:2], spec.padding[2:]
        try:
            rows, columns = map(axis_of, image, taps, spec.stride, spec.dilation, sides, self.modes)
        except RuntimeError:  # too much padding
            return None
        inputs, outputs = zip(*(((0, axis.extent), (0, axis.outputs)) for axis in (rows, columns)), strict=True)
        cut = cut_of((rows, columns), inputs, outputs, (0, 0))
        return None if cut.padded is None else cut

    def _problem(self, direction: Direction, cut: Cut | None) -> Problem:
        shape, spec = self.x_shape, _behind_copy(self.spec, self.modes)
        if cut is not None and cut.padded is not None:
            spec = spec._replace(padding=cut.padded.padding)
        else:
            n, c, h, w = shape
            before, after = self.spec.padding, spec.padding
            shape = (n, c, h + sum(before[:2]) - sum(after[:2]), w + sum(before[2:]) - sum(after[2:]))
        return plans.problem_of(direction, shape, self.w_shape, spec, self.dtype, self.layout)


def job_of(x: Tensor, w: Tensor, b: Tensor | None, spec: ConvSpec, modes: Modes) -> Job | None:
    """How a convolution of plain tensors is cut: x (N, C, H, W), w (K, C/G, R, S), b (K,) or None.

    None where a padded copy is to be convolved, as it is where the arguments are refused: PyTorch then says why.
    """
    try:
        check_tensors(x, w, b, spec)
    except (RuntimeError, ValueError):
        return None
    posed = Posed(tuple(x.shape), tuple(w.shape), x.dtype, plans.result_layout(x, w), spec, modes)
    job = _job_of_form(posed, x.device, torch_precision(), plans.generation)
    if job is not None or spec.family != "auto" or (is_recording(x, w, b) and posed.is_small()):
        return job
    at_once = _job_at_once(posed)
    return None if at_once is None or plan_at_once(x, w, b, at_once) is None else at_once


@lru_cache(maxsize=4096)
def _job_at_once(posed: Posed) -> Job | None:
    """One launch in the place of a padded copy: for inference of any size. Gradients are one launch, too, or rims."""
    cut = posed._cut()
    return None if cut is None else Job(cut, (0, 0), posed.spec, modes=posed.modes, saves_copy=True)


@lru_cache(maxsize=4096)
def _job_of_form(posed: Posed, device: torch.device, precision: str, generation: int) -> Job | None:
    """The last two stand for what the choice depends on besides."""
    cut = posed.cut_on(device)
    return None if cut is None else Job(cut, (0, 0), posed.spec, modes=posed.modes)
