"""What every verb does with the files it writes, with wrong input, and with numbers that must be positive."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from haloconv import atomic

MAX_SEED = (1 << 63) - 1
"""What torch.manual_seed takes at most."""

Force = Annotated[bool, typer.Option("--force", help="Overwrite files that are there already.")]


def positive(value: float | None) -> float | None:
    """The value of an option, for ``callback=``. Raises BadParameter unless it is a finite number above 0, or None."""
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{value} is not a number above 0")
    return value


def check_inputs(*paths: Path | None) -> None:
    """Raise BadParameter for the first of the files or folders that is not there; None stands for one not asked for."""
    for path in paths:
        if path is not None and not path.exists():
            raise typer.BadParameter(f"{path}: there is no such file")


def check_outputs(outputs: Mapping[str, Path | None], inputs: Iterable[Path] = (), force: bool = False) -> None:
    """Raise BadParameter for a file that must not, or cannot, be written; called before any work is done.

    ``outputs`` are the files by the names of their options, None if not asked for. No output may be one of the
    ``inputs``, whatever it is called, nor another output; one that exists needs ``force``. Folders among the inputs
    stand for the Python files directly in them.
    """
    read = [file for path in inputs for file in (path.glob("*.py") if path.is_dir() else [path])]
    seen: dict[str, str] = {}
    for option, path in outputs.items():
        if path is None:
            continue
        for file in read:
            if _same(path, file):
                raise typer.BadParameter(f"{option} {path} would overwrite {file}, which this command reads")
        if path.is_dir():
            raise typer.BadParameter(f"{option} {path} is a folder; name a file")
        if path.is_file() and not force:
            raise typer.BadParameter(f"{option} {path} exists; add --force to overwrite it")
        other = seen.setdefault(os.path.realpath(path), option)
        if other != option:
            raise typer.BadParameter(f"{other} and {option} name the same file, {path}")
        if path.is_file() or not path.exists():  # no pipe or device, which is written to as it is
            check_folder(option, path)


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and os.path.samefile(one, other)


def check_folder(option: str, path: Path) -> None:
    """Raise BadParameter if the folder of the file ``path`` can neither be written to nor be made."""
    folder = next(each for each in Path(os.path.realpath(path)).parents if each.exists())
    if not folder.is_dir():
        raise typer.BadParameter(f"{option}: cannot write {path}: {folder} is no folder")
    if not os.access(folder, os.W_OK):
        raise typer.BadParameter(f"{option}: cannot write {path}: no permission to write in {folder}")


def write_output(path: Path, content: str | bytes, console: Console) -> None:
    """Write the file and say so, or exit with 2 and the reason. The caller has asked ``check_outputs`` before."""
    try:
        if isinstance(content, bytes):
            atomic.write_bytes(path, content)
        else:
            atomic.write_text(path, content)
    except OSError as error:
        raise refusal(f"cannot write {path}: {error.strerror or error}") from None
    console.print(f"wrote {path}", highlight=False, markup=False)


def refusal(error: Exception | str) -> typer.Exit:
    """Tell the error on stderr; gives what to raise: exit code 2, for input that cannot be used."""
    tell_error(error)
    return typer.Exit(2)


def tell_error(error: Exception | str) -> None:
    """The error on stderr, in one line."""
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"error: {error}", style="bold red", highlight=False, markup=False)
