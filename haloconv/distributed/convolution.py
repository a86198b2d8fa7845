"""``haloconv.distributed.conv2d``: a convolution of images that are sharded over the ranks of a mesh."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from haloconv.distributed.exchange import MeshExchange, convolution_traffic
from haloconv.distributed.group import RankError, agree
from haloconv.distributed.image import COLUMNS, ROWS, Image, gathered, image_of, to_local
from haloconv.functional import autocasted, make_spec
from haloconv.precision import Precision
from haloconv.problem import ConvSpec, PaddingMode, Pair, check_tensors
from haloconv.rims import Axis, axis_of
from haloconv.strips import Job, convolve_cut

Tensor = torch.Tensor
PaddingModes = PaddingMode | tuple[PaddingMode, PaddingMode]


class _Call(NamedTuple):
    """A convolution of one shard, checked."""

    image: Image
    x: Tensor
    w: Tensor
    b: Tensor | None
    axes: tuple[Axis, Axis]
    shape: tuple[int, int, int, int]
    spec: ConvSpec
    words: str


@torch.compiler.disable
def conv2d(
    input: DTensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Pair = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    *,
    padding_mode: PaddingModes = "zeros",
    precision: Precision | None = None,
    family: str = "auto",
    strict: bool = False,
) -> DTensor:
    """2-D convolution of images that are sharded over a device mesh, differentiable to any order.

    Each rank convolves its own shard at once; outputs whose filters reach into other shards are computed of strips that
    their owners send. Every rank of the mesh must make the same calls in the same order.

    Args:
        input: (N, C, H, W), sharded along H, W, N or several of them, as ``distribute_tensor`` divides: shards may be
            uneven, thinner than the filter, or empty. What is sharded along C, or still a sum, is gathered first.
        weight: (K, C / groups, R, S), a plain tensor that all ranks have alike, or a DTensor, which is gathered. Its
            gradient is the sum over all ranks with different pixels.
        bias: (K,) or None, likewise.
        stride: as for haloconv.conv2d, and so are ``dilation``, ``groups``, ``precision``, ``family``, ``strict``.
        padding: pixels around the whole image: an int, (vertical, horizontal), (top, bottom, left, right), ``"same"``
            or ``"valid"``.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``, or a pair: that of rows above and
            below, and that of columns. Nothing is padded in a copy; circular rows come from the last rank.

    Returns:
        (N, K, P, Q) with the placements of ``input``, along C replicated, divided as DTensor divides all of its size.

    Raises:
        TypeError: ``input`` is no DTensor.
        RuntimeError: what torch.nn.functional.conv2d and pad raise for arguments that they refuse, if all ranks have
            the same error; RankError, with the same sentence on every rank, if one rank fails or ranks differ.
    """
    if not isinstance(input, DTensor):
        raise TypeError(f"haloconv.distributed.conv2d takes images as a DTensor, not {type(input).__name__}")
    x, image = image_of(input)
    try:
        modes = padding_mode if isinstance(padding_mode, tuple) else (padding_mode, padding_mode)
        extents = tuple(weight.shape[2:]) if isinstance(padding, str) else None
        spec = make_spec(stride, padding, dilation, groups, extents, precision, family, strict)
        call = _checked(x, image, weight, bias, spec, modes)
    except Exception as error:
        everyone = image.all_ranks()
        if everyone is not None and not isinstance(error, RankError):
            agree(everyone, "conv2d", error)
        raise
    return _run(call)


def _checked(
    x: DTensor, image: Image, w: Tensor, b: Tensor | None, spec: ConvSpec, modes: tuple[PaddingMode, PaddingMode]
) -> _Call:
    """The call of this rank's shard. Raises as conv2d."""
    weight, bias = gathered(w, image), None if b is None else gathered(b, image)
    local, weight, bias = autocasted(to_local(x), weight, bias)
    whole = local.new_empty(1).expand(x.shape)  # for the checks: no memory
    check_tensors(whole, weight, bias, spec)
    top, bottom, left, right = spec.padding
    rows = axis_of(x.shape[2], weight.shape[2], spec.stride[0], spec.dilation[0], (top, bottom), modes[0])
    columns = axis_of(x.shape[3], weight.shape[3], spec.stride[1], spec.dilation[1], (left, right), modes[1])
    shape = (x.shape[0], weight.shape[0], rows.outputs, columns.outputs)
    recorded = [
        name for name, each in (("x", local), ("w", weight), ("b", bias)) if each is not None and each.requires_grad
    ]
    gradients = f", gradients of {' '.join(recorded)}" if recorded and torch.is_grad_enabled() else ""
    words = (
        f"conv2d of {list(x.shape)} {str(local.dtype).removeprefix('torch.')} as {list(image.placements)} with "
        f"{list(weight.shape)}{'' if bias is None else ' and a bias'}, stride {spec.stride}, padding {spec.padding} of "
        f"{'/'.join(modes)}, dilation {spec.dilation}, groups {spec.groups}{gradients}"
    )
    return _Call(image, local, weight, bias, (rows, columns), shape, spec, words)


def _run(call: _Call) -> DTensor:
    image, (rows, columns) = call.image, call.axes
    inputs = (image.bounds(rows.extent, ROWS), image.bounds(columns.extent, COLUMNS))
    outputs = (image.bounds(rows.outputs, ROWS), image.bounds(columns.outputs, COLUMNS))
    traffic = convolution_traffic(call.axes, inputs, outputs, image.place)
    spec = call.spec._replace(padding=(0, 0, 0, 0))
    whole = tuple(axis.mode if len(each) == 2 else "zeros" for axis, each in zip(call.axes, inputs, strict=True))
    job = Job(traffic.cut, image.place, spec, MeshExchange(image, traffic, call.words), (whole[0], whole[1]))
    return image.closed(convolve_cut(call.x, call.w, call.b, job), call.shape)
