"""The constants of families/halo_sm90/edges.cuh: what stands outside an image."""

from __future__ import annotations

from haloconv.problem import ZEROS, EdgeModes


def edge_constants(modes: EdgeModes) -> dict[str, int | str]:
    """None where all outside is zeros."""
    if modes == ZEROS:
        return {}
    rows, columns = modes
    of_rows: dict[str, int | str] = {"HALO_ROWS": 1} if rows == "halo" else {"EDGE_ROWS": f"hc::Edge::{rows.upper()}"}
    return {**of_rows, "EDGE_COLS": f"hc::Edge::{columns.upper()}"}
