"""Depthwise kernels apply epilogues themselves: every activation, and the bias of a transposed layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from haloconv import emulator, plan
from haloconv.emulator import emulated_device
from haloconv.families import FAMILIES
from haloconv.families.depthwise import finish
from haloconv.jit import get_kernel
from haloconv.problem import ACTIVATIONS, Epilogue
from tests import oracle
from tests.activations import check_activation
from tests.cases import generator
from tests.emulated import BY_NAME, SM_COUNT
from tests.emulated_depthwise import OLDER, PLANES, SMALL, forced
from tests.exact import integers, make_exact
from tests.families import DEPTHWISE
from tests.fuzz.campaign import commit_seed
from tests.launches import launched
from tests.parts import sources_of_commit
from tests.sources import compile_all

pytestmark = [
    pytest.mark.skipif(emulator.available() is not None, reason=f"no emulator: {emulator.available()}"),
    pytest.mark.usefixtures("emulator_cache"),
]
SOME = ("silu", "gelu", "hardswish")
KERNELS = {  # a case, its dtype, what it is forced to, and activations
    "march": ("march_nhwc", torch.bfloat16, "", (None, *ACTIVATIONS)),
    "pairs": ("pairs_3x3", torch.float16, "", (None, *ACTIVATIONS)),
    "patch": ("patch_7x7", torch.bfloat16, "", SOME),
    "tile_sm90": ("patch_3x3", torch.float32, "", SOME),
    "band": ("band_5x5_multiplier", torch.float16, OLDER, SOME),
    "tile": ("band_5x5_multiplier", torch.float32, OLDER, SOME),
    "box": ("box_sides", torch.float32, SMALL, SOME),
    "lanes": ("lanes_sides", torch.float32, SMALL, SOME),
    "plane": ("plane_5x5", torch.float16, PLANES, SOME),
}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is followed by passes of PyTorch's."""
    seen: list[object] = []
    for name in ("followed", "biased"):
        monkeypatch.setattr(plan, name, lambda run, *rest: seen.append(run) or run)
    return seen


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_activation(kernel: str, passes: list[object]) -> None:
    """With a scale or without, with a residual or without, one after the other."""
    name, dtype, shape, activations = KERNELS[kernel]
    one = DEPTHWISE.on(BY_NAME[name], dtype)
    with emulated_device(sm_count=SM_COUNT), forced(shape):
        plan.clear_plans()
        for at, activation in enumerate(activations):
            ran = check_activation(one, dtype, "cpu", activation, at + (not activation))
            assert ran == f"depthwise/{kernel}" and not passes
    plan.clear_plans()


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_adds_the_bias_of_a_transposed_layer(kernel: str, passes: list[object]) -> None:
    name, dtype, shape, _ = KERNELS[kernel]
    one = DEPTHWISE.on(BY_NAME[name.replace("5x5_multiplier", "7x7")], dtype)
    t, layout = make_exact(one, dtype), oracle.layout_of(one.storage)
    b = integers((t.x.shape[1],), dtype, generator("transposed bias", "cpu"))
    with emulated_device(sm_count=SM_COUNT), forced(shape), launched() as names:
        plan.clear_plans()
        dx = plan.plan_dgrad(t.dy, t.w, tuple(t.x.shape), layout, one.spec, b).run(t.dy, t.w, b)
    plan.clear_plans()
    want = oracle.expected("dgrad", t, one.spec).value + b.double()[:, None, None]
    assert names == {f"depthwise/{kernel}"} and not passes and torch.equal(dx, want.to(dtype))


def test_a_residual_of_any_strides(passes: list[object]) -> None:
    """In the other order, expanded, and where it begins at an odd element: integers, to the bit."""
    gen, epilogue = generator("residual", "cpu"), Epilogue(activation="relu", residual=True)
    x, w = integers((2, 32, 9, 11), torch.float16, gen), integers((32, 1, 3, 3), torch.float16, gen)
    x = x.contiguous(memory_format=torch.channels_last)
    dense = integers((2, 32, 9, 11), torch.float16, gen).contiguous(memory_format=torch.channels_last)
    flat = dense.permute(0, 2, 3, 1).flatten()
    odd = torch.cat((flat[:1], flat))[1:].view(2, 9, 11, 32).permute(0, 3, 1, 2)
    sums = torch.nn.functional.conv2d(x.double(), w.double(), padding=1, groups=32)
    spec = DEPTHWISE.on(BY_NAME["pairs_3x3"], torch.float16).spec
    for shape in ("", OLDER):
        with emulated_device(sm_count=SM_COUNT), forced(shape):
            plan.clear_plans()
            for given in (dense, odd, dense.contiguous(), dense[:, :1].expand(dense.shape)):
                got = plan.plan_fprop(x, w, None, spec, epilogue, given).run(x, w, None, given)
                assert torch.equal(got, torch.relu(sums + given.double()).to(torch.float16))
    plan.clear_plans()
    assert not passes


def test_sources_without_an_epilogue_have_no_constants_of_one() -> None:
    """So that what they compile to depends on nothing that follows."""
    plain = BY_NAME["pairs_3x3"].problem()
    assert finish.constants(plain) == {}
    for has_residual, first in ((False, "AFFINE"), (True, "AFFINE_AND_RESIDUAL")):
        epilogue = Epilogue(True, "silu", has_residual)
        found = finish.constants(replace(plain, bias=False, epilogue=epilogue))
        assert found == {first: "hc::Affine::SCALE_AND_BIAS", "ACTIVATION": "hc::Activation::SILU"}
        assert finish.constants(replace(plain, bias=False, epilogue=epilogue._replace(compiled=True))) == found


def test_sources_with_an_epilogue_do_not_spill() -> None:
    """Those that CI compiles for Hopper: of kernels with a stamp a quarter, which the commit says."""
    sources = [each for each in FAMILIES["depthwise"].sources() if "ACTIVATION" in dict(each.constants)]
    assert {each.kernel for each in sources} == {f"depthwise/{kernel}" for kernel in KERNELS}
    drawn = sources_of_commit(sources, commit_seed())
    compile_all(drawn, "sm_90a")
    assert not [each.kernel for each in drawn if get_kernel(each, "sm_90a").spill_bytes]
