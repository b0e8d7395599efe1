"""Connections between processes that agree on their next group: messages in JSON over TCP, encrypted where they can be.

With a secret a connection runs inside TLS. Two messages cannot, because the other side does not answer: a decision for
a process that is stopped, and the greeting of a Watch. They are sent without TLS, and **sealed**: the checksum of every
message is made with a key that follows from the secret, so nobody else can make one.
"""

from __future__ import annotations

import hashlib
import hmac
import select
import struct
import time
from typing import Any, NamedTuple

from qccl.transports.messages import MOST_NBYTES, encode, parse
from qccl.transports.secret import derive
from qccl.transports.secure_socket import Connection, SecureSocket
from qccl.transports.sockets import LONGEST_SECONDS, connect
from qccl.transports.strangers import NotARank

__all__ = ["ANSWER_SECONDS", "CONNECT_SECONDS", "TLS_NONCE", "Channel", "Keys", "call", "frame"]

#: how long the other side may take to take a message or to answer, and a machine to accept a connection
ANSWER_SECONDS = 2.0
CONNECT_SECONDS = 0.5
#: messages that wait to be read, at most: each side waits for an answer after one or two
_MOST_MESSAGES = 4
#: stands for the nonce of a challenge over TLS
TLS_NONCE = "0" * 32
_HEAD = struct.Struct("<8sI16s")  # magic, length of the content, its checksum
_MAGIC = b"qccl/me2"
_PART_NBYTES = 1 << 16


class Keys(NamedTuple):
    """Of a job's secret: for TLS, and for the checksums of messages; empty: the job has no secret."""

    tls: bytes
    seal: bytes

    @classmethod
    def of(cls, secret: bytes | None) -> Keys:
        """Derived from a job's secret."""
        return cls(derive(secret, "membership"), derive(secret, "sealed message")) if secret else cls(b"", b"")


class Channel:
    """A connection with messages: JSON behind a magic number, a length and a checksum.

    ``seal`` is the key of the checksums, which without one tell damaged messages only. ``is_caller``: this side has
    called, and a challenge is the first message in its inbox. Over TLS it is there as soon as the other side has proved
    that it has the key; nothing is sent for it, because the handshake makes old messages useless.

    Attributes:
        inbox: messages that hear() has read.
        has_ended: the other side has closed the connection, is lost, or is not a rank.
    """

    def __init__(self, connection: Connection, seal: bytes = b"", *, is_caller: bool = False) -> None:
        self._connection, self._seal = connection, seal
        self._awaits_proof = is_caller and isinstance(connection, SecureSocket)
        self._received = bytearray()
        self.inbox: list[Any] = []
        self.has_ended = False

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        """What has come of a message that is not complete."""
        return len(self._received)

    def fileno(self) -> int:
        """For select."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def send(self, message: dict[str, Any], seconds: float = ANSWER_SECONDS) -> None:
        """Raises OSError if the other side has ended, or does not take the message in time."""
        self._connection.settimeout(max(0.0, seconds))  # sendall's is for the whole
        self._connection.sendall(frame(encode(message), self._seal))

    def receive(self, until: float) -> Any:
        """The next message. Raises TimeoutError at ``until``, another OSError if the other side has ended."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        self.hear()
        while not self.inbox:
            left = until - time.monotonic()
            if self.has_ended:
                raise ConnectionError("the other side has closed the connection")
            if left <= 0:
                raise TimeoutError
            poll.poll(1000 * min(left, LONGEST_SECONDS))
            self.hear()
        return self.inbox.pop(0)

    def hear(self) -> None:
        """Put what has come into ``inbox``, of one message's size at most. Raises NotARank if it is something else."""
        self._connection.setblocking(False)
        try:
            while not self.has_ended and len(self._received) < _HEAD.size + MOST_NBYTES:
                part = self._connection.recv(_PART_NBYTES)
                self._received += part
                self.has_ended = not part
        except BlockingIOError:
            pass
        except NotARank:
            self.has_ended = True
            raise
        except OSError:
            self.has_ended = True
        if self._awaits_proof and isinstance(self._connection, SecureSocket) and self._connection.is_proved:
            self._awaits_proof = False
            self.inbox.append({"kind": "challenge", "nonce": TLS_NONCE})
        try:
            self._read()
        except NotARank:
            self.has_ended = True
            self._received.clear()
            raise

    def _read(self) -> None:
        """Take the messages that are complete."""
        while len(self._received) >= _HEAD.size:
            magic, length, checksum = _HEAD.unpack_from(self._received)
            if magic != _MAGIC:
                raise NotARank("it speaks another protocol")
            if length > MOST_NBYTES:
                raise NotARank("a message that is too long")
            end = _HEAD.size + length
            if len(self._received) < end:
                return
            if len(self.inbox) == _MOST_MESSAGES:
                raise NotARank("too many messages")
            content = bytes(self._received[_HEAD.size : end])
            if not hmac.compare_digest(checksum, _checksum(content, self._seal)):
                raise NotARank("a message that is damaged, or of another job")
            self.inbox.append(parse(content))
            del self._received[:end]


def frame(content: bytes, seal: bytes = b"") -> bytes:
    """A message as it is sent."""
    return _HEAD.pack(_MAGIC, len(content), _checksum(content, seal)) + content


def _checksum(content: bytes, seal: bytes = b"") -> bytes:
    return hashlib.blake2b(content, digest_size=16, key=seal, person=b"qccl message").digest()


def call(place: tuple[str, int], until: float, keys: Keys, *, is_sealed: bool = False) -> Channel:
    """A connection. Raises ConnectionRefusedError if nobody listens, another OSError if the machine does not answer.

    It is encrypted if there are ``keys``, unless its only message will be a sealed one.
    """
    left = max(0.01, until - time.monotonic())
    connection = connect(place, min(left, CONNECT_SECONDS))
    if keys.tls and not is_sealed:
        return Channel(SecureSocket(connection, keys.tls, is_server=False), keys.seal, is_caller=True)
    return Channel(connection, keys.seal, is_caller=True)
