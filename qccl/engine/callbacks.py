"""The functions to be called when a run is over."""

from __future__ import annotations

from collections.abc import Callable

from qccl.base.errors import QcclError

__all__ = ["WithCallbacks"]


class WithCallbacks:
    """A run that calls functions when it is over (a base of the classes with the interface engine.base.Execution).

    One thread may add a function while another ends the run. Both then take functions out of the list, which is atomic,
    and call them, so each function is called once.

    Attributes:
        done: the run has ended well.
        failure: the error that has ended it.
        callbacks: the functions that have not been called.
    """

    __slots__ = ("callbacks", "done", "failure")

    def __init__(self) -> None:
        self.done = False
        self.failure: QcclError | None = None
        self.callbacks: list[Callable[[], None]] = []

    def add_done_callback(self, function: Callable[[], None]) -> None:
        """Call ``function`` once, when the run has ended or failed; now if it has."""
        self.callbacks.append(function)
        if self.done or self.failure is not None:
            self.call_back()

    def call_back(self) -> None:
        """Call the functions, after ``done`` or ``failure`` was set."""
        while self.callbacks:
            try:
                function = self.callbacks.pop(0)
            except IndexError:  # another thread took the last one
                return
            function()
