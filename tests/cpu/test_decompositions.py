"""haloconv's operators written in PyTorch's, and what PyTorch counts of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

import haloconv
from haloconv.env import child_environment

OPS = torch.ops.haloconv
CASES = {
    "plain": ((2, 4, 8, 9), (6, 4, 3, 3), ([1, 1], [1, 1, 1, 1], [1, 1], 1)),
    "stride": ((2, 4, 8, 9), (6, 4, 3, 2), ([2, 3], [1, 1, 0, 0], [1, 1], 1)),
    "dilation": ((1, 4, 12, 9), (6, 4, 3, 2), ([1, 2], [2, 2, 1, 1], [2, 3], 1)),
    "groups": ((2, 6, 8, 9), (9, 2, 3, 3), ([2, 1], [1, 1, 1, 1], [1, 1], 3)),
    "depthwise": ((2, 6, 8, 9), (6, 1, 3, 3), ([1, 1], [1, 1, 1, 1], [1, 1], 6)),
    "uneven": ((2, 4, 8, 9), (6, 2, 4, 3), ([2, 1], [1, 2, 0, 1], [1, 1], 2)),
}


def tensors(x_shape: tuple[int, ...], w_shape: tuple[int, ...], values: tuple, layout: str) -> tuple[torch.Tensor, ...]:
    """x, w, b and dy in float64."""
    generator = torch.Generator().manual_seed(0)
    order = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    x, w = (
        torch.randn(s, dtype=torch.float64, generator=generator).to(memory_format=order) for s in (x_shape, w_shape)
    )
    b = torch.randn(w_shape[0], dtype=torch.float64, generator=generator)
    dy = OPS.fprop(x, w, b, *values, None, "auto", False)
    return x, w, b, torch.randn(dy.shape, dtype=torch.float64, generator=generator).to(memory_format=order)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("case", CASES)
def test_every_decomposition_gives_the_operators_values_and_strides(case: str, layout: str) -> None:
    *shapes, values = CASES[case]
    values = (*values, None, "auto", False)
    x, w, b, dy = tensors(*shapes, values[:4], layout)

    def all_four(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dx, dw = OPS.dgrad(dy, w, x.shape, layout, *values), OPS.wgrad(dy, x, w.shape, layout, *values)
        return OPS.fprop(x, w, b, *values), dx, dw, OPS.bgrad(dy, "auto")

    plain = make_fx(all_four, decomposition_table={**haloconv.decompositions()})(x, w, b, dy)
    assert "haloconv" not in plain.code
    for ours, theirs in zip(all_four(x, w, b, dy), plain(x, w, b, dy), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-12, atol=1e-12)
        assert theirs.stride() == ours.stride()


@pytest.mark.parametrize("extents", ["numbers", "symbols"])
def test_fake_results_have_our_strides_where_extents_are_symbols(extents: str) -> None:
    """PyTorch's convolution of float64 on a GPU is contiguous whatever its operands are; ours is not."""
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        size = torch.Size((2, 4, 8, 9)) if extents == "numbers" else symbols(shapes, (2, 4, 8, 9))
        x = torch.empty(size, dtype=torch.float64, device="cuda").to(memory_format=torch.channels_last)
        w = torch.empty(6, 4, 3, 3, dtype=torch.float64, device="cuda")
        y = OPS.fprop(x, w, None, [1, 1], [1, 1, 1, 1], [1, 1], 1, None, "auto", False)
    assert (type(y.shape[2]) is torch.SymInt) == (extents == "symbols")
    assert y.is_contiguous(memory_format=torch.channels_last) and not y.is_contiguous()


def symbols(shapes: ShapeEnv, size: tuple[int, ...]) -> list[torch.SymInt]:
    """A symbol for each extent."""
    found = []
    for extent in size:
        symbol = shapes.create_symbol(extent, ConstantSource(f"extent{len(found)}"), DimDynamic.DYNAMIC)
        found.append(shapes.create_symintnode(symbol, hint=extent))
    return found


class Net(torch.nn.Module):
    """Layers of ours, with groups, strides, and a padding that PyTorch's convolution does not know."""

    def __init__(self, cls: type[torch.nn.Conv2d] = haloconv.Conv2d) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = cls(4, 6, 3, stride=(2, 1), padding=1)
        self.second = cls(6, 9, (3, 2), padding=(1, 0), dilation=(1, 2), groups=3)
        self.third = cls(9, 9, 4, padding="same", groups=9, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.relu(self.second(self.first(x))))


def image(n: int = 2, h: int = 10, w: int = 11) -> torch.Tensor:
    return torch.randn(n, 4, h, w, generator=torch.Generator().manual_seed(n))


