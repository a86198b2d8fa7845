"""Which problems share a measurement: the same layer, on images of about the same size."""

from __future__ import annotations

import re
from typing import NamedTuple, cast

import torch

from haloconv.layout import Layout
from haloconv.precision import Precision
from haloconv.problem import ACTIVATIONS, DIRECTIONS, Activation, Direction, Epilogue, Problem

_PRODUCTS: dict[str, Precision] = {"tf32": "tf32", "tf32x3": "tf32x3"}
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16} | dict.fromkeys(("fp32", *_PRODUCTS), torch.float32)
_LAYER = re.compile(
    r"(?P<direction>\w+) (?P<c>\d+)->(?P<k>\d+) (?P<r>\d+)x(?P<s>\d+) s(?P<down>\d+)x(?P<across>\d+) "
    r"p(?P<padding>\d+,\d+,\d+,\d+) d(?P<tall>\d+)x(?P<wide>\d+) g(?P<groups>\d+) "
    rf"(?P<precision>{'|'.join(_DTYPES)}) (?P<layout>nchw|nhwc)(?P<bias> bias)?(?P<epilogue>(?: \w+)*)"
)
_EPILOGUE = re.compile(rf"( scale)?( residual)?(?: ({'|'.join(ACTIVATIONS)}))?( compiled)?")


class Size(NamedTuple):
    """Images, rows and columns of the input: what changes from call to call of one layer."""

    n: int
    h: int
    w: int

    def __str__(self) -> str:
        return f"{self.n} x {self.h} x {self.w}"


class Bucket(NamedTuple):
    """Sizes that one measurement serves: powers of two of all output pixels of all images, and of a row's."""

    pixels: int
    cols: int


def layer_key(problem: Problem) -> str:
    """Everything about a problem but its size, as one line: a record's name for it.

    Precisions and layouts differ, and so does what follows: a bias, or an epilogue. PyTorch does each part by a kernel
    of its own, which may take as long as the convolution, and all by one in a compiled graph; ours apply it to sums.
    """
    one, forward = problem, problem.direction == "fprop"
    top, bottom, left, right = one.padding
    return (
        f"{one.direction} {one.c}->{one.k} {one.r}x{one.s} s{one.stride[0]}x{one.stride[1]} "
        f"p{top},{bottom},{left},{right} d{one.dilation[0]}x{one.dilation[1]} g{one.groups} "
        f"{one.precision_label} {one.layout}{' bias' if one.bias and forward else ''}"
        f"{f' {one.epilogue}' if any(one.epilogue) and forward else ''}"
    )


def read_layer(layer: str, size: Size) -> Problem:
    """The problem of a size whose ``layer_key`` is ``layer``. Raises ValueError if there is none."""
    found = _LAYER.fullmatch(layer)
    follows = None if found is None else _EPILOGUE.fullmatch(found["epilogue"])
    if found is None or follows is None or found["direction"] not in DIRECTIONS:
        raise ValueError(f"no layer of a record: {layer!r}")
    c, k, r, s, *strides = (int(found[name]) for name in ("c", "k", "r", "s", "down", "across"))
    top, bottom, left, right = map(int, found["padding"].split(","))
    problem = Problem(
        cast("Direction", found["direction"]), size.n, c, size.h, size.w, k, r, s, (strides[0], strides[1]),
        (top, bottom, left, right), (int(found["tall"]), int(found["wide"])), int(found["groups"]),
        found["bias"] is not None, _DTYPES[found["precision"]], cast("Layout", found["layout"]),
        _PRODUCTS.get(found["precision"], "ieee"), _epilogue_of(*follows.groups()),
    )  # fmt: skip
    if layer_key(problem) != layer:
        raise ValueError(f"no layer of a record: {layer!r}")
    return problem


def _epilogue_of(scale: str | None, residual: str | None, activation: str | None, compiled: str | None) -> Epilogue:
    return Epilogue(bool(scale), cast("Activation | None", activation), bool(residual), bool(compiled))


def size_of(problem: Problem) -> Size:
    """The size of a problem."""
    return Size(problem.n, problem.h, problem.w)


def bucket_of(problem: Problem) -> Bucket:
    """The bucket of a problem, which has outputs: floor(log2) of N * P * Q, and of Q."""
    return Bucket((problem.n * problem.p * problem.q).bit_length() - 1, problem.q.bit_length() - 1)
