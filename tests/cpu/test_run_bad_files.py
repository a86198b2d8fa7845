"""``haloconv run`` on files that break, end the process, or leave nothing to compare: the others run, none is green."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import make_dataclass
from pathlib import Path

import pytest
import torch

from haloconv import gradients, plan
from haloconv.bench.networks import whole
from haloconv.bench.networks.whole import Contest, try_model
from haloconv.bench.trial import UNTIMED
from haloconv.bench.values import output_tensors
from haloconv.export.export import export
from haloconv.module import Conv2d
from haloconv.problem_file import ProblemFileError, load_problem_file, scaled_inputs
from tests.exported import load_text
from tests.verbs import run, words

pytestmark = pytest.mark.usefixtures("without_gpu")

PROBLEM = """
import sys
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(2, 3, 2, device={device})

    def forward(self, x, *others):
        {forward}

def get_inputs():
    return {inputs}

def get_init_inputs():
    return []
"""
GOOD = "return self.conv(x)"
IMAGE = "[torch.rand(1, 2, 17, 17)]"


def write(
    folder: Path, name: str, forward: str = GOOD, inputs: str = IMAGE, device: str = "None", end: str = ""
) -> Path:
    path = folder / f"{name}.py"
    path.write_text(PROBLEM.format(forward=forward, inputs=inputs, device=device) + end)
    return path


BROKEN: dict[str, tuple[dict[str, str], str]] = {
    "lookup": ({"forward": "return {}['key']"}, "Model's forward raised KeyError: 'key'"),
    "assertion": ({"forward": "assert False, 'never'"}, "Model's forward raised AssertionError: never"),
    "attribute": ({"forward": "return self.none(x)"}, "Model's forward raised AttributeError"),
    "exit_forward": ({"forward": "sys.exit(0)"}, "Model's forward called sys.exit(0)"),
    "generator": ({"forward": "raise GeneratorExit"}, "Model's forward raised GeneratorExit"),
    "skip_import": ({"end": "import pytest; raise pytest.skip.Exception"}, "importing it raised Skipped"),
    "panic_later": (
        {
            "forward": "y = self.conv(x)\n        y.requires_grad and y.register_hook(self.panic)\n        return y\n"
            "    def panic(self, dy):\n        raise BaseException('a panic in Rust')"
        },
        "Model's training step raised BaseException: a panic in Rust",
    ),
    "exit_import": ({"end": "sys.exit(0)"}, "importing it called sys.exit(0)"),
    "left_forward": ({"forward": "__import__('os')._exit(0)"}, "Model's forward called os._exit(0)"),
    "left_import": ({"end": "__import__('os')._exit(0)"}, "importing it called os._exit(0)"),
    "exit_inputs": ({"inputs": "sys.exit()"}, "get_inputs called sys.exit()"),
    "exit_later": (
        {"forward": "y = self.conv(x)\n        y.requires_grad and y.register_hook(sys.exit)\n        return y"},
        "Model's training step called sys.exit(",
    ),
    "meta_inputs": (
        {"inputs": "[torch.rand(1, 2, 9, 9, device='meta')]"},
        "get_inputs()[0] is on the meta device, which holds no numbers",
    ),
    "meta_model": ({"device": "'meta'"}, "Model has parameters or buffers on the meta device"),
    "nan_inputs": (
        {"inputs": "[torch.full((1, 2, 9, 9), float('nan'))]"},
        "every element of get_inputs()[0] is NaN, so nothing can be compared",
    ),
    "nan_outputs": ({"forward": "return self.conv(x) * float('nan')"}, "Model's forward returned no finite number"),
    "no_tensor": ({"forward": "return int(self.conv(x).sum())"}, "returned no floating-point tensor (int)"),
    "indices": ({"forward": "return self.conv(x).argmax(1)"}, "returned no floating-point tensor (Tensor)"),
    "empty": ({"forward": "return self.conv(x)[:0]"}, "Model's forward returned no finite number"),
}  # fmt: skip


def test_each_bad_file_gets_a_line_and_the_others_run(tmp_path: Path) -> None:
    """One run of them all: some end in their import, some in the training step behind rows that passed."""
    folder = tmp_path / "problems"
    folder.mkdir()
    for name, (changes, _) in BROKEN.items():
        write(folder, name, **changes)
    write(folder, "z_good", "return self.conv(self.first(x))")
    result = run(folder, "--json", tmp_path / "rows.json")
    assert result.exit_code == 2, result.output
    content = json.loads((tmp_path / "rows.json").read_text())
    outcomes = {file["name"]: file for file in content["files"]}
    assert not content["passed"] and outcomes.pop("z_good")["verdict"] == "passed"
    assert set(outcomes) == set(BROKEN)
    for name, (_, sentence) in BROKEN.items():
        assert outcomes[name]["verdict"] == "unusable" and sentence in outcomes[name]["reason"], outcomes[name]
        assert " ".join(sentence.split()) in words(result)
    assert f"1 of 1 files correct, {len(BROKEN)} unusable." in words(result)


def test_a_failed_row_outranks_what_broke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What haloconv's side raises is a check that failed, in the layer and in the model, and no fault of the file."""
    write(tmp_path, "broken", "sys.exit(0)")
    write(tmp_path, "good")

    def refuse(*arguments: object) -> torch.Tensor:
        raise LookupError("no kernel")

    monkeypatch.setattr(plan, "fprop", refuse)
    monkeypatch.setattr(Conv2d, "_conv_forward", refuse)
    result = run(tmp_path)
    assert result.exit_code == 1, result.output
    sentence = "FAILED good (model) forward: with haloconv's convolutions Model's forward raised LookupError"
    assert sentence in words(result)


