"""The encrypted socket of ranks: it waits, times out and ends as a socket does."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from qccl.meeting.secret import derive
from qccl.meeting.secure_socket import SecureSocket

KEY = derive(bytes(32), "meeting")


def sockets() -> tuple[SecureSocket, SecureSocket]:
    ours, theirs = socket.socketpair()
    return SecureSocket(ours, KEY, is_server=False), SecureSocket(theirs, KEY, is_server=True)


def test_both_sides_wait_as_sockets_do():
    client, server = sockets()
    with client, server, ThreadPoolExecutor(1) as pool:
        for each in (client, server):
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(10)
            each.settimeout(0.05)
            with pytest.raises(TimeoutError):
                each.recv(10)
            each.settimeout(None)
        content = os.urandom(3 << 20)
        sent = pool.submit(client.sendall, content)
        got = b""
        while len(got) < len(content):
            got += server.recv(1 << 20)
        assert got == content and sent.result(10) is None
        assert client.is_proved and server.is_proved
        client.close()
        assert server.recv(10) == b""
        assert client.fileno() == -1
        for work in (lambda: client.recv(1), lambda: client.sendall(b"x")):
            with pytest.raises(OSError, match="closed"):
                work()
        client.close()


def test_a_server_that_hears_nothing_has_no_stream():
    client, server = sockets()
    with server:
        client.close()
        assert server._stream is None and server.recv(1) == b""
        with pytest.raises(ConnectionResetError):
            server.sendall(b"x")
