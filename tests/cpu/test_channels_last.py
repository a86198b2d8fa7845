"""Graphs that torch.compile(backend="haloconv") brings to channels_last: the same values, strides and gradients."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._subclasses import FakeTensorMode
from torch.nn import functional

from haloconv import backend as backends
from haloconv import env
from haloconv.choose.choice import Choice
from haloconv.device import DeviceFacts
from haloconv.fusion.group_norms import group_norm_by_channel
from haloconv.precision import Precision, convolution_precision
from haloconv.problem import Request
from tests.compiled import Decoder, Residual, Separable, image

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]
W, DEEP, SIX = image(6, 4, 3, 3), image(8, 6, 3, 3), image(6)
_library = torch.library.Library("haloconv_test_order", "FRAGMENT")
_library.define("twice(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("twice", lambda x: 2 * x.contiguous(), "CompositeExplicitAutograd")
torch.library.register_fake("haloconv_test_order::twice", lambda x: torch.empty(x.shape), lib=_library)


@pytest.fixture
def gaining(monkeypatch: pytest.MonkeyPatch) -> None:
    """All convolutions are ours and gain by channels_last; the operator then runs PyTorch's."""
    monkeypatch.setattr(backends, "choose_now", lambda request, family: Choice("direct", "chosen by the test"))
    monkeypatch.setattr(backends, "_gains_by_channels_last", lambda forward: True)


class Seen:
    """A backend that keeps what it was given, what became of it, and what was told."""

    def __init__(self, chooses_layout: bool = True) -> None:
        self.chooses_layout = chooses_layout
        self.before = self.after = ""
        self.told: list[backends.Convolution] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable:
        self.before = graph.code
        known = {node: node.meta.get("example_value") for node in graph.graph.nodes}
        self.told = backends.replace_convolutions(graph, self.chooses_layout)
        self.after = graph.code
        self.known_is_as_before = all(node.meta.get("example_value") is value for node, value in known.items())
        return lookup_backend("aot_eager")(graph, inputs)

    @property
    def layouts(self) -> set[str]:
        return {each.problem.layout for each in self.told if each.problem is not None}


def flat(y: object) -> list[torch.Tensor]:
    return [y] if isinstance(y, torch.Tensor) else [*y]


def compared(function: Callable, x: torch.Tensor, seen: Seen) -> None:
    """The compiled function has the values, strides and gradients of the function."""
    compiled = torch.compile(copy.deepcopy(function), backend=seen, fullgraph=True)
    wanted, found = (flat(each(x)) for each in (function, compiled))
    for want, got in zip(wanted, found, strict=True):
        assert (got.dtype, got.stride(), got.requires_grad) == (want.dtype, want.stride(), want.requires_grad)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    if x.requires_grad:
        gradients = [
            torch.autograd.grad(sum(each.float().square().sum() for each in results if each.requires_grad), x)[0]
            for results in (wanted, found)
        ]
        assert gradients[0].stride() == gradients[1].stride()
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def pooled(x: torch.Tensor) -> torch.Tensor:
    y = functional.interpolate(functional.max_pool2d(functional.conv2d(x, W, padding=1), 2), scale_factor=2)
    return functional.conv2d(functional.group_norm(torch.relu_(y), 2), DEEP).mean((2, 3))


def several(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = functional.conv2d(x, W)
    return y, torch.relu(functional.conv2d(y, DEEP)), x * 2, x.shape[0] + y.flatten(1)[:, ::2]


def under_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = functional.conv2d(x, W)
    with torch.no_grad():
        z = functional.conv2d(y.float(), DEEP)
    return y.sum() + z.sum()


def attention(x: torch.Tensor) -> torch.Tensor:
    y = functional.conv2d(x, W, padding=1)
    tokens = y.flatten(2).transpose(1, 2)
    seen = functional.scaled_dot_product_attention(tokens, tokens, tokens).transpose(1, 2).reshape(y.shape)
    return functional.conv2d(y + seen, DEEP)


@pytest.mark.usefixtures("gaining")
@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "function",
    [Residual().eval(), Residual(), Separable(), Decoder(), pooled, several, under_autocast, attention],
    ids=["residual", "residual in training", "separable", "decoder", "pooled", "several", "autocast", "attention"],
)
def test_convolutions_run_in_channels_last_and_nobody_outside_sees_it(function: Callable, gradients: bool) -> None:
    torch.manual_seed(0)
    seen = Seen()
    compared(function, image().requires_grad_(gradients), seen)
    assert seen.layouts == {"nhwc"} and all(each.replaced for each in seen.told)


