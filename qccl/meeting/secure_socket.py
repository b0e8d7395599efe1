"""TCP connections encrypted by TLS 1.3 with a key that both sides have, in the form of Python's sockets.

Native code calls OpenSSL (kernels/tls/tls.h). No side returns received bytes before the other side has proved that it
has the key.
"""

from __future__ import annotations

import math
import select
import socket

from qccl import _host
from qccl.base.deadline import Deadline
from qccl.meeting import tls
from qccl.meeting.sockets import LONGEST_SECONDS
from qccl.meeting.strangers import NotARank

__all__ = ["Connection", "SecureSocket"]

#: most bytes given to OpenSSL at a time
_PART_NBYTES = 1 << 20


class SecureSocket:
    """A connected socket with the methods of socket.socket that this package uses; they raise the same errors.

    The first recv() or sendall() begins the handshake. A server does nothing, and keeps no memory for it, until the
    other side has sent something. A handshake with a process without the key raises NotARank.

    Attributes:
        is_proved: the other side has proved that it has the key.
    """

    def __init__(self, connection: socket.socket, key: bytes, *, is_server: bool) -> None:
        """From now on ``connection`` belongs to this object. ``key``: 32 bytes."""
        self._functions = tls.functions()
        self._plain: socket.socket | None = connection
        self._stream: _host.TlsStream | None = None
        self._key, self._is_server = key, is_server
        self._timeout: float | None = None
        self.is_proved = False

    def __enter__(self) -> SecureSocket:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def fileno(self) -> int:
        """The descriptor, for select; -1 after close()."""
        if self._stream is not None:
            return self._stream.fileno()
        return -1 if self._plain is None else self._plain.fileno()

    def close(self) -> None:
        """Close the connection; what was sent is still delivered. Idempotent."""
        if self._stream is not None:
            self._stream.shut()
            self._stream.close()
        elif self._plain is not None:
            self._plain.close()
        self._stream = self._plain = None

    def settimeout(self, seconds: float | None) -> None:
        """Set how long recv() and sendall() may take; None: without a limit; 0: they never wait."""
        self._timeout = seconds

    def setblocking(self, flag: bool) -> None:
        """Same as settimeout() with None or 0."""
        self._timeout = None if flag else 0.0

    def recv(self, nbytes: int) -> bytes:
        """Receive at most ``nbytes``; nothing if the other side has closed in order."""
        deadline = self._deadline()
        while True:
            stream = self._open(deadline)
            if stream is None:
                return b""
            if self._shake_hands(stream):
                found = stream.read(nbytes)
                if found is not None:
                    return found
            self._wait(stream, deadline)

    def sendall(self, content: bytes) -> None:
        """Send all of ``content``. After an error it is unknown how much was sent: close the connection."""
        deadline, sent = self._deadline(), 0
        stream = self._open(deadline)
        if stream is None:
            raise ConnectionResetError("the other side has closed the connection")
        while sent < len(content):
            some = stream.write(content[sent : sent + _PART_NBYTES]) if self._shake_hands(stream) else None
            if some is None:
                self._wait(stream, deadline)
            else:
                sent += some

    def _open(self, deadline: Deadline) -> _host.TlsStream | None:
        """The stream, which a server makes when the first bytes come; None if the other side ends instead."""
        if self._stream is None:
            if self._plain is None:
                raise OSError("this connection is closed")
            if self._is_server:
                left = min(deadline.remaining(0.001), LONGEST_SECONDS)
                self._plain.settimeout(left if self._timeout else self._timeout)
                if not self._plain.recv(1, socket.MSG_PEEK):
                    return None
            self._plain.setblocking(False)
            self._stream = _host.TlsStream(self._functions, self._key, self._plain.detach(), self._is_server)
        return self._stream

    def _shake_hands(self, stream: _host.TlsStream) -> bool:
        """Whether the handshake is over."""
        if not self.is_proved:
            try:
                self.is_proved = stream.handshake()
            except ConnectionError as error:
                if str(error).startswith("TLS"):  # other errors mean that the connection was cut
                    raise NotARank("it does not have the secret, or speaks another protocol") from error
                raise
        return self.is_proved

    def _deadline(self) -> Deadline:
        return Deadline(math.inf if self._timeout is None else self._timeout)

    def _wait(self, stream: _host.TlsStream, deadline: Deadline) -> None:
        """Wait until the stream can go on. Raises BlockingIOError if it may not wait, TimeoutError at the deadline."""
        if self._timeout == 0:
            raise BlockingIOError
        poll = select.poll()
        poll.register(stream, select.POLLIN | (select.POLLOUT if stream.wants_write else 0))
        if deadline.is_over or not poll.poll(1000 * min(deadline.remaining(), LONGEST_SECONDS)):
            raise TimeoutError("timed out")


Connection = socket.socket | SecureSocket
