"""The control messages at the end of a group: each rank tells the others that it leaves, or that it gives up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from qccl import _host
from qccl.base.deadline import Deadline
from qccl.base.errors import MismatchError, QcclError, failure_text, gave_up
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
        left: ranks that make no more calls, with the text of their last control message.
    """

    def __init__(self, loop: _host.Loop) -> None:
        self._loop = loop
        self.left: dict[int, str] = {}

    def tell(self, kind: ControlKind, text: str) -> None:
        """Begin to send this rank's last control message to all others."""
        message = _packed(kind, text)
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

    def close(self, text: str, timeout: float, on_control: Callable[[int, bytes], None]) -> bool:
        """Collective: leave when all other ranks do. Returns False if some have not after ``timeout`` seconds."""
        deadline, idle = Deadline(timeout), 0
        self._loop.broadcast_control(_packed(ControlKind.CLOSE, text))
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
            self.left[peer] = header.text


def leave(transport: Transport, error: BaseException) -> None:
    """Tell the others that this rank leaves a new group, because of an exception; some may not be connected yet."""
    if transport.engine is not None:
        transport.engine.fail(gave_up(transport.rank, error))
        return
    text = failure_text(transport.rank, error)
    wire = transport.wire or _host.PythonWire(transport)
    with contextlib.suppress(QcclError, ValueError, IndexError):  # a rank is not connected
        shutdown = Shutdown(_host.Loop(wire, transport.rank, transport.size, transport.eager_nbytes, CALL))
        shutdown.tell(ControlKind.ABORT, text)
        shutdown.flush()
    transport.abort(text)


def _packed(kind: ControlKind, text: str) -> bytes:
    """Pack a control message."""
    return Header(kind, 0, text).pack() + data_nbytes(0)
