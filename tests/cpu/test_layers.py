"""Who may import whom: each layer those below it, whatever the place of the import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import haloconv
from haloconv.env import child_environment
from tests.cpu.test_budgets import MODULE_NAMES, MODULES, imported, module_name, name_of, tree_of

LAYERS = (
    {"version"},
    {"atomic", "device", "layout"},
    {"env", "epilogue", "extras", "logs", "precision", "problem", "profiling", "support", "reference", "roofline"},
    {"report"},
    {"jit"},
    {"families"},
    {"choose"},
    {"gradients", "plan"},
    {
        "accelerate",
        "arguments",
        "autograd",
        "backend",
        "decompositions",
        "distributed",
        "front",
        "fronts",
        "functional",
        "fusion",
        "gathered",
        "layer",
        "library",
        "module",
        "one_dimension",
        "padding",
        "precompile",
        "reclass",
        "rims",
        "rim_batch",
        "strips",
        "subclasses",
        "three_dimensions",
        "transforms",
        "transposed",
    },
    {"emulator", "problem_file"},
    {"export", "tune"},
    {"bench", "doctor"},
    {"cli"},
    {"__main__"},
)
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}
HEAVY = (
    "haloconv.report",
    "haloconv.tune.",
    "haloconv.bench",
    "jinja2",
    "matplotlib",
    "rich",
    "typer",
    "torch._dynamo",
    "haloconv.distributed",
    "torch.distributed.tensor",
)


def part_of(module: str) -> str:
    """The first name below the package: ``families`` of ``haloconv.families.base``."""
    return module.split(".")[1]


def test_every_part_has_its_layer() -> None:
    parts = {part_of(name) for name in MODULE_NAMES if name != "haloconv"}
    assert parts == set(RANKS)


@pytest.mark.parametrize("file", [each for each in MODULES if module_name(each) != "haloconv"], ids=name_of)
def test_imports_go_downwards(file: Path) -> None:
    """Imports inside functions count; ``haloconv`` itself gives names alone to those that use it."""
    own = part_of(module_name(file))
    names = {name for node in ast.walk(tree_of(file)) for name in imported(node) if name.startswith("haloconv.")}
    above = {name for name in names if part_of(name) != own and RANKS[part_of(name)] > RANKS[own]}
    assert not above


def test_importing_the_package_loads_no_measuring_and_no_reports() -> None:
    code = (
        "import sys, haloconv\n"
        f"heavy = [name for name in sys.modules if name.startswith({HEAVY})]\n"
        "assert not heavy, heavy\n"
        "import inspect\n"
        "assert 'example_inputs' in inspect.signature(haloconv.tune).parameters\n"
        "assert 'arch' in inspect.signature(haloconv.export).parameters\n"
        "from haloconv.tune import measure\n"
        "assert callable(haloconv.tune) and {'tune', 'export'} <= set(dir(haloconv))\n"
    )
    subprocess.run([sys.executable, "-c", code], env=child_environment(), check=True, timeout=120)


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        haloconv.nothing  # noqa: B018
