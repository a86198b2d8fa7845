"""Exported files on a GPU: built and checked by themselves, in processes that cannot import haloconv."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.utils.cpp_extension import is_ninja_available

from haloconv.export.export import export
from tests import oracle
from tests.exported import load_text

ROOT = Path(__file__).resolve().parents[2]
SMALLER = {  # problem files, and what is written there in the place of what
    "examples/problems/a_5x9_dilated.py": ("8, 32, 512, 512", "2, 32, 130, 200"),
    "examples/problems/b_5x9.py": ("8, 32, 512, 512", "1, 32, 512, 512"),
    "examples/problems/c_3x3.py": ("8, 64, 512, 1024", "1, 64, 512, 1024"),
    "tests/problems/depthwise_7x7.py": ("", ""),
    "tests/problems/half_channels_last.py": ("", ""),
    "tests/problems/stem_and_grouped.py": ("", ""),
}
NAMES = [Path(path).stem for path in SMALLER]
BUILD_S = 300
CHECK = (
    "import runpy, sys; sys.modules['haloconv'] = None; sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)

pytestmark = pytest.mark.skipif(
    shutil.which("nvcc") is None or not is_ninja_available(), reason="exported files are built with nvcc and ninja"
)


class Checked(NamedTuple):
    """An exported file, and what its own check said."""

    path: Path
    code: int
    output: str


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checked]:
    """Every problem exported, built and checked, side by side."""
    folder = tmp_path_factory.mktemp("exported")
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = os.pathsep.join(
        path for path in sys.path if path.endswith(("site-packages", "dist-packages"))
    )
    running = {}
    for path, (old, new) in SMALLER.items():
        problem = folder / Path(path).name
        text = (ROOT / path).read_text("utf-8")
        assert old in text
        problem.write_text(text.replace(old, new) if old else text, encoding="utf-8")
        output = folder / f"{problem.stem}_new.py"
        output.write_text(export(problem), encoding="utf-8")
        command = [sys.executable, "-c", CHECK, output.name, problem.name]
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        running[problem.stem] = (output, process)
    done = {}
    for name, (output, process) in running.items():
        said, _ = process.communicate(timeout=BUILD_S)
        done[name] = Checked(output, process.returncode, said)
    return done


@pytest.fixture(scope="module")
def depthwise(checked: dict[str, Checked]) -> types.ModuleType:
    """The file with the depthwise layer in this process; what was built before is loaded."""
    return load_text(checked["depthwise_7x7"].path.read_text("utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_a_file_s_own_check_passes(name: str, checked: dict[str, Checked]) -> None:
    """Output and every gradient against float64; and both times are there."""
    _, code, output = checked[name]
    print(output)
    assert code == 0, output
    assert "WRONG" not in output and output.count(": ok") >= 3
    assert len(re.findall(r"^forward.* \d+\.\d+ ms, PyTorch's \d+\.\d+ ms", output, re.MULTILINE)) == 2


def layer_and_input(module: types.ModuleType) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return module.ModelNew().cuda().depthwise, torch.randn(16, 96, 56, 56, device="cuda")


def test_work_is_queued_on_the_current_stream(depthwise: types.ModuleType) -> None:
    """The input is written late on a side stream; a launch on any other stream would read the old values."""
    layer, x = layer_and_input(depthwise)
    want = layer(x).detach()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        torch.cuda._sleep(40_000_000)
        late.copy_(x)
        got = layer(late)
    side.synchronize()
    assert oracle.same_bits(got, want)


def test_any_storage_of_the_input_and_of_the_gradient(depthwise: types.ModuleType) -> None:
    layer, x = layer_and_input(depthwise)
    want = layer(x)
    shifted = torch.empty(x.numel() + 1, device="cuda")[1:].view_as(x).copy_(x)
    for stored in (shifted, x.to(memory_format=torch.channels_last)):
        assert oracle.same_bits(layer(stored), want)
    (wide,) = torch.autograd.grad(want.sum(), layer.get_parameter("weight"))  # of a gradient whose strides are zero
    (dense,) = torch.autograd.grad(layer(x), layer.get_parameter("weight"), torch.ones_like(want))
    assert oracle.same_bits(wide, dense)


def test_a_graph_replays_the_launches(depthwise: types.ModuleType) -> None:
    layer, x = layer_and_input(depthwise)
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert oracle.same_bits(y, layer(x))


def test_a_second_derivative_is_refused(depthwise: types.ModuleType) -> None:
    layer, x = layer_and_input(depthwise)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), layer.get_parameter("weight"), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
