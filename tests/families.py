"""Our families as tests see them: what the registry says of each, and in one table what only tests know of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch

from haloconv.families import FAMILIES
from haloconv.precision import Precision
from tests import oracle
from tests.cases import DTYPE_NAMES, DTYPES, Case, case, case_id
from tools.stamps import MOMENTS


class Facts(NamedTuple):
    """What tests know of a family and the registry does not say.

    ``takes`` is a small problem that it takes in each of its directions. ``main`` is the kernel that takes every call
    that it takes, empty if several do. ``proven`` are results beside its directions that its stamps show. ``same_sums``
    are results whose sums it forms in one order in whatever storage. With ``tma_stores`` results of some kernel leave
    by TMA; with ``fronts`` functions beside conv2d are drawn for it.
    """

    takes: Case
    main: str
    proven: tuple[str, ...] = ()
    same_sums: tuple[str, ...] = ()
    tma_stores: bool = False
    fronts: bool = False


_DENSE = case("dense", "few channels per group", (2, 8, 18, 22), (8, 3, 3), padding=1, groups=2)
_STRIDED = case("strided", "several launches in dgrad", (1, 32, 16, 20), (40, 3, 3), padding=1, stride=2)
_GROUPED = case("grouped", "groups of 8 channels in channels_last", (2, 16, 9, 18), (16, 3, 3), padding=1, groups=2,
                storage="channels_last", w_storage="channels_last")  # fmt: skip
_DEPTHWISE = case("depthwise", "one channel a group", (2, 8, 17, 20), (8, 3, 3), padding=1, groups=8)
_LARGE = case("large", "one channel a group, a large filter", (2, 3, 17, 20), (3, 9, 9), padding=4, groups=3)
_EPILOGUES = ("relu", "scale_relu", "residual_relu", "scale_residual")
FACTS = {
    "direct": Facts(_DENSE, "direct/direct", ("bgrad",), ("fprop", "dgrad", "wgrad"), fronts=True),
    "halo_sm90": Facts(_STRIDED, "halo_sm90/conv", (*_EPILOGUES, "moments"), tma_stores=True, fronts=True),
    "halo_sm80": Facts(_DENSE, "halo_sm80/conv", _EPILOGUES, fronts=True),
    "halo_sm80_wgrad": Facts(_DENSE, "halo_sm80_wgrad/wgrad"),
    "halo_sm80_f64": Facts(_STRIDED, "halo_sm80_f64/conv"),
    "grouped_sm90": Facts(_GROUPED, "grouped_sm90/conv", tma_stores=True),
    "depthwise_window": Facts(_DEPTHWISE, "depthwise_window/window", fronts=True),
    "depthwise_toeplitz": Facts(_LARGE, "depthwise_toeplitz/toeplitz", fronts=True),
    "depthwise": Facts(_DEPTHWISE, "", _EPILOGUES, tma_stores=True),
}
"""Each family once; CONTRIBUTING.md has a new one added here."""


@dataclass(frozen=True)
class Subject:
    """One family under test.

    ``capability`` is the compute capability it is bound to, None for any; ``newer``: or any that is newer.
    ``tensor_cores``: fp32 tensors are multiplied in TF32. ``results`` are its own; the others go to PyTorch.
    ``verifies`` names a kernel that the tests are about alone; else they verify the family.
    """

    name: str
    dtypes: tuple[torch.dtype, ...] = DTYPES
    results: tuple[str, ...] = oracle.RESULTS
    tensor_cores: bool = False
    capability: tuple[int, int] | None = None
    newer: bool = False
    verifies: str = ""

    @property
    def group(self) -> str:
        """The group of GPU tests that its tests are in (``tools.stamps.groups_of``)."""
        return self.verifies or self.name

    def on(self, one: Case, dtype: torch.dtype, *, strict: bool = True) -> Case:
        """The case with this family forced: with ``strict`` a refusal raises instead of running PyTorch's own."""
        precision: Precision | None = "tf32" if self.tensor_cores and dtype == torch.float32 else None
        return replace(one, spec=one.spec._replace(family=self.name, precision=precision, strict=strict))

    def label(self, dtype: torch.dtype) -> str:
        """The precision that its errors are recorded under."""
        return "tf32" if self.tensor_cores and dtype == torch.float32 else DTYPE_NAMES[dtype]

    def missing(self) -> str | None:
        """Why the current device does not run it, or None. Without any device that is for conftest to say."""
        if self.capability is None or not torch.cuda.is_available():
            return None
        found = torch.cuda.get_device_capability()
        if found == self.capability or (self.newer and found > self.capability):
            return None
        wanted = f"{self.capability} or newer" if self.newer else f"{self.capability}"
        return f"{self.name} needs compute capability {wanted}; this GPU has {found}"

    def __str__(self) -> str:
        return self.name


