"""Exported files: what they promise to a reader, to a benchmark and to an old compiler; what an export refuses."""

from __future__ import annotations

import ast
import inspect
import locale
import os
import re
import runpy
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from haloconv import jit
from haloconv.emulator.build import INCLUDE_FOLDER
from haloconv.export.export import ARCHS, export
from haloconv.families import FAMILIES, OWN
from haloconv.jit.params import params_of, size_of
from haloconv.jit.source import KernelSource, is_marker
from haloconv.problem_file import load_problem_file
from tests.exported import compiled, load_text
from tests.kernelbench_rules import offences
from tests.nvrtc_ctypes import Nvrtc, library_folder

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples" / "problems").glob("*.py"))}
OTHERS = {path.stem: path for path in sorted((ROOT / "tests" / "problems").glob("[!_]*.py"))}
PROBLEMS = EXAMPLES | OTHERS
PORTABLE, HOPPER = "sm_70", "sm_90a"
PROBE = 'extern "C" __global__ void probe() {}\n'

HEAD = "import torch\nfrom torch import nn\n"
INPUTS = "def get_inputs():\n    return [torch.rand(1, 4, 8, 8)]\ndef get_init_inputs():\n    return []\n"
MODEL = "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.conv = {conv}\n"
FORWARD = "    def forward(self, x):\n        return {forward}\n"


@cache
def text_of(name: str, arch: str = HOPPER, family: str = "auto") -> str:
    return export(PROBLEMS[name], arch=arch, family=family)


def families_of(text: str) -> dict[str, str]:
    return dict(re.findall(r"^    (\w+)  (\w+): ", text, re.MULTILINE))


def problem(tmp_path: Path, conv: str = "nn.Conv2d(4, 8, 3)", forward: str = "self.conv(x)", head: str = HEAD) -> Path:
    path = tmp_path / "problem.py"
    path.write_text(head + MODEL.format(conv=conv) + FORWARD.format(forward=forward) + INPUTS, encoding="utf-8")
    return path


# What a reader and a benchmark see ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_file_keeps_the_published_rules(name: str) -> None:
    """Those of KernelBench; its evaluator also puts two lines in front of the text before it runs it."""
    text = text_of(name)
    assert offences(text) == []
    context: dict = {}
    exec("import os\nos.environ['NOTHING_OF_OURS'] = '1'\n" + text, context)
    assert issubclass(context["ModelNew"], torch.nn.Module)


@pytest.mark.parametrize(
    "line",
    [
        "try:", "except RuntimeError:", "    pass", "y = torch.conv2d(x, w)", "y = torch.nn.functional.relu(x)",
        "self.conv = torch.nn.Conv2d(1, 1, 1)", "s = torch.cuda.Stream()", "import threading", "F.conv2d(x, w)",
        "from concurrent.futures import ThreadPoolExecutor", "class Lazy(torch.Tensor):", "x = x.half()",
        "torch.cuda.Event.record = fake", "y = torch.matmul(a, b)", "with torch.cuda.stream(s):",
    ],
)  # fmt: skip
def test_the_rules_find_what_they_forbid(line: str) -> None:
    assert len(offences(f"__global__ load_inline\n{line}\n")) >= 1
    assert offences(f"__global__ load_inline\nx = 1  # {line}\n// {line}\n") == []


def test_the_rules_ask_for_kernels() -> None:
    assert offences("# __global__\nload_inline\n") == ["__global__ is missing"]


