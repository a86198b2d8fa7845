"""``haloconv bench --family depthwise/march``: one kernel of a family is timed on all that it takes, and no other."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from haloconv.bench.one_kernel import check_asked, chosen_kernels, only
from haloconv.bench.suite import Case
from haloconv.bench.trial import UNTIMED
from haloconv.cli.bench import suite as bench_suite
from haloconv.emulator import emulated_device
from haloconv.families import FAMILIES
from haloconv.problem import DIRECTIONS, TensorForm, dense_request

CPU = torch.device("cpu")
DEPTHWISE = Case("depthwise", (1, 4, 6, 56), 4, (3, 3), padding=(1, 1), groups=4)
CUT = Case("cut", (1, 4, 6, 56), 4, (3, 3), padding=(1, 1), groups=4, padding_mode="circular")
DENSE = Case("dense", (1, 8, 6, 8), 8, (3, 3))


def test_only_that_kernel_of_the_family_is_left() -> None:
    """With its own configs: in those of the family, of which there are three at most, it need not be."""
    whole, request = FAMILIES["depthwise"], dense_request(DEPTHWISE.problem("fprop", "fp32", "nchw"), CPU)
    with emulated_device(arch="sm_90a"):
        assert whole.configs(request)[0].kernel != "depthwise/march"
        with only("depthwise/march") as family:
            left = FAMILIES[family]
            assert family == "depthwise" and {each.kernel for each in left.configs(request)} == {"depthwise/march"}
            assert {source.kernel for source in left.sources()} == {"depthwise/march"}
            assert left.why_not(request.problem, CPU) is None
            assert left.why_not(request.problem.toward("wgrad"), CPU) == "this is for fprop and dgrad"
            assert left.why_not(DENSE.problem("fprop", "fp32", "nchw"), CPU) == whole.why_not(
                DENSE.problem("fprop", "fp32", "nchw"), CPU
            )
        assert FAMILIES["depthwise"] is whole
        with pytest.raises(ValueError, match="at the end"), only("depthwise/march"):
            raise ValueError("at the end")
        assert FAMILIES["depthwise"] is whole
        with only("depthwise") as family:
            assert family == "depthwise" and FAMILIES["depthwise"] is whole


def test_tensors_of_forms_that_it_does_not_take_are_an_error() -> None:
    with emulated_device(arch="sm_90a"), only("depthwise/tile_sm90"):
        problem = DEPTHWISE.problem("fprop", "fp32", "nchw")
        request = dense_request(problem, CPU)
        assert FAMILIES["depthwise"].configs(request)
        odd = TensorForm(request.first.strides, False)
        with pytest.raises(RuntimeError, match="depthwise/tile_sm90 does not take these tensors: "):
            FAMILIES["depthwise"].configs(type(request)(problem, odd, request.second, "nchw", CPU))


def test_names() -> None:
    for name in ("auto", "aten", "depthwise", *chosen_kernels()):
        check_asked(name)
    with pytest.raises(ValueError, match="family must be one of"):
        check_asked("depth/march")
    with pytest.raises(ValueError, match="depthwise has no kernel depthwise/marsh; it has depthwise/band, "):
        check_asked("depthwise/marsh")
    with pytest.raises(ValueError, match="aten has no kernel aten/any; it has none that can be named"):
        check_asked("aten/any")


@pytest.mark.usefixtures("emulator_cache")
def test_rows_are_of_that_kernel_and_the_rest_is_told_and_left(tmp_path: Path) -> None:
    out = Console(width=200, file=io.StringIO())
    directions = ("fprop", "wgrad", "step")
    pieces = [bench_suite.Piece(each, "fp32", "nchw", "depthwise/march", directions) for each in (DEPTHWISE, DENSE)]
    pieces.append(bench_suite.Piece(CUT, "fp32", "nchw", "depthwise/march", DIRECTIONS[:1]))
    with emulated_device(arch="sm_90a"):
        assert bench_suite.bench_suite(bench_suite.Order(pieces, UNTIMED), CPU, tmp_path, out)
    (row,) = (json.loads(line) for line in (tmp_path / "latest.jsonl").read_text("utf-8").splitlines())
    assert (row["case"], row["direction"], row["family"]) == ("depthwise", "fprop", "depthwise")
    assert (row["kernel"], row["reason"]) == ("depthwise/march", "kernel asked for") and row["passed"]
    said = " ".join(out.file.getvalue().split())  # type: ignore[attr-defined]
    assert "depthwise wgrad fp32 nchw: depthwise/march does not take it: this is for fprop and dgrad" in said
    assert "depthwise step fp32 nchw: depthwise/march is one kernel, and this runs several" in said
    assert "dense fprop fp32 nchw: depthwise/march does not take it: a group has 8 channels" in said
    assert "cut fprop fp32 nchw: depthwise/march is one kernel, and this runs several" in said
