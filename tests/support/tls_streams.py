"""Ends of connections by TLS, with the secret of these tests."""

from __future__ import annotations

import socket

from qccl import _host
from qccl.transports import tls

__all__ = ["SECRET", "stream"]

SECRET = bytes(range(32))


def stream(sock: socket.socket, is_server: bool, secret: bytes = SECRET, **options: int) -> _host.TlsStream:
    return _host.TlsStream(tls.functions(), secret, sock.detach(), is_server, **options)
