"""Scenarios of haloconv.distributed in four processes; what a rank found goes to ``rankN.json``."""

from __future__ import annotations

import copy
import json
import os
import runpy
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from random import Random
from unittest.mock import patch

import torch
import torch._dynamo  # DTensor loads it at its first use: here once, before ranks are forked
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from haloconv import distributed, strips
from tests import spatial_models, spatial_operations
from tests.spatial_problems import COLUMNS, ROWS, assert_equal, draw, integers, meshes, same, shard

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = {
    "sharded_unet": ["--image", "12", "8", "--channels", "4", "--steps", "2", "--device", "cpu"],
    "sharded_decoder": ["--latent", "3", "2", "--channels", "2", "--device", "cpu"],
}
FUZZED = 300
OK = "as one process"


def fuzzed() -> None:
    """Every seventh problem on the same mesh; every twentieth with second gradients."""
    random, places = Random(0), list(meshes().items())
    for number in range(FUZZED):
        name, (mesh, placements) = places[number % len(places)]
        try:
            assert_equal(draw(random), mesh, placements, second=number % 20 == 0)
        except Exception as error:
            raise AssertionError(f"problem {number} on {name}") from error


def other_placements() -> None:
    """Channels of x and of the filter that are sharded, and images that all have, as DTensor takes them."""
    mesh, _ = meshes()["2x2"]
    x, w, b = integers(4, 4, 7, 6), integers(6, 4, 3, 3), integers(6)
    expected = torch.nn.functional.conv2d(x, w, b, padding=1)
    dy = integers(*expected.shape)
    wanted = torch.autograd.grad(expected, (x, w, b), dy)
    for placements, kept in (
        ((Shard(1), ROWS), (Replicate(), ROWS)),
        ((Replicate(), COLUMNS), (Replicate(), COLUMNS)),
        ((Replicate(), Replicate()), (Replicate(), Replicate())),
        ((Shard(0), Shard(1)), (Shard(0), Replicate())),
    ):
        ours = shard(x, mesh, placements), shard(w, mesh, (Shard(0), Shard(1))), shard(b, mesh, (Replicate(), Shard(0)))
        y = distributed.conv2d(*ours, padding="same")
        assert y.placements == kept and same(y, expected)
        assert all(map(same, torch.autograd.grad(y, ours, shard(dy, mesh, kept)), wanted)), placements
        with torch.no_grad():
            assert same(distributed.conv2d(*ours, padding=1), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert distributed.conv2d(ours[0].detach().float(), w.float(), b.float(), padding=1).dtype == torch.bfloat16


def models() -> None:
    """A whole model in training: outputs, gradients of parameters and inputs, running statistics; then in inference."""
    for place in ("2x2", "images and rows"):
        spatial_models.assert_alike(spatial_models.Everything, (2, 3, 9, 11), *meshes()[place])


def compiled() -> None:
    """torch.compile leaves a sharded convolution to Python, and gives the same."""
    mesh = init_device_mesh("cpu", (2,))
    layer = distributed.shard_spatially(torch.nn.Conv2d(3, 4, 3, padding=1).double(), mesh)
    x = integers(1, 3, 5, 6)
    y = torch.compile(lambda x: layer(x) * 2, backend="eager")(shard(x, mesh, (ROWS,)))
    spatial_models.assert_close(y.full_tensor(), 2 * torch.nn.functional.conv2d(x, layer.weight, layer.bias, padding=1))


def beside_data_parallel() -> None:
    """DDP and FSDP2 on one dimension of the mesh, images sharded on the other."""
    mesh, _ = meshes()["2x2"]
    for wrap in (spatial_models.with_ddp, spatial_models.with_fsdp2):
        spatial_models.assert_trained_alike(wrap, data=mesh["rows"], space=mesh["columns"])


def refused() -> str:
    """What a sharded model says of all that it does not take."""
    mesh, placements = meshes()["2x2"]
    said = {name: spatial_models.refusal(model, mesh, placements) for name, model in spatial_models.REFUSED.items()}
    return json.dumps(said)


class _Scaled(torch.nn.Module):
    """A convolution beside a parameter that no layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(2, 2, 3, padding=1).double()
        self.gain = torch.nn.Parameter(torch.randn(1, 2, 1, 1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.gain).pow(3)


def parameters_twice() -> None:
    """Gradients of gradients of parameters, of one of no layer, too."""
    mesh, placements = meshes()["2x2"]
    theirs, x, found = _Scaled(), torch.randn(1, 2, 6, 5, dtype=torch.float64), []
    ours = distributed.shard_spatially(copy.deepcopy(theirs), mesh)
    for model, image in ((ours, shard(x, mesh, placements)), (theirs, x)):
        first = torch.autograd.grad(model(image).sum(), [*model.parameters()], create_graph=True)
        penalty = torch.stack([each.pow(2).sum() for each in first]).sum()
        found.append((*first, *torch.autograd.grad(penalty, [*model.parameters()])))
    torch.testing.assert_close(*found)


def third_order() -> None:
    """Through what crosses shards."""
    mesh, placements = meshes()["2x2"]
    x, w, found = integers(1, 2, 6, 5), integers(2, 2, 3, 3), []
    convolve = torch.nn.functional.conv2d
    for function, leaf in ((distributed.conv2d, shard(x, mesh, placements)), (convolve, x)):
        y = function(function(leaf, w, padding=1).pow(2), w, padding=1)
        for _ in range(3):
            (y,) = torch.autograd.grad((y / 100).pow(2).sum(), leaf, create_graph=True)
        found.append(y.detach())
    torch.testing.assert_close(found[0].full_tensor(), found[1])


def _differs(**by_rank: int) -> int:
    return by_rank.get(f"rank_{dist.get_rank()}", by_rank["others"])


def _convolve(x: torch.Tensor | None = None, channels: int = 3, stride: int = 1) -> DTensor:
    mesh, placements = meshes()["2x2"]
    x = shard(integers(2, 3, 8, 8), mesh, placements) if x is None else x
    return distributed.conv2d(x, integers(4, channels, 3, 3), None, stride, 1)


def strides_differ() -> None:
    _convolve(stride=_differs(rank_1=2, others=1))


def a_filter_is_wrong() -> None:
    _convolve(channels=_differs(rank_2=5, others=3))


def all_filters_are_wrong() -> None:
    _convolve(channels=5)


def shapes_differ() -> None:
    """Whole images that from_local guesses of shards of unequal height, on each rank its own."""
    mesh, _ = meshes()["4x1"]
    _convolve(DTensor.from_local(integers(2, 3, 3 if dist.get_rank() < 3 else 1, 8), mesh, [ROWS]))


def a_model_fails() -> None:
    """In a layer between convolutions, on one rank, which lives on."""
    mesh, placements = meshes()["2x2"]
    model = distributed.shard_spatially(spatial_models.fails_on(3), mesh)
    model(shard(integers(2, 3, 8, 8), mesh, placements))


def a_layer_fails() -> None:
    """On one rank, once all are at work: the others hear of it in the next one."""
    with _failing("_strips"):
        _convolve()
        _convolve()


def a_gradient_fails() -> None:
    """On one rank, before anything is exchanged for dx and dw."""
    mesh, placements = meshes()["2x2"]
    x, w = shard(integers(2, 3, 8, 8), mesh, placements), integers(4, 3, 3, 3)
    y = distributed.conv2d(x.requires_grad_(), w.requires_grad_(), padding=1).to_local()
    with _failing("_wgrad"):
        y.sum().backward()


def other_orders() -> None:
    """Gradients of gradients of two layers that are alike, from another thread than their forward pass, as on a GPU.

    What autograd runs first it decides by numbers, which each thread gives to its nodes: on rank 1 those of the forward
    pass are higher than those of the gradients, on others they are lower.
    """
    mesh, placements = meshes()["2x2"]
    x, weights = shard(integers(1, 2, 8, 6), mesh, placements), [integers(2, 2, 3, 3) for _ in range(2)]

    def forward() -> DTensor:
        spend(_differs(rank_1=1000, others=0))
        one, other = (distributed.conv2d(x, w, padding=1) for w in weights)
        return one.pow(3) + other.pow(3)

    def gradients(y: DTensor) -> None:
        spend(_differs(rank_1=0, others=1000))
        (first,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        torch.autograd.grad(first, weights, torch.ones_like(first))

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        other.submit(gradients, one.submit(forward).result()).result()


def spend(count: int) -> None:
    """Let autograd in this thread number so many nodes."""
    leaf = torch.ones(1, requires_grad=True)
    for _ in range(count):
        leaf.view_as(leaf)


@contextmanager
def _failing(function: str) -> Iterator[None]:
    """Inside, a function of haloconv.strips raises on rank 2."""

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    with patch.object(strips, function, fails) if dist.get_rank() == 2 else nullcontext():
        yield


def a_rank_ends() -> None:
    if dist.get_rank() == 1:
        os._exit(0)
    _convolve()


SCENARIOS: tuple[Callable[[], object], ...] = (
    fuzzed,
    other_placements,
    spatial_operations.pixels_mixed,
    spatial_operations.operations_fuzzed,
    spatial_operations.in_place,
    spatial_operations.norms_twice,
    spatial_operations.norms_of_every_dtype,
    spatial_operations.norms_under_autocast,
    spatial_operations.pixels_are_not_shared,
    parameters_twice,
    third_order,
    models,
    beside_data_parallel,
    refused,
    strides_differ,
    a_filter_is_wrong,
    all_filters_are_wrong,
    shapes_differ,
    a_model_fails,
    a_layer_fails,
    a_gradient_fails,
    other_orders,
    a_rank_ends,
)


def all_of_them(folder: str, chosen: tuple[str, ...] = ()) -> None:
    """Each scenario after the other, in one process group: an error of one leaves the next one whole."""
    found, file = {}, Path(folder) / f"rank{dist.get_rank()}.json"
    for scenario in SCENARIOS:
        if chosen and scenario.__name__ not in chosen:
            continue
        begin = time.monotonic()
        torch.manual_seed(0)
        try:
            said = scenario() or OK
        except Exception as error:
            said = f"{type(error).__name__}: {error}{f': {error.__cause__!r}' if type(error) is AssertionError else ''}"
        found[scenario.__name__] = (said, time.monotonic() - begin)
        file.write_text(json.dumps(found))


def in_two_processes(folder: str) -> None:
    """The scripts of examples/ for several processes; what rank 0 prints goes to ``NAME.txt``. Then torch.compile."""
    for name, arguments in EXAMPLES.items():
        with (Path(folder) / f"{name}.txt").open("a") as file, redirect_stdout(file):
            runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"](arguments)
    compiled()
