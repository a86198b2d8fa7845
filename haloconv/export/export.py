"""``haloconv.export``: a problem file as one Python file with its kernels, which needs PyTorch and nvcc alone.

The launches of every layer are recorded as the families make them (record.py) and written out as C++ that
torch.utils.cpp_extension.load_inline builds. They are made for the shapes of get_inputs(); the file checks its inputs.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import textwrap
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from haloconv import env, extras, support
from haloconv.choose.choice import DISABLED
from haloconv.device import DeviceFacts, device_facts, max_smem_bytes_of
from haloconv.export.cpp import LINE_WIDTH, constants, host_function, kernel_files, named_kernels, signature
from haloconv.export.layers import Layer, choose_and_record, choose_on, gpu_of, layers_of
from haloconv.export.model_source import NEW_MODEL, model_source
from haloconv.export.record import recorder
from haloconv.families import FAMILIES, OWN
from haloconv.precision import Precision
from haloconv.problem import PRECISIONS
from haloconv.problem_file import ProblemFile, ProblemFileError, how_it_ended, load_problem_file, no_silent_end
from haloconv.reference import error_limits
from haloconv.version import __version__

TEMPLATES = Path(__file__).resolve().parent / "templates"
DEFAULT_ARCH = "sm_90a"
ARCHS = {
    "sm_70": ("V100", 80),
    "sm_75": ("T4", 40),
    "sm_80": ("A100", 108),
    "sm_86": ("RTX A6000", 84),
    "sm_89": ("RTX 4090", 128),
    "sm_90a": ("H200", 132),
    "sm_100": ("B200", 148),
    "sm_120": ("RTX 5090", 170),
}
"""The architectures that can be named without a GPU of theirs: a usual one, and its multiprocessors."""

_MAPS_CAPABILITY = (9, 0)
_TF32_CAPABILITY = (8, 0)
_DIRECTION_NAMES = {"fprop": "forward", "dgrad": "input gradient", "wgrad": "weight gradient", "bgrad": "bias gradient"}


def export(
    path: str | Path, *, arch: str | None = None, family: str = "auto", precision: Precision | None = None
) -> str:
    """The text of a Python file with ``ModelNew``: the problem file's ``Model`` on kernels that stand in the text.

    Constructor, forward, defaults, parameter names and initialisation are those of ``Model``; forward and backward of
    every torch.nn.Conv2d run on our kernels. The file holds launches for the shapes of ``get_inputs()`` and raises a
    RuntimeError that says so for others.

    Args:
        path: a problem file, which defines Model, get_inputs() and get_init_inputs().
        arch: the architecture the launches are made for, a name of ARCHS; None for the current GPU's, or sm_90a.
        family: ``"auto"`` or the family that runs the directions it takes; a RuntimeWarning names those it does not.
        precision: how fp32 products are formed: ``"ieee"``, ``"tf32"``, ``"tf32x3"``, or None to follow PyTorch's
            setting (``"ieee"`` where the architecture has no TF32).

    Plans are forgotten, and no other thread may run layers on the CPU meanwhile (record.py).

    Raises:
        ProblemFileError: the file cannot be used, holds a layer that no kernel runs, or none that ``family`` takes.
        ValueError: ``arch``, ``family`` or ``precision`` is not one of the names above, or ``arch`` cannot run the
            family or has no TF32; HALOCONV_DISABLE is set.
        ModuleNotFoundError: jinja2, of the extra ``cli``, is not installed.
    """
    extras.require("haloconv.export", "jinja2")
    if env.disabled():
        raise ValueError(f"{DISABLED}: unset it to export kernels")
    if family not in ("auto", *OWN):
        raise ValueError(f"family must be one of {('auto', *OWN)}, not {family!r}")
    if precision not in (None, *PRECISIONS):
        raise ValueError(f"precision must be None or one of {PRECISIONS}, not {precision!r}")
    facts = facts_of(arch)
    _check_family_runs_on(family, facts)
    if facts.capability < _TF32_CAPABILITY:
        if precision in ("tf32", "tf32x3"):
            raise ValueError(f"{facts.arch} has no TF32: leave precision out, or ask for 'ieee'")
        precision = "ieee"
    with no_silent_end():
        file = load_problem_file(path)
        layers = layers_of(file, precision)
        record(layers, facts, family)
        _tell_refusals(file, layers, family)
        text = _rendered(file, layers, facts)
        _check_names(file, text)
        _check_twin(file, text)
    return text


def _check_family_runs_on(family: str, facts: DeviceFacts) -> None:
    """Raise ValueError if the family has no kernels for the architecture."""
    able = [name for name in OWN if _runs_on(name, facts)]
    if family != "auto" and family not in able:
        major, minor = FAMILIES[family].capability
        which = f"{major}.{minor}{' and newer' if FAMILIES[family].newer else ' alone'}"
        raise ValueError(
            f"{family} runs on compute capability {which}, and {facts.arch} has {facts.capability[0]}."
            f"{facts.capability[1]}; the families that run on {facts.arch} are {', '.join(able)}"
        )


def _runs_on(name: str, facts: DeviceFacts) -> bool:
    family = FAMILIES[name]
    return support.why_not_capability(facts.capability, family.capability, family.newer) is None


def _tell_refusals(file: ProblemFile, layers: list[Layer], family: str) -> None:
    """Warn of the directions that the family asked for does not take. Raises ProblemFileError if it takes none."""
    places: dict[str, list[str]] = {}
    for layer in layers:
        for direction, reason in layer.refusals.items():
            places.setdefault(reason, []).append(f"{layer.name} {direction} ({layer.choices[direction].family})")
    if not places:
        return
    reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in places.items())
    if all(len(layer.refusals) == len(layer.choices) for layer in layers):
        raise ProblemFileError(
            f"{file.path}: {family} takes no direction of any layer; in brackets is what does: {reasons}"
        )
    message = f"haloconv: {family} does not take all of {file.path.name}; in brackets is what does: {reasons}"
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def record(layers: list[Layer], facts: DeviceFacts, family: str) -> None:
    """Choose a family for each direction of each layer, and record what it launches on a GPU of these facts."""
    gpu = gpu_of(facts.arch)
    if gpu is not None:
        for layer in layers:
            choose_on(gpu, layer)
    with recorder(facts) as device:
        for layer in layers:
            choose_and_record(layer, device, family)


def facts_of(arch: str | None) -> DeviceFacts:
    """Facts about the current GPU if it is of ``arch`` (None: any), else those of a usual GPU of the architecture.

    Raises ValueError for an architecture that is not in ARCHS.
    """
    if torch.cuda.is_available():
        here = device_facts(torch.cuda.current_device())
        if arch in (None, here.arch):
            return here
    arch = DEFAULT_ARCH if arch is None else arch
    if arch not in ARCHS:
        raise ValueError(f"arch must be one of {tuple(ARCHS)}, or that of the GPU at hand, not {arch!r}")
    digits = arch.removeprefix("sm_").rstrip("a")
    capability = (int(digits[:-1]), int(digits[-1]))
    name, sm_count = ARCHS[arch]
    return DeviceFacts(name, arch, sm_count, capability, 0, max_smem_bytes_of(capability), "none")


def _rendered(file: ProblemFile, layers: list[Layer], facts: DeviceFacts) -> str:
    functions = {name: tape for layer in layers for name, tape in layer.functions.items()}
    kernels = named_kernels(functions)
    families = [FAMILIES[choice.family] for layer in layers for choice in layer.choices.values()]
    only = not all(family.newer for family in families)  # compiled for one architecture
    comments = {
        name: f"{layer.name}, {_DIRECTION_NAMES[name.removeprefix(layer.name + '_')]}"
        for layer in layers
        for name in layer.functions
    }
    hosts = [host_function(name, comments[name], tape, kernels) for name, tape in functions.items()]
    files = kernel_files(kernel.source for kernel in kernels)
    has_pixel_maps = any("pixel_map(" in host for host in hosts)
    has_maps = has_pixel_maps or any("box_map(" in host for host in hosts)
    content = {
        "version": __version__,
        "file": file,
        "layers": layers,
        "facts": facts,
        "files": files,
        "kernels": kernels,
        "constants": constants,
        "hosts": hosts,
        "has_clears": any("clear(" in host for host in hosts),
        "has_clusters": any("launch_clusters(" in host for host in hosts),
        "has_maps": has_maps,
        "has_pixel_maps": has_pixel_maps,
        "declarations": [f"{signature(name, tape)};" for name, tape in functions.items()],
        "functions": list(functions),
        "only_capability": facts.capability if only else None,
        "least_capability": max([family.capability for family in families] + [_MAPS_CAPABILITY] * has_maps),
        "formats": {"nchw": "contiguous_format", "nhwc": "channels_last"},
        "built_for": facts.arch if only else None,
        "precision": layers[0].fprop.precision_label,
        "error_limit": _error_limit(layers),
        "digest": _digest([*files.values(), *hosts, *(str(kernel.source.constants) for kernel in kernels)]),
        "model": model_source(file.path, _module_of(file)),
    }
    import jinja2

    loader = jinja2.FileSystemLoader(TEMPLATES)
    page = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    page.filters["folded"] = _folded
    return page.get_template("export.py.j2").render(content)


def _folded(text: str, indent: int) -> str:
    """A paragraph whose lines after the first are indented by that many spaces."""
    return textwrap.fill(text, LINE_WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent).strip()


def _error_limit(layers: list[Layer]) -> float:
    """The relative norm that the file's own check allows: the sum over the layers of the widest limit of each."""
    return sum(max(error_limits(layer.fprop.toward(each)).norm for each in layer.choices) for layer in layers)


