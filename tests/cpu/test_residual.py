"""haloconv.conv2d with a residual: what PyTorch's addition gives, in every mode and to any order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

import haloconv
from haloconv import plan
from haloconv.emulator import available, emulated_device
from haloconv.epilogue import bias_and_scale
from haloconv.families.common import in_order
from haloconv.families.halo_sm90.pointwise import implicit_gemm
from haloconv.jit import kernel_source
from haloconv.jit.params import params_of
from haloconv.plan import plan_fprop
from haloconv.problem import ConvSpec, Epilogue

VALUES = ([1, 1], [1] * 4, [1, 1], 1, None, "auto", False)  # of the operator, with padding of one pixel
ACTIVATIONS = (None, "relu", "silu")
SCALE = torch.linspace(-2, 2, 8, dtype=torch.float64)


def _tensors(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """x, w, b and a residual."""
    new = torch.Generator().manual_seed(0)
    shapes = ((2, 6, 9, 7), (8, 6, 3, 3), (8,), (2, 8, 9, 7))
    return tuple(torch.randn(shape, generator=new, dtype=dtype) for shape in shapes)


def _composed(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, residual: torch.Tensor, scale: torch.Tensor | None = None,
    name: str | None = "relu",
) -> torch.Tensor:  # fmt: skip
    y = functional.conv2d(x, w, None if scale is not None else b, padding=1)
    if scale is not None:
        y = y * scale[:, None, None] + (0 if b is None else b[:, None, None])
    return y + residual if name is None else getattr(functional, name)(y + residual)


def _ours(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    return haloconv.conv2d(x, w, b, padding=1, residual=residual, activation="relu")


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("has_scale", [False, True])
def test_gradients_of_every_part(name: str | None, has_scale: bool, own_autograd: None) -> None:
    """To the second order, by our autograd and by the operator that torch.compile is given."""
    leaves = [each.requires_grad_() for each in (*_tensors(), *([SCALE.clone()] if has_scale else []))]
    x, w, b, residual, scale = (*leaves, None)[:5]
    want = _composed(x, w, b, residual, scale, name)
    y = haloconv.conv2d(x, w, b, padding=1, scale=scale, activation=name, residual=residual)
    runs = [y] if has_scale else [y, torch.ops.haloconv.fprop_epilogue(x, w, b, residual, False, name, *VALUES)]
    with torch.no_grad():
        unseen = haloconv.conv2d(x, w, b, padding=1, scale=scale, activation=name, residual=residual)
    assert torch.allclose(unseen, want) and (want == 0).any() == (name == "relu")
    expected = _two_orders(want, leaves)
    for each in runs:
        assert torch.allclose(each, want)
        assert all(torch.allclose(one, other) for one, other in zip(_two_orders(each, leaves), expected, strict=True))


def _two_orders(y: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    first = torch.autograd.grad(y, leaves, y.detach().cos(), create_graph=True)
    return [*first, *torch.autograd.grad(sum(each.square().sum() for each in first), leaves[:2])]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_operator_with_a_scale(name: str | None) -> None:
    x, w, b, residual = _tensors(torch.float32)
    leaves = [each.requires_grad_() for each in (x, w, bias_and_scale(b, SCALE, torch.float32), residual)]
    y, pairs = torch.ops.haloconv.fprop_epilogue(*leaves, True, name, *VALUES), leaves[2]
    want = _composed(x, w, pairs[:, 0], residual, pairs[:, 1], name)
    for got, expected in zip(*(torch.autograd.grad(each, leaves, y.detach().cos()) for each in (y, want)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    torch.library.opcheck(torch.ops.haloconv.fprop_epilogue.default, (*leaves, True, name, *VALUES))
    table = haloconv.decompositions()[torch.ops.haloconv.fprop_epilogue.default]
    torch.testing.assert_close(table(*leaves, True, name, *VALUES), y)


@pytest.mark.parametrize(
    ("wanted", "shapes"),
    [("w", ["x", "y"]), ("residual", ["y"])],
)
def test_nothing_but_y_is_kept_for_the_mask(wanted: str, shapes: list[str], own_autograd: None) -> None:
    tensors = dict(zip("xwb", _tensors(), strict=False)) | {"residual": _tensors()[3]}
    tensors[wanted].requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = _ours(*tensors.values())
    by_name = {**tensors, "y": y}
    assert sorted(each.shape for each in kept) == sorted(by_name[name].shape for name in shapes)


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channels_last": lambda r: r.contiguous(memory_format=torch.channels_last),
    "transposed": lambda r: r.transpose(2, 3).contiguous().transpose(2, 3),
    "expanded": lambda r: r[:, :1].expand(r.shape),
    "sliced": lambda r: torch.cat((r, r), 3)[..., 3 : 3 + r.shape[3]],
    "unaligned": lambda r: torch.cat((r.flatten()[:1], r.flatten()))[1:].view(r.shape),
}


@pytest.mark.parametrize("form", STRIDED)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_any_strides(form: str, order: torch.memory_format, own_autograd: None) -> None:
    x, w, b, residual = _tensors()
    x, residual = x.contiguous(memory_format=order), STRIDED[form](residual)
    got, want = _ours(x, w, b, residual), _composed(x, w, b, residual)
    assert torch.allclose(got, want) and got.is_contiguous(memory_format=order)
    assert torch.allclose(_ours(x[0], w, b, residual[0]), want[0])
    assert _ours(x[:0], w, b, residual[:0]).shape == (0, 8, 9, 7)


TRACED: dict[str, Callable] = {
    "vmap": lambda run, x, w, r: torch.func.vmap(lambda each, other: run(each, w, None, other))(x, r),
    "vmap, one residual": lambda run, x, w, r: torch.func.vmap(lambda each: run(each, w, None, r[0]))(x),
    "jvp": lambda run, x, w, r: torch.func.jvp(lambda each: run(x, w, None, each), (r,), (r.cos(),))[1],
    "grad": lambda run, x, w, r: torch.func.grad(lambda each: run(x, w, None, each).square().sum())(r),
    "trace": lambda run, x, w, r: torch.jit.trace(lambda one, other: run(one, w, None, other), (x, r))(2 * x, r),
    "fake": lambda run, x, w, r: torch.fx.experimental.proxy_tensor.make_fx(lambda one: run(x, w, None, one))(r)(2 * r),
    "autocast": lambda run, x, w, r: _under_autocast(lambda: run(x.float(), w.float(), None, r.float())),
    "autocast, its dtype": lambda run, x, w, r: _under_autocast(lambda: run(x.float(), w.float(), None, r.bfloat16())),
    "batched gradients": lambda run, x, w, r: _batched(run(x, w, None, r.requires_grad_()), r),
}


def _under_autocast(run: Callable) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return run()


def _batched(y: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(y, leaf, torch.stack((y, y.cos())), is_grads_batched=True)[0]


@pytest.mark.parametrize("mode", TRACED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_whatever_traces_or_transforms_sees_it(mode: str, own_autograd: None) -> None:
    got, wanted = (TRACED[mode](run, *(_tensors()[i] for i in (0, 1, 3))) for run in (_ours, _composed))
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted)


def test_export_and_back() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return haloconv.conv2d(x, w, padding=1, residual=residual, activation="silu")

    x, w, _, residual = _tensors()
    program = torch.export.export(Layer(), (x, w, residual)).run_decompositions(haloconv.decompositions())
    torch.testing.assert_close(program.module()(x, w, residual), _composed(x, w, None, residual, name="silu"))


KERNELS = {  # shapes of x and w
    "halo_sm90/conv": ((2, 6, 9, 7), (8, 6, 3, 3)),
    "halo_sm90/implicit_gemm": ((2, 8, 9, 7), (8, 8, 3, 3)),  # in channels_last
    "halo_sm90/pointwise": ((2, 64, 8, 8), (64, 64, 1, 1)),
    "halo_sm90/pointwise_planes": ((2, 32, 7, 7), (32, 32, 1, 1)),
    "halo_sm80/conv": ((2, 6, 9, 8), (8, 6, 3, 3)),
}


@pytest.mark.skipif(available() is not None, reason=f"no emulator: {available()}")
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_strides_in_kernels(kernel: str, emulator_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers, to the bit; a residual that lies as the result does is not copied, wherever it begins."""
    passes, followed = [], plan.followed
    monkeypatch.setattr(plan, "followed", lambda *args: passes.append(args) or followed(*args))
    monkeypatch.setattr(implicit_gemm, "cycles", lambda *_: 0.0)  # ahead of conv where it takes the layer
    by_taps = kernel == implicit_gemm.KERNEL
    (n, *_, h, w), (k, *_, s) = KERNELS[kernel]
    new = torch.Generator().manual_seed(0)
    shapes = (*KERNELS[kernel], (k,), (n, k, h, w))
    x, filters, b, dense = (torch.randint(-3, 4, shape, generator=new).float() for shape in shapes)
    x = x.contiguous(memory_format=torch.channels_last) if by_taps else x
    spec = ConvSpec(padding=(s // 2,) * 4, family=kernel.partition("/")[0], strict=True, precision="tf32")
    plan.clear_plans()
    with emulated_device():
        for name, form in STRIDED.items():
            residual = form(dense)
            bound = plan_fprop(x, filters, b, spec, Epilogue(activation="relu", residual=True), residual)
            got = bound.run(x, filters, b, residual)
            want = torch.relu(functional.conv2d(x, filters, b, padding=s // 2) + residual)
            assert torch.equal(got, want) and bound.choice.kernel == kernel, name
            copied = in_order(residual, got.stride()) is not residual
            assert copied == (name != ("channels_last" if by_taps else "unaligned")), name
    plan.clear_plans()
    assert not passes


def test_padding_that_wraps() -> None:
    x, w, b, residual = _tensors()
    y = haloconv.conv2d(x, w, b, padding=1, padding_mode="circular", residual=residual)
    torch.testing.assert_close(y, haloconv.conv2d(x, w, b, padding=1, padding_mode="circular") + residual)


def test_a_plan_for_each_epilogue() -> None:
    x, w, b, residual = _tensors()
    epilogue, spec = Epilogue(activation="relu", residual=True), ConvSpec(padding=(1,) * 4)
    one, other = plan_fprop(x, w, b, spec, epilogue, residual), plan_fprop(x, w, b, spec, Epilogue(activation="relu"))
    assert one is not other and str(one.problem).endswith("residual relu") and str(other.problem).endswith("nchw relu")
    assert one.problem.bytes - other.problem.bytes == residual.nbytes
    assert one.problem.toward("wgrad") == other.problem.toward("wgrad")


def test_a_noted_call_has_its_residual() -> None:
    x, w, b, residual = _tensors()
    plan.clear_plans()
    found: list[plan.Noted] = []
    with plan.noting(found.append), torch.no_grad():
        y = _ours(x, w, b, residual)
    assert torch.allclose(y, _composed(x, w, b, residual)) and found[0].request.problem.epilogue.residual


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda r: 2.0, TypeError, "residual must be a Tensor or None, not float"),
        (lambda r: r[0], RuntimeError, r"as many dimensions as the result, but got \[8, 9, 7\]"),
        (lambda r: r[:, :1], RuntimeError, r"as the result, \[2, 8, 9, 7\] of torch.float64 on cpu, but got \[2, 1,"),
        (lambda r: r.float(), RuntimeError, "but got .* of torch.float32 on cpu: expand or convert it"),
        (lambda r: r.to("meta"), RuntimeError, "on meta"),
    ],
)
@pytest.mark.parametrize("composed", [False, True])
def test_what_is_no_residual(change: Callable, error: type[Exception], says: str, composed: bool) -> None:
    x, w, b, residual = _tensors()
    assert _ours(x, w, b, residual).shape == residual.shape  # a plan is there already
    extras = {"padding_mode": "circular"} if composed else {}
    with pytest.raises(error, match=says):
        haloconv.conv2d(x, w, b, padding=1, residual=change(residual), **extras)


def test_a_struct_has_a_residual_only_where_it_is_added() -> None:
    """Without one no argument of a launch has moved."""
    for kernel, entry, constant in (
        ("halo_sm90/conv", "halo_sm90", "AFFINE_AND_RESIDUAL"),
        ("halo_sm90/fixup", "halo_sm90_fixup", "AFFINE_AND_RESIDUAL"),
        ("halo_sm90/pointwise", "halo_sm90_pointwise", "AFFINE_AND_RESIDUAL"),
        ("halo_sm90/implicit_gemm", "halo_sm90_implicit_gemm", "AFFINE_AND_RESIDUAL"),
        ("halo_sm80/conv", "halo_sm80", "AFFINE_AND_RESIDUAL"),
        ("reduce/partials", "sum_partials", "HAS_RESIDUAL"),
    ):
        without, added = (params_of(kernel_source(kernel, entry, {name: 1})) for name in ("ELEM", constant))
        names = [[each.name for each in fields if each.is_pointer] for fields in (without, added)]
        assert names[1] == [*names[0], "residual"] and len(added) > len(without)