@pytest.mark.usefixtures("gaining")
def test_images_are_copied_once_and_results_where_their_strides_differ() -> None:
    seen = Seen()
    compared(lambda x: functional.conv2d(torch.relu(functional.conv2d(x, W)), DEEP), image(), seen)
    assert seen.after.count(".contiguous(") == 2  # the image, and the result
    compared(lambda x: functional.conv2d(functional.conv2d(x, W), DEEP).sum(), image(), seen)
    assert seen.after.count(".contiguous(") == 1
    compared(several, image().to(memory_format=torch.channels_last), seen)
    assert ".contiguous(" not in seen.after


def written_behind_a_copy(x: torch.Tensor) -> torch.Tensor:
    """In channels_last ``contiguous`` copies nothing, so that what is written in place would be read."""
    y = functional.conv2d(x, W)
    copied = y.movedim(1, -1).contiguous()
    return copied.sum() + functional.hardswish(y, inplace=True).mean()


@pytest.mark.usefixtures("gaining")
def test_filters_of_few_channels_are_brought_along_and_their_gradients_lie_as_before() -> None:
    stem = nn.Conv2d(3, 8, 3)
    seen = Seen()
    compared(stem, image(2, 3, 8, 10).requires_grad_(), seen)
    assert seen.after.count(".contiguous(memory_format = torch.channels_last)") == 2
    y = torch.compile(stem, backend=Seen())(image(2, 3, 8, 10))
    assert torch.autograd.grad(y.sum(), stem.weight)[0].is_contiguous()


STAYS: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "a view of neighbours": (lambda x: functional.conv2d(x, W).view(2, -1), "an operation would fail: "),
    "strides": (lambda x: torch.as_strided(functional.conv2d(x, W), (2, 2), (3, 1)), "may ask for"),
    "an operator of others": (lambda x: torch.ops.haloconv_test_order.twice(functional.conv2d(x, W)), "may ask for"),
    "a result in an order of its own": (
        lambda x: functional.conv2d(x, W).transpose(2, 3),
        "lie in another order",
    ),
    "results that share memory": (
        lambda x: [y := functional.conv2d(x, W), y.detach()],
        "would lie in another order",
    ),
    "a copy that would be none": (written_behind_a_copy, "written in place would be read elsewhere"),
    "a function transform": (lambda x: torch.vmap(lambda y: functional.conv2d(y[None], W))(x).sum(), ""),
}


@pytest.mark.usefixtures("gaining")
@pytest.mark.parametrize("name", STAYS)
def test_these_graphs_stay_as_they_lie(name: str, caplog: pytest.LogCaptureFixture) -> None:
    function, reason = STAYS[name]
    seen = Seen()
    with caplog.at_level(logging.INFO, logger="haloconv.choice"):
        compared(function, image(), seen)
    assert seen.after.count(".contiguous(") == seen.before.count(".contiguous(") and seen.layouts <= {"nchw"}
    assert re.search(reason, caplog.text) and (not reason or "images stay as they lie" in caplog.text)


@pytest.mark.usefixtures("gaining")
def test_unknown_extents_stay_as_they_lie() -> None:
    seen = Seen()
    compiled = torch.compile(lambda x: functional.conv2d(x, W), backend=seen, dynamic=True)
    torch.testing.assert_close(compiled(image()), functional.conv2d(image(), W), rtol=1e-5, atol=1e-5)
    assert seen.layouts == {"nchw"}


@pytest.mark.usefixtures("gaining")
def test_inference_mode_where_tensors_may_have_no_versions() -> None:
    seen = Seen()
    with torch.inference_mode():
        compared(lambda x: torch.relu_(functional.conv2d(x, W)).mul_(2), image(), seen)
        assert seen.layouts == {"nhwc"}
        compared(written_behind_a_copy, image(), seen)
        assert seen.layouts == {"nchw"}


@pytest.mark.usefixtures("gaining")
def test_autocast_is_as_before_where_an_operation_would_fail() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            return functional.conv2d(x, W).view(2, -1)

    seen = Seen()
    compared(fails, image(), seen)
    assert seen.layouts == {"nchw"} and not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


@pytest.mark.usefixtures("gaining")
def test_a_graph_of_which_none_is_ours_is_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "choose_now", lambda request, family: Choice("aten", "chosen by the test"))
    seen = Seen()
    compared(Residual(), image(), seen)
    assert seen.before == seen.after and seen.known_is_as_before


@pytest.mark.usefixtures("gaining")
def test_a_user_may_keep_the_layout() -> None:
    seen = Seen(chooses_layout=False)
    compared(Residual(), image(), seen)
    assert seen.layouts == {"nchw"}


@pytest.mark.usefixtures("gaining")
def test_the_option_of_inductor_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(backends, "replace_convolutions", lambda graph, chooses, form: asked.append(chooses) or [])
    monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", lambda *_: lambda graph, inputs: graph.forward)
    for options in (None, {}, {"layout_optimization": True}, {"layout_optimization": False}):
        torch.compile(lambda x: functional.conv2d(x, W), backend="haloconv", options=options)(image())
        torch._dynamo.reset()
    assert asked == [True, True, True, False]


