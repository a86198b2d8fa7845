"""The sources of halo_sm90: image sizes choose among few, and ptxas leaves their wgmma asynchronous."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from haloconv.families.halo_sm90.wgrad import wgrad
from haloconv.jit import KernelSource
from haloconv.jit import compile as compiler
from haloconv.problem import Problem, dense_request
from tests.tilings import all_sources, chosen_sources

MOST = 75  # five ways to stage (aligned rows; 1, 2, 4 and 8 planes end to end), by fifteen tile shapes and rings
SERIALIZED = "wgmma.mma_async instructions are serialized"
_WAIT = "accumulate);\n        next_stage(self);"
REPRESENTATIVE = {  # layout, width of the image, dtype, and constants of the source; "loads" has a stride
    "planes": ("nchw", 62, torch.float16, {"X_BOXES": 1, "X_JOINED": 4, "RUN": 64, "RUNS": 2, "SHARED_TILE": 1}),
    "transposed": ("nchw", 64, torch.float32, {"X_BOXES": 1, "RUN": 128, "RUNS": 2, "FLAT": 0, "SHARED_TILE": 0}),
    "boxes": ("nhwc", 64, torch.float16, {"X_BOXES": 1, "RUN": 256, "FLAT": 0, "SHARED_TILE": 1}),
    "loads": ("nchw", 63, torch.float16, {"X_BOXES": 0, "RUN": 64, "RUNS": 1, "FLAT": 1, "SHARED_TILE": 0}),
    "terms": ("nchw", 64, torch.float32, {"X_BOXES": 1, "RUN": 128, "RUNS": 1, "CHUNK_BYTES": 64, "OPERAND_TERMS": 2}),
}


def _sources(problem: Problem, every: bool = False) -> list[KernelSource]:
    return (all_sources if every else chosen_sources)(dense_request(problem, torch.device("cpu")))


@pytest.mark.parametrize("filters", [64, 128])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_many_image_sizes_need_few_kernels(direction: str, layout: str, filters: int) -> None:
    rng, digests = random.Random(layout), set()
    for _ in range(200):
        n, h, w = rng.randint(1, 9), rng.randint(5, 160), rng.randint(5, 160)
        problem = Problem(
            direction, n, filters // 2, h, w, filters, 3, 3, padding=(1, 1, 1, 1), dtype=torch.float16, layout=layout
        )
        digests |= {source.digest for source in _sources(problem)}
    assert 1 < len(digests) <= MOST


def _representative(layout: str, width: int, dtype: torch.dtype, constants: dict[str, int]) -> KernelSource:
    """The first source of a layer of 128 filters that has these constants. Wide strips need wide images."""
    width += 192 if constants["RUN"] > 64 else 0
    several = constants.get("OPERAND_TERMS") == 2
    precision = "tf32x3" if several else "tf32" if dtype == torch.float32 else "ieee"
    extents = {"n": 2, "c": 64, "h": 9, "w": width, "k": 128, "r": 3, "s": 3, "padding": (1, 1, 1, 1)}
    extents["stride"] = (1, 1) if constants["X_BOXES"] else (2, 2)
    problem = Problem("fprop", **extents, dtype=dtype, layout=layout, precision=precision)
    return next(one for one in _sources(problem, True) if constants.items() <= dict(one.constants).items())


def log_of(source: KernelSource, monkeypatch: pytest.MonkeyPatch) -> str:
    """What NVRTC and ptxas say about the source."""
    logs, parse = [], compiler.parse_resources
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "parse_resources", lambda log, entry: logs.append(log) or parse(log, entry))
        compiler.compile_source(source, "sm_90a")
    return logs[0]


@pytest.mark.of_kernel("halo_sm90/conv")
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_wgmma_is_not_serialized(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(_representative(*REPRESENTATIVE[name]), monkeypatch)
    assert "Compiling entry function 'halo_sm90'" in log and SERIALIZED not in log


@pytest.mark.of_kernel("halo_sm90/wgrad")
@pytest.mark.parametrize(("width", "channels", "loads"), [(64, 64, 0), (63, 64, 0), (63, 63, 1), (60, 63, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_wgmma_of_weight_gradients_is_not_serialized(
    dtype: torch.dtype, width: int, channels: int, loads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision, height = "tf32" if dtype == torch.float32 else "ieee", 63
    layer = (8, channels, height, width, channels, 3, 3)
    problem = Problem("wgrad", *layer, padding=(1, 1, 1, 1), dtype=dtype, precision=precision)
    source = next(wgrad.sources(dense_request(problem, torch.device("cpu"))))
    constants, whole = dict(source.constants), dtype == torch.float32 and loads == 4
    assert constants["X_LOADS"] == (0 if whole else loads)
    assert (constants["X_PLANES"] > 0) == (width == 63 and loads == 0)
    log = log_of(source, monkeypatch)
    assert "Compiling entry function 'halo_sm90_wgrad'" in log and SERIALIZED not in log


def test_serialized_wgmma_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An access of the sums while they are under way makes ptxas say what the test above looks for."""
    source = _representative(*REPRESENTATIVE["loads"])
    assert source.code.count(_WAIT) == 1
    touched = replace(source, code=source.code.replace(_WAIT, _WAIT + " sums[0][0] += 1;"))
    assert SERIALIZED in log_of(touched, monkeypatch)
