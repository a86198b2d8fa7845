"""The wheel holds the whole package, and works where nothing of this folder is seen."""

from __future__ import annotations

import email
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
import trove_classifiers
import yaml

from haloconv import emulator
from haloconv.version import __version__

ROOT = Path(__file__).resolve().parents[2]
MISSING = emulator.available()
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")

USE = """
import sys
sys.modules.update(dict.fromkeys(("typer", "rich", "jinja2", "matplotlib")))  # not installed: importing one raises
import torch
import haloconv

assert haloconv.__file__.startswith(sys.prefix), haloconv.__file__
layer = haloconv.Conv2d(3, 5, 3, padding=1)
x = torch.rand(2, 3, 8, 9)
torch.testing.assert_close(layer(x), torch.nn.functional.conv2d(x, layer.weight, layer.bias, padding=1))
layer(x).sum().backward()
model = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3))
assert "1 of 1 convolutions swapped" in str(haloconv.accelerate(model))
assert haloconv.tune(model, x).notes and haloconv.tune(model, x).to_json()

from importlib.metadata import entry_points
from pathlib import Path
assert [each.value for each in entry_points(group="torch_dynamo_backends")] == ["haloconv.backend:backend"]
from haloconv.bench.results import results_folder
from haloconv.bench.suite import find_suite, load_suite

suite = find_suite(Path("suite"))
assert len(load_suite(suite)) > 10 and results_folder(suite) == Path("benchmarks", "results")
print(haloconv.__version__, layer.weight.grad.shape)
"""

PROBLEM = """
from torch import nn, rand

class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 5, 3))

def get_inputs():
    return [rand(2, 3, 9, 10)]

def get_init_inputs():
    return []
"""


