"""Owns the end of a communicator: whether it has failed or was closed, and why. Wires keep errors of their own."""

from __future__ import annotations

from qccl.base.errors import ArgumentError, EngineError, QcclError, forked, with_text
from qccl.base.lifetime import Registry

__all__ = ["End"]


class End:
    """Whether one communicator is over. Its session and its engine, in all their threads, ask and tell this object.

    A run and a Work keep errors of their own, because they may have ended well before the communicator failed.

    Attributes:
        failure: the first failure, or None.
        closed: the communicator was closed, perhaps after a failure.
        is_over: the communicator has failed or was closed.
        has_left: the engine has told the other ranks as far as it can reach them, and has nothing more to do.
        is_forked: this is a child of os.fork(), and the communicator is the parent's.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.failure: QcclError | None = None
        self.closed = self.is_over = self.has_left = self.is_forked = False
        self._failures: dict[None, QcclError] = {}
        _ends.add(self)

    def fail(self, error: QcclError) -> QcclError:
        """Keep the first failure; returns it. After close() nothing fails any more."""
        if self.closed:
            return error
        # atomic, without a lock: threads may fail at the same time, and a signal handler may fail in the middle of this
        self.failure = first = self._failures.setdefault(None, error)
        self.is_over = True
        return first

    def close(self) -> None:
        """Mark the communicator as closed: it takes no more calls."""
        self.closed = self.is_over = True

    def check(self) -> None:
        """Raise the failure itself, as for calls under way, or ArgumentError after close()."""
        if self.closed:
            raise ArgumentError("this communicator is closed; make another with qccl.init()")
        if self.failure is not None:
            raise self.failure

    def check_usable(self) -> None:
        """Raise, as for later calls, an error like the failure, which is its cause, or ArgumentError after close()."""
        if self.failure is None or self.closed:
            self.check()
        else:
            text = f"this communicator failed earlier and is unusable: {self.failure}"
            raise with_text(self.failure, text) from self.failure  # a variable would keep the call's arrays alive

    def _forked(self) -> None:
        self.failure = self._failures[None] = EngineError(forked(self.rank))
        self.is_over = self.has_left = self.is_forked = True


_ends = Registry(at_fork=End._forked)
