"""Configs of halo_sm90: what a request is offered is what is bound, and nothing is searched for a second time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from haloconv.families import FAMILIES
from haloconv.families.base import MOST_CONFIGS, Config
from haloconv.families.halo_sm90.conv import conv
from haloconv.families.halo_sm90.conv.form import form_of
from haloconv.families.halo_sm90.conv.launches import conv_source
from haloconv.families.halo_sm90.pointwise import implicit_gemm
from haloconv.jit.params import params_of
from haloconv.problem import Problem, Request, dense_request
from tools.fingerprint import recording

CPU = torch.device("cpu")
FAMILY = FAMILIES["halo_sm90"]
LAYER = Problem("fprop", 2, 32, 16, 20, 40, 3, 3, padding=(1, 1, 1, 1), dtype=torch.float16)


def configs_of(request: Request) -> list[Config]:
    with recording():
        return FAMILY.configs(request)


def of_conv(request: Request) -> list[Config]:
    """Those of conv among them."""
    return [config for config in configs_of(request) if config.kernel == conv.KERNEL]


def tape_of(request: Request, config: Config) -> list:
    """Every launch of a bound config."""
    problem = request.problem
    gathered, last = (problem.x_shape, (None,)) if problem.direction == "fprop" else (problem.y_shape, ())
    operands = [torch.zeros(shape, dtype=problem.dtype) for shape in (gathered, problem.w_shape)]
    with recording() as device:
        device.watch(FAMILY.bind(request, config))(*operands, *last)
    return device.tape


@pytest.mark.parametrize("layer", [LAYER, replace(LAYER.toward("dgrad"), stride=(2, 2))], ids=str)
def test_the_config_that_is_given_is_bound(layer: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tilings are not looked up by its key, and not derived again."""
    request = dense_request(layer, CPU)
    first, second = configs_of(request)[:2]
    assert first.key != second.key
    tapes = [tape_of(request, each) for each in (first, second)]
    assert tapes[0] != tapes[1]
    monkeypatch.setattr(conv, "best_tilings", None)
    renamed = replace(second, key=first.key)
    assert [tape_of(request, each) for each in (first, second, renamed)] == [*tapes, tapes[1]]


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_configs_are_few_and_differ(direction: str, layout: str) -> None:
    request = dense_request(replace(LAYER.toward(direction), layout=layout), CPU)
    keys = [config.key for config in of_conv(request)]
    assert len(set(keys)) == len(keys) == MOST_CONFIGS
    assert {config.kernel for config in configs_of(request)[:MOST_CONFIGS]} == {conv.KERNEL, implicit_gemm.KERNEL}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_of_a_strided_gradient_one_config_reads_a_copy_of_dy(dtype: torch.dtype) -> None:
    """Where its channels are whole groups of 16 bytes that are no neighbours; and it takes a launch more."""
    precision = "tf32" if dtype == torch.float32 else "ieee"
    layer = Problem("dgrad", 8, 64, 16, 16, 128, 4, 4, (2, 2), (1, 1, 1, 1), dtype=dtype, precision=precision)
    configs = configs_of(dense_request(layer, CPU))
    assert sorted(config.derived.shape.copied for config in configs[:2]) == [False, True]
    launches = {config.derived.shape.copied: len(tape_of(dense_request(layer, CPU), config)) for config in configs[:2]}
    assert launches[True] == launches[False] + 1
    for other in (replace(layer, layout="nhwc"), replace(layer, k=127), replace(layer, stride=(1, 1))):
        assert not any(config.derived.shape.copied for config in of_conv(dense_request(other, CPU)))


def test_a_gradient_that_no_tap_reaches_is_zeros_that_torch_writes() -> None:
    layer = Problem("dgrad", 1, 8, 1, 1, 8, 1, 1, stride=(2, 2), padding=(1, 1, 1, 1), dtype=torch.float16)
    request = dense_request(layer, CPU)
    with recording():
        assert FAMILY.why_not(layer, CPU) is None
    form = form_of(layer)
    assert (form.has_gaps, form.classes, form.vertical.places) == (True, 1, 1)
    assert all(tape_of(request, config) for config in configs_of(request))


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
@pytest.mark.parametrize(("stride", "fits"), [(4, True), (8, False)])
def test_a_filter_whose_lines_fit_no_memory_is_refused(precision: str, stride: int, fits: bool) -> None:
    """Two terms of each value take twice the room of one: then half as many channels are staged at a time."""
    extents = {"n": 2, "c": 64, "h": 64, "w": 200, "k": 33, "r": 15, "s": 3, "stride": (stride, stride)}
    layer = Problem("fprop", **extents, padding=(3, 4, 8, 5), layout="nhwc", precision=precision)
    with recording():
        assert (FAMILY.why_not(layer, CPU) is None) == fits
    assert bool(configs_of(dense_request(layer, CPU))) == fits


def test_a_struct_is_parsed_once_for_all_specialisations() -> None:
    sources = [conv_source(LAYER, config.derived) for config in of_conv(dense_request(LAYER, CPU))]
    assert len({source.digest for source in sources}) == len(sources) > 1
    assert len({id(params_of(source)) for source in sources}) == 1
