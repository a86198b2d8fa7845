"""``make matrix``: the wheel in bare environments, one for each pair of Python and PyTorch, as a table.

uv finds the interpreters that this machine has, makes the environments and installs; every one is removed after use.
In each the wheel is installed without extras and used (matrix_cell.py); then the extra ``cli`` is added, and
``haloconv --version`` must print the version. The column ``lowest`` has the lowest version of everything that
pyproject.toml allows. Exit code 1 if any of that failed anywhere, an index could not be reached, or nothing was tried.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
LOWEST, NEWEST = "lowest", "newest"
TORCHES = (LOWEST, "2.4", "2.6", "2.9", NEWEST)
ROOT = Path(__file__).resolve().parents[1]
CELL = ROOT / "tools" / "matrix_cell.py"
NO_INTERPRETER, NO_WHEEL = "not tried: no interpreter", "no such wheel"
NOTHING_FITS = 1  # what uv exits with where it asked the index and no versions fit together; 2 is any other error
UV = Path(sys.executable).with_name("uv")
Run = Callable[..., subprocess.CompletedProcess[str]]


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command with variables that show nothing of this environment; its output is kept."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(
        [str(word) for word in command],
        env={**kept, "CUDA_VISIBLE_DEVICES": "", **variables},
        cwd=tempfile.gettempdir(), capture_output=True, text=True, check=False,
    )  # fmt: skip


def search_path() -> str:
    """PATH, with what pyenv installed put first: its shims answer for the version in use alone."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [str(folder) for folder in sorted(root.glob("versions/*/bin"))]
    return os.pathsep.join([*found, os.environ.get("PATH", os.defpath)])


def interpreter(version: str, run: Run = run) -> str | None:
    """The path of an interpreter of this version on this machine; None if there is none."""
    found = run(UV, "python", "find", "--no-project", "--no-python-downloads", version, PATH=search_path())
    return found.stdout.strip() or None if found.returncode == 0 else None


def wanted(torch: str) -> tuple[str | Path, ...]:
    """What to install first: the newest patch of a minor version of PyTorch, or of all, or the lowest of everything."""
    if torch == LOWEST:
        project = ROOT / "pyproject.toml"
        return "--resolution", "lowest-direct", "--only-binary", ":all:", "--requirements", project, "--extra", "cli"
    return "--only-binary", "torch", "torch" if torch == NEWEST else f"torch=={torch}.*"


def cell(python: str, torch: str, wheel: Path, extra_arguments: Sequence[str], run: Run = run) -> tuple[str, str]:
    """What came of one pair: ``ok`` with PyTorch's version, that no wheel fits, or what failed; and its output."""
    with tempfile.TemporaryDirectory(prefix="haloconv-matrix-") as folder:
        environment = Path(folder) / "env"
        program = environment / "bin" / "python"
        install = (UV, "pip", "install", "--quiet", "--python", program, *extra_arguments)
        made = run(UV, "venv", "--quiet", "--no-project", "--python", python, environment)
        if made.returncode:
            return "FAILED: no environment", made.stderr
        found = run(*install, "--dry-run", *wanted(torch))
        if found.returncode:
            return (NO_WHEEL, "") if found.returncode == NOTHING_FITS else ("FAILED: find PyTorch", found.stderr)
        version, command_line = "", environment / "bin" / "haloconv"
        steps = (
            ("install PyTorch", (*install, *wanted(torch))),
            ("install", (*install, wheel)),
            ("use", (program, "-I", CELL)),
            ("install cli", (*install, f"haloconv[cli] @ {wheel.as_uri()}")),
            ("command", (command_line, "--version")),
            ("help", (command_line, "run", "--help")),
        )
        for name, command in steps:
            done = run(*command)
            if done.returncode or (name == "command" and version_of(wheel) not in done.stdout):
                return f"FAILED: {name}", done.stdout + done.stderr
            version = done.stdout.strip() if name == "use" else version
    return f"ok {version}", ""


def version_of(wheel: Path) -> str:
    """The version that a wheel's name says."""
    return wheel.name.split("-")[1]


def table_of(results: dict[tuple[str, str], str], pythons: Sequence[str], torches: Sequence[str]) -> Table:
    """A line for each Python, a column for each PyTorch."""
    table = Table()
    for head in ("", *(f"PyTorch {torch}" for torch in torches)):
        table.add_column(head, overflow="fold")
    for python in pythons:
        texts = [results[python, torch] for torch in torches]
        styles = ["red" if text.startswith("FAILED") else "green" if text.startswith("ok") else "" for text in texts]
        table.add_row(f"Python {python}", *(Text(*each) for each in zip(texts, styles, strict=True)))
    return table


def build_wheel(folder: str) -> Path:
    """The wheel of this checkout."""
    done = run(UV, "build", "--quiet", "--wheel", "--out-dir", folder, ROOT)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description=__doc__)
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="3.x")
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="2.x", help=f"or {LOWEST}, {NEWEST}")
    parser.add_argument("--torch-backend", metavar="cpu", help="PyTorch's own index of such builds, as uv names them")
    given = parser.parse_args(arguments)
    if not UV.exists():
        parser.error(f"{UV} is not there: `make matrix` installs it")
    backend = ("--torch-backend", given.torch_backend) if given.torch_backend else ()
    results: dict[tuple[str, str], str] = {}
    logs: list[str] = []
    pythons = {version: interpreter(version) for version in given.python}
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(folder)
        for torch in given.torch:  # outside: the CUDA libraries of one PyTorch are those of every Python
            for version, path in pythons.items():
                text, log = (NO_INTERPRETER, "") if path is None else cell(path, torch, wheel, backend)
                results[version, torch] = text
                logs += [f"Python {version}, PyTorch {torch}: {text}\n{log}"] if log else []
                print(f"Python {version}, PyTorch {torch}: {text}", file=sys.stderr, flush=True)
    for log in logs:
        print(log)
    Console().print(table_of(results, given.python, given.torch))
    if not any(text.startswith(("ok", "FAILED")) for text in results.values()):
        print("Nothing was tried.")
        return 1
    return 1 if any(text.startswith("FAILED") for text in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
