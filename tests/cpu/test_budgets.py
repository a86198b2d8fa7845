"""The budgets that keep the code readable, and the rules about where things may live."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from haloconv import extras

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "haloconv"
PYTHON = sorted(file for folder in ("haloconv", "tests", "tools", "examples") for file in (ROOT / folder).rglob("*.py"))
KERNELS = sorted(file for suffix in ("*.cu", "*.cuh") for file in PACKAGE.rglob(suffix))
MODULES = sorted(PACKAGE.rglob("*.py"))
LAZY_PACKAGES = {"cuda", "torchvision", "timm", *extras.CLI}
FILE_LINES, FUNCTION_LINES, DEVICE_FUNCTION_LINES, HEADER_LINES, LINE_LENGTH, VARIABLES = 400, 60, 70, 15, 120, 8
PARAMETERS, FOLDER_MODULES = 6, 12
_PYTORCHS = "PyTorch's signature of the same name, and what ours has on top"
_DRIVERS = "the signature of the driver's function of the same name"
_COMMANDS = "the options of a command"
LONG_SIGNATURES = {
    "distributed/convolution.py": {"conv2d": _PYTORCHS},
    "distributed/norms.py": {"batch_norm": _PYTORCHS},
    "distributed/pixels.py": dict.fromkeys(("avg_pool2d", "interpolate", "max_pool2d"), _PYTORCHS),
    "fronts.py": {"__init__": _PYTORCHS},
    "functional.py": {
        "conv2d": _PYTORCHS,
        "make_spec": "conv2d's arguments one by one: its cache looks them up in every call, which no object may slow",
    },
    "module.py": {"__init__": _PYTORCHS},
    "one_dimension.py": {"conv1d": _PYTORCHS},
    "three_dimensions.py": {"conv3d": _PYTORCHS},
    "transforms.py": {"vmap": _PYTORCHS},
    "transposed.py": dict.fromkeys(("conv_transpose1d", "conv_transpose2d"), _PYTORCHS),
    "tune/ahead.py": {"tune": "haloconv.tune, which users call by these names"},
    "jit/tensor_map.py": {"encode_tiled": _DRIVERS},
    "emulator/tensor_map.py": dict.fromkeys(("encode_tiled", "encode_im2col"), _DRIVERS),
    "cli/bench/command.py": {"bench": _COMMANDS},
    "cli/export.py": {"export_file": _COMMANDS},
    "cli/report.py": {"report": _COMMANDS},
    "cli/run.py": {"run": _COMMANDS},
    "cli/tune.py": {"tune": _COMMANDS},
}


def name_of(file: object) -> str:
    return str(file.relative_to(ROOT)) if isinstance(file, Path) else str(file)


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULE_NAMES = {module_name(file) for file in MODULES}


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        modules = [name for name in names if name in MODULE_NAMES]
        return modules if len(modules) == len(names) else [node.module or "", *modules]
    return []


# Python -------------------------------------------------------------------------------------------------------------


def test_the_lists_are_not_empty() -> None:
    assert len(MODULES) > 10 and len(PYTHON) > 30 and KERNELS


@pytest.mark.parametrize("file", PYTHON, ids=name_of)
def test_python_file_and_functions_are_short(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= FILE_LINES
    too_long = {
        f.name: length for f in functions(tree_of(file)) if (length := f.end_lineno - f.lineno + 1) > FUNCTION_LINES
    }
    assert not too_long


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Of a method, those besides the object."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_functions_have_few_parameters(file: Path) -> None:
    """But where a reason is given: most of these signatures are those of others."""
    found = {each.name: count for each in functions(tree_of(file)) if (count := parameters(each)) > PARAMETERS}
    assert found.keys() == LONG_SIGNATURES.get(file.relative_to(PACKAGE).as_posix(), {}).keys()


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_imports_stand_at_the_top(file: Path) -> None:
    """Inside a function only optional packages may be imported."""
    for function in functions(tree_of(file)):
        for node in ast.walk(function):
            wrong = [name for name in imported(node) if name.split(".")[0] not in LAZY_PACKAGES]
            assert not wrong, f"line {node.lineno}: {wrong} imported inside {function.name}"


def test_folders_have_few_modules() -> None:
    """But the package itself, whose modules are its public names, and the kernels of depthwise."""
    found = Counter(file.parent for file in MODULES if file.name != "__init__.py")
    excepted = {PACKAGE, PACKAGE / "families" / "depthwise"}
    assert {each: count for each, count in found.items() if count > FOLDER_MODULES}.keys() == excepted


def top_level_imports(file: Path) -> set[str]:
    """The modules of the package that importing this file imports."""
    names: set[str] = set()
    body = [tree_of(file)]
    while body:
        node = body.pop()
        names.update(imported(node))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body.extend(ast.iter_child_nodes(node))
    return {name for name in names if name.split(".")[0] == "haloconv"}


def import_graph() -> dict[str, set[str]]:
    return {module_name(file): top_level_imports(file) & MODULE_NAMES - {module_name(file)} for file in MODULES}


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """One cycle as a list of names, or an empty list."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            if found := visit(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((cycle for name in sorted(graph) if (cycle := visit(name, []))), [])


def test_no_import_cycle() -> None:
    graph = {name: others - {"haloconv"} for name, others in import_graph().items()}
    assert sum(map(len, graph.values())) > 20
    assert find_cycle(graph) == []


def test_cycles_would_be_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


