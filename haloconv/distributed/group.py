"""The ranks that have an image together: their process groups, and what they agree on before they communicate.

Whatever communicates is agreed on first, by one small message of every rank to every other: that all of them are about
to do the same. A rank that fails sends its sentence in that place, so that the others learn it and none waits.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

PATIENCE = timedelta(seconds=25)
"""How long a rank that failed waits for the others to hear of it."""
FAILED = -1
"""What a rank that failed gives in place of the hash of its call."""
AGREEING = 1
"""The tag of agreements, which gloo may have in the group of pixels; those have tag 0."""


class RankError(RuntimeError):
    """A rank failed, or ranks differ in what they are about to do: raised on all ranks, with the same sentence."""


class Group(NamedTuple):
    """The ranks that differ from this one along some dimensions of a mesh, in row-major order of these.

    It names process groups and holds none, so that tensors with gradients do not keep them.

    Attributes:
        mesh: the DeviceMesh.
        dims: along which ranks exchange pixels, and sum.
        agreeing: along which they agree before that, ``dims`` among them.
    """

    mesh: DeviceMesh
    dims: tuple[int, ...]
    agreeing: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the processes that agree."""
        return ranks_along(self.mesh, self.agreeing)

    @property
    def data(self) -> dist.ProcessGroup:
        """The process group for pixels and sums. All its ranks must ask for it together when they first do."""
        return _data_group(self.mesh, self.dims)

    @property
    def control(self) -> dist.ProcessGroup:
        """The process group for agreements, on gloo. All its ranks must ask for it together when they first do."""
        data = _data_group(self.mesh, self.agreeing)
        return data if dist.get_backend(data) == "gloo" else _new_group(sorted(self.ranks), "gloo")


_ranks: WeakKeyDictionary[DeviceMesh, dict[tuple[tuple[int, ...], ...], tuple[int, ...]]] = WeakKeyDictionary()
_made: WeakValueDictionary[tuple[object, ...], dist.ProcessGroup] = WeakValueDictionary()
_begun: WeakSet[dist.ProcessGroup] = WeakSet()
_counted: WeakKeyDictionary[dist.ProcessGroup, defaultdict[tuple[int, ...], list[int]]] = WeakKeyDictionary()


def group_of(mesh: DeviceMesh, dims: tuple[int, ...], agreeing: tuple[int, ...]) -> Group | None:
    """The group along ``dims``; None if there is no other rank. Raises RuntimeError on a rank outside the mesh."""
    return Group(mesh, dims, agreeing) if len(ranks_along(mesh, dims)) > 1 else None


def coordinate(mesh: DeviceMesh) -> list[int]:
    """This rank's place in a mesh. Raises RuntimeError on a rank outside it."""
    at = mesh.get_coordinate()
    if at is None:
        raise RuntimeError(
            f"haloconv.distributed: rank {dist.get_rank()} is not in {mesh}, and has no shard to compute"
        )
    return list(at)


