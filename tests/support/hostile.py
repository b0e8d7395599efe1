"""A rank whose messages are changed on their way: an honest engine over a transport that is not."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from threads import Wrapped, meeting, outcomes_of_ranks

from qccl.engine.control import CONTROL_TAG, HEADER_NBYTES
from qccl.meeting.network import Network
from qccl.transports.ucx import UcxTransport

__all__ = ["Changed", "Recorded", "announcing", "kind_of", "of_call", "outcomes_over_ucx", "sequence_of"]

#: of messages that the engine did not send; it ignores such tokens
_FOREIGN_TOKEN = 1 << 60
#: for how long a group over UCX is made, and for how long its ranks may run
_SECONDS = 30.0

#: what a message with its peer and tag becomes: any number of messages
Change = Callable[[int, int, bytes], Sequence[bytes]]


class Changed(Wrapped):
    """A transport that sends ``change(peer, tag, message)`` in place of each message."""

    wire = None  # the engine calls the methods of this class

    def __init__(self, transport, change: Change) -> None:
        super().__init__(transport)
        self._change = change
        self._kept: list[object] = []  # the memory of what was sent

    @property
    def progress_hook(self):
        return self.wrapped.progress_hook

    @progress_hook.setter
    def progress_hook(self, hook):
        self.wrapped.progress_hook = hook

    def send(self, peer, tag, address, nbytes, token):
        messages = self._change(peer, tag, ctypes.string_at(address, nbytes))
        for i, message in enumerate(messages):
            memory = ctypes.create_string_buffer(message, max(len(message), 1))
            self._kept.append(memory)
            its_token = _FOREIGN_TOKEN + len(self._kept) if i else token
            self.wrapped.send(peer, tag, ctypes.addressof(memory), len(message), its_token)


class Recorded(Wrapped):
    """A transport that keeps what it sends, as (peer, tag, bytes)."""

    def __init__(self, transport) -> None:
        super().__init__(transport)
        self.sent: list[tuple[int, int, bytes]] = []

    def send(self, peer, tag, address, nbytes, token):
        self.sent.append((peer, tag, ctypes.string_at(address, nbytes)))
        self.wrapped.send(peer, tag, address, nbytes, token)


def outcomes_over_ucx(n: int, fn: Callable[[UcxTransport], Any]) -> list[Any]:
    """As threads.outcomes(), over UCX: what ``fn(transport)`` returned on each of ``n`` threads, or its exception."""
    gather = meeting(n)

    def run(rank: int) -> Any:
        with closing(UcxTransport.meet(gather(rank), _SECONDS, Network.towards("127.0.0.1"))) as transport:
            return fn(transport)

    return outcomes_of_ranks(n, run, 2 * _SECONDS)


def only_headers(change: Callable[[bytes], Sequence[bytes]], sequence: int) -> Change:
    """``change`` for the headers of one call, with the data that follows them."""

    def changed(_: int, tag: int, message: bytes) -> Sequence[bytes]:
        is_it = tag == CONTROL_TAG and kind_of(message) == 1 and sequence_of(message) == sequence
        return change(message) if is_it else [message]

    return changed


def only_data(change: Callable[[bytes], Sequence[bytes]]) -> Change:
    """``change`` for messages of data alone."""
    return lambda _, tag, message: [message] if tag == CONTROL_TAG else change(message)


def kind_of(message: bytes) -> int:
    return int.from_bytes(message[6:8], "little")


def sequence_of(message: bytes) -> int:
    return int.from_bytes(message[8:16], "little")


def of_kind(message: bytes, kind: int) -> bytes:
    """The message with another kind."""
    return message[:6] + kind.to_bytes(2, "little") + message[8:]


def of_call(message: bytes, sequence: int) -> bytes:
    """The message with another number of its call."""
    return message[:8] + (sequence % (1 << 64)).to_bytes(8, "little") + message[16:]


def announcing(message: bytes, nbytes: int) -> bytes:
    """The message with another number of bytes that follow its header."""
    return message[: HEADER_NBYTES - 4] + (nbytes % (1 << 32)).to_bytes(4, "little") + message[HEADER_NBYTES:]
