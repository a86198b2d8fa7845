"""What a stamp vouches for: a kernel, and the hash of everything that decides what it computes.

A stamp covers a closure: the kernel's host file and every file of haloconv that it imports, the .cu files that these
launch, and every header that those include. Files are hashed as canonical source: comments, docstrings, blank lines,
imports and paths are left out. What an import brings in is hashed itself.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from haloconv.env import child_environment
from haloconv.families import FAMILIES
from haloconv.families.files import canonical_device, kernels_of, total_hash
from haloconv.jit.source import SOURCE_ROOT, family_sources

ROOT = SOURCE_ROOT.parent
VERIFIED = ROOT / "benchmarks" / "verified"
PENDING = VERIFIED / "PENDING.md"
PENDING_LINE = re.compile(r"^[-*] `(?P<kernel>[\w/]+)` \((?P<date>\d{4}-\d{2}-\d{2})\): (?P<reason>.+)$", re.MULTILINE)

_DECIDES_NOTHING = ("haloconv.version", "haloconv.families")  # the version stands in a comment; the list of families


def kernel_families() -> list[str]:
    """The families that have device code of their own."""
    return sorted(name for name in FAMILIES if kernels_of(name))


def kernels() -> list[str]:
    """Every kernel of the package by name, ``halo_sm90/conv`` for one."""
    folders = sorted(file.parent for file in (SOURCE_ROOT / "families").glob("*/__init__.py"))
    return [kernel for folder in folders for kernel in kernels_of(folder.name)]


def module_file(name: str) -> Path | None:
    """The file of a module or of a package; None if there is none of that name."""
    place = ROOT / name.replace(".", "/")
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


def host_files(kernel: str) -> list[Path]:
    """The kernel's host file and every module of haloconv that it imports, at any distance."""
    first = SOURCE_ROOT / "families" / f"{kernel}.py"
    found, waiting = {first}, [first]
    while waiting:
        for node in ast.walk(_tree(waiting.pop())):
            names = [name for name in _imported(node) if name.startswith("haloconv.") and name not in _DECIDES_NOTHING]
            new = {file for name in names if (file := module_file(name)) is not None} - found
            found |= new
            waiting += new
    return sorted(found)


def launched(kernel: str) -> list[str]:
    """The .cu files that the kernel's host files launch, by name."""
    names = set()
    for file in host_files(kernel):
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "kernel_source":
                first = node.args[0]
                if isinstance(first, ast.Constant):
                    names.add(first.value)
    return sorted(names)


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


def stamp_hash(kernel: str) -> str:
    """The hash of the kernel's closure."""
    return total_hash([canonical(file) for file in stamped_files(kernel)])


def all_hashes() -> dict[str, str]:
    """The stamp hash of every kernel."""
    return {kernel: stamp_hash(kernel) for kernel in kernels()}


def read_stamps(folder: Path = VERIFIED) -> dict[str, dict]:
    """The stamp of every kernel that has one: a file a family, a line a kernel."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        found |= {f"{content['family']}/{name}": stamp for name, stamp in content["kernels"].items()}
    return found


def write_stamps(stamps: dict[str, dict], folder: Path = VERIFIED) -> list[Path]:
    """Put stamps into their families' files; those of other kernels stay. Gives the files."""
    whole = read_stamps(folder) | stamps
    written = []
    for family in sorted({kernel.split("/")[0] for kernel in stamps}):
        own = {kernel.split("/")[1]: whole[kernel] for kernel in sorted(whole) if kernel.split("/")[0] == family}
        lines = ",\n".join(f'    "{name}": {json.dumps(stamp, sort_keys=True)}' for name, stamp in own.items())
        path = folder / f"{family}.json"
        path.write_text(f'{{\n  "family": "{family}",\n  "kernels": {{\n{lines}\n  }}\n}}\n', encoding="utf-8")
        written.append(path)
    return written


def environment_of(root: Path) -> dict[str, str]:
    """The environment for a Python process that must find the checkout at ``root`` first."""
    return child_environment(PYTHONPATH=str(root))


def pending() -> dict[str, str]:
    """Kernel -> "date: reason" for the kernels that PENDING.md names."""
    text = PENDING.read_text(encoding="utf-8") if PENDING.exists() else ""
    return {line["kernel"]: f"{line['date']}: {line['reason']}" for line in PENDING_LINE.finditer(text)}
