"""KernelBench-style problem files: a module with ``Model``, ``get_inputs()`` and ``get_init_inputs()``."""

from __future__ import annotations

import ast
import copy
import importlib.util
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn, TextIO

import torch
from torch.utils import _pytree

from haloconv.calls import noting_calls

SMALLEST_OUTPUT = 16
REDUCED_FLOPS = 2_000_000_000
NAMES = ("Model", "get_inputs", "get_init_inputs")

Inputs = tuple[object, ...]
"""The positional arguments of a model: tensors, numbers, None, and lists, tuples and dicts of them."""

_counter = itertools.count()


class ProblemFileError(Exception):
    """A problem file cannot be used; the message is a sentence for the person who wrote the file."""


def how_it_ended(error: BaseException) -> str:
    """``raised ValueError: why``, or ``called sys.exit(0)``: the end of a sentence about someone's code.

    Whatever code of a problem file raises ends that file alone, but for KeyboardInterrupt: ``sys.exit()``, too, and
    what libraries derive from BaseException, such as ``pytest.skip()`` and a panic in Rust.
    """
    if isinstance(error, _Exit):
        return f"called os._exit({error.code})"
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else repr(error.code)})"
    return f"raised {type(error).__name__}: {error}"


class _Exit(SystemExit):
    """What os._exit raises inside ``no_silent_end``."""


@contextmanager
def no_silent_end() -> Iterator[None]:
    """Inside, a file cannot end a run in silence.

    ``os._exit`` raises SystemExit; children of a fork still end. ``sys.stdout`` and ``sys.stderr`` are copies, which a
    file may close, detach or replace for itself alone.
    """
    process, leave = os.getpid(), os._exit
    streams = sys.stdout, sys.stderr

    def refused(status: int) -> NoReturn:
        if os.getpid() != process:
            leave(status)
        raise _Exit(status)

    os._exit = refused
    sys.stdout, sys.stderr = copies = _copy_of(sys.stdout), _copy_of(sys.stderr)
    try:
        yield
    finally:
        os._exit = leave
        sys.stdout, sys.stderr = streams
        for copy_ in copies:
            with suppress(AttributeError, OSError, ValueError):  # none, full, or closed by the file
                copy_.flush()


def _copy_of(stream: TextIO) -> TextIO:
    """Another stream to the same place; the stream itself if it is no file of the process.

    Nobody closes the copy, as a handler of log messages may hold it for longer than its file runs.
    """
    if type(stream) is not io.TextIOWrapper:
        return stream
    try:
        descriptor = os.dup(stream.fileno())
    except (OSError, ValueError):  # it is closed
        return stream
    return open(descriptor, "w", buffering=1, encoding=stream.encoding, errors=stream.errors)


def tensors_in(arguments: object) -> list[torch.Tensor]:
    """The tensors among a model's arguments, those in lists, tuples and dicts too, in their order."""
    return [leaf for leaf in _pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], arguments: Inputs) -> Inputs:
    """The arguments with every tensor changed, wherever it stands; all else is the same object."""
    changed: tuple[object, ...] = _pytree.tree_map_only(torch.Tensor, change, arguments)
    return changed


@dataclass(frozen=True)
class ProblemFile:
    """A loaded problem file. ``name`` is the file's stem."""

    path: Path
    model_class: Callable[..., torch.nn.Module]
    get_inputs: Callable[[], object]
    get_init_inputs: Callable[[], object]

    @property
    def name(self) -> str:
        return self.path.stem

    def model(self) -> torch.nn.Module:
        """A new ``Model(*get_init_inputs())``.

        Raises ProblemFileError if one of the two fails or returns something else than a list and a torch.nn.Module.
        """
        arguments = _called(self.path, "get_init_inputs", self.get_init_inputs)
        if not isinstance(arguments, (list, tuple)):
            raise ProblemFileError(
                f"{self.path}: get_init_inputs() must return a list of arguments for Model, not {_kind(arguments)}"
            )
        model = _called(self.path, "Model", lambda: self.model_class(*arguments))
        if not isinstance(model, torch.nn.Module):
            raise ProblemFileError(f"{self.path}: Model must be a torch.nn.Module, not {_kind(model)}")
        return model

    def inputs(self) -> Inputs:
        """What ``get_inputs()`` returns: the arguments of a call of the model.

        Beside tensors there may be numbers, None, and lists, tuples and dicts of all of them.

        Raises ProblemFileError if it fails, or returns no list, an empty list, or one that holds no tensor.
        """
        inputs = _called(self.path, "get_inputs", self.get_inputs)
        if not isinstance(inputs, (list, tuple)) or not inputs:
            raise ProblemFileError(f"{self.path}: get_inputs() must return a list of tensors, not {_kind(inputs)}")
        if not tensors_in(inputs):
            kinds = ", ".join(dict.fromkeys(_kind(value) for value in inputs))
            raise ProblemFileError(
                f"{self.path}: get_inputs() must return a list with a tensor in it, not only {kinds}"
            )
        return tuple(inputs)


def load_problem_file(path: str | Path) -> ProblemFile:
    """Import the file under a name of its own and find the three names in it.

    Raises ProblemFileError if there is no such file or it is a folder, if importing it fails, or if a name is missing.
    """
    path = Path(path)
    if not path.exists():
        raise ProblemFileError(f"{path}: there is no such file")
    if path.is_dir():
        raise ProblemFileError(f"{path}: this is a folder; name a Python file in it")
    module = _imported(path)
    found = {name: getattr(module, name, None) for name in NAMES}
    missing = [name for name, value in found.items() if not callable(value)]
    if missing:
        raise ProblemFileError(
            f"{path}: {' and '.join(missing)} missing; a problem file defines the class Model and the functions "
            "get_inputs() and get_init_inputs()"
        )
    model, inputs, init_inputs = (getattr(module, name) for name in NAMES)
    return ProblemFile(path, model, inputs, init_inputs)


