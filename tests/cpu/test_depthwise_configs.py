"""depthwise: which of its kernels offer a config for a layer, in which order, and what a config is called."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from haloconv.device import DeviceFacts
from haloconv.families import FAMILIES
from haloconv.families.base import MOST_CONFIGS
from haloconv.families.depthwise import family as family_module
from haloconv.families.depthwise import march, march_wgrad, patch_wgrad
from haloconv.jit import compile_source
from haloconv.problem import DIRECTIONS, Direction, Problem, Request, dense_request
from tests.sources import noted_sources

CPU = torch.device("cpu")
H200 = DeviceFacts("NVIDIA H200", "sm_90a", 132, (9, 0), 141 << 30, 227 << 10, "580")
A100 = DeviceFacts("NVIDIA A100", "sm_80", 108, (8, 0), 80 << 30, 163 << 10, "580")
T4 = DeviceFacts("Tesla T4", "sm_75", 40, (7, 5), 15 << 30, 64 << 10, "580")
LAYERS = [
    (dtype, layout, taps)
    for dtype in (torch.float32, torch.float16)
    for layout in ("nchw", "nhwc")
    for taps in (3, 5, 7)
]


def request_of(direction: Direction, dtype: torch.dtype, layout: str, taps: int) -> Request:
    problem = Problem(
        direction, n=32, c=96, h=56, w=56, k=96, r=taps, s=taps, padding=(taps // 2,) * 4, groups=96, dtype=dtype,
        layout=layout,
    )  # fmt: skip
    return dense_request(problem, CPU)


def names(direction: Direction, dtype: torch.dtype, layout: str, taps: int, facts: DeviceFacts = H200) -> list[str]:
    """The kernels of what is offered, in its order; ``march`` once."""
    with noted_sources(facts):
        configs = FAMILIES["depthwise"].configs(request_of(direction, dtype, layout, taps))
    return list(dict.fromkeys(config.kernel.removeprefix("depthwise/") for config in configs))


@pytest.mark.parametrize("facts", [H200, A100, T4], ids=lambda facts: facts.arch)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_is_offered_is_what_is_taken(direction: Direction, facts: DeviceFacts) -> None:
    """A kernel offers a config of its own name exactly if it gives no reason against it; the family's are theirs."""
    family, own = FAMILIES["depthwise"], march_wgrad if direction == "wgrad" else march
    with noted_sources(facts) as sources:
        for layer in LAYERS:
            request, offered = request_of(direction, *layer), []
            for twin in family_module._KERNELS.values():
                found = twin.configs(request)
                assert bool(found) == (twin.why_not(request) is None)
                assert all(config.kernel == twin.KERNEL and config.key for config in found)
                assert len(found) <= (MOST_CONFIGS if twin is own else 1)
                offered += found
            configs = family.configs(request)
            assert configs == offered[:MOST_CONFIGS] and len({config.key for config in configs}) == len(configs)
            for config in configs:
                sources.clear()
                family.bind(request, config)
                assert config.kernel in {source.kernel for source in sources.values()}


def test_special_kernels_come_before_the_march() -> None:
    assert names("fprop", torch.float32, "nhwc", 7) == ["lanes", "march"]
    assert names("fprop", torch.float32, "nchw", 7) == ["box", "tile", "march"]
    assert names("dgrad", torch.float16, "nchw", 7) == ["patch", "band", "march"]
    assert names("fprop", torch.float16, "nhwc", 7) == ["pairs", "march"]
    assert names("fprop", torch.float32, "nchw", 5) == ["tile_sm90", "tile", "march"]
    assert names("wgrad", torch.float16, "nchw", 5) == ["patch_wgrad", "band_wgrad", "march_wgrad"]
    assert names("wgrad", torch.float16, "nhwc", 5) == ["pairs_wgrad", "march_wgrad"]
    assert names("wgrad", torch.float32, "nchw", 5) == ["box_wgrad", "march_wgrad"]
    assert names("wgrad", torch.float32, "nhwc", 5) == ["lanes_wgrad", "march_wgrad"]


def test_other_devices_have_fewer() -> None:
    assert names("fprop", torch.float16, "nchw", 7, A100) == ["band", "march"]
    assert names("fprop", torch.float16, "nchw", 7, T4) == ["march"]


def test_a_key_says_the_parameters() -> None:
    with noted_sources(H200):
        configs = FAMILIES["depthwise"].configs(request_of("fprop", torch.float32, "nchw", 7))
    assert [str(config.key) for config in configs] == [
        "rows7 buffers2 min_blocks3 warps4",
        "rows7 buffers3 min_blocks3 warps4",
        "q2 c1 a3 m4",
    ]


@pytest.mark.parametrize("dilation", [1, 2, 3, 4])
def test_dilated_patches_do_not_spill(dilation: int) -> None:
    """The blocks of a multiprocessor leave the registers that a window needs: it is higher with dilated taps."""
    problem = request_of("wgrad", torch.bfloat16, "nchw", 3).problem
    request = dense_request(replace(problem, dilation=(dilation, dilation), padding=(dilation,) * 4), CPU)
    with noted_sources(H200):
        tilings = [config.derived[0] for config in patch_wgrad.configs(request)]
    sources = [patch_wgrad.source(request.problem, tiling) for tiling in tilings]
    assert sources and not any(compile_source(source, H200.arch).spill_bytes for source in sources)
