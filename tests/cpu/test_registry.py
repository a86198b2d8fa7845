"""The registry of families: what each says of itself is what it does."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from haloconv.bench.costs.host_cost import H200
from haloconv.bench.one_kernel import chosen_kernels, host_module
from haloconv.emulator import emulated_device
from haloconv.families import FAMILIES, OWN, UNIVERSAL, check_family
from haloconv.families.base import MOST_CONFIGS
from haloconv.families.closure import kernels
from haloconv.families.files import kernels_of
from haloconv.jit.source import SOURCE_ROOT
from haloconv.problem import DIRECTIONS, Direction, Problem, Request, dense_request
from haloconv.support import KERNEL_DTYPES
from tests.cases import CASES
from tests.families import FACTS, SPECIALS, SUBJECTS
from tests.sources import noted_sources

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
DENSE = Problem("fprop", 2, 32, 24, 24, 32, 3, 3, padding=(1, 1, 1, 1), precision="tf32")
GROUPED = replace(DENSE, c=64, k=64, groups=8, layout="nhwc")
DEPTHWISE = replace(DENSE, groups=32)
HALF = {"dtype": torch.float16, "precision": "ieee"}
DOUBLE = {"dtype": torch.float64, "precision": "ieee"}


def narrow(name: str) -> dict[str, object]:
    """What a family is asked in: fp16 where it takes that."""
    return HALF if torch.float16 in FAMILIES[name].dtypes else DOUBLE


def takes(name: str, layers: tuple[Problem, ...] = (DENSE, GROUPED, DEPTHWISE), **changes: object) -> bool:
    """Whether a family takes one of the layers, with changes, with a small or a large filter, in some direction."""
    changed = [replace(layer.toward(each), **changes) for layer in layers for each in DIRECTIONS]
    large = [replace(each, r=9, s=9, padding=(4, 4, 4, 4)) for each in changed]
    return any(FAMILIES[name].why_not(each, CPU) is None for each in (*changed, *large))


def test_names_are_those_of_folders() -> None:
    assert list(FAMILIES)[0] == "aten" and "auto" not in FAMILIES
    assert all(family.name == name for name, family in FAMILIES.items())
    assert all(kernels_of(name) for name in OWN) and set(OWN) == set(FAMILIES) - {"aten"}


@pytest.mark.parametrize("name", OWN)
def test_a_family_takes_its_directions_and_dtypes_alone(name: str) -> None:
    family = FAMILIES[name]
    with emulated_device():
        assert tuple(each for each in DIRECTIONS if takes(name, direction=each, **narrow(name))) == family.directions
        for dtype in KERNEL_DTYPES:
            precision = "tf32" if dtype == torch.float32 else "ieee"
            assert takes(name, dtype=dtype, precision=precision) == (dtype in family.dtypes), dtype


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (12, 0)], ids=str)
def test_one_family_takes_all_that_any_takes(capability: tuple[int, int]) -> None:
    """Choices ask it for the reason why no kernel of ours runs."""
    facts = replace(H200, arch=f"sm_{capability[0]}{capability[1]}", capability=capability)
    problems = [one.problem(each, dtype) for one in CASES for each in DIRECTIONS for dtype in KERNEL_DTYPES]
    with noted_sources(facts):
        reasons = {name: [FAMILIES[name].why_not(each, CPU) for each in problems] for name in OWN}
    taken = {name: {at for at, reason in enumerate(found) if reason is None} for name, found in reasons.items()}
    assert taken[UNIVERSAL] == set().union(*taken.values()) != set()


@pytest.mark.parametrize("name", OWN)
def test_depthwise_families_take_one_channel_a_group(name: str) -> None:
    with emulated_device():
        assert takes(name, (DENSE, GROUPED), **narrow(name)) != FAMILIES[name].depthwise
        assert takes(name, (DEPTHWISE,), **narrow(name)) >= FAMILIES[name].depthwise


@pytest.mark.parametrize("name", OWN)
def test_a_family_runs_on_its_gpus_alone(name: str) -> None:
    family = FAMILIES[name]
    for arch in ("sm_75", "sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"):
        with emulated_device(arch=arch) as device:
            found = device.facts.capability
            expected = found == family.capability or (family.newer and found > family.capability)
            assert takes(name, **narrow(name)) == expected, arch


@pytest.mark.parametrize("name", [name for name in OWN if torch.float32 in FAMILIES[name].dtypes])
def test_fp32_goes_to_tensor_cores_only_where_tf32_is_allowed(name: str) -> None:
    with emulated_device():
        assert takes(name) and takes(name, precision="ieee") != FAMILIES[name].tensor_cores


@pytest.mark.parametrize("name", OWN)
def test_sources_are_of_the_familys_own_kernels(name: str) -> None:
    assert {each.kernel.split("/")[0] for each in FAMILIES[name].sources()} & {name}


def test_an_unknown_family_is_refused() -> None:
    check_family("auto")
    with pytest.raises(ValueError, match="family must be one of .*'auto', 'aten'"):
        check_family("cudnn")


# The contract of a kernel ---------------------------------------------------------------------------------------------


CHOSEN = chosen_kernels()


def test_every_kernel_answers_the_same_three_questions() -> None:
    contract = {
        "why_not": "(request: 'Request') -> 'str | None'",
        "configs": "(request: 'Request') -> 'list[Config]'",
        "bind": "(request: 'Request', config: 'Config') -> 'BoundCall'",
    }
    assert len(CHOSEN) > 20 and {kernel.split("/")[0] for kernel in CHOSEN} == set(OWN)
    for kernel in CHOSEN:
        module = host_module(kernel)
        assert {name: str(inspect.signature(getattr(module, name))) for name in contract} == contract, kernel


def test_why_not_has_one_signature_in_the_files_of_kernels() -> None:
    """Also where kernels share it; a family's own is a method."""
    found = {}
    for file in (SOURCE_ROOT / "families").rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name == "why_not":
                found[file.stem, file.parent.name] = ast.unparse(node.args)
    assert len(found) >= len(CHOSEN) and set(found.values()) == {"request: Request"}


