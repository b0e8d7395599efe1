"""Ends of connections by TLS, with the secret of these tests."""

from __future__ import annotations

import socket
from contextlib import suppress

from qccl import _host
from qccl.meeting import callers, tls
from qccl.meeting.secure_socket import SecureSocket

SECRET = bytes(range(32))


def stream(sock: socket.socket, is_server: bool, secret: bytes = SECRET, **options: int) -> _host.TlsStream:
    return _host.TlsStream(tls.functions(), secret, sock.detach(), is_server, **options)


def client_hello(key: bytes) -> bytes:
    """The first message of a handshake."""
    ours, theirs = socket.socketpair()
    with theirs:
        client = stream(ours, False, key)
        assert not client.handshake()
        found = theirs.recv(1 << 16)
        client.close()
    assert found[:1] == callers.HANDSHAKE
    return found


def shake_hands(connection: socket.socket, key: bytes, *, is_server: bool = False) -> bool:
    """Whether a handshake with this key succeeds."""
    with SecureSocket(connection, key, is_server=is_server) as secured:
        secured.settimeout(60)
        with suppress(OSError):
            if is_server:
                secured.recv(1)
            else:
                secured.sendall(b"x")
        return secured.is_proved
