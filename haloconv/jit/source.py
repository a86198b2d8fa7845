"""One self-contained source per specialisation: a banner, the constants, and a kernel with its headers joined in once.

The source is what is hashed, cached, compiled, shown and exported. It names no path and no date, so that the same
arguments give the same source in every process. Marker comments remember which file each line came from.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from haloconv.version import __version__

SOURCE_ROOT = Path(__file__).resolve().parent.parent
"""The folder that includes are relative to: the package."""

_FAMILIES = "families"  # the folder in it that names of kernels are relative to

Constants = tuple[tuple[str, "int | str"], ...]

_BEGIN = "//@ begin "
_END = "//@ end "
_INCLUDE = re.compile(r'\s*#\s*include\s*(?P<quote>["<])(?P<header>[^">]+)[">]')
_PRAGMA_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")
_NAME = re.compile(r"[A-Za-z_]\w*")
_TYPE = re.compile(r"[A-Za-z_]\w*(?:(?: |::)[A-Za-z_]\w*)*")


class SourceError(RuntimeError):
    """A kernel's source cannot be put together: a file is missing, or an include or a constant is not allowed."""


class Origin(NamedTuple):
    """The place in the package that a line of a joined source came from. ``line`` counts from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class KernelSource:
    """One specialisation of one kernel as a single source that NVRTC compiles as it is.

    ``kernel`` is the name of the .cu file: its family and its stem; ``entry`` is the ``extern "C"`` name;
    ``constants`` are the values in the order in which ``code`` defines them.
    """

    kernel: str
    entry: str
    constants: Constants
    code: str

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the code and the entry, in hexadecimal."""
        return hashlib.sha256(f"{self.code}\n{self.entry}".encode()).hexdigest()

    @property
    def unspecialised(self) -> str:
        """The code without its banner and constants: the same in every specialisation of the kernel."""
        return self.code[max(0, self.code.find(_BEGIN)) :]

    def origin(self, line: int) -> Origin | None:
        """Where line ``line`` (from 1) of the code came from, or None for the banner and the constants."""
        open_files: list[list[Any]] = []
        for code_line in self.code.splitlines()[:line]:
            if code_line.startswith(_BEGIN):
                open_files.append([code_line.removeprefix(_BEGIN), 0])
            elif open_files and code_line == _END + open_files[-1][0]:
                open_files.pop()
                if open_files:
                    open_files[-1][1] += 1
            elif open_files:
                open_files[-1][1] += 1
        return Origin(*open_files[-1]) if open_files else None


def kernel_source(kernel: str, entry: str, constants: Mapping[str, int | str]) -> KernelSource:
    """The source of a kernel's .cu file with ``constants`` defined in the given order, for the entry ``entry``.

    A value is an int, or the name of a type or constant such as ``float``, ``unsigned short`` or ``hc::bf16``.

    Raises SourceError if a file is missing, a system header is included, or a name or value is no valid constant.
    """
    return _specialised(kernel, entry, tuple(constants.items()))


def kernel_path(kernel: str) -> str:
    """The path in the package of ``halo_sm90/conv``'s files, without suffix.

    They lie in their family's folder, or in a folder of that which the family made for some of its kernels.
    """
    family, _, name = kernel.rpartition("/")
    folder = SOURCE_ROOT / _FAMILIES / family
    found = sorted(folder.glob(f"*/{name}.cu")) if family and not (folder / f"{name}.cu").exists() else []
    return "/".join((_FAMILIES, *filter(None, [family]), *(file.parent.name for file in found[:1]), name))


def family_sources(kernel: str) -> list[Path]:
    """A kernel's .cu file and every header it includes, in the order of inclusion.

    Raises SourceError if one is missing.
    """
    begins = [line for line in _joined(kernel).splitlines() if line.startswith(_BEGIN)]
    return [SOURCE_ROOT / line.removeprefix(_BEGIN) for line in begins]


def is_marker(line: str) -> bool:
    """True for the lines of a joined source that tell where a file begins or ends."""
    return line.startswith((_BEGIN, _END))


@lru_cache(maxsize=1024)
def _specialised(kernel: str, entry: str, constants: Constants) -> KernelSource:
    banner = f"// haloconv {__version__}: entry {entry} of kernel {kernel}, joined with its headers and constants"
    defines = [f"#define {_checked_name(name)} {_literal(name, value)}" for name, value in constants]
    code = "\n".join([banner, *defines, _joined(kernel)])
    return KernelSource(kernel, entry, constants, code)


@lru_cache(maxsize=64)
def _joined(kernel: str) -> str:
    return "\n".join(_inlined(f"{kernel_path(kernel)}.cu", set())) + "\n"


def _inlined(file: str, seen: set[str], included_from: Origin | None = None) -> Iterator[str]:
    """The lines of one file between two markers. Each line of the file gives one line, or one whole inlined file."""
    seen.add(file)
    yield _BEGIN + file
    for number, line in enumerate(_read(file, included_from).splitlines(), 1):
        include = _INCLUDE.match(line)
        if include is None:
            yield "" if _PRAGMA_ONCE.match(line) else line
            continue
        here = Origin(file, number)
        header = include["header"]
        if include["quote"] == "<":
            raise SourceError(f"{here}: #include <{header}>: kernels include their own headers only, no system header")
        if header in seen:
            yield f"// {header} is joined above"
        else:
            yield from _inlined(header, seen, here)
    yield _END + file


def _read(file: str, included_from: Origin | None) -> str:
    asked_by = f"{included_from}: " if included_from else ""
    if file.startswith(("/", "~")) or ".." in Path(file).parts:
        raise SourceError(f"{asked_by}'{file}' is outside the package; give a path relative to {SOURCE_ROOT}")
    try:
        return (SOURCE_ROOT / file).read_text(encoding="utf-8")
    except OSError as error:
        raise SourceError(f"{asked_by}cannot read '{file}' in {SOURCE_ROOT}: {error.strerror or error}") from error


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SourceError(f"constant {name!r}: a constant's name must be a C identifier")
    return name


def _literal(name: str, value: int | str) -> str:
    if isinstance(value, int):
        number = int(value)
        return f"({number})" if number < 0 else str(number)
    if isinstance(value, str) and _TYPE.fullmatch(value):
        return value
    raise SourceError(f"constant {name}={value!r}: a value must be an int or a name such as 'float' or 'hc::bf16'")
