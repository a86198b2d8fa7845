"""What a command line may name: a problem file, or a model of torchvision or timm with random weights."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from haloconv.problem_file import Inputs, ProblemFile, load_problem_file

LIBRARIES = ("torchvision", "timm")


class TargetError(ValueError):
    """A target is no file and no model that is installed."""


@dataclass(frozen=True)
class NamedModel:
    """A model of a library with random weights, and the extents of its images.

    ``libraries`` are asked one after the other.
    """

    name: str
    libraries: tuple[str, ...]
    batch: int
    pixels: int

    def model(self) -> torch.nn.Module:
        """A new model, whose dropout is off: both sides of a comparison must compute the same.

        Raises TargetError if no library is installed that has it.
        """
        missing = []
        for library in self.libraries:
            try:
                model = _BUILDERS[library](self.name)
            except ImportError:
                missing.append(library)
                continue
            if model is not None:
                return without_chance(model)
        looked = " and ".join(self.libraries)
        remedy = f"; not installed: pip install {' '.join(missing)}" if missing else ""
        file = "this is a folder; name a file in it" if Path(self.name).is_dir() else "there is no such file"
        raise TargetError(f"{self.name}: {file}, and {looked} (if installed) has no such model{remedy}")

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """One batch of standard normal images; random numbers follow torch's seed."""
        return (torch.randn(self.batch, 3, self.pixels, self.pixels),)


class Target(NamedTuple):
    """A model on the CPU and the arguments of a call. ``from_file``: both are those of a problem file."""

    name: str
    model: torch.nn.Module
    inputs: Inputs
    from_file: bool


def find_source(text: str, batch: int, pixels: int) -> NamedModel | ProblemFile:
    """``path/to/file.py``, ``resnet50``, ``torchvision:resnet50`` or ``timm:convnext_tiny``; nothing is built yet.

    Models get ``batch`` images of 3 x ``pixels`` x ``pixels``; a problem file makes its own inputs.

    Raises TargetError for an unknown library, ProblemFileError if a file cannot be used.
    """
    if text.endswith(".py") or Path(text).is_file():
        return load_problem_file(text)
    library, _, name = text.rpartition(":")
    if library and library not in LIBRARIES:
        raise TargetError(f"{text}: models come from {' or '.join(LIBRARIES)}, not from {library}")
    return NamedModel(name, (library,) if library else LIBRARIES, batch, pixels)


def load_target(text: str, batch: int, pixels: int) -> Target:
    """The model and the inputs that ``find_source`` finds.

    Raises TargetError if there is no such file or model, ProblemFileError if the file cannot be used.
    """
    source = find_source(text, batch, pixels)
    return Target(source.name, source.model(), source.inputs(), isinstance(source, ProblemFile))


def without_chance(model: torch.nn.Module) -> torch.nn.Module:
    """``model`` itself, with every probability of dropping something set to 0."""
    for module in model.modules():
        for name in ("p", "drop_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def _of_torchvision(name: str) -> torch.nn.Module | None:
    import torchvision

    if name not in torchvision.models.list_models():
        return None
    builder = torchvision.models.get_model_builder(name)
    backbone = {"weights_backbone": None} if "weights_backbone" in inspect.signature(builder).parameters else {}
    model: torch.nn.Module = builder(weights=None, **backbone)
    return model


def _of_timm(name: str) -> torch.nn.Module | None:
    import timm

    return timm.create_model(name, pretrained=False) if name in timm.list_models() else None


_BUILDERS = {"torchvision": _of_torchvision, "timm": _of_timm}
