"""Connections between processes that agree on their next group: messages in JSON over TCP."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from typing import Any

__all__ = ["ANSWER_SECONDS", "CONNECT_SECONDS", "Channel", "call", "listen"]

#: how long the other side may take to take a message or to answer, and a machine to accept a connection
ANSWER_SECONDS = 2.0
CONNECT_SECONDS = 0.5
#: how long a caller may take to say something
_STRANGER_SECONDS = 10.0
_HEAD = struct.Struct("<8sI")
_MAGIC = b"qccl/mem"
_MOST_NBYTES = 64 << 20


class Channel:
    """A connection with messages: JSON behind a magic number and a length.

    Attributes:
        inbox: messages that hear() has read.
        has_ended: the other side has closed the connection, or is lost.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""
        self._silent_until = time.monotonic() + _STRANGER_SECONDS
        self.inbox: list[Any] = []
        self.has_ended = False

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def send(self, message: dict[str, Any]) -> None:
        """Raises OSError if the other side has ended, or does not take the message in time."""
        content = json.dumps(message).encode()
        self._connection.settimeout(ANSWER_SECONDS)
        self._connection.sendall(_HEAD.pack(_MAGIC, len(content)) + content)

    def receive(self, until: float) -> Any:
        """The next message. Raises TimeoutError at ``until``, OSError if the other side has ended."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        self.hear()
        while not self.inbox:
            left = until - time.monotonic()
            if self.has_ended:
                raise ConnectionError("the other side has closed the connection")
            if left <= 0:
                raise TimeoutError
            poll.poll(1000 * left)
            self.hear()
        return self.inbox.pop(0)

    def hear(self) -> None:
        """Put what has come into ``inbox``. Raises OSError for a caller that speaks another protocol, or nothing."""
        self._connection.setblocking(False)
        try:
            while part := self._connection.recv(1 << 16):
                self._received += part
                self._silent_until = float("inf")
            self.has_ended = True
        except BlockingIOError:
            pass
        except OSError:
            self.has_ended = True
        if time.monotonic() > self._silent_until:
            raise ConnectionError("the caller says nothing")
        while len(self._received) >= _HEAD.size:
            magic, length = _HEAD.unpack_from(self._received)
            if magic != _MAGIC or length > _MOST_NBYTES:
                raise ConnectionError("the caller is not a rank")
            end = _HEAD.size + length
            if len(self._received) < end:
                return
            self.inbox.append(_message(self._received[_HEAD.size : end]))
            self._received = self._received[end:]


def _message(content: bytes) -> dict[str, Any]:
    try:
        message = json.loads(content)
    except ValueError as error:
        raise ConnectionError("the caller is not a rank") from error
    if not isinstance(message, dict) or "kind" not in message:
        raise ConnectionError("the caller is not a rank")
    return message


def listen() -> socket.socket:
    """A socket for connections to any port that is free."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def call(place: tuple[str, int], until: float) -> Channel:
    """A connection. Raises ConnectionRefusedError if nobody listens, another OSError if the machine does not answer."""
    left = max(0.01, until - time.monotonic())
    return Channel(socket.create_connection(place, timeout=min(left, CONNECT_SECONDS)))
