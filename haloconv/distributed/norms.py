"""Batch and group normalisation of sharded images, with the statistics of the whole ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from haloconv.distributed.exchange import all_gathered, replicated, start_sum, summed
from haloconv.distributed.group import Group, agree, numbered
from haloconv.distributed.image import Image, gathered, image_of, to_local

Tensor = torch.Tensor
FP32_UNDER_AUTOCAST = ("cuda",)
"""The types of devices on which autocast runs group norm in fp32 (docs.pytorch.org/docs/stable/amp.html)."""


class _Moments(torch.autograd.Function):
    """Mean and variance over some dimensions of the shards of all ranks of a group, ``count`` elements each.

    They are used for this shard alone: gradients of all ranks are summed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dims: tuple[int, ...], count: int, group: Group | None, words: str
    ) -> tuple[Tensor, Tensor]:
        mean, variance = _statistics(x, dims, count, group, words)
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
        (both,) = replicated([summed(both, group, words)], group, words)
        d_mean, d_variance = both
        slope = 2 * d_variance / count
        dx = torch.addcmul(d_mean / count - mean * slope, x, slope)
        return dx.to(x.dtype), None, None, None, None


def _statistics(x: Tensor, dims: tuple[int, ...], count: int, group: Group | None, words: str) -> tuple[Tensor, Tensor]:
    """Mean and variance over some dimensions of the shards of all ranks, in one message.

    Each shard is read once, for its own mean and its sum of squares about that; sums about the mean of all follow
    (Chan, Golub, LeVeque 1979), so nothing cancels.
    """
    mean, squares, own_count = _moments(x, dims)
    if group is None:
        return mean, squares / count
    agree(group, words)
    parts = all_gathered(torch.stack([mean, squares, torch.full_like(mean, own_count)]), group)
    means, squares, counts = parts.unbind(1)
    mean = (means * counts).sum(0) / count
    return mean, (squares + (means - mean).square() * counts).sum(0) / count


def _moments(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, int]:
    """The mean over dimensions, the sum of squares about it, and of how many elements: zeros of none."""
    dtype, shape = torch.promote_types(x.dtype, torch.float32), [1 if d in dims else e for d, e in enumerate(x.shape)]
    count = x.numel() // max(torch.Size(shape).numel(), 1)
    if not x.numel():
        zeros = x.new_zeros(shape, dtype=dtype)
        return zeros, zeros, 0
    variance, mean = torch.var_mean(x.to(dtype), dims, correction=0, keepdim=True)
    return mean, variance * count, count


