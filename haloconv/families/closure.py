"""What decides the results of a kernel, and one hash of it: that of its stamp, which every measured row names.

The closure is the kernel's host file and every file of haloconv that it imports, the .cu files that these launch, and
every header that those include. Files are hashed as canonical source: comments, docstrings, blank lines, imports and
paths are left out. What an import brings in is hashed itself.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from haloconv.families.files import canonical_device, kernels_of, total_hash
from haloconv.jit.source import SOURCE_ROOT, family_sources, kernel_path

_DECIDES_NOTHING = (
    "haloconv.version",  # stands in a comment
    "haloconv.families",  # the list of families
    "haloconv.env",  # where files lie, what is told, whether haloconv is asked at all
    "haloconv.logs",
)

JOIN = " + "
"""What stands between the names of kernels that ran one after another."""


@cache
def kernels() -> tuple[str, ...]:
    """Every kernel of the package by name, ``halo_sm90/conv`` for one."""
    folders = sorted(file.parent for file in (SOURCE_ROOT / "families").glob("*/__init__.py"))
    return tuple(kernel for folder in folders for kernel in kernels_of(folder.name))


def module_file(name: str) -> Path | None:
    """The file of a module or of a package; None if there is none of that name."""
    place = SOURCE_ROOT.parent / name.replace(".", "/")
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.exists()), None)


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _imported(node: ast.AST) -> list[str]:
    """The names that an import of the package's own modules may mean."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


@cache
def _imports(file: Path) -> frozenset[Path]:
    """The files of haloconv that a file imports."""
    names = {name for node in ast.walk(_tree(file)) for name in _imported(node)}
    wanted = {name for name in names if name.startswith("haloconv.") and name not in _DECIDES_NOTHING}
    return frozenset(found for name in wanted if (found := module_file(name)) is not None)


@cache
def host_files(kernel: str) -> tuple[Path, ...]:
    """The kernel's host file and every module of haloconv that it imports, at any distance."""
    first = SOURCE_ROOT / f"{kernel_path(kernel)}.py"
    found, waiting = {first}, [first]
    while waiting:
        new = _imports(waiting.pop()) - found
        found |= new
        waiting += new
    return tuple(sorted(found))


def _name_of(argument: ast.expr, tree: ast.Module) -> str:
    """A kernel's name, given as it is or as a constant of the module."""
    name = argument.id if isinstance(argument, ast.Name) else None
    for node in tree.body if name is not None else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            argument = node.value
            break
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return argument.value
    raise ValueError(f"line {argument.lineno}: the first argument of kernel_source must be a kernel's name")


@cache
def _launched_by(file: Path) -> frozenset[str]:
    """The .cu files that a host file itself launches, by name."""
    tree = _tree(file)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return frozenset(_name_of(each.args[0], tree) for each in calls if getattr(each.func, "id", "") == "kernel_source")


def launched(kernel: str) -> list[str]:
    """The .cu files that the kernel's host files launch, by name.

    Raises ValueError where a file does not say which.
    """
    return sorted({name for file in host_files(kernel) for name in _launched_by(file)})


def stamped_files(kernel: str) -> list[Path]:
    """Every file whose content the kernel's stamp covers."""
    device = dict.fromkeys(file for name in launched(kernel) for file in family_sources(name))
    return [*device, *host_files(kernel)]


def _left_out(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """First and last line of every docstring and of every import of the package."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for each in node.body:  # a string that stands alone documents what is beside it
                if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                    yield each.lineno, each.end_lineno or each.lineno
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if any(name.split(".")[0] == "haloconv" for name in _imported(node)):
            yield node.lineno, node.end_lineno or node.lineno


def canonical_host(text: str) -> str:
    """Python code without comments, docstrings, blank lines and imports of the package."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for first, last in _left_out(ast.parse(text)):
        lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


@cache
def canonical(file: Path) -> str:
    """What of a file counts."""
    text = file.read_text(encoding="utf-8")
    return canonical_host(text) if file.suffix == ".py" else canonical_device(text)


@cache
def stamp_hash(kernel: str) -> str:
    """The hash of the kernel's closure."""
    return total_hash([canonical(file) for file in stamped_files(kernel)])


def all_hashes() -> dict[str, str]:
    """The stamp hash of every kernel."""
    return {kernel: stamp_hash(kernel) for kernel in kernels()}


def source_of(kernel: str) -> str:
    """What rows and records call the source of a kernel: its stamp hash, empty for a kernel that is not ours.

    Those of several kernels, joined by `` + `` as their names are.
    """
    known = set(kernels())
    return JOIN.join(stamp_hash(each) if each in known else "" for each in kernel.split(JOIN))
