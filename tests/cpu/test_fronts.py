"""The functions beside conv2d: PyTorch's values, gradients of any order, layouts, autocast, transforms and errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import hessian, jacfwd, vjp, vmap

import haloconv
from haloconv import arguments, plan, three_dimensions
from haloconv.emulator import emulated_device
from tests import samples
from tests.fronts import CALLS, FRONTS, OF_NO_KERNEL, POSED, call_id, front, operands

NAMES = [each.name for each in FRONTS]
SOME = [call for call in POSED if call[2].get("groups") == 2 or call == POSED[0] or call[1] == (2, 2, 2)]


@contextmanager
def counted() -> Iterator[list[str]]:
    """The directions that ran inside, each time that one was planned anew."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        real = plan.bind
        patch.setattr(plan, "bind", lambda one, spec: found.append(one.problem.direction) or real(one, spec))
        plan.clear_plans()
        yield found
        plan.clear_plans()


def words(error: BaseException) -> str:
    """Without places and names of arguments, which PyTorch tells as they were given."""
    return re.sub(r" \(position \d+\)| - got .*", "", str(error), flags=re.DOTALL)


def results(function: Callable, tensors: list[torch.Tensor], options: dict) -> list[torch.Tensor]:
    """Output and gradients."""
    leaves = [each.detach().clone().requires_grad_() for each in tensors]
    y = function(*leaves, **options)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(y.dtype)
    return [y, *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("call", CALLS, ids=call_id)
def test_values_and_gradients_on_pytorch_are_pytorchs(call: tuple, bias: bool) -> None:
    one, tensors = front(call[0]), operands(call, torch.float32, bias=bias)
    ours, theirs = results(one.ours, tensors, call[2]), results(one.theirs, tensors, call[2])
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("batch", [2, 1, 0])
@pytest.mark.parametrize("call", CALLS, ids=call_id)
def test_our_own_autograd(call: tuple, batch: int, own_autograd: None, as_on_a_gpu: None) -> None:
    """In float64 on PyTorch's convolution, through our functions of autograd."""
    one, tensors = front(call[0]), operands(call, batch=batch)
    for got, want in zip(results(one.ours, tensors, call[2]), results(one.theirs, tensors, call[2]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert got.stride() == want.stride() or not got.numel()


@pytest.mark.parametrize("call", SOME, ids=call_id)
def test_gradients_of_gradients(call: tuple, own_autograd: None, as_on_a_gpu: None) -> None:
    one, tensors = front(call[0]), [each[:2, :2] if each.dim() > 1 else each for each in operands(call)]
    groups = call[2].get("groups", 1)
    if groups > 1 or one.transposed:
        tensors = operands(call, batch=1)
    leaves = [each.clone().requires_grad_() for each in tensors[:2]]

    def run(*given: torch.Tensor) -> torch.Tensor:
        return one.ours(*given, **call[2])

    assert gradcheck(run, leaves, fast_mode=True) and gradgradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("which", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("call", [call for call in POSED if len(call[1]) == 2], ids=call_id)
def test_channels_last(call: tuple, which: tuple[bool, bool], own_autograd: None) -> None:
    """Output and dx lie in memory as PyTorch's do, dw as w does."""
    one, (*tensors, b) = front(call[0]), operands(call)
    given = [
        each.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        for each, last in zip(tensors, which, strict=True)
    ]
    found = [results(each, [*given, b], call[2]) for each in (one.ours, one.theirs)]
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    (y, dx, dw, _), (want_y, want_dx, *_) = found
    assert (y.stride(), dx.stride(), dw.stride()) == (want_y.stride(), want_dx.stride(), given[1].stride())


@pytest.mark.parametrize("call", POSED, ids=call_id)
def test_unbatched(call: tuple, as_on_a_gpu: None) -> None:
    one, (x, *others) = front(call[0]), operands(call)
    torch.testing.assert_close(one.ours(x[1], *others, **call[2]), one.theirs(x[1], *others, **call[2]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("call", POSED[:3], ids=call_id)
def test_autocast(call: tuple, dtype: torch.dtype) -> None:
    one, tensors = front(call[0]), operands(call, torch.float32)
    with torch.autocast("cpu", dtype):
        got, want = one.ours(*tensors, **call[2]), one.theirs(*tensors, **call[2])
        wide = one.ours(*(each.double() for each in tensors), **call[2])
    assert got.dtype == want.dtype == dtype and torch.equal(got, want) and wide.dtype == torch.float64


@pytest.mark.parametrize("call", POSED, ids=call_id)
def test_function_transforms(call: tuple, as_on_a_gpu: None) -> None:
    """Batches over inputs, filters and both; tangents; gradients inside transforms."""
    one, (x, w, b), others = front(call[0]), operands(call, batch=1), operands(call, batch=1)
    xs, ws = torch.stack([x, x.flip(-1)]), torch.stack([w, w.flip(0)])

    def both(function: Callable) -> tuple[torch.Tensor, ...]:
        def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return function(x, w, b, **call[2])

        def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return run(x, w).pow(3).sum()

        out = [vmap(run, (0, None))(xs, w), vmap(run, (None, 0))(x, ws), vmap(run)(xs, ws)]
        y, back = vjp(loss, x, w)
        out += [y, *back(torch.ones_like(y)), torch.func.jvp(loss, (x, w), (others[0], others[1]))[1]]
        small = x[..., :1, :1] if one.transposed and x.dim() > 3 else x[..., :3] if x.dim() == 3 else x
        return (*out, *jacfwd(torch.func.grad(loss, (0, 1)))(small, w)[:1])

    for got, want in zip(both(one.ours), both(one.theirs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("call", POSED, ids=call_id)
def test_small_integers_on_our_kernels_are_exact(call: tuple, emulator_cache: None) -> None:
    """Output and gradients, bit by bit, run by kernels of ours in each direction."""
    one = front(call[0])
    tensors = [(each * 4).round().clamp(-8, 8) for each in operands(call)]

    def rounded(function: Callable, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [each.to(dtype).requires_grad_() for each in tensors]
        y = function(*leaves, **call[2])
        dy = (torch.arange(y.numel()) % 7 - 3).to(dtype).reshape(y.shape)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    with emulated_device(), counted() as planned:
        got = rounded(one.ours, torch.float32)
    for ours, theirs in zip(got, rounded(one.theirs, torch.float64), strict=True):
        assert torch.equal(ours.double(), theirs)
    assert sorted(planned) == ([] if call in OF_NO_KERNEL else ["dgrad", "fprop", "wgrad"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.int64], ids=str)
def test_op_samples_are_pytorchs(name: str, dtype: torch.dtype) -> None:
    one, count = front(name), 0
    for sample in samples.calls_of(name, "cpu", dtype):
        want = one.theirs(sample.x, sample.w, sample.b, **sample.options)
        got = one.ours(sample.x, sample.w, sample.b, **sample.options)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert got.stride() == want.stride()
        count += 1
    assert count >= 5


@pytest.mark.parametrize("name", NAMES)
def test_op_samples_through_our_autograd(name: str, own_autograd: None, as_on_a_gpu: None) -> None:
    one = front(name)
    for x, w, b, options in samples.calls_of(name, "cpu", torch.float64):
        tensors = [each for each in (x, w, b) if each is not None]
        for got, want in zip(results(one.ours, tensors, options), results(one.theirs, tensors, options), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["auto", "direct"])
def test_errors_are_pytorchs(name: str, family: str) -> None:
    """Each call is refused with the same class and the same words."""
    one, call = front(name), next(each for each in CALLS if each[0] == name)
    x, w, b = operands(call, torch.float32)
    wrong = [
        ((x, w[:-1] if one.transposed else w[:, :-1], b), {}),
        ((x, w, b[:-1]), {}),
        ((x, w, b.double()), {}),
        ((x.double(), w, b), {}),
        ((x[0, 0], w, b), {}),
        ((x, w[0], b), {}),
        ((x, w, b), {"stride": 0}),
        ((x, w, b), {"stride": "2"}),
        ((x, w, b), {"dilation": -1}),
        ((x, w, b), {"padding": -1}),
        ((x, w, b), {"groups": 3}),
        ((x, w, b), {"groups": 0}),
        ((x, w, b), {"stride": (1, 1, 1, 1)}),
        ((x[:, :, :0], w, b), {}),
        ((x[..., :1], w, b), {"padding": 9} if one.transposed else {"dilation": 40}),
        ((None, w, b), {}),
        ((x, w, 3), {}),
    ]
    wrong += [((x, w, b), {"output_padding": 1}), ((x, w, b), {"output_padding": -1})] if one.transposed else []
    for tensors, options in wrong:
        with pytest.raises((RuntimeError, TypeError, ValueError)) as theirs:
            one.theirs(*tensors, **options)
        with pytest.raises(theirs.type) as ours:
            one.ours(*tensors, **options, family=family)
        assert words(ours.value) == words(theirs.value)


@pytest.mark.parametrize("name", NAMES)
def test_functional_mode_serves_them(name: str) -> None:
    """PyTorch's function is ours inside, unless the padding has sides that PyTorch refuses."""
    one, call = front(name), next(each for each in CALLS if each[0] == name)
    tensors = operands(call, torch.float32)
    want = one.theirs(*tensors, **call[2])
    with haloconv.functional_mode():
        assert torch.equal(one.theirs(*tensors, **call[2]), want)
    with haloconv.functional_mode(strict=True):
        with pytest.raises(RuntimeError, match=r"\(strict=True\)"):
            one.theirs(*tensors, **call[2])
        with pytest.raises(RuntimeError, match="expected padding to be a single integer value"):
            one.theirs(*tensors, padding=(1, 1, 1, 1))


@pytest.mark.parametrize("name", NAMES)
def test_strict_and_named_families_tell_what_pytorch_runs(name: str) -> None:
    one, call = front(name), next(each for each in CALLS if each[0] == name)
    tensors = operands(call, torch.float32)
    with pytest.raises(RuntimeError, match=r"PyTorch's own .* \(strict=True\)"):
        one.ours(*tensors, strict=True)
    with pytest.warns(RuntimeWarning, match="PyTorch's own"):
        plan.clear_plans()
        plan._warned.clear(), arguments._warned.clear()
        one.ours(*tensors, family="direct")
    with pytest.raises(ValueError, match="family"):
        one.ours(*tensors, family="nobody")


def test_a_transposed_convolution_that_mirrors_none_is_left_to_pytorch() -> None:
    call = CALLS[-1]
    tensors = operands(call, torch.float32)
    with counted() as planned:
        haloconv.conv_transpose2d(*tensors, **call[2])
    assert planned == []
    with pytest.raises(RuntimeError, match="output_padding is not below the stride"):
        haloconv.conv_transpose2d(*tensors, **call[2], strict=True)


def test_hessian_of_a_transposed_convolution() -> None:
    x, w = torch.randn(1, 2, 2, 2, dtype=torch.float64), torch.randn(2, 1, 2, 2, dtype=torch.float64)
    for function, want in ((haloconv.conv_transpose2d, torch.nn.functional.conv_transpose2d),):
        got = hessian(lambda x, f=function: f(x, w, stride=2).pow(3).sum())(x)
        torch.testing.assert_close(got, hessian(lambda x, f=want: f(x, w, stride=2).pow(3).sum())(x))


LAST = {"memory_format": torch.channels_last_3d}
ROUTES: tuple[tuple[str, tuple[int, ...], tuple[int, ...], dict, dict], ...] = (
    ("product", (2, 4, 2, 4, 4), (6, 4, 2, 4, 4), {"stride": (2, 4, 4)}, {}),
    ("product", (2, 4, 2, 4, 4), (6, 4, 2, 4, 4), {"stride": (2, 4, 4)}, LAST),
    ("product", (2, 4, 5, 8, 6), (6, 4, 2, 4, 3), {"stride": (2, 4, 3)}, {}),
    ("product", (2, 4, 5, 9, 6), (6, 4, 2, 4, 3), {"stride": (2, 4, 3)}, LAST),
    ("product", (2, 4, 3, 8, 6), (6, 4, 1, 4, 3), {"stride": (1, 4, 3), "dilation": (3, 1, 1)}, {}),
    ("frames", (2, 4, 3, 8, 6), (6, 4, 1, 4, 3), {"stride": (1, 4, 3)}, LAST),
    ("frames", (2, 4, 3, 5, 6), (6, 4, 1, 3, 3), {"padding": (0, 1, 2)}, LAST),
    ("frames", (1, 4, 5, 5, 6), (6, 2, 1, 3, 3), {"stride": (2, 1, 1), "groups": 2}, LAST),
    ("frames", (2, 4, 1, 5, 6), (6, 4, 1, 3, 2), {"dilation": (1, 2, 1)}, {}),
    ("time", (2, 4, 6, 5, 4), (6, 4, 3, 1, 1), {"padding": (2, 0, 0), "stride": (2, 1, 1)}, {}),
    ("time", (2, 4, 6, 5, 4), (8, 1, 3, 1, 1), {"dilation": (2, 1, 1), "groups": 4}, LAST),
    ("time", (2, 4, 3, 5, 4), (6, 4, 1, 1, 1), {}, {}),
    ("frames do not lie", (2, 4, 3, 5, 6), (6, 4, 1, 3, 3), {}, {}),
    ("frames do not lie", (2, 4, 5, 5, 6), (6, 4, 1, 3, 3), {"stride": (2, 1, 1)}, LAST),
    ("a filter spans", (2, 4, 3, 5, 6), (6, 4, 2, 3, 3), {}, LAST),
    ("a filter spans", (2, 4, 4, 6, 6), (6, 2, 2, 3, 3), {"stride": (2, 3, 3), "groups": 2}, {}),
    ("a filter spans", (2, 4, 4, 6, 6), (6, 4, 2, 3, 3), {"stride": (2, 3, 3), "padding": 1}, {}),
)


@pytest.mark.parametrize("case", ROUTES, ids=call_id)
@pytest.mark.usefixtures("own_autograd", "as_on_a_gpu")
def test_volumes_take_their_route(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients are PyTorch's in float64, in the order of memory of x; which route was taken is checked."""
    route, x_shape, w_shape, options, order = case
    gen = torch.Generator().manual_seed(5)
    x, w, b = (torch.randn(shape, generator=gen, dtype=torch.float64) for shape in (x_shape, w_shape, w_shape[:1]))
    taken, real = [], three_dimensions.route_of
    monkeypatch.setattr(three_dimensions, "route_of", lambda *args: taken.append(real(*args)) or taken[-1])
    for bias in ([b], []):
        tensors = [x.contiguous(**order), w.contiguous(**order) if order else w, *bias]
        found = [results(each, tensors, options) for each in (haloconv.conv3d, torch.nn.functional.conv3d)]
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        ran_by_torch = " " in route  # whose float64 on a CPU is in another order
        assert ran_by_torch or found[0][0].is_contiguous(**order)
    assert all(each.startswith(route) for each in taken) and len(taken) == 2


@pytest.mark.parametrize("setting", ["ieee", "tf32"])
def test_products_are_never_less_precise_than_asked(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU full products are asked for, while PyTorch's matrix products may be of TF32."""
    monkeypatch.setattr(three_dimensions, "_get_fp32_precision", lambda *_: setting)
    cuda = torch.device("cuda")
    found = {one: three_dimensions._why_not_here(torch.float32, cuda, one)[1] for one in ("ieee", "tf32")}
    assert found["tf32"] is None and (found["ieee"] is None) == (setting == "ieee")
    assert three_dimensions._why_not_here(torch.bfloat16, cuda, "ieee")[1] is None
