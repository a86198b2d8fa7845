"""A launch of halo_sm90, which begins while its weights are still being packed."""

from __future__ import annotations

from collections.abc import Callable

from haloconv.families.launch import Launch
from haloconv.jit import ArgumentBlock, LoadedKernel


class OverlappingLaunch(Launch):
    """A Launch that may begin before the kernel before it on the stream has ended (LoadedKernel.overlapping)."""

    __slots__ = ("_submits",)

    _submits: dict[int, Callable[[int, int], None]]  # of each block of arguments, which serves one thread at a time

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self._submits = {}

    def _queue(self, arguments_address: int) -> None:
        submit = self._submits.get(arguments_address)
        if submit is None:  # of a stand-in for a GPU
            super()._queue(arguments_address)
        else:
            submit(self._stream(self._index), arguments_address)

    def _new_block(self) -> ArgumentBlock:
        block = super()._new_block()
        if isinstance(self._kernel, LoadedKernel):
            submit = self._kernel.overlapping(self._grid, self._threads, self._smem_bytes)
            self._submits[block.pointer_array_address] = submit
        return block
