"""A rank whose messages are changed on their way: an honest engine over a transport that is not."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from qccl.engine.control import CONTROL_TAG, HEADER_NBYTES
from qccl.transports.ucx import UcxTransport

__all__ = ["Changed", "Recorded", "announcing", "kind_of", "of_call", "outcomes_over_ucx", "sequence_of"]

#: of messages that the engine did not send; it ignores such tokens
_FOREIGN_TOKEN = 1 << 60
#: for how long a group over UCX is made, and for how long its ranks may run
_SECONDS = 30.0

#: what a message with its peer and tag becomes: any number of messages
Change = Callable[[int, int, bytes], Sequence[bytes]]


class Changed:
    """A transport that sends ``change(peer, tag, message)`` in place of each message."""

    wire = None  # the engine calls the methods of this class

    def __init__(self, transport, change: Change) -> None:
        self._transport, self._change = transport, change
        self._kept: list[object] = []  # the memory of what was sent

    def __getattr__(self, name):
        return getattr(self._transport, name)

    @property
    def progress_hook(self):
        return self._transport.progress_hook

    @progress_hook.setter
    def progress_hook(self, hook):
        self._transport.progress_hook = hook

    def send(self, peer, tag, address, nbytes, token):
        messages = self._change(peer, tag, ctypes.string_at(address, nbytes))
        for i, message in enumerate(messages):
            memory = ctypes.create_string_buffer(message, max(len(message), 1))
            self._kept.append(memory)
            its_token = _FOREIGN_TOKEN + len(self._kept) if i else token
            self._transport.send(peer, tag, ctypes.addressof(memory), len(message), its_token)


class Recorded:
    """A transport that keeps what it sends, as (peer, tag, bytes)."""

    def __init__(self, transport) -> None:
        self._transport = transport
        self.sent: list[tuple[int, int, bytes]] = []

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def send(self, peer, tag, address, nbytes, token):
        self.sent.append((peer, tag, ctypes.string_at(address, nbytes)))
        self._transport.send(peer, tag, address, nbytes, token)


def outcomes_over_ucx(n: int, fn: Callable[[UcxTransport], Any]) -> list[Any]:
    """As threads.outcomes(), over UCX: what ``fn(transport)`` returned on each of ``n`` threads, or its exception."""
    meeting, notes = threading.Barrier(n), [b""] * n
    found: list[Any] = [TimeoutError("still running")] * n

    def run(rank: int) -> None:
        def gather(note: bytes) -> list[bytes]:
            notes[rank] = note
            meeting.wait(_SECONDS)
            return list(notes)

        try:
            transport = UcxTransport(gather, _SECONDS, master="127.0.0.1")
            meeting.wait(_SECONDS)
            try:
                found[rank] = fn(transport)
            finally:
                transport.close()
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 2 * _SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return found


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
