"""Batch and group normalisation of sharded images, with the statistics of the whole ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from haloconv.distributed.exchange import replicated, start_sum, summed
from haloconv.distributed.group import Group, agree, numbered
from haloconv.distributed.image import Image, gathered, image_of, to_local

Tensor = torch.Tensor


class _Moments(torch.autograd.Function):
    """Mean and variance over some dimensions of the shards of all ranks of a group, ``count`` elements each.

    They are used for this shard alone: gradients of all ranks are summed. Each shard is read once, for its own mean and
    its sum of squares about that; sums about another mean follow (Chan, Golub, LeVeque 1979), so nothing cancels.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dims: tuple[int, ...], count: int, group: Group | None, words: str
    ) -> tuple[Tensor, Tensor]:
        own_mean, own_squares, own_count = _moments(x, dims)
        mean = _total(own_mean * own_count, group, words) / count
        squares = own_squares + (own_mean - mean).square() * own_count
        ctx.save_for_backward(x, mean)
        ctx.asked = dims, count, group, words
        return mean, _total(squares, group, words) / count

    @staticmethod
    def backward(ctx: Any, d_mean: Tensor, d_variance: Tensor) -> tuple[Any, ...]:
        x, mean = ctx.saved_tensors
        _, count, group, words = ctx.asked
        if torch.is_grad_enabled():
            mean, _ = _Moments.apply(x, *ctx.asked)
        both = torch.stack([d_mean, d_variance])
        d_mean, d_variance = replicated(summed(both, group, words), group, words)
        slope = 2 * d_variance / count
        dx = torch.addcmul(d_mean / count - mean * slope, x, slope)
        return dx.to(x.dtype), None, None, None, None


def _moments(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, int]:
    """The mean over dimensions, the sum of squares about it, and of how many elements: zeros of none."""
    dtype, shape = torch.promote_types(x.dtype, torch.float32), [1 if d in dims else e for d, e in enumerate(x.shape)]
    count = x.numel() // max(torch.Size(shape).numel(), 1)
    if not x.numel():
        zeros = x.new_zeros(shape, dtype=dtype)
        return zeros, zeros, 0
    variance, mean = torch.var_mean(x.to(dtype), dims, correction=0, keepdim=True)
    return mean, variance * count, count


class _Scaled(torch.autograd.Function):
    """x * scale + shift, with these (1 or N, C, 1, 1) of fp32 or more: their gradients take one pass over x and dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return torch.addcmul(shift, x, scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, scale = ctx.saved_tensors
        d_scale, d_shift = _sums(dy, x, scale.dtype)
        if scale.shape[0] == 1:
            d_scale, d_shift = (each.sum(0, keepdim=True) for each in (d_scale, d_shift))
        return (dy * scale).to(x.dtype), d_scale, d_shift


def _sums(dy: Tensor, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sums of dy * x and of dy (N, C, H, W) over pixels, (N, C, 1, 1)."""
    n, c, *extents = x.shape
    plain = dy.dtype == x.dtype == dtype and x.is_contiguous() and dy.is_contiguous() and x.numel()
    if plain and not torch.is_grad_enabled():
        # What a group norm of one image of N * C groups has as gradients of weight and bias, if its mean is 0.
        zeros, ones = x.new_zeros(1, n * c), x.new_ones(1, n * c)
        asked = (dy, x, zeros, ones, ones[0], 1, n * c, extents[0] * extents[1], n * c, [False, True, True])
        _, d_scale, d_shift = torch.ops.aten.native_group_norm_backward(*asked)
        return d_scale.view(n, c, 1, 1), d_shift.view(n, c, 1, 1)
    wide = dy.to(dtype)
    return (wide * x).sum((2, 3), keepdim=True), wide.sum((2, 3), keepdim=True)


def _total(part: Tensor, group: Group | None, words: str) -> Tensor:
    if group is None:
        return part
    agree(group, words)
    return start_sum([part], group)()[0]


def batch_norm(
    input: DTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> DTensor:
    """torch.nn.functional.batch_norm; in training its statistics are those of all images and all their shards."""
    x, image = image_of(input)
    local, words = to_local(x), numbered(f"batch_norm of {list(x.shape)}", image.all_ranks())
    scale, shift = _affine(weight, bias, image, words)
    if not training:
        y = functional.batch_norm(local, running_mean, running_var, scale, shift, False, momentum, eps)
        return image.closed(y, x.shape)
    count = x.shape[0] * x.shape[2] * x.shape[3]
    if count < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
    mean, variance = _Moments.apply(local, (0, 2, 3), count, image.all_ranks(), words)
    with torch.no_grad():
        for running, new in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
            if running is not None:
                running.lerp_(new.flatten().to(running.dtype), momentum)
    return image.closed(_normalised(local, mean, variance, eps, scale, shift), x.shape)


def group_norm(
    input: DTensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> DTensor:
    """torch.nn.functional.group_norm; its statistics are those of whole images."""
    x, image = image_of(input)
    n, c, h, w = x.shape
    if c % num_groups:
        raise RuntimeError(
            f"Expected number of channels in input to be divisible by num_groups, but got input of shape "
            f"{list(x.shape)} and num_groups={num_groups}"
        )
    local, words = to_local(x), numbered(f"group_norm of {list(x.shape)} in {num_groups}", image.all_ranks())
    scale, shift = _affine(weight, bias, image, words)
    count = c // num_groups * h * w
    grouped = local.reshape(local.shape[0], num_groups, c // num_groups, *local.shape[2:])
    moments = _Moments.apply(grouped, (2, 3, 4), count, image.spatial_ranks(), words)
    of_channels = (local.shape[0], num_groups, c // num_groups, 1, 1)
    mean, variance = (each.expand(of_channels).reshape(-1, c, 1, 1) for each in moments)
    return image.closed(_normalised(local, mean, variance, eps, scale, shift), x.shape)


def _affine(
    weight: Tensor | None, bias: Tensor | None, image: Image, words: str
) -> tuple[Tensor | None, Tensor | None]:
    everyone = image.all_ranks()
    weight, bias = (
        None if each is None else replicated(gathered(each, image), everyone, f"{name} of {words}")
        for name, each in (("weight", weight), ("bias", bias))
    )
    return weight, bias


def _normalised(
    x: Tensor, mean: Tensor, variance: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """x (N, C, H, W) normalised by one product and one sum for each channel, which are formed in fp32 or more."""
    scale = (variance + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.view(1, -1, 1, 1)
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias.view(1, -1, 1, 1)
    y: Tensor = _Scaled.apply(x, scale, shift)
    return y
