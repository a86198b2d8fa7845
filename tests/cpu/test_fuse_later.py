"""A fused model stays what it was: changes hold, copies and files are fused, and tools meet its own forward."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.utils import parametrizations

import haloconv
from haloconv.accelerate import restore
from haloconv.fusion.fuse import fuse
from tests.fusable import BasicBlock, ConvNormActivation, Written, chain, hooked, image, once, replaced, settled

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
same = torch.testing.assert_close


@pytest.fixture(autouse=True)
def ran(at_once: list[str]) -> list[str]:
    """What ran as one call."""
    return at_once


def test_what_trains_is_left_until_it_does_not() -> None:
    model = chain().train()
    assert "training mode: call eval() before fuse" in str(fuse(model)) and type(model) is nn.Sequential
    assert len(fuse(model.eval())) == 1


def test_training_between_two_evaluations(ran: list[str]) -> None:
    """In training mode the model's own forward runs, and statistics are those that it leaves."""
    model, theirs = chain(), chain()
    fuse(model)
    for net in (model, theirs):
        net.train()(image())
        net.train()(image() + 1)
    assert not ran
    same(model.eval()(image()), theirs.eval()(image()), rtol=1e-5, atol=1e-5)
    assert ran == ["0 with batch norm and relu"]


def step(model: nn.Module) -> None:
    with torch.enable_grad():
        model.train()(image()).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval()


def loaded(model: nn.Module, assign: bool = False) -> None:
    state = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "in place": lambda model: model[1].running_mean.add_(1),
    "a factor": lambda model: model[1].weight.mul_(-2),
    "the bias of the convolution": lambda model: model[0].bias.add_(1),
    "weights of the convolution": lambda model: model[0].weight.neg_(),
    "a step": step,
    "loaded": loaded,
    "loaded by assignment": lambda model: loaded(model, assign=True),
    "to another dtype and back": lambda model: model.bfloat16().float(),
    "a new parameter": lambda model: setattr(model[1], "weight", nn.Parameter(torch.full((6,), 3.0))),
    "eps": lambda model: setattr(model[1], "eps", 0.5),
    "one layer more": lambda model: model.append(nn.Sigmoid()),
    "one layer less": lambda model: model.pop(2),
    "another layer": lambda model: model.__setitem__(2, nn.Tanh()),
    "a hook": lambda model: hooked(model[1]),
    "a forward": lambda model: replaced(model[2]),
    "the model's forward": replaced,
    "a norm that trains": lambda model: model[1].train(),
    "weights made anew": lambda model: parametrizations.weight_norm(model[0]),
    "another stride": lambda model: setattr(model[0], "stride", (2, 2)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_later_holds(name: str) -> None:
    """Statistics and weights are read at each call; what else is changed makes the model's own calls run."""
    model, theirs = chain(), chain()
    fuse(model)
    model(image())
    for net in (model, theirs):
        CHANGES[name](net)
    for _ in range(2):
        same(model(image()), theirs(image()), rtol=2e-5, atol=2e-5)


def test_hooks_that_come_and_go(ran: list[str]) -> None:
    model, seen = chain(), []
    fuse(model)
    hook = model[2].register_forward_hook(lambda *_: seen.append("inner"))
    model.register_forward_hook(lambda *_: seen.append("outer"))
    model(image())
    assert seen == ["inner", "outer"] and not ran
    hook.remove()
    model(image())
    assert seen == ["inner", "outer", "outer"] and len(ran) == 1
    with nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__)):
        model(image())
    assert len(ran) == 1 and {"Conv2d", "BatchNorm2d", "ReLU"} <= {*seen}


def test_a_block_without_its_projection_runs_its_own_forward(ran: list[str]) -> None:
    model = settled(BasicBlock(4, 4, projects=True))
    fuse(model)
    model(image())
    assert len(ran) == 3
    theirs = restore(copy.deepcopy(model)) and copy.deepcopy(model)
    restore(theirs)
    model.downsample = theirs.downsample = None
    ran.clear()
    same(model(image()), theirs(image()))
    assert not ran and len(fuse(model)) == 2


def doubled(self: Written, x: torch.Tensor) -> torch.Tensor:
    return 2 * self.norm(self.conv(x))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ConvNormActivation(4, 4)[0], nn.BatchNorm2d(4)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, factor: float = 1.0) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x if mask is None else x * mask) * factor


def test_other_arguments_and_other_tensors_run_the_own_forward(ran: list[str]) -> None:
    model = settled(Masked())
    theirs, x = copy.deepcopy(model), image()
    fuse(model)
    same(model(x), theirs(x), rtol=1e-5, atol=1e-5)
    assert ran == ["layers.0 with batch norm"]
    for args, kwargs in (((x, x), {}), ((x,), {"mask": x}), ((x,), {"factor": 2.0}), ((x[0],), {}), ((x[:, :3],), {})):
        results = []
        for net in (model, theirs):
            try:
                results.append(net(*args, **kwargs))
            except (RuntimeError, ValueError) as error:
                results.append(str(error))
        assert results[0] == results[1] if isinstance(results[1], str) else torch.equal(*results)
    twin = type(model).__new__(type(model))
    vars(twin).update(vars(model))
    for replica in (model._replicate_for_data_parallel(), twin):
        assert torch.equal(replica(x), theirs(x)) and len(ran) == 1
    model.layers.append(nn.Sigmoid()), theirs.layers.append(nn.Sigmoid())
    assert torch.equal(model(x), theirs(x)) and len(ran) == 1