@pytest.mark.parametrize("dtype, capability, gains", [
    (torch.bfloat16, (9, 0), True), (torch.float16, (9, 0), True), (torch.float32, (9, 0), False),
    ("tf32", (9, 0), True), (torch.float64, (9, 0), False), (torch.bfloat16, (8, 0), False), ("tf32", (8, 0), False),
])  # fmt: skip
def test_what_gains(
    dtype: torch.dtype | str, capability: tuple[int, int], gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision: Precision = "tf32" if dtype == "tf32" else "ieee"
    dtype = torch.float32 if isinstance(dtype, str) else dtype
    facts = DeviceFacts("a GPU", "sm", 1, capability, 1, 1, "1")
    monkeypatch.setattr(backends, "has_facts", lambda device: True)
    monkeypatch.setattr(backends, "device_facts", lambda index: facts)
    found: list[Request] = []
    monkeypatch.setattr(backends, "choose_now", lambda request, family: found.append(request) or Choice("aten", ""))
    monkeypatch.setenv(env.TUNE, "off")
    seen = Seen()
    with convolution_precision(precision):
        compared(lambda x: functional.conv2d(x, W.to(dtype)).float().sum(), image().to(dtype), seen)
    assert [each.problem.layout for each in found] == (["nhwc", "nchw"] if gains else ["nchw"])


def by_channel(
    x: torch.Tensor, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return group_norm_by_channel(x, groups, weight, bias, eps, x.dtype)


@pytest.mark.parametrize("is_affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_by_channel_are_no_less_accurate_than_pytorchs(dtype: torch.dtype, is_affine: bool) -> None:
    """Far from 0, where the square of a mean is 10^6 times the variance."""
    x = (image(3, 6, 8, 5) + (4 if dtype == torch.bfloat16 else 1000)).to(memory_format=torch.channels_last).to(dtype)
    asked = [x, image(6).to(dtype), image(6).to(dtype) + 1] if is_affine else [x]
    gradient = image(3, 6, 8, 5, dtype=torch.float64)

    def values(norm: Callable, dtype: torch.dtype) -> list[torch.Tensor]:
        tensors = [each.detach().to(dtype).requires_grad_() for each in asked]
        y = norm(tensors[0], 3, *(tensors[1:] or (None, None)), 1e-5)
        assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)
        return [each.double() for each in (y, *torch.autograd.grad(y, tensors, gradient.to(dtype)))]

    truth = values(functional.group_norm, torch.float64)
    for want, theirs, ours in zip(truth, values(functional.group_norm, dtype), values(by_channel, dtype), strict=True):
        assert (ours - want).norm() <= 1.1 * (theirs - want).norm() + 1e-9 * want.norm()


@pytest.mark.usefixtures("gaining")
@pytest.mark.parametrize("chooses", [False, True])
def test_group_norms_are_reduced_by_channel_where_images_are_in_channels_last(chooses: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.group_norm(functional.conv2d(x, W), 2, eps=1e-3)
        return functional.conv2d(functional.group_norm(y, num_groups=3, weight=SIX, bias=None), DEEP)

    for memory_format in (torch.contiguous_format, torch.channels_last):
        seen = Seen(chooses)
        torch._dynamo.reset()
        compared(function, image().to(memory_format=memory_format), seen)
        assert seen.after.count("group_norm_by_channel(") == (2 if chooses else 0)


def test_group_norms_of_a_graph_without_a_convolution_of_ours_are_pytorchs() -> None:
    seen = Seen()
    compared(lambda x: functional.group_norm(functional.conv2d(x, W), 2), image(), seen)
    assert seen.before == seen.after


def test_results_of_one_channel_have_the_strides_that_the_compiler_was_told() -> None:
    """Else a convolution behind one would lie in another order than compiled code expects."""
    spec = ([1, 1], [0] * 4, [1, 1], 1, None, "auto", False)
    x = image(2, 4, 6, 7).to(memory_format=torch.channels_last)
    calls: tuple[tuple[Callable, tuple], ...] = (
        (torch.ops.haloconv.fprop, (x, image(1, 4, 1, 1), None)),
        (torch.ops.haloconv.dgrad, (x, image(4, 1, 1, 1), [2, 1, 6, 7], "nhwc")),
        (torch.ops.haloconv.wgrad, (x, image(2, 1, 6, 7), [4, 1, 1, 1], "nhwc")),
    )
    for operation, operands in calls:
        with FakeTensorMode() as mode:
            told = operation(*(mode.from_tensor(each) if torch.is_tensor(each) else each for each in operands), *spec)
        assert operation(*operands, *spec).stride() == told.stride()
