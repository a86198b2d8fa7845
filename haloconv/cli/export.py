"""``haloconv export``: one Python file with ModelNew and its kernels, for torch.utils.cpp_extension.load_inline."""

from __future__ import annotations

import subprocess
import sys
import warnings
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from haloconv.cli.live import make_console
from haloconv.cli.output import Force, check_outputs, refusal, write_output
from haloconv.cli.run import Precision
from haloconv.export.export import ARCHS, export
from haloconv.families import OWN
from haloconv.problem_file import ProblemFileError

Family = Enum("Family", {name: name for name in ("auto", *OWN)}, type=str)  # type: ignore[misc]  # its members are the registry
AUTO = Family("auto")


def export_file(
    problem: Annotated[Path, typer.Argument(help="A file that defines Model, get_inputs, get_init_inputs.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write, by default PROBLEM_new.py here.")
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help=f"The GPU's architecture, by default this GPU's: {', '.join(ARCHS)}.")
    ] = None,
    family: Annotated[Family, typer.Option(help="The family of kernels where it applies.")] = AUTO,
    precision: Annotated[Precision, typer.Option(help="How fp32 products are formed.")] = Precision.auto,
    check: Annotated[bool, typer.Option("--check", help="Build the file on this GPU; print errors and times.")] = False,
    force: Force = False,
) -> None:
    """Write a problem file's model with its kernels as one Python file that needs PyTorch and nvcc alone.

    Exit code 0: written, and right if checked. 1: the check failed. 2: a file or an option cannot be used.
    """
    console = make_console()
    output = output or Path(f"{problem.stem}_new.py")
    try:
        check_outputs({"--output": output}, [problem], force)
        if check and not torch.cuda.is_available():
            raise ValueError("--check runs the kernels, and PyTorch sees no GPU")
        asked = None if precision is Precision.auto else precision.value
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", "haloconv:")
            text = export(problem, arch=arch, family=family.value, precision=asked)
    except (ProblemFileError, typer.BadParameter, ValueError) as error:
        raise refusal(error) from None
    for warning in caught:
        console.print(f"note: {warning.message}", style="yellow", highlight=False, markup=False)
    write_output(output, text, console)
    if check:
        raise typer.Exit(_checked(output, problem, console))


def _checked(output: Path, problem: Path, console: Console) -> int:
    """Run the file's own check in a process of its own, which does not import haloconv."""
    console.print("building the kernels, which takes about a minute", highlight=False)
    return 0 if subprocess.run([sys.executable, str(output), str(problem)], check=False).returncode == 0 else 1
