"""Scenarios of tests/spatial_ranks.py: operations of sharded images that are no convolutions, beside one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from haloconv.distributed import norms, pixels, shard_spatially
from tests.spatial_problems import integers, meshes, same, shard

Tensor = torch.Tensor
FUZZED = 60
functions = torch.nn.functional


class Operation(NamedTuple):
    """A function of a sharded image and of weight and bias, the same of PyTorch, and whether it has these two."""

    name: str
    ours: Callable[[Any, Tensor, Tensor], Tensor]
    theirs: Callable[[Any, Tensor, Tensor], Tensor]
    is_affine: bool


def _draw(random: Random, channels: int) -> Operation:
    groups, factor = random.choice([g for g in (1, 2, channels) if channels % g == 0]), random.choice((2, 3))
    mode = random.choice(("bilinear", "nearest"))
    return random.choice((
        Operation("group_norm", lambda x, w, b: norms.group_norm(x, groups, w, b),
                  lambda x, w, b: functions.group_norm(x, groups, w, b), True),
        Operation("plain group_norm", lambda x, w, b: norms.group_norm(x, groups),
                  lambda x, w, b: functions.group_norm(x, groups), False),
        Operation("batch_norm", lambda x, w, b: norms.batch_norm(x, None, None, w, b, True),
                  lambda x, w, b: functions.batch_norm(x, None, None, w, b, True), True),
        Operation("interpolate", lambda x, w, b: pixels.interpolate(x, None, factor, mode),
                  lambda x, w, b: functions.interpolate(x, None, float(factor), mode), False),
        Operation("cat", lambda x, w, b: pixels.cat([pixels.interpolate(each, None, 2, mode) for each in (x * x, x)]),
                  lambda x, w, b: functions.interpolate(torch.cat([x * x, x], 1), None, 2.0, mode), False),
    ))  # fmt: skip


def operations_fuzzed() -> None:
    """Random operations and images, down to one pixel and to shards without any: values, gradients, second ones."""
    random, places = Random(0), list(meshes().items())
    for number in range(FUZZED):
        name, (mesh, placements) = places[number % len(places)]
        n, c, h, w = random.randint(1, 3), random.choice((2, 4, 6)), random.randint(2, 9), random.choice((1, 2, 7))
        order = random.choice((torch.contiguous_format, torch.channels_last))
        x = torch.randn(n, c, h, w, dtype=torch.float64) + random.choice((0, 5))
        x = x.contiguous(memory_format=order).requires_grad_()
        weights = [torch.randn(c, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        operation, found = _draw(random, c), []
        for function, image in ((operation.ours, shard(x, mesh, placements)), (operation.theirs, x)):
            leaves = (image, *weights) if operation.is_affine else (image,)
            y = function(image, *weights)
            alone = torch.autograd.grad(y.pow(3).sum(), leaves, retain_graph=True)
            first = torch.autograd.grad(y.pow(3).sum(), leaves, create_graph=True)
            (second,) = torch.autograd.grad(first[0].pow(2).sum(), image)
            everything = (y, *alone, *first, second)
            found.append([each.full_tensor() if isinstance(each, DTensor) else each for each in everything])
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6, msg=f"{number}: {operation.name} on {name}")


def pixels_mixed() -> None:
    """Pooling, padding, interpolation, joined channels, on thin and empty shards: on integers to the bit."""
    for name in ("2x2", "4x1", "1x2", "2x2 of rows"):
        mesh, placements = meshes()[name]
        for shape in ((2, 3, 9, 11), (2, 3, 3, 5), (2, 3, 2, 3)):
            for about, ours, theirs in (
                ("max", lambda x: pixels.max_pool2d(x, 2, (1, 2), 1), lambda x: functions.max_pool2d(x, 2, (1, 2), 1)),
                ("avg", lambda x: pixels.avg_pool2d(x, 2, 1, 1), lambda x: functions.avg_pool2d(x, 2, 1, 1)),
                ("cat", lambda x: pixels.cat([pixels.interpolate(each, None, 2.0, "bilinear") for each in (x, x * 2)]),
                 lambda x: torch.cat([functions.interpolate(each, None, 2.0, "bilinear") for each in (x, x * 2)], 1)),
                ("by 2 and 3", lambda x: pixels.interpolate(x, None, (2, 3)),
                 lambda x: functions.interpolate(x, None, (2, 3))),
                *(
                    (mode, lambda x, m=mode: pixels.interpolate(x, None, 2, m),
                     lambda x, m=mode: functions.interpolate(x, None, 2.0, m))
                    for mode in ("bilinear", "nearest-exact")
                ),
                *(
                    (mode, lambda x, m=mode: pixels.pad(x, (2, 1, 1, 0), m),
                     lambda x, m=mode: functions.pad(x, (2, 1, 1, 0), m))
                    for mode in ("constant", "circular", "reflect", "replicate")
                ),
            ):  # fmt: skip
                x = integers(*shape)
                mine = shard(x, mesh, placements)
                y, expected = ours(mine), theirs(x)
                dy = integers(*expected.shape)
                (dx,) = torch.autograd.grad(y, mine, shard(dy, mesh, placements))
                (wanted,) = torch.autograd.grad(expected, x, dy)
                assert same(y, expected) and same(dx, wanted), (about, name, shape)


class _ChangesIts(torch.nn.Module):
    """A convolution whose output a function changes in place; what was one tensor is then used twice."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.change = torch.nn.Conv2d(2, 2, 3, padding=1).double(), change

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.change(y) + 3 * y


