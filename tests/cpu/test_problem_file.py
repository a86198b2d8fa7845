"""Problem files: loading, the sentences for what is wrong with them, and cutting their inputs down."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from haloconv.problem_file import ProblemFileError, load_problem_file, scaled_inputs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "problems"

GOOD = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3)

    def forward(self, x):
        return self.conv(x)

def get_inputs():
    return [torch.rand(2, 3, 40, 50)]

def get_init_inputs():
    return [4]
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "problem.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_good_file(write):
    file = load_problem_file(write(GOOD))
    assert file.name == "problem"
    (x,) = file.inputs()
    assert file.model()(x).shape == (2, 4, 38, 48)


def test_two_files_of_one_name_stay_apart(tmp_path):
    paths = []
    for channels in (4, 5):
        folder = tmp_path / str(channels)
        folder.mkdir()
        path = folder / "problem.py"
        path.write_text(GOOD.replace("return [4]", f"return [{channels}]"))
        paths.append(path)
    first, second = (load_problem_file(path) for path in paths)
    assert [file.model().conv.out_channels for file in (first, second)] == [4, 5]


def test_missing_file(tmp_path):
    with pytest.raises(ProblemFileError, match="nothing.py: there is no such file"):
        load_problem_file(tmp_path / "nothing.py")


def test_folder_is_no_file(tmp_path):
    with pytest.raises(ProblemFileError, match="this is a folder; name a Python file in it"):
        load_problem_file(tmp_path)


def test_file_that_is_no_python(write):
    with pytest.raises(ProblemFileError, match="its name must end in .py"):
        load_problem_file(write(GOOD, "problem.txt"))


@pytest.mark.parametrize(
    "text, message",
    [
        ("def broken(:\n", "importing it raised SyntaxError"),
        ("import no_such_module_anywhere\n", "importing it raised ModuleNotFoundError: .*no_such_module_anywhere"),
        ("1 / 0\n", "importing it raised ZeroDivisionError"),
        (GOOD.replace("def get_inputs", "def inputs"), "get_inputs missing; a problem file defines"),
        ("x = 1\n", "Model and get_inputs and get_init_inputs missing"),
        (GOOD + "\nModel = 3\n", "Model missing"),
    ],
)
def test_files_that_cannot_be_loaded(write, text, message):
    with pytest.raises(ProblemFileError, match=message):
        load_problem_file(write(text))


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("return [4]", "return 4", r"get_init_inputs\(\) must return a list of arguments for Model, not int"),
        ("return [4]", "raise OSError('no disk')", "get_init_inputs raised OSError: no disk"),
        ("return [4]", "return [4, 5]", "Model raised TypeError"),
        ("return [4]", "return ['four']", "Model raised TypeError"),
        (
            "class Model(nn.Module):",
            "class Model:\n    __init__ = None\n\nclass Other(nn.Module):",
            "Model raised TypeError",
        ),
        (
            "class Model(nn.Module):",
            "def Model(n):\n    return n\n\nclass Other(nn.Module):",
            "must be a torch.nn.Module, not int",
        ),
    ],
)
def test_models_that_cannot_be_built(write, old, new, message):
    file = load_problem_file(write(GOOD.replace(old, new)))
    with pytest.raises(ProblemFileError, match=message):
        file.model()


@pytest.mark.parametrize(
    "returned, message",
    [
        ("torch.rand(1, 3, 9, 9)", r"get_inputs\(\) must return a list of tensors, not Tensor"),
        ("[]", r"get_inputs\(\) must return a list of tensors, not an empty list"),
        ("[3, None]", r"get_inputs\(\) must return a list with a tensor in it, not only int, NoneType"),
        ("1 / 0", "get_inputs raised ZeroDivisionError"),
    ],
)
def test_inputs_that_cannot_be_used(write, returned, message):
    file = load_problem_file(write(GOOD.replace("[torch.rand(2, 3, 40, 50)]", returned)))
    with pytest.raises(ProblemFileError, match=message):
        file.inputs()


@pytest.mark.parametrize(
    "name, x_shape, w_shape, y_shape",
    [
        ("a_5x9_dilated", (8, 32, 512, 512), (64, 32, 5, 9), (8, 64, 508, 496)),
        ("b_5x9", (8, 32, 512, 512), (64, 32, 5, 9), (8, 64, 508, 504)),
        ("c_3x3", (8, 64, 512, 1024), (128, 64, 3, 3), (8, 128, 510, 1022)),
    ],
)
def test_shipped_problems(monkeypatch, name, x_shape, w_shape, y_shape):
    file = load_problem_file(EXAMPLES / f"{name}.py")
    rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *shape: rand(*shape, device="meta"))
    (x,) = file.inputs()
    model = file.model()
    assert x.shape == x_shape and model.conv.weight.shape == w_shape
    assert model.to("meta")(x).shape == y_shape


def test_crop_keeps_outputs_at_16():
    model = nn.Sequential(nn.Conv2d(4, 4, (5, 9), padding=(2, 4), dilation=(2, 3)))
    x = torch.rand(8, 4, 512, 512)
    reduced = scaled_inputs(model, [x])
    (small,) = reduced.inputs
    assert small.shape == (1, 4, 32, 32) and model(small).shape == (1, 4, 28, 16)
    assert torch.equal(small, x[:1, :, :32, :32]) and small.is_contiguous()
    assert reduced.note == "inputs cut from (8, 4, 512, 512) to (1, 4, 32, 32)"


def test_every_convolution_counts():
    model = nn.Sequential(nn.Conv2d(3, 4, 7, stride=2), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3))
    (small,) = scaled_inputs(model, [torch.rand(2, 3, 224, 200)]).inputs
    outputs = model(small).shape
    assert min(outputs[2:]) >= 16 and small.shape[2] == small.shape[3] < 100


def test_limit_on_the_work_wins():
    model = nn.Conv2d(64, 64, 3, stride=8)
    wanted = scaled_inputs(model, [torch.rand(1, 64, 256, 256)]).inputs[0].shape
    bounded = scaled_inputs(model, [torch.rand(1, 64, 256, 256)], limit_flops=64 * 64 * 9 * 2 * 30).inputs[0].shape
    assert bounded[2] < wanted[2]
    assert model(torch.rand(bounded)).shape[2] ** 2 <= 30


def test_model_of_a_fixed_size_keeps_its_image():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 18 * 18, 2))
    reduced = scaled_inputs(model, [torch.rand(6, 3, 20, 20)])
    assert reduced.inputs[0].shape == (1, 3, 20, 20)


def test_small_inputs_are_left_alone():
    x = torch.rand(1, 3, 12, 12)
    reduced = scaled_inputs(nn.Conv2d(3, 4, 3), [x])
    assert torch.equal(reduced.inputs[0], x) and reduced.note is None


def test_crop_of_a_layer_whose_input_has_another_name():
    class Renamed(nn.Conv2d):
        def forward(self, image):
            return super().forward(image)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = Renamed(4, 4, 3)

        def forward(self, x):
            return self.conv(image=x)

    reduced = scaled_inputs(Model(), [torch.rand(8, 4, 64, 64)])
    assert reduced.inputs[0].shape == (1, 4, 18, 18)


def test_other_tensors_follow_the_batch():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x, gain, table):
            return self.conv(x) * gain[:, None, None, None] + table.sum()

    reduced = scaled_inputs(Scaled(), [torch.rand(6, 3, 64, 64), torch.rand(6), torch.rand(5)])
    assert [tuple(x.shape) for x in reduced.inputs] == [(1, 3, 18, 18), (1,), (5,)]


def test_the_model_is_not_touched():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    scaled_inputs(model, [torch.rand(2, 3, 64, 64)])
    assert model[0].weight.device.type == "cpu" and not model[0]._forward_hooks
