"""Autograd, the registered operators, torch.compile, torch.export and autocast on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import haloconv
from haloconv import plan
from haloconv.bench.layer import LAYOUTS
from haloconv.families import aten
from haloconv.gradients import gradients
from haloconv.layout import strides_of
from haloconv.problem import ConvSpec
from tests.cases import BY_NAME, Case, case, case_id, make, pick

LAYERS = (
    case("plain", "border", (2, 2, 4, 5), (3, 3, 3), padding=1),
    case("uneven", "stride, dilation, four sides", (1, 2, 7, 6), (2, 2, 3), stride=(2, 1), padding=(1, 0, 2, 1),
         dilation=(2, 1)),
    case("depthwise", "groups with multiplier", (1, 2, 3, 3), (4, 2, 2), groups=2, padding=(1, 0, 0, 1)),
    case("nhwc", "channels_last", (2, 2, 4, 4), (2, 3, 3), padding=1, storage="channels_last"),
    case("no_bias", "no bias", (2, 2, 4, 4), (2, 3, 3), bias=False),
    case("unread_rest", "rows that no output reads have zero gradient", (1, 2, 6, 8), (2, 3, 3), stride=(2, 4)),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def call(one: Case, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    s = one.spec
    return haloconv.conv2d(x, w, b, s.stride, s.padding, s.dilation, s.groups)


def leaves(one: Case, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    t = make(one, dtype)
    return [v.detach().requires_grad_() for v in (t.x, t.w, t.b) if v is not None]


@pytest.mark.parametrize("one", LAYERS, ids=case_id)
def test_gradcheck(one: Case, own_autograd: None) -> None:
    assert torch.autograd.gradcheck(lambda *a: call(one, *a), leaves(one))


@pytest.mark.parametrize("one", LAYERS, ids=case_id)
def test_gradgradcheck(one: Case, own_autograd: None) -> None:
    assert torch.autograd.gradgradcheck(lambda *a: call(one, *a), leaves(one))


@pytest.mark.parametrize("through", ["x", "w", "b"])
def test_gradient_penalty_is_torchs(through: str, own_autograd: None) -> None:
    """A loss on a gradient, as WGAN-GP uses it: second derivatives by way of every operand."""
    (one,) = pick("border_3x3")
    results = []
    for conv in (haloconv.conv2d, torch.nn.functional.conv2d):
        x, w, b = leaves(one)
        y = torch.tanh(conv(x, w, b, 1, 1))
        (gradient,) = torch.autograd.grad(y.square().sum(), {"x": x, "w": w, "b": b}[through], create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), (x, w, b)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("needed", ["x", "w", "b", "xw", "wb", "xb", "xwb"])
def test_only_needed_gradients_are_computed(needed: str, own_autograd: None, monkeypatch: pytest.MonkeyPatch) -> None:
    one = LAYERS[0]
    ran: list[str] = []

    def counted(name: str, inner: Callable) -> Callable:
        def call_and_note(*args: object, **kwargs: object) -> torch.Tensor:
            ran.append(name)
            return inner(*args, **kwargs)

        return call_and_note

    for name in ("plan_dgrad", "plan_wgrad", "plan_bgrad"):
        monkeypatch.setattr(plan, name, counted(name, getattr(plan, name)))
    x, w, b = leaves(one)
    for letter, leaf in zip("xwb", (x, w, b), strict=True):
        leaf.requires_grad_(letter in needed)
    call(one, x, w, b).sum().backward()
    names = {"x": "plan_dgrad", "w": "plan_wgrad", "b": "plan_bgrad"}
    assert sorted(ran) == sorted(names[letter] for letter in needed)
    for letter, leaf in zip("xwb", (x, w, b), strict=True):
        assert (leaf.grad is not None) == (letter in needed)


@pytest.mark.parametrize("one", LAYERS, ids=case_id)
def test_two_gradients_of_pytorch_are_one_call(one: Case, own_autograd: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[list[bool]] = []
    inner = aten._backward

    def note(*arguments: object) -> tuple:
        wanted.append(arguments[-1])
        return inner(*arguments)

    monkeypatch.setattr(aten, "_backward", note)
    x, w, *b = leaves(one)
    y = call(one, x, w, *b)
    dy = torch.randn_like(y)
    both = torch.autograd.grad(y, (x, w), dy)
    apart = [[True, False, False], [False, True, False]]
    assert wanted == [[True, True, False]] if aten.is_symmetric(one.problem()) else apart
    dx = plan.dgrad(dy, w.detach(), tuple(x.shape), plan.layout_of(x), one.spec)
    dw = plan.wgrad(dy, x.detach(), tuple(w.shape), plan.layout_of(w), one.spec)
    for together, alone in zip(both, (dx, dw), strict=True):
        torch.testing.assert_close(together, alone)
        assert together.stride() == alone.stride()


def test_backward_keeps_only_what_it_needs(own_autograd: None) -> None:
    x, w, b = leaves(LAYERS[0])
    kept: list[int] = []

    def note(v: torch.Tensor) -> torch.Tensor:
        kept.append(v.data_ptr())
        return v

    with torch.autograd.graph.saved_tensors_hooks(note, lambda v: v):
        call(LAYERS[0], x, w.detach(), b)
        assert kept == [w.data_ptr()]
        kept.clear()
        call(LAYERS[0], x.detach(), w, b)
        assert kept == [x.data_ptr()]
        kept.clear()
        call(LAYERS[0], x.detach(), w.detach(), b)
        assert kept == []
        with torch.no_grad():
            assert not call(LAYERS[0], x, w, b).requires_grad
        assert kept == []


def test_a_changed_input_is_noticed(own_autograd: None) -> None:
    x, w, b = leaves(LAYERS[0])
    y = call(LAYERS[0], x, w, b)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_of_strided_and_expanded_dy(own_autograd: None) -> None:
    """sum() sends an expanded gradient back, a transpose a strided one."""
    (one,) = pick("border_3x3")
    for loss in (
        torch.sum,
        lambda y: (y.transpose(2, 3) * torch.arange(y.shape[2])).sum(),
        lambda y: y[..., ::2].sum(),
    ):
        results = []
        for conv in (haloconv.conv2d, torch.nn.functional.conv2d):
            x, w, b = leaves(one)
            results.append(torch.autograd.grad(loss(conv(x, w, b, 1, 1)), (x, w, b)))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)


# Registered operators -----------------------------------------------------------------------------------------------


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes every operator of ours that reaches the dispatcher, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func.namespace == "haloconv":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def recorded_calls(one: Case) -> list[tuple]:
    with Recorder() as recorder:
        call(one, *leaves(one, torch.float32)).sum().backward()
    return recorder.calls


@pytest.mark.parametrize("one", LAYERS, ids=case_id)
def test_opcheck_of_every_registered_operator(one: Case) -> None:
    """The calls that one forward and backward make, put through torch.library's own checks."""
    calls = recorded_calls(one)
    names = {func.name().removeprefix("haloconv::").split(".")[0] for func, _, _ in calls}
    assert names == {"fprop", "dgrad", "wgrad"} | ({"bgrad"} if one.bias else set())
    for func, args, kwargs in calls:
        detached = [v.detach().contiguous() if isinstance(v, torch.Tensor) else v for v in args]
        detached = [v.requires_grad_() if isinstance(v, torch.Tensor) else v for v in detached]
        torch.library.opcheck(func, detached, kwargs)


