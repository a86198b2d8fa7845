"""torch.compile, torch.export and autocast on the GPU, with our kernels inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import haloconv
from haloconv import plan
from haloconv.problem import ConvSpec
from tests import oracle
from tests.cases import Tensors, case_id, generator, values


class Net(torch.nn.Module):
    """Two convolutions of ours around an activation; channels and filters that differ."""

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": "cuda", "family": "direct", "strict": True}
        self.first = haloconv.Conv2d(6, 10, (3, 5), stride=(1, 2), padding=(1, 2), **options)
        self.second = haloconv.Conv2d(10, 8, 3, padding=1, groups=2, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def plain(net: Net) -> torch.nn.Module:
    """The same network on torch.nn.Conv2d with the same parameters."""
    first = torch.nn.Conv2d(6, 10, (3, 5), stride=(1, 2), padding=(1, 2), device="cuda")
    second = torch.nn.Conv2d(10, 8, 3, padding=1, groups=2, device="cuda")
    other = torch.nn.Sequential(first, torch.nn.ReLU(), second)
    first.load_state_dict(net.first.state_dict())
    second.load_state_dict(net.second.state_dict())
    return other


def image(n: int = 2, h: int = 15, w: int = 18, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return values((n, 6, h, w), dtype, generator(f"image {n} {h} {w}", "cuda"))


def test_inductor_fullgraph_forward_and_backward() -> None:
    torch.manual_seed(0)
    net, x = Net(), image().requires_grad_()
    wanted = [x, *net.parameters()]
    eager = net(x)
    dy = torch.randn_like(eager)
    compiled = torch.compile(net, fullgraph=True)(x)
    for ours, theirs in zip(
        (compiled, *torch.autograd.grad(compiled, wanted, dy)), (eager, *torch.autograd.grad(eager, wanted, dy)),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(ours, theirs)


def test_compiled_graph_runs_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled forward still goes through the planner, and the result is the direct family's own bits."""
    ran: list[plan.Plan] = []
    inner = plan.plan_fprop

    def note(*args: Any) -> plan.Plan:
        ran.append(inner(*args))
        return ran[-1]

    monkeypatch.setattr(plan, "plan_fprop", note)
    x, w = image(), values((4, 6, 3, 3), torch.float32, generator("w", "cuda"))

    @torch.compile(fullgraph=True)
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return haloconv.conv2d(x, w, None, padding=1, family="direct")

    got = call(x, w)
    assert [one.choice.family for one in ran] == ["direct"]
    assert oracle.same_bits(got, haloconv.conv2d(x, w, None, padding=1, family="direct"))


def test_dynamic_shapes() -> None:
    net = Net().eval()
    compiled = torch.compile(net, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for n, h, w in ((2, 15, 18), (3, 20, 31), (1, 9, 11)):
            torch.testing.assert_close(compiled(image(n, h, w)), net(image(n, h, w)))


def test_export() -> None:
    net, x = Net().eval(), image()
    program = torch.export.export(net, (x,))
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert sum("haloconv" in str(target) for target in called) == 2
    with torch.no_grad():
        assert oracle.same_bits(program.module()(x), net(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=case_id)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast(dtype: torch.dtype, compiled: bool) -> None:
    """Autocast computes in the low precision as PyTorch does: result dtype, values and float32 parameter gradients."""
    torch.manual_seed(0)
    ours = haloconv.Conv2d(6, 10, 3, padding=1, device="cuda", family="direct", strict=True)
    theirs = torch.nn.Conv2d(6, 10, 3, padding=1, device="cuda")
    theirs.load_state_dict(ours.state_dict())
    x = image()
    call = torch.compile(ours, fullgraph=True) if compiled else ours
    with torch.autocast("cuda", dtype=dtype):
        y, other = call(x), theirs(x)
    assert y.dtype == other.dtype == dtype
    t = Tensors(x.to(dtype), ours.weight.detach().to(dtype), ours.bias.detach().to(dtype), torch.ones_like(y))
    spec = ConvSpec(padding=(1, 1, 1, 1))
    oracle.check("fprop", y.detach(), t, spec)
    y.backward(t.dy)
    assert ours.weight.grad.dtype == torch.float32
    oracle.check("wgrad", ours.weight.grad.to(dtype), t, spec)


def test_grad_scaler_step_matches_torch() -> None:
    """A short mixed-precision training run stays next to PyTorch's."""
    torch.manual_seed(0)
    net = Net()
    other = plain(net)
    losses = []
    for model in (net, other):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cuda")
        for step in range(5):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(image(4, 16, 16 + step)).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