def ranks_along(mesh: DeviceMesh, dims: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that differ from this one along ``dims`` alone, in row-major order of these.

    Looked up once: a mesh puts the tensor of its ranks together each time that it is asked for it.
    """
    here, known = coordinate(mesh), _ranks.setdefault(mesh, {})
    found = known.get((tuple(here), dims))
    if found is None:
        at: list[int | slice] = [slice(None) if dim in dims else index for dim, index in enumerate(here)]
        found = known[tuple(here), dims] = tuple(mesh.mesh[tuple(at)].flatten().tolist())
    return found


def _data_group(mesh: DeviceMesh, dims: tuple[int, ...]) -> dist.ProcessGroup:
    longer = [dim for dim in dims if mesh.size(dim) > 1]
    group = mesh.get_group(longer[0]) if len(longer) == 1 else _new_group(sorted(ranks_along(mesh, dims)), None)
    if group not in _begun:
        if dist.get_backend(group) != "gloo":
            # Of NCCL the first call of a group must be one that all its ranks take part in; those that exchange do not.
            dist.all_reduce(torch.zeros(1, device=mesh.device_type), group=group)
        _begun.add(group)
    return group


def _new_group(ranks: list[int], backend: str | None) -> dist.ProcessGroup:
    """A process group of these ranks alone, made once."""
    key = (backend, *ranks)
    group = _made.get(key)
    if group is None:
        group = _made[key] = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    return group


def _counts(ranks: tuple[int, ...]) -> list[int]:
    """How often these ranks have agreed, and how many calls they have made since: on each of them the same."""
    world = dist.group.WORLD
    assert world is not None
    return _counted.setdefault(world, defaultdict(lambda: [0, 0]))[ranks]


def numbered(call: str, group: Group | None) -> str:
    """A call in words that no other call of these ranks has.

    Autograd may take the gradients of two layers that are alike in another order on another rank (docs/distributed.md):
    without a number each would agree to the exchange of the other.
    """
    if group is None:
        return call
    counts = _counts(group.ranks)
    counts[1] += 1
    return f"{call}, call {counts[0]}.{counts[1]}"


def agree(group: Group, call: str, error: Exception | None = None) -> None:
    """Every rank of the group is about to do ``call``, and says so here; one that cannot, because of ``error``, too.

    Raises:
        RankError: a rank failed, or calls differ, on every rank and with the same sentence; also if a rank ended.
        Exception: ``error``, if all ranks failed alike.
    """
    ranks = group.ranks
    counts = _counts(ranks)
    counts[:] = counts[0] + 1, 0
    digest = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=7).digest(), "big")
    told = (error is None, call if error is None else f"{type(error).__name__}: {error}")
    answers: list[tuple[bool, str]] = [told] * len(ranks)
    with others_there(error):
        if _all_equal(digest if error is None else FAILED, sorted(ranks), group.control) and error is None:
            return
        dist.all_gather_object(answers, told, group=group.control)
    if error is not None and all(answer == told for answer in answers):
        raise error
    raise RankError(_difference(list(zip(sorted(ranks), answers, strict=True)))) from error


def _all_equal(value: int, ranks: list[int], control: dist.ProcessGroup) -> bool:
    """Whether all ranks give the same value; the answer is the same on each.

    A dissemination barrier (Hensgen, Finkel, Manber 1988) that carries the largest of values and of their negatives: in
    each round a rank hears of as many more as it knows of, from one of them. Of two ranks that is one message each way;
    gloo's all_gather hands over to a thread of its own on either side, which takes longer (docs/notebook.md#rims).
    """
    most, me, distance = torch.tensor([value, -value], device="cpu"), ranks.index(dist.get_rank()), 1
    until = time.monotonic() + PATIENCE.total_seconds()

    def limit() -> tuple[timedelta, ...]:
        """None of a rank that is well: then the process group's own holds."""
        return (timedelta(seconds=max(until - time.monotonic(), 0.01)),) if value == FAILED else ()

    while distance < len(ranks):
        heard = torch.empty_like(most)
        to, of = ranks[(me + distance) % len(ranks)], ranks[me - distance]
        for work in (dist.irecv(heard, of, control, AGREEING), dist.isend(most, to, control, AGREEING)):
            assert work is not None
            work.wait(*limit())
        most, distance = torch.maximum(most, heard), 2 * distance
    return int(most.sum()) == 0


def _difference(answers: list[tuple[int, tuple[bool, str]]]) -> str:
    for rank, (is_well, said) in answers:
        if not is_well:
            return f"haloconv.distributed failed on rank {rank}: {said}"
    (first, (_, asked)), *others = answers
    other, (_, else_asked) = next(each for each in others if each[1] != (True, asked))
    return (
        f"haloconv.distributed: ranks ask for different things: rank {first} for {asked}, rank {other} for {else_asked}"
    )


@contextmanager
def others_there(error: Exception | None = None) -> Iterator[None]:
    """Raise a sentence for what a process group says of a rank that is gone; ``error`` is this rank's own failure."""
    try:
        yield
    except RuntimeError as gone:
        if error is not None:
            raise error from None
        raise RankError(
            "haloconv.distributed: another rank ended, or did not come here within the time limit of the process "
            f"group: {gone}"
        ) from gone
