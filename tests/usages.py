"""What people do with models, each once on an accelerated one: a function per usage, the same on every device.

A usage compares an accelerated network with an untouched copy of it, and where that makes sense the restored network
with the copy, bit by bit.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import haloconv
from haloconv.accelerate import Acceleration
from haloconv.bench.networks.swapped import in_memory_format


class Net(nn.Module):
    """Two convolutions, one that stands in two places, around what networks have between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Conv2d(8, 8, (1, 3), padding=(0, 1), groups=2, bias=False)
        self.again = self.body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(torch.relu(self.body(torch.relu(self.norm(self.stem(x))))))


@dataclass(frozen=True)
class Place:
    """Where a usage runs, and which family has to run its convolutions."""

    device: str
    family: str = "auto"
    strict: bool = False

    def net(self) -> Net:
        """The network of always the same weights."""
        torch.manual_seed(0)
        return Net().to(self.device)

    def pair(self) -> tuple[Net, Net]:
        """An accelerated network and an untouched one of the same weights."""
        ours = self.net()
        self.accelerate(ours)
        return ours, self.net()

    def accelerate(self, model: nn.Module) -> Acceleration:
        return haloconv.accelerate(model, family=self.family, strict=self.strict)

    def image(self, dtype: torch.dtype = torch.float32, n: int = 2) -> torch.Tensor:
        return torch.randn(n, 3, 10, 12, generator=torch.Generator().manual_seed(1)).to(self.device, dtype)


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of every parameter."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    model.zero_grad(set_to_none=True)
    y = model(x)
    y.float().square().mean().backward()
    return [y, x.grad, *(each.grad for each in model.parameters() if each.requires_grad)]


def assert_close(ours: nn.Module, theirs: nn.Module, x: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Outputs and gradients are those of PyTorch's model, in dtype and up to rounding."""
    for got, want in zip(results(ours, x), results(theirs, x), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def assert_restored(ours: nn.Module, theirs: nn.Module, x: torch.Tensor) -> None:
    """After restore the model has nothing of ours, and computes the very bits of PyTorch's."""
    haloconv.restore(ours)
    assert haloconv.restore(ours) == []
    for a, b in zip(ours.modules(), theirs.modules(), strict=True):
        assert [each.__name__ for each in type(a).__mro__] == [each.__name__ for each in type(b).__mro__]
        assert not isinstance(a, haloconv.Conv2d) and vars(a).keys() == vars(b).keys()
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))


def convolutions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


def all_ours(model: nn.Module) -> bool:
    return all(isinstance(module, haloconv.Conv2d) for module in convolutions(model))


def a_plain_step(on: Place) -> None:
    ours, theirs = on.pair()
    assert all_ours(ours) and ours.body is ours.again
    assert_close(ours, theirs, on.image())
    assert_restored(ours, theirs, on.image())


def deep_copies(on: Place) -> None:
    ours, theirs = on.pair()
    other = copy.deepcopy(ours)
    assert all_ours(other) and other.body is other.again and other.stem.weight is not ours.stem.weight
    assert_close(other, theirs, on.image())
    assert_restored(other, theirs, on.image())
    assert all_ours(ours)


def pickles(on: Place) -> None:
    ours, theirs = on.pair()
    results(ours, on.image())
    other = pickle.loads(pickle.dumps(ours))
    assert all_ours(other) and other.body is other.again
    theirs.load_state_dict(ours.state_dict())
    assert_close(other, theirs, on.image())
    assert_restored(other, theirs, on.image())
    assert b"haloconv" not in pickle.dumps(other)


def saved_whole(on: Place) -> None:
    ours, theirs = on.pair()
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    other = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert all_ours(other)
    assert_close(other, theirs, on.image())
    assert_restored(other, theirs, on.image())


def saved_state(on: Place) -> None:
    """Checkpoints go from the accelerated model to a plain one and back, as files that hold tensors alone."""
    ours, theirs = on.pair()
    for source, target in ((ours, theirs), (theirs, ours)):
        with torch.no_grad():
            source.stem.weight.mul_(1.5)
        buffer = io.BytesIO()
        torch.save(source.state_dict(), buffer)
        state = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        assert list(state) == list(target.state_dict())
        target.load_state_dict(state)
        assert_close(ours, theirs, on.image())
    assert_restored(ours, theirs, on.image())


