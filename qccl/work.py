"""A collective under way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from qccl.errors import CollectiveTimeout, PeerLost, QcclError

if TYPE_CHECKING:
    from qccl.communicator import Communicator
    from qccl.engines.host import Execution

__all__ = ["Work"]


class Work:
    """One call of a collective: poll it, wait for it, ask what went wrong.

    It keeps the arrays of the call alive. All ranks must complete the call, in any order among calls under way.
    """

    def __init__(self, comm: Communicator, execution: Execution, result: Any, keep: Any) -> None:
        self._comm = comm
        self._execution: Execution | None = execution
        self._result = result
        self._keep = keep
        self._finish: list[Callable[[], None]] = []
        self._exception: Exception | None = None

    def is_completed(self) -> bool:
        """Whether the call has ended, with success or not; makes progress, never blocks for long."""
        if self._execution is not None:
            try:
                if self._execution.step():
                    self._conclude()
            except QcclError as error:
                self._conclude(error)
        return self._execution is None

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the call has ended and return its output array.

        ``timeout`` is in seconds from now; None means the call's own, counted from its start. Raises what the call
        raised, or CollectiveTimeout, after which the communicator is unusable.
        """
        if self._execution is not None:
            try:
                if timeout is None:
                    self._execution.run()
                else:
                    self._run_until(self._execution, timeout)
            except QcclError as error:
                self._conclude(error)
            except BaseException:  # Ctrl-C: the engine has told the other ranks
                self._conclude(PeerLost("this rank was interrupted in the middle of the call"))
                raise
            else:
                self._conclude()
        if self._exception is not None:
            raise self._exception
        return self._result

    def _run_until(self, execution: Execution, timeout: float) -> None:
        limit = time.monotonic() + timeout
        while not execution.step():
            if time.monotonic() > limit:
                error = CollectiveTimeout(f"{execution.waits_for()} for {timeout} s in wait()")
                self._comm._fail(error)
                raise error

    def synchronize(self) -> Any:
        """The same as wait(): on the host a result that has arrived is known to be good."""
        return self.wait()

    def exception(self) -> Exception | None:
        """What the call raised, or None; makes no progress."""
        return self._exception

    def _then(self, finish: Callable[[], None]) -> None:
        """Run ``finish`` when the call has ended well; it may refuse the result by raising."""
        self._finish.append(finish)

    def _conclude(self, error: QcclError | None = None) -> None:
        """End the call."""
        self._execution = None
        self._exception = error
        if error is not None:
            self._comm._fail(error)
        else:
            try:
                for finish in self._finish:
                    finish()
            except QcclError as refused:
                self._exception = refused
        self._finish.clear()
        self._keep = None