def targets(program: torch.export.ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def test_a_decomposed_program_runs_where_there_is_no_haloconv(tmp_path: Path) -> None:
    """Of any batch: the program was exported with a dynamic one."""
    model = Net().eval()
    program = torch.export.export(model, (image(),), dynamic_shapes=({0: torch.export.Dim("n", min=1, max=64)},))
    assert sum("haloconv" in target for target in targets(program)) == 3
    plain = program.run_decompositions(haloconv.decompositions())
    assert targets(plain).count("aten.convolution.default") == 3 and "haloconv" not in str(plain.graph)
    torch.export.save(plain, tmp_path / "plain.pt2")
    torch.save((image(3), model(image(3))), tmp_path / "pair.pt")
    code = (
        "import sys; sys.modules['haloconv'] = None\nimport torch\n"
        "x, y = torch.load('pair.pt')\n"
        "torch.testing.assert_close(torch.export.load('plain.pt2').module()(x), y)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=child_environment(), check=True, timeout=120)


def test_the_table_decomposes_pytorchs_operators_too() -> None:
    table = haloconv.decompositions()
    assert {*torch.export.default_decompositions().keys()} <= {*table.keys()}
    program = torch.export.export(torch.nn.Sequential(Net(), torch.nn.Hardswish()), (image(),))
    assert "aten.hardswish.default" in targets(program)
    assert "aten.hardswish.default" not in targets(program.run_decompositions(table))


def flops(call: Callable[[], torch.Tensor], *wanted: torch.Tensor) -> dict[str, int]:
    """Of the call and, where gradients are wanted, of its backward pass: by direction of pass, and in all."""
    with FlopCounterMode(display=False) as forward:
        y = call()
    with FlopCounterMode(display=False) as backward:
        if wanted:
            torch.autograd.grad(y.sum(), wanted)
    return {"forward": forward.get_total_flops(), "backward": backward.get_total_flops()}


@pytest.mark.parametrize("wanted", ["nothing", "x", "w", "both"])
def test_a_layers_operations_are_counted_as_those_of_pytorchs(wanted: str) -> None:
    def counted(model: torch.nn.Module) -> dict[str, int]:
        x = image().requires_grad_(wanted in ("x", "both"))
        model.requires_grad_(wanted in ("w", "both"))
        return flops(lambda: model(x), *(each for each in (x, *model.parameters()) if each.requires_grad))

    ours, theirs = counted(Net()), counted(Net(torch.nn.Conv2d))
    assert ours == theirs and ours["forward"] > 0 and (ours["backward"] > 0) == (wanted != "nothing")


@pytest.mark.parametrize("case", [name for name in CASES if name != "uneven"])
def test_each_direction_is_counted_as_the_call_of_pytorch_that_it_stands_for(case: str) -> None:
    *shapes, values = CASES[case]
    x, w, b, dy = tensors(*shapes, values, "nchw")
    stride, (top, _, left, _), dilation, groups = values
    ours = values + (None, "auto", False)
    backward = (dy, x, w, None, stride, (top, left), dilation, False, (0, 0), groups)
    rest = [one - ((outputs - 1) * s - 2 * p + d * (taps - 1) + 1) for one, outputs, s, p, d, taps in zip(
        x.shape[2:], dy.shape[2:], stride, (top, left), dilation, w.shape[2:], strict=True)]  # fmt: skip
    pairs = {
        "fprop": (
            lambda: OPS.fprop(x, w, b, *ours),
            lambda: torch.conv2d(x, w, b, stride, (top, left), dilation, groups),
        ),
        "dgrad": (
            lambda: OPS.dgrad(dy, w, x.shape, "nchw", *ours),
            lambda: torch.conv_transpose2d(dy, w, None, stride, (top, left), rest, groups, dilation),
        ),
        "wgrad": (
            lambda: OPS.wgrad(dy, x, w.shape, "nchw", *ours),
            lambda: torch.ops.aten.convolution_backward(*backward, (False, True, False))[1],
        ),
    }
    for direction, (call, theirs) in pairs.items():
        torch.testing.assert_close(call(), theirs(), rtol=1e-12, atol=1e-12)
        assert flops(call) == flops(theirs) and flops(call)["forward"] > 0, direction


def test_a_second_derivative_is_counted() -> None:
    """Of the gradient of an input: fprop with what comes back in dy's place, and the gradient of the filter."""
    model, x = haloconv.Conv2d(4, 6, 3), image().requires_grad_()
    (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(dx.sum(), model.weight)
    assert counter.get_total_flops() >= 2 * flops(lambda: model(x))["forward"]


def test_pytorchs_table_has_none_of_ours() -> None:
    """Inductor raises where the variable CI is set, if an operator that it calls has a decomposition there."""
    operators = [torch.ops.haloconv.fprop.default, torch.ops.haloconv.dgrad.default, torch.ops.haloconv.wgrad.default]
    assert not torch._decomp.get_decompositions(operators)
