"""Which problems share a measurement: the same layer, on images of about the same size."""

from __future__ import annotations

from typing import NamedTuple

from haloconv.problem import Problem


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

    Precisions and layouts differ, and so does a bias: PyTorch adds it by a kernel of its own, which may take as long as
    the convolution; ours add it to the sums.
    """
    one = problem
    top, bottom, left, right = one.padding
    return (
        f"{one.direction} {one.c}->{one.k} {one.r}x{one.s} s{one.stride[0]}x{one.stride[1]} "
        f"p{top},{bottom},{left},{right} d{one.dilation[0]}x{one.dilation[1]} g{one.groups} "
        f"{one.precision_label} {one.layout}{' bias' if one.bias and one.direction == 'fprop' else ''}"
    )


def size_of(problem: Problem) -> Size:
    """The size of a problem."""
    return Size(problem.n, problem.h, problem.w)


def bucket_of(problem: Problem) -> Bucket:
    """The bucket of a problem, which has outputs: floor(log2) of N * P * Q, and of Q."""
    return Bucket((problem.n * problem.p * problem.q).bit_length() - 1, problem.q.bit_length() - 1)
