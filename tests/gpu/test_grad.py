"""Autograd on the GPU: first and second derivatives, and only the gradients that are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import haloconv
from haloconv import plan
from tests import oracle
from tests.cases import Case, case, case_id, make, pick
from tests.families import HALO_SM90, Subject, each_dtype, name_of

LAYERS = (
    case("plain", "3x3 with border", (2, 2, 4, 5), (3, 3, 3), padding=1),
    case("uneven", "stride, dilation and four sides", (1, 2, 7, 6), (2, 2, 3), stride=(2, 1), padding=(1, 0, 2, 1),
         dilation=(2, 1)),
    case("depthwise", "groups with multiplier", (2, 2, 4, 4), (4, 2, 2), groups=2, padding=1),
    case("nhwc", "channels_last", (2, 2, 4, 4), (2, 3, 3), padding=1, storage="channels_last"),
)  # fmt: skip


def call(one: Case, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    s = one.spec
    return haloconv.conv2d(x, w, b, s.stride, s.padding, s.dilation, s.groups, family="direct", strict=True)


@pytest.mark.parametrize("one", LAYERS, ids=case_id)
def test_gradcheck_and_gradgradcheck(one: Case) -> None:
    t = make(one, torch.float64, "cuda")
    leaves = tuple(v.detach().requires_grad_() for v in (t.x, t.w, t.b))
    assert torch.autograd.gradcheck(lambda *a: call(one, *a), leaves, fast_mode=False)
    assert torch.autograd.gradgradcheck(lambda *a: call(one, *a), leaves, fast_mode=False)


@pytest.mark.parametrize("needed", ["x", "w", "b", "xw", "wb", "xb", "xwb"])
def test_only_needed_gradients_are_computed(needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = (layer for layer in LAYERS if layer.name == "plain")
    t = make(one, torch.float32, "cuda")
    ran: list[str] = []

    def counted(name: str, inner: Callable) -> Callable:
        def call_and_note(*args: object, **kwargs: object) -> torch.Tensor:
            ran.append(name)
            return inner(*args, **kwargs)

        return call_and_note

    for name in ("plan_dgrad", "plan_wgrad", "plan_bgrad"):
        monkeypatch.setattr(plan, name, counted(name, getattr(plan, name)))
    x, w, b = (v.detach().requires_grad_(name in needed) for name, v in zip("xwb", (t.x, t.w, t.b), strict=True))
    call(one, x, w, b).backward(t.dy)
    names = {"x": "plan_dgrad", "w": "plan_wgrad", "b": "plan_bgrad"}
    assert sorted(ran) == sorted(names[letter] for letter in needed)
    for letter, leaf in zip("xwb", (x, w, b), strict=True):
        assert (leaf.grad is not None) == (letter in needed)


def test_backward_keeps_only_what_it_needs() -> None:
    """With a frozen filter nothing needs x, so that x is not kept alive for backward."""
    (one,) = (layer for layer in LAYERS if layer.name == "plain")
    t = make(one, torch.float32, "cuda")
    kept: list[int] = []

    def note(v: torch.Tensor) -> torch.Tensor:
        kept.append(v.data_ptr())
        return v

    with torch.autograd.graph.saved_tensors_hooks(note, lambda v: v):
        call(one, t.x.requires_grad_(), t.w, t.b)
        assert kept == [t.w.data_ptr()]
        kept.clear()
        call(one, t.x.detach(), t.w.requires_grad_(), t.b)
    assert kept == [t.x.data_ptr()]


@pytest.mark.parametrize(("subject", "dtype"), each_dtype((HALO_SM90,)), ids=name_of)
@pytest.mark.parametrize("one", pick("groups_2", "dilated_strided_coprime"), ids=case_id)
def test_all_gradients_where_a_family_lacks_one(one: Case, subject: Subject, dtype: torch.dtype) -> None:
    """Output and dx come from the tensor cores; dw goes to PyTorch at the same precision, and is said to."""
    forced, t = subject.on(one, dtype, strict=False), make(one, dtype, "cuda")
    s, leaves = forced.spec, [v.detach().requires_grad_() for v in (t.x, t.w, t.b)]
    plan.clear_plans()
    plan._warned.clear()
    x, w, b = leaves
    own: dict[str, Any] = {"precision": s.precision, "family": subject.name}
    y = haloconv.conv2d(x, w, b, s.stride, s.padding, s.dilation, s.groups, **own)
    with pytest.warns(RuntimeWarning, match="takes groups of at least 8"):
        grads = torch.autograd.grad(y, leaves, t.dy)
    for result, value in zip(oracle.RESULTS, (y.detach(), *grads), strict=True):
        oracle.check(result, value, t, s)
