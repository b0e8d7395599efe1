"""The state of all ranks in the form that frameworks save: an object with state_dict() and load_state_dict()."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["FullState"]


class _HasFullState(Protocol):
    def full_state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class FullState:
    """``compression.full``: for frameworks that save one state for all ranks, which may then be another number.

    For torch.distributed.checkpoint, Accelerate's register_for_checkpointing() and others that call state_dict() on
    every rank and keep one result.
    """

    def __init__(self, compression: _HasFullState) -> None:
        self._compression = compression

    def state_dict(self) -> dict[str, Any]:
        """Collective: full_state_dict()."""
        return self._compression.full_state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """load_state_dict() of the compression; every rank must call it."""
        self._compression.load_state_dict(state)
