"""One run of a program on CUDA: what its caller asks and waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from qccl.errors import ArgumentError, QcclError

if TYPE_CHECKING:
    from qccl.cuda.engine import CudaEngine
    from qccl.cuda.program import CudaProgram

__all__ = ["CudaRun"]


class CudaRun:
    """One run of a program (interface: Execution).

    Attributes:
        what: the call, for messages.
        deadline: in time.monotonic() seconds.
        stream: the caller's.
        event: complete when the run is.
        captured: it was put into a graph, and has not run.
        on_stream: all of it has been put on its streams.
        done, failure: what became of it.
    """

    is_ordered = True

    def __init__(self, engine: CudaEngine, what: str, deadline: float, stream: int, *, captured: bool) -> None:
        self._engine = engine
        self.what, self.deadline, self.stream, self.captured = what, deadline, stream, captured
        self.event: Any = None
        self.kept: object = None
        self.program: CudaProgram | None = None  # its tables are read until the run is done
        self.on_stream = False
        self.done = False
        self.failure: QcclError | None = None
        self.finish: Callable[[], None] | None = None

    def step(self) -> bool:
        self._check()
        self._engine.sweep()
        self._check()
        return self.done

    def run(self, limit: float | None = None) -> bool:
        if self.captured:
            raise ArgumentError(f"{self.what} was put into a graph and has not run; synchronize after a replay")
        self._engine.wait_until(lambda: self.done or self.failure is not None, self.deadline, self.what, limit)
        self._check()
        return self.done

    def detach(self, *, at_once: bool) -> None:
        """Nothing: it progresses by itself."""

    def order(self) -> None:
        self._check()
        self._engine.order(self)

    def waits_for(self) -> str:
        return f"{self.what} is not done"

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