def _old_norm(norm: Callable[[nn.Module], nn.Module], layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # they are deprecated, and still in checkpoints
        return norm(layer)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


REWEIGHTINGS: dict[str, tuple[Callable, Callable]] = {
    "weight_norm": (parametrizations.weight_norm, partial(parametrize.remove_parametrizations, tensor_name="weight")),
    "spectral_norm": (
        parametrizations.spectral_norm,
        partial(parametrize.remove_parametrizations, tensor_name="weight"),
    ),
    "own parametrisation": (
        lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
        partial(parametrize.remove_parametrizations, tensor_name="weight"),
    ),
    "old weight_norm": (partial(_old_norm, torch.nn.utils.weight_norm), torch.nn.utils.remove_weight_norm),
    "old spectral_norm": (partial(_old_norm, torch.nn.utils.spectral_norm), torch.nn.utils.remove_spectral_norm),
    "pruning": (
        lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
        lambda layer: prune.remove(layer, "weight"),
    ),
}
"""What gives a layer its weight anew at each call, and what ends that."""


def weights_made_anew(on: Place, kind: str, first: bool) -> None:
    """A norm, parametrisation or mask that was there ``first``, or comes later; removed before and after restore."""
    apply, remove = REWEIGHTINGS[kind]
    ours, theirs = on.net(), on.net()
    for net in (ours, theirs):
        torch.manual_seed(2)
        if net is ours and not first:
            on.accelerate(net)
        apply(net.stem)
        if net is ours and first:
            on.accelerate(net)
    assert type(ours.stem).__name__ == type(theirs.stem).__name__ and all_ours(ours)
    assert_close(ours, theirs, on.image())
    removed, plain = on.net(), on.net()
    for net in (removed, plain):
        torch.manual_seed(2)
        apply(net.stem)
        if net is removed:
            on.accelerate(net)
        net(on.image())
        remove(net.stem)
    assert type(removed.stem) is haloconv.Conv2d
    assert_close(removed, plain, on.image())
    assert_restored(removed, plain, on.image())
    assert_restored(ours, theirs, on.image())
    remove(ours.stem), remove(theirs.stem)
    assert type(ours.stem) is nn.Conv2d
    assert_restored(ours, theirs, on.image())


def fused_with_batch_norm(on: Place) -> None:
    ours, theirs = (net.eval() for net in on.pair())
    fused, plain = (torch.nn.utils.fuse_conv_bn_eval(net.stem, net.norm) for net in (ours, theirs))
    assert type(fused) is haloconv.Conv2d
    assert_close(fused, plain, on.image())
    assert_restored(fused, plain, on.image())


def channels_last(on: Place) -> None:
    """Before or after, by ``to`` or by hand: the memory order of weights stays, and their gradients have it."""
    ours, theirs = on.pair()
    late = in_memory_format(on.net(), torch.channels_last)
    on.accelerate(late)
    ours, theirs = (in_memory_format(net, torch.channels_last) for net in (ours, theirs))
    x = on.image().to(memory_format=torch.channels_last)
    for net in (ours, late):
        assert net.stem.weight.stride() == theirs.stem.weight.stride() == (27, 1, 9, 3)
        assert_close(net, theirs, x)
        y, dx, *others = results(net, x)
        assert all(each.is_contiguous(memory_format=torch.channels_last) for each in (y, dx))
        assert [each.stride() for each in others] == [each.stride() for each in net.parameters()]
        assert_restored(net, theirs, x)


def other_dtypes(on: Place) -> None:
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
        ours, theirs = (net.to(dtype) for net in on.pair())
        assert_close(ours, theirs, on.image(dtype), tolerance)
        assert_restored(ours, theirs, on.image(dtype))
    ours, theirs = on.pair()
    assert_close(ours.half().float(), theirs.half().float(), on.image())


def compiled(on: Place) -> None:
    """Accelerated first, or compiled first: what was compiled for PyTorch's class is compiled anew.

    The graphs run as they are; tests/gpu/test_compile_export.py gives them to Inductor.
    """
    ours, theirs = on.pair()
    torch._dynamo.reset()
    options: dict[str, Any] = {"fullgraph": True, "backend": "aot_eager"}
    first: Any = torch.compile(ours, **options)  # a module, which PyTorch's annotations call a function
    late: Any = torch.compile(on.net(), **options)
    assert_close(first, theirs, on.image())
    results(late, on.image())
    on.accelerate(late)
    with torch.profiler.profile() as profile:
        late(on.image())
    assert "haloconv::fprop" in {event.name for event in profile.events()}
    haloconv.restore(late)
    with torch.profiler.profile() as profile:
        late(on.image())
    assert "haloconv::fprop" not in {event.name for event in profile.events()}
    torch._dynamo.reset()


def exported(on: Place) -> None:
    ours, theirs = (net.eval() for net in on.pair())
    program = torch.export.export(ours, (on.image(),))
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert sum("haloconv.fprop" in target for target in called) == 3
    torch.testing.assert_close(program.module()(on.image()), theirs(on.image()), rtol=1e-5, atol=1e-5)
    haloconv.restore(ours)
    again = torch.export.export(ours, (on.image(),))
    assert not any("haloconv" in str(node.target) for node in again.graph.nodes)


def traced_by_fx(on: Place) -> None:
    """A layer of ours stays one node that calls the module, as torch.nn's do."""
    ours, theirs = (torch.fx.symbolic_trace(net) for net in on.pair())
    nodes = [[(node.op, node.target) for node in graph.graph.nodes] for graph in (ours, theirs)]
    assert nodes[0] == nodes[1] and all_ours(ours)
    assert_close(ours, theirs, on.image())
    assert_restored(ours, theirs, on.image())


def traced_by_jit(on: Place) -> None:
    ours, theirs = (net.eval() for net in on.pair())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(ours, on.image())
    assert "haloconv::fprop" in str(traced.inlined_graph)
    assert_close(traced, theirs, on.image(n=3))
    assert_restored(ours, theirs, on.image())


def autocast(on: Place) -> None:
    ours, theirs = on.pair()
    with torch.autocast(on.device, dtype=torch.bfloat16):
        assert ours(on.image()).dtype == torch.bfloat16
        assert_close(ours, theirs, on.image(), 3e-2)
        assert_restored(ours, theirs, on.image())


def checkpointed(on: Place) -> None:
    """Activations that backward computes again, in both ways that PyTorch has."""
    for reentrant in (False, True):
        ours, theirs = on.pair()
        again = nn.Sequential(Checkpointed(ours, reentrant))
        assert_close(again, theirs, on.image())


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def function_transforms(on: Place) -> None:
    """functional_call with other weights, gradients per sample, an ensemble, and derivatives along a direction."""
    ours, theirs = (net.eval() for net in on.pair())
    x, state = on.image(), {name: 1.5 * value.detach() for name, value in theirs.named_parameters()}
    many = {name: torch.stack((value, 0.5 * value)) for name, value in state.items()}

    def outputs(net: nn.Module) -> list:
        def loss(state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return functional_call(net, state, (x[None],)).square().mean()

        return [
            functional_call(net, state, (x,)),
            grad(loss)(state, x[0]),
            vmap(grad(loss), in_dims=(None, 0))(state, x),
            vmap(grad(loss), in_dims=(0, None))(many, x[0]),
            jvp(grad(loss), (state, x[0]), (state, x[1])),
        ]

    got, want = (torch.utils._pytree.tree_leaves(outputs(net)) for net in (ours, theirs))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def trained(on: Place) -> None:
    """An optimiser that was made before goes on training the same parameters after, and after restore."""
    ours, theirs = on.net(), on.net()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in (ours, theirs)]
    for step in range(3):
        if step == 1:
            on.accelerate(ours)
        if step == 2:
            haloconv.restore(ours)
        for net, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            net(on.image()).square().mean().backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def made_on_meta(on: Place) -> None:
    """A model without memory is accelerated, then given memory and weights."""
    with torch.device("meta"):
        ours = Net()
    on.accelerate(ours)
    assert ours(torch.empty(2, 3, 10, 12, device="meta")).shape == (2, 8, 10, 12)
    theirs = on.net()
    ours.to_empty(device=on.device).load_state_dict(theirs.state_dict())
    assert_close(ours, theirs, on.image())
    assert_restored(ours, theirs, on.image())


USAGES: dict[str, Callable[[Place], None]] = {
    **{usage.__name__: usage for usage in (
        a_plain_step, trained, deep_copies, pickles, saved_whole, saved_state, fused_with_batch_norm, channels_last,
        other_dtypes, compiled, exported, traced_by_fx, traced_by_jit, autocast, checkpointed, function_transforms,
        made_on_meta,
    )},
    **{
        f"{kind}, {'first' if first else 'later'}": partial(weights_made_anew, kind=kind, first=first)
        for kind in REWEIGHTINGS
        for first in (True, False)
    },
}  # fmt: skip