def _subject(name: str, results: tuple[str, ...] | None = None) -> Subject:
    """What the registry says of a family, and those of its results that are tested as its own."""
    family = FAMILIES[name]
    everywhere = family.newer and family.capability == LEAST
    capability = None if everywhere else family.capability
    return Subject(name, family.dtypes, results or family.directions, family.tensor_cores, capability, family.newer)


LEAST = (7, 0)  # compute capability of the oldest GPU
TENSOR_CORE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DIRECT = _subject("direct", oracle.RESULTS)
HALO_SM80 = _subject("halo_sm80")
HALO_SM90 = _subject("halo_sm90", ("fprop", "dgrad"))
HALO_SM90_WGRAD = replace(HALO_SM90, results=("wgrad",))  # not of groups of few channels
HALO_SM90_MOMENTS = replace(HALO_SM90, results=("fprop",), verifies=MOMENTS)  # where statistics are asked for
HALO_SM80_WGRAD = _subject("halo_sm80_wgrad")
HALO_SM80_F64 = _subject("halo_sm80_f64")  # not of groups of few channels
GROUPED_SM90 = _subject("grouped_sm90")  # of fp32 no filter gradient
DEPTHWISE, DEPTHWISE_WINDOW = _subject("depthwise"), _subject("depthwise_window")
DEPTHWISE_TOEPLITZ = _subject("depthwise_toeplitz")
# Families that take problems of their own alone.
SPECIALS = (HALO_SM80_F64, GROUPED_SM90, DEPTHWISE, DEPTHWISE_WINDOW, DEPTHWISE_TOEPLITZ)
SUBJECTS = (DIRECT, HALO_SM80, HALO_SM80_WGRAD, HALO_SM90)  # those that take every problem of their dtypes and results


def forms_tiles(family: str) -> bool:
    """Whether the name is that of a family whose kernels multiply tiles of a dense layer on tensor cores."""
    return family in FAMILIES and FAMILIES[family].capability > LEAST and not FAMILIES[family].depthwise


def computing(*results: str) -> tuple[Subject, ...]:
    """The subjects that compute all of these results."""
    return tuple(subject for subject in SUBJECTS if set(results) <= set(subject.results))


def name_of(value: object) -> str | None:
    """Readable pytest ids for families, cases and dtypes."""
    return str(value) if isinstance(value, Subject) else case_id(value)


def over(*values: tuple) -> list:
    """Parameters for tests: tuples that begin with a Subject, skipped with the reason where its device is missing."""
    return [pytest.param(*each, marks=_marks(each[0])) for each in values]


def each_subject(subjects: tuple[Subject, ...] = SUBJECTS) -> list:
    """Every family alone."""
    return over(*((subject,) for subject in subjects))


def each_dtype(subjects: tuple[Subject, ...] = SUBJECTS) -> list:
    """Every family with every dtype of its own."""
    return over(*((subject, dtype) for subject in subjects for dtype in subject.dtypes))


def each_result(subjects: tuple[Subject, ...] = SUBJECTS, results: tuple[str, ...] = oracle.RESULTS) -> list:
    """Every family with every dtype and every one of ``results`` of its own."""
    return over(
        *(
            (subject, dtype, result)
            for subject in subjects
            for dtype in subject.dtypes
            for result in results
            if result in subject.results
        )
    )


def _marks(subject: Subject) -> list[pytest.MarkDecorator]:
    reason = subject.missing()
    return [pytest.mark.skip(reason=reason)] if reason else []
