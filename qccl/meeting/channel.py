"""Connections that carry whole messages over TCP, encrypted if possible, for meetings and for ranks that regroup.

With a token or a secret a connection runs inside TLS. Two messages cannot, because the other side does not answer: a
decision for a process that is stopped, and the greeting of a Watch. They are sent without TLS, and **sealed**: the
checksum of every message is made with a key, so nobody else can make one. The key follows from the job's secret, or in
a meeting from the job's name.
"""

from __future__ import annotations

import hashlib
import hmac
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from qccl.base.deadline import Deadline
from qccl.base.errors import QcclError
from qccl.meeting.secret import derive
from qccl.meeting.secure_socket import Connection, SecureSocket
from qccl.meeting.sockets import LONGEST_SECONDS, connect
from qccl.meeting.strangers import NotARank

__all__ = [
    "ANSWER_SECONDS",
    "CONNECT_SECONDS",
    "MOST_NBYTES",
    "RETRY_SECONDS",
    "TLS_NONCE",
    "Channel",
    "Keys",
    "OtherJob",
    "OtherVersion",
    "call",
    "frame",
    "retry",
]

#: seconds in which the other side must take a message or answer, and a machine must accept a connection
ANSWER_SECONDS = 2.0
CONNECT_SECONDS = 0.5
#: seconds between two tries of retry(), so that many ranks do not overload a name service
RETRY_SECONDS = 0.05
_NAME_SECONDS = 0.5
#: most bytes of a message
MOST_NBYTES = 1 << 20
#: most messages that wait to be read: each side waits for an answer after one or two
_MOST_MESSAGES = 4
#: placeholder for a challenge's nonce over TLS, which needs none
TLS_NONCE = "0" * 32
_HEAD = struct.Struct("<8sI16s")  # magic, length of the content, its checksum
_MAGIC = b"qccl/me3"
#: the first bytes of every version's magic
_FAMILY = b"qccl/"
_PART_NBYTES = 1 << 16


class Packable(Protocol):
    """A message that can be sent."""

    def packed(self) -> bytes:
        """The content of the message."""


class OtherJob(NotARank):
    """A message with a wrong checksum: it is damaged, or was sealed with another job's key."""


class OtherVersion(NotARank):
    """A message of another version of qccl."""


class Keys(NamedTuple):
    """The keys of a job: one for TLS, empty without a token or secret; and one for the checksums of messages."""

    tls: bytes
    seal: bytes

    @classmethod
    def of(cls, secret: bytes | None) -> Keys:
        """The keys for a job's membership, derived from its secret."""
        return cls(derive(secret, "membership"), derive(secret, "sealed message")) if secret else cls(b"", b"")


class Channel:
    """A connection with messages: their contents behind a magic number, a length and a checksum.

    ``parse`` makes a message of its content, or raises NotARank. ``seal`` is the key of the checksums; if it is empty
    they only detect damage. ``most``: most bytes of a received message. ``proof``: a message that appears in the inbox
    as soon as the other side has proved over TLS that it has the key.

    Attributes:
        inbox: received messages that nobody has taken yet.
        has_ended: the other side has closed the connection, is lost, or is not a rank.
    """

    def __init__(
        self,
        connection: Connection,
        parse: Callable[[bytes], Any],
        seal: bytes = b"",
        *,
        most: int = MOST_NBYTES,
        proof: Any = None,
    ) -> None:
        self._connection, self._parse, self._seal, self._most = connection, parse, seal, most
        self._proof = proof
        self._received = bytearray()
        self.inbox: list[Any] = []
        self.has_ended = False

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        """The received bytes of an unfinished message."""
        return len(self._received)

    @property
    def is_proved(self) -> bool:
        """Whether the other side has proved over TLS that it has the key."""
        return isinstance(self._connection, SecureSocket) and self._connection.is_proved

    def fileno(self) -> int:
        """The descriptor, for select."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def send(self, message: Packable, seconds: float = ANSWER_SECONDS) -> None:
        """Send a message. Raises OSError if the other side has ended, or does not take the message in time."""
        self.send_frame(frame(message, self._seal), seconds)

    def send_frame(self, framed: bytes, seconds: float) -> None:
        """Send a message that frame() has made for several channels; see send()."""
        self._connection.settimeout(min(max(0.0, seconds), LONGEST_SECONDS))  # counts for all bytes together
        self._connection.sendall(framed)

    def receive(self, deadline: Deadline) -> Any:
        """The next message. Raises TimeoutError at the deadline, another OSError if the other side has ended."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        self.hear()
        while not self.inbox:
            if self.has_ended:
                raise ConnectionError("the other side has closed the connection")
            if deadline.is_over:
                raise TimeoutError
            poll.poll(1000 * min(deadline.remaining(), LONGEST_SECONDS))
            self.hear()
        return self.inbox.pop(0)

    def hear(self) -> None:
        """Read received messages into ``inbox``, at most one message's size. Raises NotARank for anything else."""
        self._connection.setblocking(False)
        try:
            while not self.has_ended and len(self._received) < _HEAD.size + self._most:
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
        if self._proof is not None and self.is_proved:
            self.inbox.append(self._proof)
            self._proof = None
        try:
            self._read()
        except NotARank:
            self.has_ended = True
            self._received.clear()
            raise

    def _read(self) -> None:
        """Move complete messages from the received bytes to the inbox."""
        while len(self._received) >= _HEAD.size:
            magic, length, checksum = _HEAD.unpack_from(self._received)
            if magic != _MAGIC and magic.startswith(_FAMILY):
                raise OtherVersion("it runs another version of qccl")
            if magic != _MAGIC:
                raise NotARank("it speaks another protocol")
            if length > self._most:
                raise NotARank("a message that is too long")
            end = _HEAD.size + length
            if len(self._received) < end:
                return
            if len(self.inbox) == _MOST_MESSAGES:
                raise NotARank("too many messages")
            content = bytes(self._received[_HEAD.size : end])
            if not hmac.compare_digest(checksum, _checksum(content, self._seal)):
                raise OtherJob("a message that is damaged, or of another job")
            self.inbox.append(self._parse(content))
            del self._received[:end]


def frame(message: Packable, seal: bytes = b"") -> bytes:
    """The bytes of a message on the connection."""
    content = message.packed()
    return _HEAD.pack(_MAGIC, len(content), _checksum(content, seal)) + content


def _checksum(content: bytes, seal: bytes = b"") -> bytes:
    return hashlib.blake2b(content, digest_size=16, key=seal, person=b"qccl message").digest()


def call(place: tuple[str, int], seconds: float, keys: Keys, parse: Callable[[bytes], Any], **how: Any) -> Channel:
    """A connection, encrypted if there is a key for TLS; for ``how`` see Channel.

    Raises ConnectionRefusedError if nobody listens, another OSError if the machine does not answer.
    """
    plain = connect(place, max(0.01, seconds))
    connection = SecureSocket(plain, keys.tls, is_server=False) if keys.tls else plain
    return Channel(connection, parse, keys.seal, **how)


_T = TypeVar("_T")


def retry(attempt: Callable[[], _T | None], deadline: Deadline) -> _T | None:
    """The result of ``attempt``, which is tried again while it is None or an OSError; None at the deadline."""
    while not deadline.is_over:
        nap = RETRY_SECONDS
        try:
            if (found := attempt()) is not None:
                return found
        except socket.gaierror:  # perhaps the name does not exist yet
            nap = _NAME_SECONDS
        except OSError as error:
            if isinstance(error, QcclError):
                raise  # the error of a signal handler of the program
        time.sleep(min(nap, deadline.remaining()))
    return None
