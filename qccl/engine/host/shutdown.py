"""The control messages at the end of a group: each rank tells the others that it leaves, or that it gives up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from qccl import _host
from qccl.base.deadline import Deadline
from qccl.base.errors import MismatchError, PeerLost, QcclError, described, gave_up
from qccl.engine.control import CALL, ControlKind, Header, data_nbytes
from qccl.transports.base import Transport

__all__ = ["Shutdown", "leave"]

#: how long a failing rank tries to send its last control message
_FLUSH_SECONDS = 0.1
#: how long a rank whose call differs waits until the others have received its message: the end of its connections may
#: overtake the message, and the others would then report the rank as lost
_MISMATCH_SECONDS = 1.0


class Shutdown:
    """Sends this rank's last control message, and takes those of the other ranks. The caller holds the engine's lock.

    Attributes:
        left: ranks that make no more calls, with the error that their last control message brought.
    """

    def __init__(self, loop: _host.Loop, rank: int) -> None:
        self._loop, self._rank = loop, rank
        self.left: dict[int, PeerLost] = {}

    def tell(self, kind: ControlKind, error: BaseException) -> None:
        """Begin to send this rank's last control message to all others."""
        message = self._packed(kind, error)
        with contextlib.suppress(QcclError):  # the wire's error; the exception of a signal handler passes
            self._loop.broadcast_control(message)

    def flush(self) -> None:
        """Wait for a moment until the message is sent."""
        deadline = Deadline(_FLUSH_SECONDS)
        while self._loop.control_sends and not deadline.is_over:
            with contextlib.suppress(QcclError):
                self._loop.drain(1, self._note)

    def hear_others(self) -> None:
        """Wait until every other rank has sent its last control message, or can send none any more."""
        deadline, idle = Deadline(_MISMATCH_SECONDS), 0
        with contextlib.suppress(QcclError):  # a rank closed its connections: it has received all messages
            while self._are_missing(self._loop.refused) and not deadline.is_over:
                idle += 1
                with contextlib.suppress(MismatchError):
                    self._loop.drain(idle, self._note)

    def close(self, timeout: float, on_control: Callable[[int, bytes], None]) -> bool:
        """Collective: leave when all other ranks do. Returns False if some have not after ``timeout`` seconds."""
        deadline, idle = Deadline(timeout), 0
        closed = PeerLost(f"rank {self._rank} has closed its communicator", self._rank)
        self._loop.broadcast_control(self._packed(ControlKind.CLOSE, closed))
        while self._loop.control_sends or self._are_missing():
            idle += 1
            self._loop.drain(idle, on_control)
            if deadline.is_over:
                return False
        return True

    def _are_missing(self, refused: int = 0) -> bool:
        """Whether more than ``refused`` other ranks have not sent their last control message."""
        return len(self.left) + refused < self._loop.size - 1

    def _note(self, peer: int, message: bytes) -> None:
        header = Header.unpack(message, peer)
        if header.kind is not ControlKind.CALL:
            self.left[peer] = header.end(peer, self._loop.size)

    def _packed(self, kind: ControlKind, error: BaseException) -> bytes:
        return Header.of_end(kind, self._rank, error).pack() + data_nbytes(0)


def leave(transport: Transport, error: BaseException) -> None:
    """Tell the others that this rank leaves a new group, because of an exception; some may not be connected yet."""
    failure = gave_up(transport.rank, described(error))  # the exception may number ranks as another group does
    if transport.engine is not None:
        transport.engine.fail(failure)
        return
    wire = transport.wire or _host.PythonWire(transport)
    with contextlib.suppress(QcclError, ValueError, IndexError):  # a rank is not connected
        loop = _host.Loop(wire, transport.rank, transport.size, transport.eager_nbytes, CALL)
        shutdown = Shutdown(loop, transport.rank)
        shutdown.tell(ControlKind.ABORT, failure)
        shutdown.flush()
    transport.abort(described(error))