def _sums(dy: Tensor, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sums of dy * x and of dy (N, C, H, W) over pixels, (N, C, 1, 1)."""
    n, c = x.shape[:2]
    plain = dy.dtype == x.dtype == dtype and x.is_contiguous() and dy.is_contiguous() and x.numel()
    if plain and not torch.is_grad_enabled():
        # What a group norm of one image of N * C groups has as gradients of weight and bias, if its mean is 0. In three
        # dimensions: in four an image of one pixel may count as channels_last, which PyTorch then reads amiss.
        zeros, ones = x.new_zeros(1, n * c), x.new_ones(1, n * c)
        dy, x = (each.view(1, n * c, -1) for each in (dy, x))
        asked = (dy, x, zeros, ones, ones[0], 1, n * c, x.shape[2], n * c, [False, True, True])
        _, d_scale, d_shift = torch.ops.aten.native_group_norm_backward(*asked)
        return d_scale.view(n, c, 1, 1), d_shift.view(n, c, 1, 1)
    wide = dy.to(dtype)
    return (wide * x).sum((2, 3), keepdim=True), wide.sum((2, 3), keepdim=True)


class _Sets(NamedTuple):
    """Which pixels are normalised together, and the ranks that have some of them.

    Attributes:
        groups: of channels of an image; None where a channel of all images is a set.
        pixels: of a set, on all ranks.
        eps: what is added to its variance.
        ranks: that have pixels of the same sets; None if there is no other.
        everyone: the ranks that have other pixels: gradients of weight and bias are summed over them.
        words: what all ranks do, for agreements.
    """

    groups: int | None
    pixels: int
    eps: float
    ranks: Group | None
    everyone: Group | None
    words: str

    def dims(self) -> tuple[int, ...]:
        """The dimensions of a set, in a tensor of the form that ``parted`` gives."""
        return (0, 2, 3) if self.groups is None else (2, 3, 4)

    def parted(self, x: Tensor) -> Tensor:
        """(N, C, ...) with channels parted into groups: (N, groups, C / groups, ...)."""
        return x if self.groups is None else x.unflatten(1, (self.groups, x.shape[1] // self.groups))

    def of_channels(self, each: Tensor, c: int) -> Tensor:
        """What each set has, for each channel: (1 or N, C, 1, 1)."""
        if self.groups is None:
            return each
        return each.expand(-1, -1, c // self.groups, -1, -1).reshape(-1, c, 1, 1)

    def sums(self, each: Tensor) -> Tensor:
        """The sums over sets of what each image and channel has (N, C, 1, 1), in the form of statistics."""
        return self.parted(each).sum(0 if self.groups is None else 2, keepdim=True)


class _Norm(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, and the statistics, which have no gradients of their own.

    x (N, C, H, W) is read twice on the way forward, and twice with dy on the way back. Two messages: the statistics,
    and the sums that the gradients need.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, sets: _Sets) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance = _statistics(sets.parted(x), sets.dims(), sets.pixels, sets.ranks, sets.words)
        scale, shift = _scale_and_shift(x, mean, variance, weight, bias, sets)
        ctx.save_for_backward(x, weight, bias, mean, variance)
        ctx.sets = sets
        ctx.mark_non_differentiable(mean, variance)
        return torch.addcmul(shift, x, scale).to(x.dtype), mean, variance

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Any, ...]:
        x, weight, bias, mean, variance = ctx.saved_tensors
        sets, needed = ctx.sets, ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            y, asked = _recorded_norm(x, weight, bias, sets), (x, weight, bias)
            wanted = [each for each, is_needed in zip(asked, needed, strict=True) if is_needed]
            found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
            return *(next(found) if is_needed else None for is_needed in needed), None
        c, rstd = x.shape[1], (variance + sets.eps).rsqrt()
        mean_of_c, rstd_of_c, gain = sets.of_channels(mean, c), sets.of_channels(rstd, c), weight.view(1, -1, 1, 1)
        with_x, d_shift = _sums(dy, x, mean.dtype)
        normalised = (with_x - mean_of_c * d_shift) * rstd_of_c  # the sums of dy times what x is normalised to
        of_sets = torch.stack([sets.sums(d_shift * gain), sets.sums(normalised * gain)])
        of_weights = torch.stack([normalised.sum(0).flatten(), d_shift.sum(0).flatten()])
        of_sets, of_weights = _sum_together(of_sets, of_weights, sets, *needed)
        d_shift_of_set, normalised_of_set = of_sets / sets.pixels
        slope = -rstd * rstd * normalised_of_set
        constant = -rstd * d_shift_of_set - slope * mean
        dx = None
        if needed[0]:
            dx = torch.addcmul(sets.of_channels(constant, c), x, sets.of_channels(slope, c))
            dx = dx.addcmul_(dy, rstd_of_c * gain).to(x.dtype)
        return dx, of_weights[0].to(weight.dtype), of_weights[1].to(bias.dtype), None


def _scale_and_shift(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, sets: _Sets
) -> tuple[Tensor, Tensor]:
    """The product and the sum that normalise each channel, formed in fp32 or more."""
    scale = sets.of_channels((variance + sets.eps).rsqrt(), x.shape[1]) * weight.view(1, -1, 1, 1)
    return scale, bias.view(1, -1, 1, 1) - sets.of_channels(mean, x.shape[1]) * scale


def _recorded_norm(x: Tensor, weight: Tensor, bias: Tensor, sets: _Sets) -> Tensor:
    """_Norm of operations that each have gradients of any order."""
    weight, bias = replicated([weight, bias], sets.everyone, f"weights of {sets.words}")
    mean, variance = _Moments.apply(sets.parted(x), sets.dims(), sets.pixels, sets.ranks, sets.words)
    scale, shift = _scale_and_shift(x, mean, variance, weight, bias, sets)
    return torch.addcmul(shift, x, scale).to(x.dtype)


def _sum_together(of_sets: Tensor, of_weights: Tensor, sets: _Sets, *needed: bool) -> tuple[Tensor, Tensor]:
    """Sums over the ranks of a set, and over all ranks: agreed on once, and one message where these are the same."""
    if sets.everyone is None:
        return of_sets, of_weights
    agree(sets.everyone, f"gradients {needed} of {sets.words}")
    if sets.ranks is not None and sets.ranks.dims == sets.everyone.dims:
        of_sets, of_weights = start_sum([of_sets, of_weights], sets.everyone)()
        return of_sets, of_weights
    if sets.ranks is not None:
        (of_sets,) = start_sum([of_sets], sets.ranks)()
    (of_weights,) = start_sum([of_weights], sets.everyone)()
    return of_sets, of_weights


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
    everyone = image.all_ranks()
    local, words = to_local(x), numbered(f"batch_norm of {list(x.shape)}", everyone)
    if not training:
        found = iter(
            replicated([gathered(each, image) for each in (weight, bias) if each is not None], everyone, words)
        )
        scale, shift = (None if each is None else next(found) for each in (weight, bias))
        y = functional.batch_norm(local, running_mean, running_var, scale, shift, False, momentum, eps)
        return image.closed(y, x.shape)
    count = x.shape[0] * x.shape[2] * x.shape[3]
    if count < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
    sets = _Sets(None, count, eps, everyone, everyone, words)
    y, mean, variance = _Norm.apply(local, *_affine(weight, bias, local, image), sets)
    with torch.no_grad():
        for running, new in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
            if running is not None:
                running.lerp_(new.flatten().to(running.dtype), momentum)
    return image.closed(y, x.shape)


def group_norm(
    input: DTensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> DTensor:
    """torch.nn.functional.group_norm; its statistics are those of whole images."""
    x, image = image_of(input)
    c, h, w = x.shape[1:]
    if c % num_groups:
        raise RuntimeError(
            f"Expected number of channels in input to be divisible by num_groups, but got input of shape "
            f"{list(x.shape)} and num_groups={num_groups}"
        )
    everyone, count = image.all_ranks(), c // num_groups * h * w
    local, words = to_local(x), numbered(f"group_norm of {list(x.shape)} in {num_groups}", everyone)
    kind = local.device.type
    if kind in FP32_UNDER_AUTOCAST and torch.is_autocast_enabled(kind):
        local = local.float()
    sets = _Sets(num_groups, count, eps, image.spatial_ranks(), everyone, words)
    y, _, _ = _Norm.apply(local, *_affine(weight, bias, local, image), sets)
    return image.closed(y, x.shape)


def _affine(weight: Tensor | None, bias: Tensor | None, x: Tensor, image: Image) -> tuple[Tensor, Tensor]:
    """Weight and bias (C,) as every rank has them; ones and zeros where there are none."""
    c, dtype = x.shape[1], torch.promote_types(x.dtype, torch.float32)
    return (
        x.new_ones(c, dtype=dtype) if weight is None else gathered(weight, image),
        x.new_zeros(c, dtype=dtype) if bias is None else gathered(bias, image),
    )