def _digest(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def _module_of(file: ProblemFile) -> types.ModuleType:
    """The module in which Model is defined. Raises ProblemFileError if that is another file."""
    module = sys.modules.get(getattr(file.model_class, "__module__", ""))
    if module is None or Path(getattr(module, "__file__", None) or "").resolve() != file.path.resolve():
        raise ProblemFileError(
            f"{file.path}: Model is defined elsewhere; the export takes its class from the file itself"
        )
    return module


def _check_names(file: ProblemFile, text: str) -> None:
    """Raise ProblemFileError if the problem file defines a name that the rest of the exported file goes by."""
    model = Counter(_defined(model_source(file.path, _module_of(file))))
    taken = [name for name, count in Counter(_defined(text)).items() if name in model and count > model[name]]
    if taken:
        raise ProblemFileError(f"{file.path}: the exported file has a {', '.join(taken)} of its own; take another name")


def _defined(text: str) -> Iterator[str]:
    """The names of functions, classes and values at the top of a module's text."""
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (each.id for each in node.targets if isinstance(each, ast.Name))


def _check_twin(file: ProblemFile, text: str) -> None:
    """Raise ProblemFileError unless ModelNew has Model's parameters, the same values from the same seed, no Conv2d."""
    module = types.ModuleType("haloconv_exported")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = file.model()
        torch.manual_seed(0)
        try:
            exec(compile(text, f"{file.name}_new.py", "exec"), vars(module))
            arguments: Any = file.get_init_inputs()
            ours = getattr(module, NEW_MODEL)(*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise ProblemFileError(f"{file.path}: {NEW_MODEL} {how_it_ended(error)}") from error
    left = [name for name, each in ours.named_modules() if isinstance(each, torch.nn.Conv2d)]
    if left:
        raise ProblemFileError(
            f"{file.path}: {', '.join(left)} is a torch.nn.Conv2d that the file's own text does not make; "
            "write nn.Conv2d(...) in the file"
        )
    own, other = ours.state_dict(), theirs.state_dict()
    if list(own) != list(other) or not all(torch.equal(own[name], other[name]) for name in own):
        raise ProblemFileError(
            f"{file.path}: ModelNew would not start with the parameters of Model under the same seed"
        )
