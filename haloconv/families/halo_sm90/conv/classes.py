"""How the residue classes of a strided dgrad are rows of M (families/halo_sm90/conv/classes.cuh)."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from haloconv.families.common import ceil_div
from haloconv.families.halo_sm90.conv.form import Form
from haloconv.families.halo_sm90.conv.shape import BLOCK_M, Storage

_WARP_ROWS = 16
_ACROSS = (2, 4, 8)


class Classes(NamedTuple):
    """Rows of M of a group: ``runs`` times ``rows``.

    A run is one residue class, or ``across`` neighbouring columns of them, of which each 16 rows have all for
    16 / ``across`` filters: where neighbours in memory are pixels, a warp has whole rows of dx. ``alike`` rows, from a
    multiple of that many on, are of one run.
    """

    runs: int
    rows: int
    across: int
    alike: int

    @property
    def all_rows(self) -> int:
        return self.runs * self.rows


def classes_of(form: Form, storage: Storage) -> Classes:
    """The classes of a strided dgrad. In nhwc ``alike`` is at most the rows that 128 bytes of the result hold."""
    step = form.horizontal.out_step
    if storage.y_inner:
        rows = ceil_div(form.filters, _WARP_ROWS) * _WARP_ROWS
        return Classes(form.classes, rows, 1, gcd(rows, min(BLOCK_M, 128 // storage.y_bytes)))
    across = step if step in _ACROSS and form.horizontal.classes == step and not storage.residual else 1
    rows = ceil_div(form.filters, _WARP_ROWS // across) * _WARP_ROWS
    return Classes(form.classes // across, rows, across, _WARP_ROWS)


def rows_of_m(form: Form, storage: Storage) -> int:
    """Rows of M of a group, without output packs."""
    return classes_of(form, storage).all_rows if form.interleaves else form.filters