def test_eager_calls_bypass_the_dispatcher(own_autograd: None) -> None:
    """The short path: an ordinary eager call never enters the registered operator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(LAYERS[0], *leaves(LAYERS[0])).sum().backward()
    entered = [event.key for event in profile.key_averages() if event.key.startswith("haloconv::")]
    assert entered == []


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        haloconv.Conv2d(3, 8, (3, 5), stride=(1, 2), padding=(1, 2)),
        torch.nn.ReLU(),
        haloconv.Conv2d(8, 6, 3, padding="same", groups=2, bias=False),
    )


@pytest.mark.parametrize("one", LAYERS, ids=case_id)
def test_compile_fullgraph(one: Case) -> None:
    compiled = torch.compile(lambda *a: call(one, *a), fullgraph=True, backend="aot_eager")
    ours, theirs = leaves(one), leaves(one)
    y, want = compiled(*ours), call(one, *theirs)
    dy = make(one, torch.float64).dy
    torch.testing.assert_close(y, want)
    assert y.stride() == want.stride()
    for a, b in zip(torch.autograd.grad(y, ours, dy), torch.autograd.grad(want, theirs, dy), strict=True):
        torch.testing.assert_close(a, b)


def test_compile_module_with_dynamic_shapes() -> None:
    model = net()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((2, 3, 9, 10), (3, 3, 12, 17), (1, 3, 7, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), model(x))


def test_compile_unbatched_and_padding_modes() -> None:
    for mode in ("reflect", "replicate", "circular"):
        model = haloconv.Conv2d(3, 4, 3, padding=(1, 2), padding_mode=mode)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        x = torch.randn(3, 8, 9)
        torch.testing.assert_close(compiled(x), model(x))


def test_export() -> None:
    model, x = net().eval(), torch.randn(2, 3, 9, 10)
    program = torch.export.export(model, (x,))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert sum("haloconv" in target for target in targets) == 2
    torch.testing.assert_close(program.module()(x), model(x))


def test_export_with_a_dynamic_image() -> None:
    model, x = net().eval(), torch.randn(2, 3, 9, 10)
    dynamic = {0: torch.export.Dim("n", min=1, max=64), 2: torch.export.Dim("h", min=4, max=512)}
    program = torch.export.export(model, (x,), dynamic_shapes=({**dynamic},))
    other = torch.randn(5, 3, 21, 10)
    torch.testing.assert_close(program.module()(other), model(other))


@pytest.mark.parametrize("name", ["border_3x3", "four_sides", "channels_last", "depthwise_multiplier", "empty_batch"])
def test_fake_tensors_have_the_real_shapes_and_strides(name: str) -> None:
    one = BY_NAME[name]
    t = make(one, torch.float32)
    real = call(one, t.x, t.w, t.b)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = call(one, *(None if v is None else mode.from_tensor(v) for v in (t.x, t.w, t.b)))
    assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)
    assert fake.stride() == real.stride()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_autocast_is_torchs(compiled: bool, grad: bool) -> None:
    torch.manual_seed(0)
    ours = haloconv.Conv2d(3, 5, 3, padding=1)
    theirs = torch.nn.Conv2d(3, 5, 3, padding=1)
    theirs.load_state_dict(ours.state_dict())
    runner = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    x = torch.randn(2, 3, 8, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(grad):
        y, want = runner(x), theirs(x)
    assert y.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(y, want)
    if grad:
        y.float().square().sum().backward()
        want.float().square().sum().backward()
        assert ours.weight.grad.dtype == torch.float32
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=2e-2, atol=2e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert ours(x).dtype == torch.float32


def test_per_sample_gradients_fail_or_are_right() -> None:
    """torch.func goes through the registered operator; vmap may be refused, a wrong number may not come out."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 6, 7, dtype=torch.float64), torch.randn(4, 3, 3, 3, dtype=torch.float64)
    try:
        got = torch.func.grad(lambda w: haloconv.conv2d(x, w, padding=1).square().sum())(w)
    except (RuntimeError, NotImplementedError):
        return
    want = torch.func.grad(lambda w: torch.nn.functional.conv2d(x, w, padding=1).square().sum())(w)
    torch.testing.assert_close(got, want)