def test_a_kernel_that_raises_fails_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> torch.Tensor:
        raise LookupError("no kernel")

    monkeypatch.setattr(plan, "wgrad", refuse)
    monkeypatch.setattr(gradients, "aten_gradients", refuse)
    result = run(write(tmp_path, "good"))
    assert result.exit_code == 1, result.output
    assert "FAILED good wgrad: raised LookupError: no kernel" in words(result)
    assert "FAILED good (model) step: haloconv's model raised LookupError: no kernel" in words(result)
    assert "4 of 6 rows passed" in words(result)


def test_what_a_file_sets_for_the_process_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dtype, device, graph and folder: the file behind it, named relative to the folder, runs as if it ran alone."""
    monkeypatch.chdir(tmp_path)
    settings = "import os; os.chdir('/'); torch.set_default_dtype(torch.float64); torch.set_grad_enabled(False)\n"
    write(Path(), "a_sets", end=settings + "torch.set_default_device('meta'); sys.exit(0)")
    write(Path(), "b_good")
    try:
        result = run("a_sets.py", "b_good.py")
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
    assert result.exit_code == 2 and "6 of 6 rows passed" in result.output and "fp32" in result.output, result.output
    assert "1 of 1 files correct, 1 unusable." in words(result)


STREAMS = {
    "a_closes": "sys.stdout.close(); sys.stderr.close(); 1 / 0",
    "b_closes_more": "sys.stdout.buffer.close(); sys.stderr.detach()",
    "c_has_none": "sys.stdout = sys.stderr = None",
    "d_wraps": "import io; sys.stdout = io.TextIOWrapper(sys.stdout.buffer)",
    "e_prints": "print('its own words')",
}


def test_a_file_that_closes_the_output_closes_it_for_itself(tmp_path: Path) -> None:
    """Nothing is lost of the table and of what is told on stderr; in a process, for a test runner's output is none."""
    for name, end in STREAMS.items():
        write(tmp_path, name, end=end)
    command = [sys.executable, "-m", "haloconv", "run", str(tmp_path), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "raised ZeroDivisionError" in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "24 of 24 rows passed" in done.stdout, done.stdout + done.stderr
    assert "4 of 4 files correct, 1 unusable." in done.stdout
    words_of_last, verdict = map(done.stdout.index, ("its own words", "24 of 24 rows"))
    assert words_of_last < done.stdout.index("\ne_prints  ") < verdict, "in the order in which they were printed"


# Models that change, detach or lack something ------------------------------------------------------------------------


class Changing(torch.nn.Module):
    """Adds to its input in place, as an activation with ``inplace=True`` in front does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.mul_(3.0))


def test_inputs_changed_in_place_stay_as_they_were() -> None:
    model, x = Changing(), torch.randn(1, 2, 3, 3)
    before = x.clone()
    contest = Contest(model, model, (x,), "ieee", "fp32", norm_limit=1e-6)
    rows, _ = try_model(contest, "changing", UNTIMED)
    for call in (whole._forward(model, contest), whole._step(model, contest)):
        call(), call()
    assert [row.passed for row in rows] == [True, True] and torch.equal(x, before)


def test_a_detached_output_has_no_training_step(tmp_path: Path) -> None:
    """Its row would say that gradients were right, and none was compared."""
    result = run(write(tmp_path, "detached", "return self.conv(x).detach()"))
    assert result.exit_code == 0 and "(model) step" not in result.output, result.output
    assert "No output of the model has a gradient, so its training step was not checked." in words(result)


@pytest.mark.parametrize("name", ["output", "gradient of w"])
def test_what_one_model_alone_gives_is_a_fault(name: str) -> None:
    contest = Contest(torch.nn.Identity(), torch.nn.Identity(), (torch.zeros(1),), "ieee", "fp32", 1e-6)
    whole_values = {"output": torch.ones(3), "gradient of w": torch.ones(2)}
    less = {key: value for key, value in whole_values.items() if key != name}
    shorter = {key: value[: len(value) - (key == name)] for key, value in whole_values.items()}
    for ours in (less, shorter):
        complaint = whole._judge(ours, whole_values, whole_values, contest).complaint
        assert complaint is not None and complaint.startswith(f"{name}: haloconv's model gives ")
    assert whole._judge(whole_values, whole_values, whole_values, contest).complaint is None


def test_a_reference_without_a_finite_element_judges_nothing() -> None:
    contest = Contest(torch.nn.Identity(), torch.nn.Identity(), (torch.zeros(1),), "ieee", "fp32", 1e-6)
    nothing, some = {"output": torch.full((3,), float("nan"))}, {"output": torch.ones(3)}
    assert "nothing was compared" in (whole._judge(nothing, nothing, nothing, contest).complaint or "")
    errors = whole._judge(
        {**nothing, "b": torch.ones(2)}, {**nothing, "b": torch.ones(2)}, {**nothing, "b": torch.ones(2)}, contest
    )
    assert errors.complaint is None and errors.unchecked == "output"
    assert whole._judge(some, nothing, nothing, contest).complaint is not None


def test_a_layer_whose_weight_is_nan_fails(tmp_path: Path) -> None:
    """The model's output is finite, because it masks what the layer gives; the layer's own rows compared nothing."""
    forward = "self.conv.weight.data.fill_(float('nan'))\n        return torch.nan_to_num(self.conv(x)) + x.mean()"
    result = run(write(tmp_path, "masked", forward))
    assert result.exit_code == 1, result.output
    assert "FAILED masked fprop: nothing was compared, for no element of the float64 reference is finite" in words(
        result
    )


# Arguments that are no tensors ---------------------------------------------------------------------------------------

NESTED = "[torch.rand(2, 2, 30, 30), 7, 0.5, None, torch.tensor(3), torch.tensor(0.25), {'a': [torch.rand(2, 3), 'b']}]"
USES_ALL = (
    "n, scale, none, step, weight, more = others\n"
    "        assert none is None and more['a'][1] == 'b' and isinstance(n, int)\n"
    "        return {'y': self.conv(self.first(x)) * (scale + n + step) * weight + more['a'][0][:, :, None, None]}"
)  # fmt: skip


def test_numbers_none_and_nested_arguments(tmp_path: Path) -> None:
    """As diffusion models take them: an image, a timestep, and a dict of conditions."""
    path = write(tmp_path, "nested", USES_ALL, NESTED)
    result = run(path, "--html", tmp_path / "page.html")
    assert result.exit_code == 0 and "6 of 6 rows passed" in result.output, result.output
    assert "inputs cut from (2, 2, 30, 30) to (1, 2, 17, 17), (2, 3) to (1, 3)." in words(result)
    file = load_problem_file(path)
    values = whole.values_of(file.model(), scaled_inputs(file.model(), file.inputs()).inputs, 0)
    assert {f"gradient of input {i}" for i in (0, 2, 3)} <= set(values) and "gradient of input 1" not in values


def test_outputs_are_found_in_dataclasses_and_complex_ones_are_pairs() -> None:
    output = make_dataclass("Output", ["sample", "parts"])(torch.ones(2), {"z": torch.ones(3, dtype=torch.complex64)})
    assert {name: tuple(x.shape) for name, x in output_tensors(output).items()} == {
        "output 0": (2,),
        "output 1": (3, 2),
    }


def test_a_batch_that_cannot_be_cut_stays(tmp_path: Path) -> None:
    """Batch normalisation of single pixels needs two images."""
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 9), torch.nn.BatchNorm2d(3))
    assert scaled_inputs(model, [torch.rand(4, 2, 9, 9)]).inputs[0].shape == (4, 2, 9, 9)


def test_export_is_not_ended_by_the_file(tmp_path: Path) -> None:
    for changes in ({"forward": "sys.exit(0)"}, {"end": "sys.exit(0)"}):
        with pytest.raises(ProblemFileError, match=r"called sys.exit\(0\)"):
            export(write(tmp_path, "exits", **changes))
    with pytest.raises(ProblemFileError, match="raised GeneratorExit"):
        export(write(tmp_path, "generator", "raise GeneratorExit"))
    with pytest.raises(ProblemFileError, match=r"called os._exit\(0\)"):
        export(write(tmp_path, "leaves", "__import__('os')._exit(0)"))


def test_children_of_a_file_still_end() -> None:
    command = (
        "import os\nfrom haloconv.problem_file import no_silent_end\nwith no_silent_end():\n    child = os.fork()\n"
    )
    command += "    if not child: os._exit(7)\nprint(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "7"


def test_an_exported_file_checks_itself_with_such_arguments(tmp_path: Path) -> None:
    """Its check runs on a GPU; here its functions get PyTorch's model, which changes its input in place."""
    forward = USES_ALL.replace("return {'y': ", "return ").replace("[:, :, None, None]}", "[:, :, None, None]")
    path = write(tmp_path, "nested", forward.replace("* weight", "* int(step) * weight"), NESTED)
    exported = load_text(export(path, arch="sm_90a", precision="ieee"))
    model, inputs = load_problem_file(path).model(), exported.leaves(list(load_problem_file(path).inputs()))
    before = [x.detach().clone() for x in exported.tensors_in(inputs)]
    dy = torch.ones(2, 3, 29, 29)
    found = exported.results(model, inputs, dy, exported.copies)
    exact = exported.results(model.double(), exported.leaves(inputs, torch.float64), dy, exported.copies)
    assert set(found) == set(exact) == {"output", "d input 0", "d input 2", "d input 3", "d conv.weight", "d conv.bias"}
    assert exact["output"].dtype == torch.float64 and exported.same(inputs) is inputs
    assert all(torch.equal(x, y) for x, y in zip(before, exported.tensors_in(inputs), strict=True))