def _imported(path: Path) -> ModuleType:
    name = f"haloconv_problem_{next(_counter)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ProblemFileError(f"{path}: this is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        del sys.modules[name]
        raise ProblemFileError(f"{path}: importing it {how_it_ended(error)}") from error
    return module


def _called(path: Path, name: str, call: Callable[[], object]) -> object:
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ProblemFileError(f"{path}: {name} {how_it_ended(error)}") from error


def _kind(value: object) -> str:
    return "an empty list" if isinstance(value, (list, tuple)) else f"{type(value).__name__}"


@dataclass(frozen=True)
class Candidate:
    """A file that may hold a problem. ``reason`` says why it does not, None if it does as far as its text tells."""

    path: Path
    reason: str | None = None


def candidates(paths: Iterable[Path]) -> list[Candidate]:
    """The files among ``paths``, and of each folder the Python files directly in it, ``2_x.py`` before ``10_x.py``.

    Files of a folder are read, not run: one whose text does not define the three names gets the reason, so that no
    ``setup.py`` is executed by accident. A file that is named itself is taken as it is.
    """
    found: list[Candidate] = []
    for path in paths:
        if path.is_dir():
            found += [Candidate(file, _why_no_problem(file)) for file in sorted(path.glob("*.py"), key=_counted)]
        else:
            found.append(Candidate(path))
    return found


def _counted(path: Path) -> list[tuple[int, str]]:
    """A sorting key in which numbers count as numbers."""
    return [(int(part), "") if part.isdigit() else (1 << 31, part) for part in re.split(r"(\d+)", path.name) if part]


def _why_no_problem(path: Path) -> str | None:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        return f"cannot be read as Python: {error}"
    missing = [name for name in NAMES if name not in _defined(tree)]
    return None if not missing else f"no problem file: it defines no {', no '.join(missing)}"


def _defined(tree: ast.Module) -> set[str]:
    """The names that the module's text binds at its top level; all three where it imports everything of another."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
    return names | set(NAMES) if "*" in names else names


@dataclass(frozen=True)
class Reduced:
    """Inputs cut down for a machine without a GPU. ``note`` says from what to what; None if nothing was cut."""

    inputs: Inputs
    note: str | None


def scaled_inputs(
    model: torch.nn.Module,
    inputs: Sequence[object],
    limit_flops: int = REDUCED_FLOPS,
    smallest_output: int = SMALLEST_OUTPUT,
) -> Reduced:
    """Crop the images among the inputs: batch 1, and the smallest H and W that keep every output's sides long enough.

    That is ``smallest_output`` pixels. Cropped are 4-dimensional tensors; the others lose all but the first element of
    their first axis, if that is the batch. ``limit_flops`` bounds the FLOP of all convolutions of a forward pass and
    wins over the pixels. If the model runs at no cropped extent, as with a linear layer of a fixed size, only the batch
    is cut; and nothing, if it does not run on a batch of 1 either.
    """
    whole = tuple(inputs)
    best, twin = None, copy.deepcopy(model).to("meta")
    for extent in _extents(whole):
        cropped = _crop(whole, extent)
        outcome = _dry_run(twin, cropped)
        if outcome is None:
            continue
        flops, smallest = outcome
        if best is not None and flops > limit_flops:
            break
        best = cropped
        if smallest >= smallest_output:
            break
    if best is None:
        one = _crop(whole, None)
        best = one if _dry_run(twin, one) or not _dry_run(twin, whole) else whole
    pairs = [(tuple(old.shape), tuple(new.shape)) for old, new in zip(tensors_in(whole), tensors_in(best), strict=True)]
    changed = [f"{old} to {new}" for old, new in pairs if old != new]
    note = f"inputs cut from {', '.join(changed)}" if changed else None
    return Reduced(map_tensors(torch.Tensor.contiguous, best), note)


def _extents(inputs: Inputs) -> Iterator[int]:
    """Candidates for H and W in rising order: every one up to 64, then coarser, then the full extent."""
    full = max((max(x.shape[2:]) for x in tensors_in(inputs) if x.dim() == 4), default=0)
    steps = itertools.chain(range(1, 64), range(64, 128, 8), range(128, 1024, 32), range(1024, 1 << 16, 256))
    yield from itertools.takewhile(lambda extent: extent < full, steps)
    if full:
        yield full


def _crop(inputs: Inputs, extent: int | None) -> Inputs:
    batches = {x.shape[0] for x in tensors_in(inputs) if x.dim() == 4}

    def cropped(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 4:
            return x[:1, :, :extent, :extent]
        return x[:1] if x.dim() > 0 and x.shape[0] in batches else x

    return map_tensors(cropped, inputs)


def _dry_run(twin: torch.nn.Module, inputs: Inputs) -> tuple[int, int] | None:
    """The FLOP of the convolutions and their smallest output extent, for a model on meta; None if it refuses."""
    outputs: list[tuple[int, int]] = []

    def note(_: str, module: torch.nn.Conv2d, __: object, y: torch.Tensor) -> None:
        outputs.append((2 * y.numel() * module.weight[0].numel(), min(y.shape[-2:])))

    layers = {name: module for name, module in twin.named_modules() if isinstance(module, torch.nn.Conv2d)}
    try:
        with noting_calls(layers, note), torch.no_grad():
            twin(*map_tensors(lambda x: x.to("meta"), inputs))
    except KeyboardInterrupt:
        raise
    except BaseException:  # whatever the model raises means: not at this extent
        return None
    return sum(flops for flops, _ in outputs), min((extent for _, extent in outputs), default=SMALLEST_OUTPUT)