@pytest.mark.parametrize("name", PROBLEMS)
def test_only_the_standard_library_and_torch_are_imported(name: str) -> None:
    nodes = list(ast.walk(ast.parse(text_of(name))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    assert {each.split(".")[0] for each in names} <= {"torch", *sys.stdlib_module_names}


def test_the_file_is_imported_without_haloconv_and_without_cuda(tmp_path: Path) -> None:
    (tmp_path / "a_new.py").write_text(text_of("a_5x9_dilated"), encoding="utf-8")
    code = (
        "import sys; sys.modules['haloconv'] = None; import a_new\n"
        "m = a_new.ModelNew(*a_new.get_init_inputs()); print(sum(p.numel() for p in m.parameters()))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(64 * 32 * 45 + 64), done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [([], "usage: python new.py PROBLEM_FILE"), (["none.py"], "none.py: there is no such file"),
     ([str(PROBLEMS["a_5x9_dilated"])], "the kernels run on an NVIDIA GPU, and PyTorch sees none here")],
)  # fmt: skip
def test_the_file_s_check_says_why_it_cannot_run(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "new.py"
    path.write_text(text_of("a_5x9_dilated"), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("arch", [HOPPER, "sm_80"])
def test_a_gpu_that_cannot_run_the_kernels_is_named(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_text(text_of("stem_and_grouped", arch, "halo_sm80"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(RuntimeError, match=r"compute capability .*, not 7\.5: export anew here"):
        module.extension()


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_model_is_the_problem_s(name: str) -> None:
    """Signatures with defaults; parameters by name, order and value under one seed; the same without arguments."""
    module, theirs = load_text(text_of(name)), load_problem_file(PROBLEMS[name])
    for method in ("__init__", "forward"):
        signatures = [inspect.signature(getattr(each, method)) for each in (module.ModelNew, theirs.model_class)]
        names = [[(p.name, p.kind, p.default) for p in each.parameters.values()] for each in signatures]
        assert names[0] == names[1]
    states = []
    for model_class in (module.ModelNew, theirs.model_class):
        torch.manual_seed(5)
        states.append(model_class(*theirs.get_init_inputs()).state_dict())
    assert list(states[0]) == list(states[1]) and all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_a_model_without_arguments_has_its_defaults() -> None:
    module = load_text(text_of("depthwise_7x7"))
    assert module.ModelNew().depthwise.weight.shape == (96, 1, 7, 7)
    with pytest.raises(RuntimeError, match=r"no launches .* \(4, 96, 56, 56\) .*\(16, 96, 56, 56\).*export anew"):
        module.ModelNew()(torch.rand(4, 96, 56, 56))
    with pytest.raises(RuntimeError, match="on cpu, the kernels run on CUDA devices"):
        module.ModelNew()(torch.rand(16, 96, 56, 56))
    with pytest.raises(RuntimeError, match="is torch.float16, the kernels take torch.float32"):
        module.ModelNew()(torch.rand(16, 96, 56, 56).half())


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_file_is_readable(name: str) -> None:
    text = text_of(name)
    sections = re.findall(r"^# --- (\d)\. ", text, re.MULTILINE)
    assert sections == list("1234567")
    assert "Apache-2.0" in ast.get_docstring(ast.parse(text))
    own = PROBLEMS[name].read_text("utf-8").replace("nn.Conv2d", "KernelConv2d")
    assert [line for line in text.splitlines() if len(line) > 120 and line not in own] == []
    assert text == export(PROBLEMS[name], arch=HOPPER), "two exports of one file differ"


# The kernels' source --------------------------------------------------------------------------------------------------


def plain(text: str) -> list[str]:
    """The lines that a compiler reads, of a source with or without marks of where its files begin."""
    kept = [line.replace('extern "C" ', "") for line in text.splitlines() if not is_marker(line)]
    return [line for line in kept if line.strip() and not line.startswith("//")]


@pytest.mark.parametrize("name", PROBLEMS)
def test_kernels_are_the_library_s(name: str) -> None:
    module = load_text(text_of(name))
    for namespace, file, values in module.KERNELS:
        place = Path(file)
        constants = {  # a negative number stands in brackets
            each: int(value.strip("()")) if isinstance(value, str) and value.startswith("(") else value
            for each, value in values.items()
        }
        source = jit.kernel_source(f"{place.parts[1]}/{place.stem}", "any", constants)
        first, *lines = plain(module.kernel_source(namespace, file, values))
        count = len(plain(source.code))
        assert first == f"namespace {namespace} {{" and lines[:count] == plain(source.code)
        assert {line.split()[0] for line in lines[count:-1]} == {"#undef"} and lines[-1] == "}"


def device_source(name: str, arch: str, family: str = "auto") -> KernelSource:
    """All kernels of an exported file as one source, with an entry whose name is not mangled."""
    module = load_text(text_of(name, arch, family))
    code = "\n".join(module.kernel_source(*kernel) for kernel in module.KERNELS) + PROBE
    return KernelSource("exported", "probe", (), code)


@pytest.mark.parametrize("name", ["a_5x9_dilated", *OTHERS])
def test_kernels_compile_for_hopper(name: str) -> None:
    assert jit.compile_source(device_source(name, HOPPER), HOPPER).arch == HOPPER


@pytest.mark.parametrize(
    ("name", "arch", "family"),
    [
        ("a_5x9_dilated", PORTABLE, "direct"),
        ("depthwise_7x7", PORTABLE, "depthwise"),
        ("depthwise_7x7", PORTABLE, "depthwise_window"),
        ("stem_and_grouped", "sm_80", "halo_sm80"),
    ],
)
def test_kernels_compile_with_cuda_11(name: str, arch: str, family: str) -> None:
    """For the oldest GPUs that a family runs on."""
    assert set(families_of(text_of(name, arch, family)).values()) <= {family, "halo_sm80_wgrad"}
    folder = library_folder(11)
    if folder is None:
        message = "NVRTC 11 is not installed: `make test` does it, or set HALOCONV_TEST_NVRTC11 to its folder"
        pytest.skip(message)
    before = locale.nl_langinfo(locale.CODESET)
    assert Nvrtc(folder).compile(device_source(name, arch, family), arch)[0]
    assert locale.nl_langinfo(locale.CODESET) == before


@pytest.mark.parametrize(("arch", "capability"), [("sm_80", "(8, 0)"), (HOPPER, "(9, 0)")])
def test_a_file_with_tensor_maps_asks_for_hopper(arch: str, capability: str) -> None:
    text = text_of("stem_and_grouped", arch, "halo_sm80")
    assert f"(major, minor) < {capability}" in text and ("box_map(" in text) == (arch == HOPPER)


@pytest.mark.parametrize("standard", ["c++17", "c++20"])
def test_the_whole_text_compiles_with_nvcc(standard: str, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip(
            "NOT CHECKED: there is no nvcc here; the kernels' source is checked with NVRTC, the host code with g++"
        )
    module = load_text(text_of("a_5x9_dilated"))
    (tmp_path / "a.cu").write_text(f"#include <cstdint>\n{module.DECLARATIONS}{module.cuda_source()}", encoding="utf-8")
    command = ["nvcc", f"-std={standard}", "-gencode=arch=compute_90a,code=sm_90a", "-c", "a.cu", "-o", "a.o"]
    compiled(command, tmp_path)


def one_of_each_entry() -> list[KernelSource]:
    sources = [source for name in OWN for source in FAMILIES[name].sources()]
    return list({source.entry: source for source in sources}.values())


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("source", one_of_each_entry(), ids=lambda source: source.entry)
def test_structs_are_read_as_a_compiler_reads_them(source: KernelSource, tmp_path: Path) -> None:
    """Size and offset of every field of every kernel's struct."""
    fields = params_of(source)
    asserts = [f"static_assert(__builtin_offsetof(P, {each.name}) == {each.offset});" for each in fields]
    asserts.append(f"static_assert(sizeof(P) >= {size_of(fields)} && sizeof(P) < {size_of(fields)} + alignof(P));")
    argument = "template <class T> T argument(void (*)(T));"
    text = [source.code, argument, f"using P = decltype(argument({source.entry}));", *asserts]
    (tmp_path / "kernel.cpp").write_text("\n".join(text), encoding="utf-8")
    flags = [
        "-std=c++17",
        "-DHALOCONV_EMULATOR",
        "-w",
        "-fsyntax-only",
        f"-I{INCLUDE_FOLDER}",
        "-include",
        "emulator.h",
    ]
    compiled(["g++", *flags, "kernel.cpp"], tmp_path)


# The page ------------------------------------------------------------------------------------------------------------


def test_figures_on_the_page_are_those_of_the_committed_run() -> None:
    run = (ROOT / "benchmarks" / "results" / "nvidia-h200" / "2026-11-22-export.txt").read_text("utf-8")
    times = re.findall(r"(\d+\.\d+) ms, PyTorch's (\d+\.\d+) ms \(\w+\): (\d+\.\d+) times", run)
    shown = re.findall(
        r"(\d+\.\d+) → (\d+\.\d+) \(\**(\d+\.\d+)×\**\)", (ROOT / "docs" / "export.md").read_text("utf-8")
    )
    assert len(shown) == len(times) == 12 and {(own, baseline, ratio) for baseline, own, ratio in shown} <= set(times)


def test_architectures_have_facts() -> None:
    assert {PORTABLE, HOPPER} <= set(ARCHS) and all(count > 0 for _, count in ARCHS.values())