def requests(direction: Direction) -> Iterator[Request]:
    layers = [replace(layer, layout=layout) for layer in (DENSE, GROUPED, DEPTHWISE) for layout in ("nchw", "nhwc")]
    layers += [replace(layer, r=taps, s=taps, padding=(taps // 2,) * 4) for layer in layers for taps in (1, 9)]
    for layer, changes in product(layers, ({}, HALF, DOUBLE)):
        yield dense_request(replace(layer.toward(direction), **changes), CPU)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_family_offers_kernels_that_take_the_request(direction: Direction) -> None:
    """And a kernel that takes it, of a family that does, has at least one config, of its own."""
    offered, taken = set(), set()
    with emulated_device(arch="sm_90a"):
        for request in requests(direction):
            families = [name for name in OWN if FAMILIES[name].why_not(request.problem, CPU) is None]
            for found in (FAMILIES[name].configs(request) for name in families):
                refused = {each.kernel: host_module(each.kernel).why_not(request) for each in found}
                assert found and set(refused.values()) == {None}, (request, refused)
                assert len({(each.kernel, each.key) for each in found}) == len(found), request
                assert max(Counter(each.kernel for each in found).values()) <= MOST_CONFIGS, request
                assert {each.kernel for each in found[:MOST_CONFIGS]} == set(refused), "a kernel that is not measured"
                offered |= set(refused)
            for kernel in (each for each in CHOSEN if each.split("/")[0] in families):
                if host_module(kernel).why_not(request) is None:
                    found = host_module(kernel).configs(request)
                    assert {each.kernel for each in found} == {kernel} and len(found) <= MOST_CONFIGS, request
                    taken.add(kernel)
    assert offered <= taken and len(taken) > 5
    assert {"wgrad" in kernel for kernel in taken - {"direct/direct"}} == {direction == "wgrad"}


def test_tests_know_every_family() -> None:
    """The table of tests/families.py has each once, and those that GPU tests see are all there are."""
    assert sorted(FACTS) == sorted(OWN)
    assert sorted(subject.name for subject in (*SUBJECTS, *SPECIALS)) == sorted(OWN)
    assert all(facts.main in ("", *kernels()) for facts in FACTS.values())


def test_nobody_asks_for_the_beginning_of_a_familys_name() -> None:
    """What families have in common the registry says; a new one's name may begin with anything."""
    asked = re.compile(r"\bfamily\.(startswith|endswith)\(")
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "haloconv").rglob("*.py")]
    found = {each.name for each in files if asked.search(each.read_text("utf-8"))}
    assert found == {"formats.py"}  # which reads the families' names of older files
