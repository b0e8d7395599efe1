"""The memory on a GPU that all plans of a communicator share during their runs.

It has the wire slots, other work buffers and the kernels' scratch. All runs of a communicator begin and end on one
stream, each behind the one before (engine.py). So one block serves them all, whichever streams the callers use, and
however many calls are under way. No run needs its contents from before. Launches, transfers and CUDA graphs have its
addresses in their arguments, so a block never moves, and is not freed before the communicator ends.

The first block is taken when the communicator is made, before other libraries have taken the memory. A plan that needs
more makes a second block for itself and for later plans, at least twice as large if the GPU has room for that. Then
all earlier blocks together are smaller than the last one.
"""

from __future__ import annotations

import contextlib
from typing import Any

from qccl.base.errors import EngineError
from qccl.engine.cuda.device import Device

__all__ = ["RESERVED_NBYTES", "Workspace"]

#: bytes of the first block of a communicator with several ranks; 8 need 13 MiB for minmax8 of 25 MiB
RESERVED_NBYTES = 32 << 20
_GRANULE = 2 << 20  # GPUs map memory in pages of this size


class Workspace:
    """Blocks of memory; a plan uses the last block that there was when it was made."""

    def __init__(self, device: Device, size: int) -> None:
        """``size``: the number of ranks; a single rank needs no first block."""
        self._device = device
        self._blocks: list[tuple[Any, int]] = []
        if size > 1:
            with contextlib.suppress(EngineError):  # there may be room for the plans, which need less
                self._grow(RESERVED_NBYTES)

    def take(self, nbytes: int) -> Any:
        """Take a block (``ptr``) of at least ``nbytes``, which other plans share. Keep it while it is used.

        Raises EngineError if the GPU has no room.
        """
        last = self._blocks[-1][1] if self._blocks else 0
        if nbytes > last:
            try:
                self._grow(max(nbytes, 2 * last))
            except EngineError:
                if nbytes >= 2 * last:
                    raise
                self._grow(nbytes)
        return self._blocks[-1][0] if self._blocks else None

    def release(self) -> None:
        """Drop the blocks; plans and graphs keep theirs alive."""
        self._blocks.clear()

    def _grow(self, nbytes: int) -> None:
        nbytes = -(-nbytes // _GRANULE) * _GRANULE
        self._blocks.append((self._device.allocate(nbytes, "the workspace"), nbytes))
