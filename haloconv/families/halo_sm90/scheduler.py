"""How the steps of a launch of halo_sm90 are shared among blocks of threads (families/halo_sm90/share.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from haloconv.families.common import ceil_div

DIVISOR = "iIi"
"""``Divisor`` of families/halo_sm90/divisor.cuh as a format of struct."""

CUTS = DIVISOR + "2i"
"""``Cuts`` of the same."""

SHARE = 6 * DIVISOR + 3 * CUTS + "2i"
"""``Share`` of families/halo_sm90/share.cuh."""

_FEW_MORE = 1.04


@dataclass(frozen=True)
class Share:
    """Who does which steps.

    ``grid`` blocks of threads, one on each multiprocessor, of which each strip has ``strip_blocks`` for itself (0:
    strips are cut anywhere). ``team`` neighbouring ones have the same steps of different blocks of filters. The
    busiest has ``most`` steps.
    """

    grid: int
    strip_blocks: int
    most: int
    team: int = 1

    def strip_part(self, total: int, strips: int) -> int:
        """The steps of each strip that its own blocks take; the others are left over."""
        return min(total // strips, self.strip_blocks * ceil_div(total, self.grid))

    def fields(self, total: int, strips: int) -> Iterator[int]:
        """The last fields of ``Share`` in families/halo_sm90/share.cuh, from the team on."""
        owners = strips * self.strip_blocks
        yield from divisor(self.team)
        yield from cuts(total // self.team, self.grid // self.team)
        yield from cuts(self.strip_part(total, strips), self.strip_blocks)
        yield from cuts(strips, self.grid - owners if owners else 0)
        yield from (total // strips, owners)

    def runs(self, total: int, strips: int) -> Iterator[tuple[int, int]]:
        """The first step of each run, and the one after its last; a block that is left over has several.

        Steps are counted member by member of a team.
        """
        if self.strip_blocks == 0:
            steps, grid = total // self.team, self.grid // self.team
            for member in range(self.team):
                yield from pairwise(member * steps + steps * block // grid for block in range(grid + 1))
            return
        whole, own = total // strips, self.strip_blocks
        part = self.strip_part(total, strips)
        cuts = [part * block // own for block in range(own + 1)]
        for before in range(0, total, whole):
            yield from pairwise(before + cut for cut in (cuts if part == whole else [*cuts, whole]))


def share_steps(total: int, blocks: int, strips: int, sm_count: int, shares_sectors: bool) -> Share:
    """The share of ``total`` steps of ``strips`` strips (of all groups) and ``blocks`` blocks of filters.

    ``shares_sectors``: neighbouring strips share sectors of memory of 32 bytes. Where it costs few steps, all strips
    are cut at the same rows, so that both halves of a sector are written at about the same time and meet in the L2.
    Blocks of filters read the same input. Where it costs no step, they do so side by side, and it comes from memory
    once.
    """
    grid = min(sm_count, total)
    anywhere = Share(grid, 0, ceil_div(total, grid), blocks if grid % blocks == 0 else 1)
    if not shares_sectors or grid < strips:
        return anywhere
    cut = (_cut_strips(total, strips, grid), _cut_strips(total, strips, grid - grid % strips))
    found = min(cut, key=lambda each: each.most)
    return found if found.most <= _FEW_MORE * anywhere.most else anywhere


def _cut_strips(total: int, strips: int, grid: int) -> Share:
    own, left = divmod(grid, strips)
    most = ceil_div(total, grid)
    rest = max(0, total // strips - own * most)  # at a strip's end, for the blocks that are left over
    ends = ceil_div(strips, left) if left else 0
    return Share(grid, own, max(most, ends * rest))


def divisor(value: int) -> tuple[int, int, int]:
    """Value, magic and shift of a ``Divisor``. Exact for dividends below 2^31."""
    bits = 31 + (value - 1).bit_length()
    return (value, 0, 0) if value == 1 else (value, ceil_div(1 << bits, value), bits - 32)


def cuts(length: int, parts: int) -> tuple[int, int, int, int, int]:
    """Parts, each and left of ``Cuts``; zeros for no parts. Exact below 2^15 of them."""
    return (*divisor(parts), length // parts, length % parts) if parts else (0, 0, 0, 0, 0)