def test_training_stays_next_to_torchs(own_autograd: None) -> None:
    models = []
    for cls in (haloconv.Conv2d, torch.nn.Conv2d):
        torch.manual_seed(0)
        models.append(torch.nn.Sequential(cls(3, 8, 3, padding=1), torch.nn.Tanh(), cls(8, 2, 3, stride=2)).double())
    x, y = torch.randn(4, 3, 9, 9, dtype=torch.float64), torch.randn(4, 2, 4, 4, dtype=torch.float64)
    losses = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("shape, groups", [((6, 4, 1, 1), 1), ((4, 1, 3, 3), 4), ((1, 4, 3, 3), 1)], ids=str)
def test_gradients_have_all_strides_of_their_filter(
    shape: tuple[int, ...], groups: int, order: torch.memory_format, own_autograd: None
) -> None:
    """Also in dimensions of size 1, where strides mean nothing: DistributedDataParallel compares them.

    The input's gradient is stored like the input, unless the filter alone is channels_last.
    """
    w = torch.randn(shape).to(memory_format=order).requires_grad_()
    for x_order in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 4, 6, 6).to(memory_format=x_order).requires_grad_()
        dx, dw = torch.autograd.grad(haloconv.conv2d(x, w, groups=groups).sum(), [x, w])
        assert dw.stride() == w.stride()
        assert dx.stride() == x.stride() or x_order != order


@pytest.mark.parametrize("pixels", [1, 5])
@pytest.mark.parametrize("w_order", ["nchw", "nhwc"])
@pytest.mark.parametrize("x_order", ["nchw", "nhwc"])
def test_pytorch_is_given_tensors_of_one_order(
    x_order: str, w_order: str, pixels: int, own_autograd: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It orders dy as x, and then all as the layer: where both are one order already, nothing is copied twice."""
    handed: list[tuple[torch.Tensor, ...]] = []
    inner = aten._backward

    def note(problem: object, *tensors: object) -> tuple:
        handed.append(tensors[:3])
        return inner(problem, *tensors)

    monkeypatch.setattr(aten, "_backward", note)
    x = torch.randn(2, 6, pixels, pixels).contiguous(memory_format=LAYOUTS[x_order])
    w = torch.randn(4, 6, 1, 1).as_strided((4, 6, 1, 1), strides_of((4, 6, 1, 1), w_order))
    layout, spec = plan.result_layout(x, w), ConvSpec()
    dy = torch.randn(2, 4, pixels, pixels).contiguous(memory_format=LAYOUTS[layout])
    plan.dgrad(dy, w, tuple(x.shape), layout, spec)
    plan.wgrad(dy, x, tuple(w.shape), plan.layout_of(w), spec)
    gradients(plan.plan_fprop(x, w, None, spec), dy, x, w, (True, True, False))
    for of_dy, of_x, _ in handed:
        assert plan.layout_of(of_dy) == plan.layout_of(of_x) or pixels == 1
    assert plan.layout_of(handed[0][0]) == plan.layout_of(handed[0][1]), "for dx nothing is copied, of one pixel either"
