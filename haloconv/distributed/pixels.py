"""Operations that move or mix pixels, of images that are sharded: padding, pooling, interpolation.

Each shard gets the rectangle of pixels that its outputs read, as one image, and PyTorch's operation runs on that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

from haloconv.distributed.exchange import Interval, MeshExchange, summed, tied, window_traffic
from haloconv.distributed.group import numbered
from haloconv.distributed.image import COLUMNS, ROWS, Image, image_of, to_local
from haloconv.layout import neighbours_of, strides_of
from haloconv.problem import PADDING_MODES, FourSides, Pair, as_pair
from haloconv.rims import Axis, axis_of
from haloconv.shard_exchange import Alone
from haloconv.strip_autograd import recorded_strips

Tensor = torch.Tensor
Pairs = int | Pair


def rectangle(
    x: Tensor, image: Image, axes: tuple[Axis, Axis], intervals: tuple[tuple[Interval, ...], ...], words: str
) -> tuple[Tensor, FourSides]:
    """The pixels that this shard's interval of outputs reads, and the zeros around them; x is the shard.

    ``intervals`` has one of rows and one of columns for each shard of these. Without outputs there are no pixels.
    """
    inputs = (image.bounds(axes[0].extent, ROWS), image.bounds(axes[1].extent, COLUMNS))
    traffic = window_traffic(axes, inputs, (intervals[0], intervals[1]), image.place)
    strips, empty = recorded_strips(x, traffic.cut, image.place, MeshExchange(image, traffic, words))
    if not strips:
        return tied(x[:, :, :0, :0], empty), (0, 0, 0, 0)
    return tied(strips[0], empty), traffic.cut.batches[0][0].padding


def _cropped(x: Tensor, asked: tuple[tuple[Interval, ...], ...]) -> Tensor:
    """The pixels in an interval of rows and one of columns: a view, whose gradient is written once, zeros around it."""
    rows, columns = x.shape[2:]
    cut = window_traffic((Axis(rows, 1), Axis(columns, 1)), ((0, rows), (0, columns)), (asked[0], asked[1]), (0, 0)).cut
    (part,), _ = recorded_strips(x, cut, (0, 0), Alone())
    return part


def cat(images: Sequence[DTensor]) -> DTensor:
    """torch.cat along channels of images that are sharded alike."""
    at = Image(images[0].device_mesh, tuple(images[0].placements))
    n, _, h, w = images[0].shape
    return at.closed(_Concatenated.apply(*map(to_local, images)), (n, sum(each.shape[1] for each in images), h, w))


class _Concatenated(torch.autograd.Function):
    """torch.cat along channels, which is slow where a part is a view, as of an interpolation: docs/notebook.md#rims."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.channels = [each.shape[1] for each in parts]
        n, _, h, w = parts[0].shape
        shape = (n, sum(ctx.channels), h, w)
        y = parts[0].new_empty_strided(shape, strides_of(shape, neighbours_of(parts[0].stride())))
        for view, part in zip(y.split(ctx.channels, 1), parts, strict=True):
            view.copy_(part)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return tuple(dy.split(ctx.channels, 1))


def _windows(x: DTensor, axes: tuple[Axis, Axis], run: Callable[[Tensor, FourSides], Tensor], words: str) -> DTensor:
    """``run`` of what each shard's outputs read. Every output reads as those of a convolution with these axes.

    What is run may be given the shard itself, and must not give that back.
    """
    x, image = image_of(x)
    outputs = (image.bounds(axes[0].outputs, ROWS), image.bounds(axes[1].outputs, COLUMNS))
    intervals = (tuple(pairwise(outputs[0])), tuple(pairwise(outputs[1])))
    pixels, sides = rectangle(to_local(x), image, axes, intervals, words)
    shape = (*x.shape[:2], axes[0].outputs, axes[1].outputs)
    here = image.shape_here(shape)
    return image.closed(pixels.reshape(here) if 0 in here[2:] else run(pixels, sides), shape)


def _padded(x: Tensor, sides: FourSides, value: float = 0.0) -> Tensor:
    top, bottom, left, right = sides
    return functional.pad(x, (left, right, top, bottom), value=value) if any(sides) else x


