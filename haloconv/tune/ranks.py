"""What the ranks of torch.distributed do together, so that a rank that fails leaves no other one waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

from haloconv.choose.measuring import in_a_group

Answer = TypeVar("Answer")


def own_rank() -> int:
    """This process's rank; 0 where there is but one."""
    return torch.distributed.get_rank() if in_a_group() else 0


def on_every_rank(work: Callable[[], Answer]) -> list[Answer]:
    """What ``work()`` gave on each rank, by rank; ``[work()]`` where there is but one. Every rank must call this.

    A rank whose work fails tells the others before it raises. What was given must pickle.

    Raises:
        RuntimeError: in a group, on every rank and with the same sentence, if the work of one failed (of several, the
            first is named; where it failed, the cause is the error). Also if a rank ended, or did not come here within
            the time limit of the process group.
        Exception: without a group, whatever ``work`` raises.
    """
    if not in_a_group():
        return [work()]
    failure: BaseException | None = None
    mine: tuple[bool, object]
    try:
        mine = True, work()
    except KeyboardInterrupt:  # every process of a terminal gets it
        raise
    except BaseException as error:  # the others wait for an answer, whatever happens
        failure, mine = error, (False, f"{type(error).__name__}: {error}")
    answers: list[tuple[bool, object]] = [mine] * torch.distributed.get_world_size()
    try:
        torch.distributed.all_gather_object(answers, mine)
    except RuntimeError as error:
        raise RuntimeError(
            "haloconv.tune: another rank ended, or did not call it within the time limit of the process group: "
            f"{failure or error}"
        ) from (failure or error)
    failed = [(rank, said) for rank, (done, said) in enumerate(answers) if not done]
    if failed:
        rank, said = failed[0]
        raise RuntimeError(f"haloconv.tune failed on rank {rank}: {said}") from failure
    return [cast("Answer", answer) for _, answer in answers]
