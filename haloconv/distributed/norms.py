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

    They are used for this shard alone: gradients of all ranks are summed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dims: tuple[int, ...], count: int, group: Group | None, words: str
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        mean = _total(x.sum(dims, keepdim=True, dtype=dtype), group, words) / count
        variance = _total((x - mean).square_().sum(dims, keepdim=True), group, words) / count
        ctx.save_for_backward(x, mean)
        ctx.asked = dims, count, group, words
        return mean, variance

    @staticmethod
    def backward(ctx: Any, d_mean: Tensor, d_variance: Tensor) -> tuple[Any, ...]:
        x, mean = ctx.saved_tensors
        _, count, group, words = ctx.asked
        if torch.is_grad_enabled():
            mean, _ = _Moments.apply(x, *ctx.asked)
        both = torch.stack([d_mean, d_variance])
        d_mean, d_variance = replicated(summed(both, group, words), group, words)
        dx = (d_mean + (x - mean) * (2 * d_variance)) / count
        return dx.to(x.dtype), None, None, None, None


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
    return torch.addcmul(shift, x.to(scale.dtype), scale).to(x.dtype)
