"""Who may import whom: each layer those below it, whatever the place of the import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import haloconv
from haloconv.env import child_environment
from haloconv.families import OWN
from tests.cpu.test_budgets import (
    MODULE_NAMES,
    MODULES,
    PACKAGE,
    find_cycle,
    imported,
    module_name,
    name_of,
    tree_of,
)

LAYERS = (
    {"version"},
    {"atomic", "calls", "device", "layout"},
    {"env", "epilogue", "extras", "logs", "precision", "problem", "profiling", "support", "reference", "roofline"},
    {"report"},
    {"jit"},
    {"families"},
    {"choose"},
    {"gradients", "plan"},
    {
        "arguments",
        "autograd",
        "decompositions",
        "distributed",
        "edges",
        "front",
        "fronts",
        "functional",
        "gathered",
        "layer",
        "library",
        "module",
        "moments",
        "one_dimension",
        "padding",
        "precompile",
        "reclass",
        "rectangles",
        "rims",
        "rim_batch",
        "shard_exchange",
        "strip_autograd",
        "strips",
        "subclasses",
        "three_dimensions",
        "transforms",
        "transposed",
    },
    {"changes"},
    {"fusion"},
    {"accelerate", "backend"},
    {"emulator", "problem_file"},
    {"export", "tune"},
    {"bench", "doctor"},
    {"cli"},
    {"__main__"},
)
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}
COMPUTED = "(computed)"
LATE_IMPORTS = {
    "__init__.py": {
        "haloconv.tune.first_use": "what measures is loaded by the first call that has to be measured",
        COMPUTED: "functions that measure, export and fuse are loaded when they are asked for",
    },
    "accelerate.py": {"haloconv.fusion.module": "what fuses is loaded by fuse, and by restore, which takes it back"},
    "backend.py": dict.fromkeys(
        ("haloconv.fusion.lowered.passes", "torch._inductor.config"), "Inductor takes seconds to import"
    ),
    "__main__.py": {"haloconv.cli": "without the packages of the command line there is one sentence, no traceback"},
    "changes.py": {"haloconv.report.changes": "tables are loaded when one is printed"},
    "bench/costs/first_step.py": dict.fromkeys(
        (
            "torch",
            "haloconv",
            "haloconv.jit",
            "haloconv.bench.networks.swapped",
            "haloconv.bench.suite",
            "haloconv.bench.targets",
            "haloconv.bench.trial",
            "haloconv.bench.values",
        ),
        "what is imported when is part of what is timed",
    ),
    "bench/networks/compiled.py": {
        COMPUTED: "takes seconds, and only what compiles needs it",
        "torch._dynamo.config": "takes seconds, and only what compiles needs it",
    },
    "families/__init__.py": {
        COMPUTED: "a family is loaded when it is first asked something: a model needs two or three"
    },
    "bench/one_kernel.py": {COMPUTED: "the module of a kernel that the user names"},
}
HEAVY = (
    "haloconv.report",
    "haloconv.tune.",
    "haloconv.bench",
    "haloconv.fusion",
    "jinja2",
    "matplotlib",
    "rich",
    "typer",
    "torch._dynamo",
    "haloconv.distributed",
    "torch.distributed.tensor",
    *(f"haloconv.families.{name}" for name in OWN),
)


def part_of(module: str) -> str:
    """The first name below the package: ``families`` of ``haloconv.families.base``."""
    return module.split(".")[1]


def test_every_part_has_its_layer() -> None:
    parts = {part_of(name) for name in MODULE_NAMES if name != "haloconv"}
    assert parts == set(RANKS)


def late_imports(tree: ast.Module) -> list[str]:
    """What ``import_module`` is told anywhere in a module, be it called or handed over."""
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        parts = [call.func, *call.args]
        (at, *_) = [*(i for i, part in enumerate(parts) if _is_import_module(part)), None]
        if at is not None:
            (told,) = parts[at + 1 :]
            named = told.value if isinstance(told, ast.Constant) else constants.get(ast.unparse(told))
            found.append(named if isinstance(named, str) else COMPUTED)
    return found


def _is_import_module(node: ast.expr) -> bool:
    return ast.unparse(node).split(".")[-1] in ("import_module", "__import__")


def uses(file: Path) -> set[str]:
    """The modules of the package that a module imports, wherever and however it does so."""
    tree = tree_of(file)
    names = {name for node in ast.walk(tree) for name in imported(node)} | set(late_imports(tree))
    return {name for name in names if name.startswith("haloconv.")}


@pytest.mark.parametrize("file", [each for each in MODULES if module_name(each) != "haloconv"], ids=name_of)
def test_imports_go_downwards(file: Path) -> None:
    """Imports inside functions count; ``haloconv`` itself gives names alone to those that use it."""
    own = part_of(module_name(file))
    above = {name for name in uses(file) if part_of(name) != own and RANKS[part_of(name)] > RANKS[own]}
    assert not above


def test_no_cycle_of_folders() -> None:
    """Files of the package and its folders, each folder as one; imports inside functions count."""
    files = [each for each in MODULES if module_name(each) != "haloconv"]
    graph: dict[str, set[str]] = {part_of(module_name(each)): set() for each in files}
    for each in files:
        own = part_of(module_name(each))
        graph[own] |= {part_of(name) for name in uses(each)} - {own}
    assert graph["fusion"] >= {"changes", "plan"}
    assert find_cycle(graph) == []


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_import_module_is_called_for_a_reason(file: Path) -> None:
    assert set(late_imports(tree_of(file))) == LATE_IMPORTS.get(file.relative_to(PACKAGE).as_posix(), {}).keys()


def test_one_walker_over_forward_hooks() -> None:
    """What else sets one, a sharded model, changes what its layers get and give."""
    setting = {name_of(each) for each in MODULES if "register_forward" in each.read_text("utf-8")}
    assert setting == {name_of(PACKAGE / "calls.py"), name_of(PACKAGE / "distributed" / "model.py")}


def test_late_imports_are_found() -> None:
    code = (
        "import importlib as loader\nNAME = 'c.d'\nlater = partial(import_module, 'a.b')\n"
        "def f(name):\n    loader.import_module(NAME).g(1)\n    return [import_module(f'e.{name}'), __import__('f')]\n"
    )
    assert sorted(late_imports(ast.parse(code))) == [COMPUTED, "a.b", "c.d", "f"]


def test_importing_the_package_loads_no_measuring_and_no_reports() -> None:
    code = (
        "import sys, haloconv\n"
        f"heavy = [name for name in sys.modules if name.startswith({HEAVY})]\n"
        "assert not heavy, heavy\n"
        "import inspect\n"
        "assert 'example_inputs' in inspect.signature(haloconv.tune).parameters\n"
        "assert 'model' in inspect.signature(haloconv.fuse).parameters\n"
        "assert 'arch' in inspect.signature(haloconv.export).parameters\n"
        "from haloconv.tune import measure\n"
        "assert callable(haloconv.tune) and {'tune', 'export'} <= set(dir(haloconv))\n"
    )
    subprocess.run([sys.executable, "-c", code], env=child_environment(), check=True, timeout=120)


def test_a_family_loads_where_it_is_asked_and_no_other() -> None:
    """Its name and whether it is there are known before."""
    own = [f"haloconv.families.{name}" for name in OWN]
    code = (
        "import sys, torch, haloconv\n"
        "from haloconv.families import FAMILIES, check_family\n"
        f"loaded = lambda: {{name for name in sys.modules if name in {own}}}\n"
        "check_family('direct')\n"
        "assert 'direct' in FAMILIES and len(list(reversed(FAMILIES))) > 5 and not loaded()\n"
        "haloconv.conv2d(torch.zeros(1, 3, 8, 8), torch.zeros(8, 3, 3, 3))\n"
        "assert FAMILIES['direct'] is FAMILIES['direct'] and loaded() == {'haloconv.families.direct'}, loaded()\n"
    )
    subprocess.run([sys.executable, "-c", code], env=child_environment(), check=True, timeout=120)


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        haloconv.nothing  # noqa: B018
