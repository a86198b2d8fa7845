"""What a command line may name: a problem file, or a model of torchvision or timm with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from haloconv.problem_file import load_problem_file

LIBRARIES = ("torchvision", "timm")


class TargetError(ValueError):
    """A target is no file and no model that is installed."""


class Target(NamedTuple):
    """A model on the CPU and the arguments of a call. ``from_file``: both are those of a problem file."""

    name: str
    model: torch.nn.Module
    inputs: tuple[torch.Tensor, ...]
    from_file: bool


def load_target(text: str, batch: int, pixels: int) -> Target:
    """``path/to/file.py``, ``resnet50``, ``torchvision:resnet50`` or ``timm:convnext_tiny``.

    Models get ``batch`` random images of 3 x ``pixels`` x ``pixels``; random numbers follow torch's seed.

    Raises TargetError if there is no such file or model, ProblemFileError if the file cannot be used.
    """
    if text.endswith(".py") or Path(text).is_file():
        file = load_problem_file(text)
        return Target(file.name, file.model(), file.inputs(), True)
    library, _, name = text.rpartition(":")
    if library and library not in LIBRARIES:
        raise TargetError(f"{text}: models come from {' or '.join(LIBRARIES)}, not from {library}")
    for each in (library,) if library else LIBRARIES:
        model = _model_of(each, name)
        if model is not None:
            return Target(name, model, (torch.randn(batch, 3, pixels, pixels),), False)
    looked = library or " and ".join(LIBRARIES)
    raise TargetError(f"{text}: there is no such file, and {looked} (if installed) has no model of this name")


def _model_of(library: str, name: str) -> torch.nn.Module | None:
    """A model of a library with random weights, or None if the library is not installed or has none of the name."""
    try:
        if library == "torchvision":
            import torchvision

            return torchvision.models.get_model(name, weights=None)
        import timm

        return timm.create_model(name, pretrained=False) if name in timm.list_models() else None
    except ImportError:
        return None
    except ValueError as error:
        if "Unknown model" in str(error):
            return None
        raise
