"""Error feedback under a GradScaler: residuals follow its factor, and a step that it skips changes no residual.

GradScaler multiplies the loss by a factor S, so gradients and residuals are S times too large, and the optimiser
divides by S. So lr / S takes the place of the learning rate, by which residuals are divided (schedule.Reduce).
When a gradient is not finite, GradScaler skips the whole step; but a call of qccl keeps the old state only if its own
result is not finite, and a step has several calls.

Nothing tells when the scaler stepped, so each pass counts as a step. If several passes precede a step that is skipped,
the passes with finite gradients have still changed the residuals. Under no_sync() only one of the passes reduces.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from qccl.base.errors import ArgumentError
from qccl.communicator.communicator import Communicator
from qccl.communicator.state import lr_of

__all__ = ["LossScaling"]


class LossScaling:
    """The factor of each backward pass, and the state from before the last pass."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._lock = threading.Lock()  # guards the list of checks, to which the threads that end calls append
        self._are_finite: list[Any] = []
        self._put_back: list[Callable[[], object]] = []

    def begin(self, lr: float | None) -> float:
        """Begin a backward pass. Returns the value in place of the learning rate ``lr`` (None: a constant rate)."""
        self.settle()
        scale = self._scaler.get_scale()
        try:
            return lr_of((1.0 if lr is None else lr) / scale)
        except (TypeError, ArithmeticError, ArgumentError) as error:
            raise ArgumentError(
                f"with lr={lr} and the scaler's factor {scale}, residuals would be scaled by their quotient, which "
                f"must be 0 or a positive number (2**-120 to 2**120); set lr to such a number or None"
            ) from error

    def keep(self, comm: Communicator, key: str) -> None:
        """Copy the state of a call that is about to start."""
        self._put_back.append(comm.state.keep(key))

    def look_at(self, gradients: Sequence[Any]) -> None:
        """Check reduced gradients, on the host now, on CUDA when the current stream comes to this point."""
        found = [torch.isfinite(gradient).all() for gradient in gradients]
        with self._lock:
            self._are_finite += found

    def settle(self) -> None:
        """Put back the state from before the last pass if its gradients were not all finite."""
        if not all(self._are_finite):
            for each in self._put_back:
                each()
        self._are_finite, self._put_back = [], []
