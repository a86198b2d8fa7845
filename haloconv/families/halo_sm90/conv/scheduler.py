"""Which work tiles of a launch of halo_sm90 a block of threads takes (families/halo_sm90/conv/scheduler.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from haloconv.families.common import ceil_div, divisor
from haloconv.jit.launch import Value


@dataclass(frozen=True)
class Schedule:
    """Who takes which work tiles.

    ``grid`` blocks of threads, one on each multiprocessor, of which each strip has ``strip_blocks`` for itself (0:
    strips are cut anywhere). ``team`` neighbouring ones have the same work tiles of different blocks of filters. The
    busiest has ``most`` work tiles.
    """

    grid: int
    strip_blocks: int
    most: int
    team: int = 1

    def owned(self, total: int, strips: int) -> int:
        """The work tiles of each strip that its own blocks take; the others are left over."""
        return min(total // strips, self.strip_blocks * ceil_div(total, self.grid))

    def fields(self, total: int, strips: int) -> dict[str, Value]:
        """The fields of ``Schedule`` in families/halo_sm90/conv/scheduler.cuh, but for the loops."""
        owners = strips * self.strip_blocks
        return {
            "team": divisor(self.team),
            "ranges": cuts(total // self.team, self.grid // self.team),
            "strip_ranges": cuts(self.owned(total, strips), self.strip_blocks),
            "spare_strips": cuts(strips, self.grid - owners if owners else 0),
            "strip_work_tiles": total // strips,
            "strip_owners": owners,
        }

    def ranges(self, total: int, strips: int) -> Iterator[tuple[int, int]]:
        """The first work tile of each range, and the one after its last; a block that is left over has several.

        Work tiles are counted member by member of a team.
        """
        if self.strip_blocks == 0:
            each, grid = total // self.team, self.grid // self.team
            for member in range(self.team):
                yield from pairwise(member * each + each * block // grid for block in range(grid + 1))
            return
        whole, own = total // strips, self.strip_blocks
        part = self.owned(total, strips)
        cuts = [part * block // own for block in range(own + 1)]
        for before in range(0, total, whole):
            yield from pairwise(before + cut for cut in (cuts if part == whole else [*cuts, whole]))


def best_schedule(total: int, blocks: int, strips: int, sm_count: int, shares_sectors: bool) -> Schedule:
    """Who takes ``total`` work tiles of ``strips`` strips (of all groups) and ``blocks`` blocks of filters.

    ``shares_sectors``: neighbouring strips share sectors of memory of 32 bytes. Where it costs few work tiles, all
    strips are cut at the same rows, so that both halves of a sector are written at about the same time and meet in the
    L2. Blocks of filters read the same input. Where it costs no work tile, they do so side by side, and it comes from
    memory once.
    """
    grid = min(sm_count, total)
    anywhere = Schedule(grid, 0, ceil_div(total, grid), blocks if grid % blocks == 0 else 1)
    if not shares_sectors or grid < strips:
        return anywhere
    cut = (_cut_strips(total, strips, grid), _cut_strips(total, strips, grid - grid % strips))
    found = min(cut, key=lambda each: each.most)
    return found if found.most <= 1.04 * anywhere.most else anywhere


def _cut_strips(total: int, strips: int, grid: int) -> Schedule:
    own, left = divmod(grid, strips)
    most = ceil_div(total, grid)
    rest = max(0, total // strips - own * most)  # at a strip's end, for the blocks that are left over
    ends = ceil_div(strips, left) if left else 0
    return Schedule(grid, own, max(most, ends * rest))


def cuts(length: int, parts: int) -> dict[str, Value]:
    """The fields of ``Cuts``; zeros for no parts. Exact below 2^15 of them."""
    if not parts:
        return {"parts": {"value": 0, "magic": 0, "shift": 0}, "each": 0, "left": 0}
    return {"parts": divisor(parts), "each": length // parts, "left": length % parts}