def pad(input: DTensor, pad: tuple[int, ...], mode: str = "constant", value: float | None = None) -> DTensor:
    """torch.nn.functional.pad of rows and columns. Raises NotImplementedError for other constants than zero."""
    if (mode == "constant" and value) or len(pad) not in (2, 4) or min(pad) < 0:
        raise NotImplementedError(
            f"haloconv.distributed: pad of a sharded image takes 2 or 4 sides, of zeros or reflect, replicate, "
            f"circular, not {pad}, {mode!r}, {value}"
        )
    left, right, top, bottom = (*pad, 0, 0)[:4]
    known = next((each for each in PADDING_MODES if each == ("zeros" if mode == "constant" else mode)), None)
    if known is None or mode == "zeros":
        raise NotImplementedError(f"Unrecognised padding mode {mode}")
    rows = axis_of(input.shape[2], 1, 1, 1, (top, bottom), known)
    columns = axis_of(input.shape[3], 1, 1, 1, (left, right), known)
    shard = input.to_local().untyped_storage().data_ptr()

    def run(pixels: Tensor, sides: FourSides) -> Tensor:
        y = _padded(pixels, sides)
        return y.clone() if y.untyped_storage().data_ptr() == shard else y

    return _windows(input, (rows, columns), run, f"pad of {list(input.shape)} by {list(pad)}, {mode}")


