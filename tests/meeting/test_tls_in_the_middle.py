"""Who is in the middle of a connection by TLS 1.3 reads nothing, and can change nothing unnoticed."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from contextlib import closing

import patience
import pytest
from tls_streams import stream

from qccl import _host

MEBIBYTE = 1 << 20


class Relay:
    """Between a client and a server: what passed in each direction, after ``change`` has seen it."""

    def __init__(self, change: Callable[[int, bytes], bytes] = lambda direction, data: data, **options: int) -> None:
        self.passed = [bytearray(), bytearray()]
        self._change = change
        client, self._to_client = socket.socketpair()
        server, self._to_server = socket.socketpair()
        self.streams = stream(client, False, **options), stream(server, True, **options)

    def pump(self) -> None:
        ends = self._to_client, self._to_server
        for direction, (source, target) in enumerate((ends, ends[::-1])):
            while source in select.select([source], [], [], 0)[0]:
                data = source.recv(MEBIBYTE)
                if not data:
                    break
                data = self._change(direction, data)
                self.passed[direction] += data
                target.sendall(data)

    def shake_hands(self) -> None:
        patience.wait_until(lambda: all([each.handshake() for each in self.streams]), self.pump)

    def close(self) -> None:
        for each in (*self.streams, self._to_client, self._to_server):
            each.close()


@pytest.mark.parametrize("place", [0, 3, 5, 500, 16_384, 20_000, -1])
def test_a_changed_byte_is_refused(place: int) -> None:
    """At ``place`` of 40 kB: in a record's header, its bytes, its tag."""
    is_on = False

    def change(direction: int, data: bytes) -> bytes:
        if not is_on:
            return data
        changed = bytearray(data)
        changed[place] ^= 0x10
        return bytes(changed)

    with closing(Relay(change)) as relay:
        relay.shake_hands()
        is_on = True
        data = os.urandom(40_000)
        relay.streams[0].write(data)
        relay.pump()
        is_on = False
        got = b""
        server = relay.streams[1]
        with pytest.raises(_host.StreamError, match=r"TLS failed: bytes were changed on the way|was cut"):
            for _ in range(10):
                got += server.read(MEBIBYTE) or b""
                if place in (3,):  # a length that is too large waits for more bytes
                    relay.streams[0].write(data)
                    relay.pump()
        assert data.startswith(got)
        assert len(got) < len(data)
        with pytest.raises(_host.StreamError):
            server.read(1)
        with pytest.raises(_host.StreamError):
            server.write(b"x")
        relay.pump()
        with pytest.raises(_host.StreamError, match=r"bad record mac|record overflow|alert"):
            relay.streams[0].read(1)


def extensions_of_server_hello(passed: bytes) -> tuple[int, set[int]]:
    """The cipher and the extensions' numbers (RFC 8446, 4.1.3)."""
    after = 5 + 4 + 2 + 32
    after += 1 + passed[after]  # the session's name
    cipher = int.from_bytes(passed[after : after + 2], "big")
    at, found = after + 5, set()
    end = at + int.from_bytes(passed[after + 3 : after + 5], "big")
    while at < end:
        found.add(int.from_bytes(passed[at : at + 2], "big"))
        at += 4 + int.from_bytes(passed[at + 2 : at + 4], "big")
    return cipher, found


def test_the_handshake_uses_the_secret_and_a_key_exchange() -> None:
    """Without the exchange, one who learns the secret later could read what was recorded."""
    with closing(Relay()) as relay:
        relay.shake_hands()
        passed = bytes(relay.passed[1])
    pre_shared_key, supported_versions, key_share = 41, 43, 51
    assert extensions_of_server_hello(passed) == (0x1301, {pre_shared_key, supported_versions, key_share})


def test_the_key_changes() -> None:
    """A message that changes the key has 5 bytes, and its record 5 + 17 (RFC 8446, 4.6.3 and 5.2)."""
    passed = {}
    for records in 1, 2, 1000:
        with closing(Relay(records_per_key=records)) as relay:
            relay.shake_hands()
            before = len(relay.passed[0])
            for _ in range(7):
                relay.streams[0].write(b"x")
                relay.pump()
                assert relay.streams[1].read(10) == b"x"
            passed[records] = len(relay.passed[0]) - before
    assert passed == {1000: 7 * 23, 2: 7 * 23 + 3 * 27, 1: 7 * 23 + 6 * 27}