@pytest.mark.parametrize("file", [f for f in MODULES if f.name != "env.py"], ids=name_of)
def test_environment_is_read_in_env_only(file: Path) -> None:
    text = ast.unparse(tree_of(file))
    assert not re.search(r"\bos\.(environ|getenv|putenv)\b|\bfrom os import .*\b(environ|getenv)\b", text)


def test_few_environment_variables() -> None:
    """All literals HALOCONV_* of the package, wherever they stand."""
    names = set()
    for file in MODULES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.update(re.findall(r"\bHALOCONV_[A-Z0-9_]+", node.value))
    assert names and len(names) <= VARIABLES
    env = (PACKAGE / "env.py").read_text(encoding="utf-8")
    assert all(f'"{name}"' in env for name in names)


CUDA_FILES = (PACKAGE / "jit" / "compile.py", PACKAGE / "jit" / "driver.py")


@pytest.mark.parametrize("file", [f for f in MODULES if f not in CUDA_FILES], ids=name_of)
def test_cuda_packages_are_imported_in_two_files(file: Path) -> None:
    wrong = [name for node in ast.walk(tree_of(file)) for name in imported(node) if name.split(".")[0] == "cuda"]
    assert not wrong


@pytest.mark.parametrize("file", CUDA_FILES, ids=name_of)
def test_they_import_cuda_lazily(file: Path) -> None:
    eager = [node for node in tree_of(file).body for name in imported(node) if name.startswith("cuda")]
    assert not eager


@pytest.mark.parametrize("file", [f for f in MODULES if "cli" not in f.parts], ids=name_of)
def test_public_functions_say_what_they_do(file: Path) -> None:
    """A docstring on every public module, class and function at the top level; a command's help stands elsewhere."""
    tree = tree_of(file)
    public = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_"]
    silent = [node.name for node in public if node.name != "main" and not ast.get_docstring(node)]
    assert ast.get_docstring(tree) or not tree.body
    assert not silent


LEANS_ON_ITS_NAME = re.compile(r"(?:Of|That|Those|The same|As) ")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and words of every docstring, those of values at the top of a module or class included."""
    for node in ast.walk(tree):
        statements = getattr(node, "body", None)
        for number, each in enumerate(statements if isinstance(statements, list) else []):
            documents = not number or isinstance(statements[number - 1], (ast.Assign, ast.AnnAssign))
            match each:
                case ast.Expr(ast.Constant(str(words))) if documents:
                    yield each.lineno, words


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_docstrings_say_what_something_is_without_its_name(file: Path) -> None:
    """``Of every shard.`` says nothing to one who does not know what ``_traffics`` are."""
    found = [(line, text[:60]) for line, text in docstrings(tree_of(file)) if LEANS_ON_ITS_NAME.match(text)]
    assert not found


def test_docstrings_are_found() -> None:
    sample = '"""Of a module."""\nX = 1\n"""That of X."""\ndef f():\n    """As g."""\n    return "Of"\n'
    assert [line for line, text in docstrings(ast.parse(sample)) if LEANS_ON_ITS_NAME.match(text)] == [1, 3, 5]


# Device code --------------------------------------------------------------------------------------------------------


def without_comments(text: str) -> str:
    """The text with comments blanked; lines keep their numbers."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.DOTALL)


def device_functions(text: str) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function with a body, by matching braces from its qualifiers on."""
    code = without_comments(text)
    code = re.sub(r"__launch_bounds__\s*\([^)]*\)", lambda found: " " * len(found[0]), code)
    for found in re.finditer(r"__(?:device|global)__[^;{}()]*?(\w+)(?:<\w+>)?\s*\([^;{}]*\)[^;{}]*\{", code):
        depth, end = 1, found.end()
        while depth and end < len(code):
            depth += {"{": 1, "}": -1}.get(code[end], 0)
            end += 1
        yield found[1], code.count("\n", found.start(), end) + 1


@pytest.mark.parametrize("file", KERNELS, ids=name_of)
def test_device_file_and_functions_are_short(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= FILE_LINES
    assert not [line for line in text.splitlines() if len(line) > LINE_LENGTH]
    too_long = {name: lines for name, lines in device_functions(text) if lines > DEVICE_FUNCTION_LINES}
    assert not too_long


def test_device_functions_are_found() -> None:
    sample = "__device__ int g();\n__device__ int f(int (&a)[2]) {\n  if (g()) { a[0] = 1; }\n  return 1;\n}\n"
    sample += 'extern "C" __global__ void __launch_bounds__(A, B) e(const P p) { f(p); }\n'
    assert list(device_functions(sample)) == [("f", 4), ("e", 1)]
    for file in KERNELS:
        text = without_comments(file.read_text(encoding="utf-8"))
        assert len(list(device_functions(text))) == len(re.findall(r"__(?:device|global)__", text)), file


@pytest.mark.parametrize("file", [f for f in KERNELS if f.suffix == ".cu"], ids=name_of)
def test_kernels_begin_with_a_short_header_comment(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    header = next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))
    assert 1 <= header <= HEADER_LINES


@pytest.mark.parametrize("file", KERNELS, ids=name_of)
def test_asm_and_headers_stay_in_their_place(file: Path) -> None:
    """Inline PTX only under kernels/ptx; no header but our own."""
    code = without_comments(file.read_text(encoding="utf-8"))
    assert file.parent.name == "ptx" or not re.search(r"\basm\b", code)
    assert not re.search(r"#\s*include\s*<", code)