@pytest.mark.parametrize("change", [lambda net: setattr(net, "body", doubled), lambda net: delattr(net, "act")])
def test_attributes_that_are_assigned_later_hold(change: Callable, ran: list[str]) -> None:
    model = settled(Written(once))
    theirs, x = copy.deepcopy(model), image()
    fuse(model)
    model.body, model.training = model.body, False
    model(x)
    assert len(ran) == 1
    change(model), change(theirs)
    try:
        want = theirs(x)
    except AttributeError as error:
        with pytest.raises(AttributeError, match=str(error)):
            model(x)
    else:
        assert torch.equal(model(x), want) and len(ran) == 1 and len(fuse(model)) == 1


def test_gradients_in_evaluation_mode_are_pytorchs(ran: list[str]) -> None:
    """A norm or another activation than ReLU is not part of what autograd records; ReLU and an addition are."""
    models = (chain(), Written(lambda self, x: functional.relu(self.conv(x) + x)).eval())
    for model, names in zip(models, ([], ["conv with addition and relu"]), strict=True):
        theirs = copy.deepcopy(model)
        fuse(model)
        ran.clear()
        found = []
        for net in (model, theirs):
            x = image().requires_grad_()
            with torch.enable_grad():
                found.append(torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()], allow_unused=True))
        for got, want in zip(*found, strict=True):
            assert (got is None and want is None) or torch.allclose(got, want, rtol=1e-4, atol=1e-4)
        assert ran == names


def test_copies_and_files(ran: list[str]) -> None:
    model, x = chain(), image()
    fuse(model)
    want = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    whole = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), whole):
        ran.clear()
        other[0].weight.neg_()
        assert not torch.equal(other(x), want) and len(ran) == 1
        other[0].weight.neg_()
        assert torch.equal(other(x), want) and restore(other) == [""] and type(other) is nn.Sequential
        assert b"haloconv" not in pickle.dumps(other)
    assert torch.equal(model(x), want)


def test_the_model_stays_what_it_was() -> None:
    model = settled(nn.ModuleDict({"a": BasicBlock(4, 4), "b": chain()}))
    theirs = copy.deepcopy(model)
    before = [*model.modules()], [*model.parameters()], [*model.state_dict()]
    fuse(model)
    assert ([*model.modules()], [*model.parameters()], [*model.state_dict()]) == before
    assert isinstance(model["a"], BasicBlock) and isinstance(model["b"], nn.Sequential)
    assert repr(model["b"]).startswith("Sequential(\n  fused: 0 with batch norm and relu\n")
    assert restore(model) == ["a", "b"] and restore(model) == [] and repr(model) == repr(theirs)


TOOLS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "trace": lambda model, x: torch.jit.trace(model, x, check_trace=False)(x),
    "fx": lambda model, x: torch.fx.symbolic_trace(model)(x),
    "compile": lambda model, x: torch.compile(model, backend="aot_eager", fullgraph=True)(x),
    "export": lambda model, x: torch.export.export(model, (x,)).module()(x),
    "vmap": lambda model, x: vmap(lambda each: model(each[None]))(x),
    "grad": lambda model, x: grad(lambda x: model(x).square().sum())(x),
    "other weights": lambda model, x: functional_call(model, {"1.weight": torch.full((6,), 2.0)}, (x,)),
    "functional_mode": lambda model, x: _in_mode(model, x),
}


def _in_mode(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with haloconv.functional_mode():
        return model(x)


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_meet_the_own_forward(tool: str, fresh_dynamo: None) -> None:
    model, theirs = chain(), chain()
    fuse(model)
    model(image())
    for each in (model, copy.deepcopy(model)):
        same(TOOLS[tool](each, image()), TOOLS[tool](theirs, image()), rtol=1e-5, atol=1e-5)


def test_a_fused_model_is_freed_as_others_are() -> None:
    model = nn.Sequential(settled(BasicBlock(4, 4)), chain())
    fuse(model)
    model(image())
    gone = weakref.ref(model[0]), weakref.ref(model[0].conv1)
    gc.collect()  # the graphs
    gc.disable()
    try:
        del model
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


def test_script_is_refused_with_the_ways_out() -> None:
    model = chain()
    fuse(model)
    with pytest.raises(RuntimeError, match="haloconv.restore.model. first"):
        torch.jit.script(nn.Sequential(model))


def test_under_autocast(ran: list[str]) -> None:
    model, theirs = settled(BasicBlock(4, 4)), settled(BasicBlock(4, 4))
    theirs.load_state_dict(model.state_dict())
    fuse(model)
    with torch.autocast("cpu", torch.bfloat16):
        for x in (image(), image().bfloat16()):
            y, want = model(x), theirs(x)
            assert y.dtype == want.dtype
            same(y.float(), want.float(), rtol=3e-2, atol=6e-2)
    assert ran[:2] == ["conv1 with batch norm and relu", "conv2 with batch norm"], "what is added is in fp32"
    assert ran[3] == "conv2 with batch norm and addition and relu"
