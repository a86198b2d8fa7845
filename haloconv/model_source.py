"""Models by name, as timm and torchvision have them, and problem files: a model and inputs for it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch

from haloconv.problem_file import ProblemFile, ProblemFileError, load_problem_file

LIBRARIES = ("timm", "torchvision")
DEFAULT_INPUT = (8, 3, 224, 224)


@dataclass(frozen=True)
class NamedModel:
    """A model of a library, with random weights. ``input`` is (N, C, H, W)."""

    library: str
    name: str
    input: tuple[int, ...]

    def model(self) -> torch.nn.Module:
        """A new model, whose dropout is off: both sides of a comparison must compute the same.

        Raises ProblemFileError if the library is not installed or has no such model.
        """
        build = _from_timm if self.library == "timm" else _from_torchvision
        try:
            model = build(self.name)
        except ImportError:
            raise ProblemFileError(
                f"{self.library}:{self.name} needs {self.library}, which is not installed: pip install {self.library}"
            ) from None
        except (RuntimeError, ValueError) as error:
            raise ProblemFileError(f"{self.library}:{self.name}: {error}") from error
        return without_chance(model)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """One batch of standard normal images."""
        return (torch.randn(self.input),)


def find_source(text: str, input: tuple[int, ...] | None = None) -> NamedModel | ProblemFile:
    """The model that ``timm:NAME``, ``torchvision:NAME`` or the path of a problem file names.

    ``input`` (N, C, H, W) replaces the usual extents. Raises ProblemFileError if there is no such file, or if extents
    are given for a file, which has its own.
    """
    library, colon, name = text.partition(":")
    if colon and library in LIBRARIES:
        return NamedModel(library, name, input or DEFAULT_INPUT)
    if input is not None:
        raise ProblemFileError(f"{text}: a problem file makes its own inputs; extents go with timm: and torchvision:")
    return load_problem_file(text)


def without_chance(model: torch.nn.Module) -> torch.nn.Module:
    """The same model, with every probability of dropping something set to 0."""
    for module in model.modules():
        for name in ("p", "drop_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def _from_timm(name: str) -> torch.nn.Module:
    import timm

    return timm.create_model(name, pretrained=False)


def _from_torchvision(name: str) -> torch.nn.Module:
    import torchvision

    builder = torchvision.models.get_model_builder(name)
    backbone = {"weights_backbone": None} if "weights_backbone" in inspect.signature(builder).parameters else {}
    return builder(weights=None, **backbone)
