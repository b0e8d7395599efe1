"""The memory on a GPU that all plans of a communicator share for what they need only during a run.

That is the wire slots, other work buffers and the kernels' scratch. All runs of a communicator begin and end on one
stream, each behind the one before (engine.py). So one block serves them all, whichever streams the callers use, and
however many calls are under way. Nothing in it is expected to survive a run. Launches and transfers have its addresses
in their arguments, and so have CUDA graphs. So a block never moves, and is not freed before the communicator ends.

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
    """Blocks of memory, of which plans use the last one that was there when they were made."""

    def __init__(self, device: Device, size: int) -> None:
        """``size``: the number of ranks; one alone needs no first block."""
        self._device = device
        self._blocks: list[tuple[Any, int]] = []
        if size > 1:
            with contextlib.suppress(EngineError):  # there may be room for the plans, which need less
                self._grow(RESERVED_NBYTES)

    def take(self, nbytes: int) -> Any:
        """A block (``ptr``) of at least ``nbytes``, to be kept while it is used; others use it, too.

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
        """Let the blocks go; plans and graphs keep theirs."""
        self._blocks.clear()

    def _grow(self, nbytes: int) -> None:
        nbytes = -(-nbytes // _GRANULE) * _GRANULE
        self._blocks.append((self._device.allocate(nbytes, "the workspace"), nbytes))