def max_pool2d(
    input: DTensor,
    kernel_size: Pairs,
    stride: Pairs | None = None,
    padding: Pairs = 0,
    dilation: Pairs = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> DTensor:
    """torch.nn.functional.max_pool2d without indices. Raises NotImplementedError where ``ceil_mode`` adds outputs."""
    if return_indices:
        raise NotImplementedError("haloconv.distributed: max_pool2d of a sharded image gives no indices")
    kernel, step, spread = as_pair(kernel_size, "kernel_size"), as_pair(stride or kernel_size, "stride"), dilation
    axes = _pool_axes(input, kernel, step, as_pair(padding, "padding"), as_pair(spread, "dilation"))
    _check_ceiling("max_pool2d", axes, ceil_mode)

    def run(pixels: Tensor, sides: FourSides) -> Tensor:
        lowest = float("-inf") if pixels.dtype.is_floating_point else torch.iinfo(pixels.dtype).min
        return functional.max_pool2d(_padded(pixels, sides, lowest), kernel, step, 0, spread)

    return _windows(input, axes, run, f"max_pool2d of {list(input.shape)}: {axes}")


def avg_pool2d(
    input: DTensor,
    kernel_size: Pairs,
    stride: Pairs | None = None,
    padding: Pairs = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> DTensor:
    """torch.nn.functional.avg_pool2d. Raises NotImplementedError where ``ceil_mode`` adds outputs.

    Also for a padding that is not counted.
    """
    kernel, step = as_pair(kernel_size, "kernel_size"), as_pair(stride or kernel_size, "stride")
    sides = as_pair(padding, "padding")
    axes = _pool_axes(input, kernel, step, sides, (1, 1))
    _check_ceiling("avg_pool2d", axes, ceil_mode)
    if any(sides) and not count_include_pad and divisor_override is None:
        raise NotImplementedError(
            "haloconv.distributed: avg_pool2d of a sharded image does not take count_include_pad=False"
        )

    def run(pixels: Tensor, sides: FourSides) -> Tensor:
        return functional.avg_pool2d(_padded(pixels, sides), kernel, step, divisor_override=divisor_override)

    return _windows(input, axes, run, f"avg_pool2d of {list(input.shape)}: {axes}")


def _pool_axes(x: DTensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> tuple[Axis, Axis]:
    """Raises RuntimeError as PyTorch's pooling does."""
    if any(2 * side > taps for side, taps in zip(padding, kernel, strict=True)):
        raise RuntimeError(
            f"pad should be at most half of effective kernel size, but got pad={padding}, kernel_size={kernel}"
        )
    axes = tuple(
        Axis(extent, taps, step, spread, side, side)
        for extent, taps, step, spread, side in zip(x.shape[2:], kernel, stride, dilation, padding, strict=True)
    )
    if min(axis.outputs for axis in axes) < 1:
        raise RuntimeError(f"Given input size: {list(x.shape)}. Calculated output size is too small")
    return axes[0], axes[1]


def _check_ceiling(name: str, axes: tuple[Axis, Axis], ceil_mode: bool) -> None:
    left_over = [(a.extent + a.before + a.after - a.dilation * (a.taps - 1) - 1) % a.stride for a in axes]
    if ceil_mode and any(left_over):
        raise NotImplementedError(
            f"haloconv.distributed: {name} of a sharded image takes ceil_mode=True only where it changes nothing"
        )


def interpolate(
    input: DTensor,
    size: Pairs | None = None,
    scale_factor: float | tuple[float, ...] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> DTensor:
    """torch.nn.functional.interpolate by integers: nearest, nearest-exact, or bilinear without aligned corners.

    Raises NotImplementedError for all else.
    """
    x, image = image_of(input)
    extents = (x.shape[2], x.shape[3])
    if size is None:
        scales = scale_factor if isinstance(scale_factor, (tuple, list)) else (scale_factor, scale_factor)
        wanted = tuple(int(extent * float(scale or 0)) for extent, scale in zip(extents, scales, strict=True))
    else:
        wanted = as_pair(size, "size")
    known = mode in ("nearest", "nearest-exact", "bilinear") and not align_corners and not antialias
    if not known or any(new < old or new % old for new, old in zip(wanted, extents, strict=True)):
        raise NotImplementedError(
            f"haloconv.distributed: interpolate takes sharded images by integers, nearest or bilinear without aligned "
            f"corners, not from {list(extents)} to {list(wanted)}, {mode!r}, align_corners={align_corners}"
        )
    factors = [new // old for new, old in zip(wanted, extents, strict=True)]
    reach = 1 if mode == "bilinear" else 0
    intervals, starts = [], []
    for dim, extent, factor in zip((ROWS, COLUMNS), extents, factors, strict=True):
        read = [
            (max(low // factor - reach, 0), min((high - 1) // factor + 1 + reach, extent)) if low < high else (0, 0)
            for low, high in pairwise(image.bounds(extent * factor, dim))
        ]
        intervals.append(tuple(read))
        starts.append(
            image.bounds(extent * factor, dim)[image.shard_index(dim)] - read[image.shard_index(dim)][0] * factor
        )
    axes = (Axis(extents[0], 1), Axis(extents[1], 1))
    words = f"interpolate of {list(x.shape)} to {list(wanted)}, {mode}"
    pixels, _ = rectangle(to_local(x), image, axes, (intervals[0], intervals[1]), words)
    shape = (*x.shape[:2], *wanted)
    here = image.shape_here(shape)
    if 0 in here[2:]:
        return image.closed(pixels.reshape(here), shape)
    y = functional.interpolate(pixels, scale_factor=[float(factor) for factor in factors], mode=mode)
    asked = tuple(((start, start + extent),) for start, extent in zip(starts, here[2:], strict=True))
    return image.closed(_cropped(y, asked), shape)


def adaptive_avg_pool2d(input: DTensor, output_size: Pairs) -> DTensor:
    """torch.nn.functional.adaptive_avg_pool2d to one pixel, which all shards have. Raises NotImplementedError else."""
    if as_pair(output_size, "output_size") != (1, 1):
        raise NotImplementedError(
            f"haloconv.distributed: adaptive_avg_pool2d of a sharded image gives one pixel, not {output_size}"
        )
    x, image = image_of(input)
    dtype = torch.promote_types(x.dtype, torch.float32)
    words = numbered(f"adaptive_avg_pool2d of {list(x.shape)}", image.all_ranks())
    total = summed(to_local(x).sum((2, 3), keepdim=True, dtype=dtype), image.spatial_ranks(), words)
    mean = (total / (x.shape[2] * x.shape[3])).to(x.dtype)
    whole = image.mesh_dims(ROWS, COLUMNS)
    kept = tuple(Replicate() if at in whole else each for at, each in enumerate(image.placements))
    return image._replace(placements=kept).closed(mean, (*x.shape[:2], 1, 1))