class Installed(NamedTuple):
    """A wheel, and an environment whose only haloconv comes from it; what it depends on is lent by our own."""

    wheel: Path
    environment: Path

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, from a folder and with variables that show nothing of this one."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run(
            [str(self.environment / "bin" / program), *arguments],
            cwd=self.environment, env={**variables, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    if any(importlib.util.find_spec(name) is None for name in ("hatchling", "hatch_fancy_pypi_readme")):
        message = "what builds the wheel is not installed: `make test` does it"
        pytest.skip(message)
    folder = tmp_path_factory.mktemp("wheel")
    build = ("wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    subprocess.run([*PIP, *build], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    bare = folder / "bare"
    venv.create(bare)
    subprocess.run([*PIP, "--python", str(bare), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    (packages,) = bare.glob("lib/python*/site-packages")
    for lender in (Path(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")):
        for each in lender.iterdir():  # links, for NVRTC is looked for beside its loader; .pth files may lead back here
            link = packages / each.name
            if each.suffix != ".pth" and "haloconv" not in each.name and not link.exists():
                link.symlink_to(each)
    return Installed(wheel, bare)


def test_the_wheel_holds_every_file_of_the_package(installed: Installed) -> None:
    """Kernels, headers, the emulator's sources, templates, shipped data and ``py.typed``, and nothing beside."""
    package = ROOT / "haloconv"
    files = [file for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    expected = {file.relative_to(ROOT).as_posix() for file in files}
    with zipfile.ZipFile(installed.wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(f"haloconv-{__version__}.dist-info/METADATA").decode()
    assert found == expected
    assert {
        "haloconv/py.typed",
        "haloconv/bench/suites/suite.toml",
        "haloconv/families/direct/direct.cu",
        "haloconv/report/templates/report.html.j2",
    } <= found
    assert "haloconv/choose/shipped/nvidia-h200.json" in found
    assert {Path(name).suffix for name in found} >= {".py", ".cu", ".cuh", ".h", ".cpp", ".j2", ".json"}
    assert "License-File: LICENSE" in metadata and "Requires-Dist: torch" in metadata


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_source_archive_builds_the_same_wheel(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hatchling.build import build_sdist, build_wheel

    monkeypatch.chdir(ROOT)
    name = build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / name) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path / name.removesuffix(".tar.gz"))
    assert {"tests", "benchmarks", "docs", "Makefile", "CHANGELOG.md"} <= {each.name for each in Path.cwd().iterdir()}
    wheel = build_wheel(str(tmp_path))
    assert wheel == installed.wheel.name and contents(tmp_path / wheel) == contents(installed.wheel)


def test_the_page_of_a_release_links_to_its_own_files(installed: Installed) -> None:
    """Links of README.md that work beside its files are absolute there; the forge is named in one place."""
    (place,) = re.findall(r'^Source = "(https://.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    message = email.message_from_bytes(contents(installed.wheel)[f"haloconv-{__version__}.dist-info/METADATA"])
    assert message["Description-Content-Type"] == "text/markdown"
    links = re.findall(r"\]\(([^)\s]+)\)", message.get_payload())
    assert links and [link for link in links if not link.startswith(("https://", "#"))] == []
    ours = [link.removeprefix(f"{place}/blob/v{__version__}/") for link in links if link.startswith(place)]
    assert "docs/results.md" in ours and [each for each in ours if not (ROOT / each.partition("#")[0]).exists()] == []
    urls = dict(each.split(", ") for each in message.get_all("Project-URL"))
    assert set(urls) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert urls["Changelog"] == f"{place}/blob/main/CHANGELOG.md" and urls["Issues"] == f"{place}/issues"


def test_classifiers_are_known_and_name_the_pythons_of_the_matrix(installed: Installed) -> None:
    from tools.matrix import PYTHONS

    text = contents(installed.wheel)[f"haloconv-{__version__}.dist-info/METADATA"]
    message = email.message_from_bytes(text)
    classifiers = message.get_all("Classifier")
    assert set(classifiers) <= trove_classifiers.classifiers
    named = [each.rpartition(" ")[2] for each in classifiers if re.search(r":: Python :: 3\.\d+$", each)]
    assert tuple(named) == PYTHONS and message["Requires-Python"] == f">={PYTHONS[0]}"


def test_a_tag_builds_checks_and_publishes_without_a_password() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "package.yml").read_text("utf-8"))
    assert workflow[True]["push"] == {"tags": ["v*"]} and workflow["permissions"] == {"contents": "read"}
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert {"run": "make package"} in build["steps"]
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == "build"
    assert publish["if"] == "github.ref_type == 'tag'" and "secrets" not in str(workflow)
    recipe = (ROOT / "Makefile").read_text("utf-8").partition("\npackage:")[2].partition("\n\n")[0]
    for command in ("uv build", "twine check --strict dist/*", "check-wheel-contents dist/*.whl"):
        assert command in recipe


def test_a_layer_of_the_installed_package_runs(installed: Installed) -> None:
    run = installed.run("python", "-c", USE)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.split() == [__version__, "torch.Size([5,", "3,", "3,", "3])"]


def test_the_command_is_installed(installed: Installed) -> None:
    run = installed.run("haloconv", "--help")
    assert run.returncode == 0 and "doctor" in run.stdout, run.stdout + run.stderr


def test_the_doctor_of_the_installed_package_is_content(installed: Installed, cache_dir: Path, tmp_path: Path) -> None:
    """It compiles a kernel with NVRTC."""
    run = installed.run("haloconv", "doctor", "--json", str(tmp_path / "findings.json"))
    assert run.returncode == 0, run.stdout + run.stderr
    checks = {check["name"]: check for check in json.loads((tmp_path / "findings.json").read_text())["checks"]}
    assert [name for name, check in checks.items() if not check["ok"]] == []
    assert "sm_90a" in checks["compile a kernel"]["detail"]


@pytest.mark.usefixtures("emulator_cache")
@pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}")
def test_kernels_of_the_installed_package_run_on_the_emulator(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "problem.py").write_text(PROBLEM)
    options = ("--device", "emulator", "--precision", "ieee", "--json", str(tmp_path / "rows.json"))
    run = installed.run("haloconv", "run", *options, str(tmp_path / "problem.py"))
    assert run.returncode == 0, run.stdout + run.stderr
    content = json.loads((tmp_path / "rows.json").read_text())
    assert content["passed"]
    assert {row["direction"]: row["family"] for row in content["rows"]}["fprop"] == "direct"