def in_place() -> None:
    """Activations and arithmetic that change a sharded image, also one of fewer rows than there are shards."""
    nn = torch.nn
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        type(each).__name__: each
        for each in (
            nn.ReLU(True), nn.ReLU6(True), nn.SiLU(True), nn.Hardswish(True), nn.Hardsigmoid(True), nn.Mish(True),
            nn.ELU(inplace=True), nn.LeakyReLU(inplace=True), nn.Hardtanh(inplace=True), nn.Threshold(0.1, 0.2, True),
        )
    }  # fmt: skip
    changes |= {
        "hardtanh_": functions.hardtanh_,
        "tanh_": Tensor.tanh_,
        "*=": lambda y: y.__imul__(2.0),
        "+=": lambda y: y.__iadd__(y * 2),
    }
    for place in ("2x2", "2x2 of rows"):
        mesh, placements = meshes()[place]
        for name, change in changes.items():
            theirs, x, found = _ChangesIts(change), torch.randn(2, 2, 2, 3, dtype=torch.float64), []
            ours = shard_spatially(copy.deepcopy(theirs), mesh)
            for model, image in ((ours, shard(x, mesh, placements)), (theirs, x)):
                y = model(image)
                first = torch.autograd.grad(y.pow(2).sum(), [*model.parameters()], create_graph=True)
                found.append([each.full_tensor() if isinstance(each, DTensor) else each for each in (y, *first)])
            torch.testing.assert_close(*found, msg=f"{name} on {place}")


def norms_twice() -> None:
    """Gradients of gradients through the statistics of norms, and through pixels that others sent."""
    mesh, placements = meshes()["images and rows"]
    w, b = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    x = torch.randn(2, 4, 5, 3, dtype=torch.float64, requires_grad=True)
    for ours, theirs in (
        (
            lambda x: norms.batch_norm(x, None, None, w, b, True),
            lambda x: functions.batch_norm(x, None, None, w, b, True),
        ),
        (lambda x: norms.group_norm(x, 2, w, b), lambda x: functions.group_norm(x, 2, w, b)),
        (lambda x: pixels.avg_pool2d(x, 3, 2, 1).pow(3), lambda x: functions.avg_pool2d(x, 3, 2, 1).pow(3)),
    ):
        mine, found = shard(x, mesh, placements), []
        for y, leaf in ((ours(mine), mine), (theirs(x), x)):
            (first,) = torch.autograd.grad((y + y.pow(2)).sum(), leaf, create_graph=True)
            found.append(torch.autograd.grad(first.pow(2).sum(), (leaf, w), allow_unused=True))
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, wanted)


def norms_of_every_dtype() -> None:
    """Values, gradients and running statistics beside those of float64, of pixels far from zero, on an empty shard."""
    mesh, placements = meshes()["4x1"]
    for dtype, far, limit in ((torch.float32, 1000, 5e-4), (torch.bfloat16, 64, 1e-2), (torch.float16, 512, 1e-3)):
        x = (torch.randn(2, 4, 6, 5) + far).to(dtype)
        dy, w, b = torch.randn(2, 4, 6, 5).to(dtype), torch.randn(4), torch.randn(4)
        for norm, name in ((0, "batch"), (1, "group 4"), (2, "group 2")):
            found = []
            for kind in (x, x.double()):
                ours, functional = (True, norms) if kind.dtype == dtype else (False, functions)
                image, upstream = kind.clone().requires_grad_(), dy.to(kind.dtype)
                if ours:
                    image, upstream = (shard(each, mesh, placements) for each in (image, upstream))
                weights = [each.to(kind.dtype).requires_grad_() for each in (w, b)]
                running = torch.zeros(4, dtype=kind.dtype), torch.ones(4, dtype=kind.dtype)
                if norm:
                    y = functional.group_norm(image, 4 // norm, *weights)
                else:
                    y = functional.batch_norm(image, *running, *weights, True)
                everything = (y, *torch.autograd.grad(y, (image, *weights), upstream), *running)
                found.append([each.full_tensor() if isinstance(each, DTensor) else each for each in everything])
            for got, wanted in zip(*found, strict=True):
                scale = wanted.detach().abs().max()
                assert (got.double() - wanted).abs().max() <= limit * scale, (dtype, name)


def norms_under_autocast() -> None:
    """In fp32 where autocast of the device has it so, as on CUDA devices; else in what they are given."""
    mesh, placements = meshes()["4x1"]
    x = shard(torch.randn(2, 4, 6, 5).bfloat16(), mesh, placements)
    with torch.autocast("cpu", torch.bfloat16):
        assert norms.group_norm(x, 2).dtype == torch.bfloat16
        with patch.object(norms, "FP32_UNDER_AUTOCAST", ("cpu",)):
            assert norms.group_norm(x, 2).dtype == torch.float32
            assert norms.batch_norm(x, None, None, training=True).dtype == torch.bfloat16


def pixels_are_not_shared() -> None:
    """A shard in the middle needs no zeros around it, and is padded into memory of its own as the others are."""
    mesh, placements = meshes()["4x1"]
    image = shard(integers(1, 2, 8, 3).detach(), mesh, placements)
    before = image.to_local().clone()
    pixels.pad(image, (0, 0, 1, 1)).to_local().add_(1)
    assert torch.equal(image.to_local(), before)
