"""All conformance cases by name."""

from __future__ import annotations

from tests.conformance import cases_copy, cases_warp, cases_wgmma
from tests.conformance.case import Case

CASES: tuple[Case, ...] = (*cases_warp.cases(), *cases_copy.cases(), *cases_wgmma.cases())
BY_NAME: dict[str, Case] = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES)
