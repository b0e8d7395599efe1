"""Wires between sites in one thread: the test polls each of them, and speaks their protocol by sockets."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import patience
from strangers import has_ended

from qccl import _host
from qccl.meeting import tls

#: kernels/wires/wan/frames.h: the head of a frame, its kinds, and the bytes of a message in one frame
HEAD = struct.Struct("<IIiIQQQ")
HELLO, DATA, ACK, ANNOUNCE, POSTED, BYE, PROBE = range(1, 8)
PART = (16 << 10) - 40
#: the address of a rank that cannot be called
NOWHERE = b"0" * 32 + b" 64"


def frame(
    kind: int,
    data: bytes = b"",
    *,
    nbytes: int | None = None,
    tag: int = 0,
    index: int = 0,
    total: int = 0,
    offset: int = 0,
) -> bytes:
    """A frame; ``nbytes``: what its head says, if not the size of ``data``."""
    return HEAD.pack(len(data) if nbytes is None else nbytes, kind, tag, 0, index, total, offset) + data


def hello(group: bytes, rank: int, to: int = 0, *, slot: int = 0, version: int = 1) -> bytes:
    """The first frame of the connection ``slot`` of two ranks."""
    return frame(HELLO, group, tag=slot, index=rank, total=version, offset=to)


class Fault(Exception):
    """What a wire reports (WireFault in kernels/wires/group_wire.h)."""


class Lost(Fault):
    """A rank was lost."""


def _raise(rank: int, status: int, reason: str, peer: int, lost: bool, got: int, expected: int) -> None:
    raise (Lost if lost else Fault)(rank, peer, reason, got, expected)


class _Memory(NamedTuple):
    buffer: ctypes.Array
    arrived: ctypes.c_size_t


class Wire:
    """One rank's wire. ``secret``: 32 bytes; None: not encrypted."""

    def __init__(
        self,
        connections: int = 1,
        away_seconds: float = 60.0,
        *,
        is_reachable: bool = True,
        secret: bytes | None = None,
        most_guests: int = 256,
        hello_seconds: float = 5.0,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            self.port = listener.getsockname()[1]
            self.nonce = os.urandom(16).hex().encode()
            place = f"\n127.0.0.1 {self.port}" if is_reachable else ""
            address = self.nonce + f" {connections}{place}".encode()
            functions = tls.functions() if secret else []
            self.native = _host.wan_wire(
                listener.detach(),
                address,
                functions,
                secret,
                "",
                connections,
                away_seconds,
                most_guests,
                hello_seconds,
                _raise,
            )
        self.done: set[int] = set()
        self._memory: dict[int, _Memory] = {}
        self._idle = self._last = 0

    def connect(
        self, rank: int, addresses: list[bytes], find_ended: Callable[[list[int]], list[int]] = lambda _: []
    ) -> None:
        self.native.connect(rank, addresses, find_ended)

    def send(self, peer: int, data: bytes, tag: int = 0) -> int:
        token = self._next()
        memory = self._memory[token] = _Memory(ctypes.create_string_buffer(data, max(1, len(data))), ctypes.c_size_t())
        self.native.send(peer, tag, ctypes.addressof(memory.buffer), len(data), token)
        return token

    def receive(self, peer: int, nbytes: int, tag: int = 0, *, exact: bool = True) -> int:
        token = self._next()
        memory = self._memory[token] = _Memory(ctypes.create_string_buffer(max(1, nbytes)), ctypes.c_size_t(nbytes))
        arrived = 0 if exact else ctypes.addressof(memory.arrived)
        self.native.receive(peer, tag, ctypes.addressof(memory.buffer), nbytes, token, arrived)
        return token

    def data(self, token: int) -> bytes:
        """What has come."""
        return self._memory[token].buffer.raw[: self._memory[token].arrived.value]

    def forget(self, token: int) -> None:
        """Release its memory."""
        self._memory.pop(token, None)

    def _next(self) -> int:
        self._last += 1
        return self._last

    def poll(self) -> None:
        self.done.update(self.native.poll(0))

    def nap(self) -> None:
        """A poll that may sleep."""
        self._idle += 1
        self.done.update(self.native.poll(self._idle))

    def close(self) -> None:
        self.native.close(0)


def connected(
    size: int = 2, connections: int = 1, away_seconds: float = 60.0, secret: bytes | None = None
) -> list[Wire]:
    """Wires of one group, which have called each other but need polls."""
    wires = [Wire(connections, away_seconds, secret=secret) for _ in range(size)]
    addresses = [wire.native.address() for wire in wires]
    for rank, wire in enumerate(wires):
        wire.connect(rank, addresses)
    return wires


def poll_until(condition: Callable[[], bool], *wires: Wire, seconds: float = 60.0) -> None:
    """Poll the wires until the condition is true. Raises AssertionError after ``seconds``."""

    def poll() -> None:
        for wire in wires:
            wire.poll()
        time.sleep(0.0002)

    patience.wait_until(condition, poll, seconds=seconds)


class Raw:
    """A connection that says what the test wants."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exception: object) -> None:
        self.socket.close()

    def say(self, *data: bytes) -> None:
        """As far as the other side takes it."""
        with suppress(OSError):
            self.socket.sendall(b"".join(data))

    def ended(self) -> bool:
        """Whether the other side has ended the connection; reads what has come."""
        return has_ended(self.socket)


@contextmanager
def rank_0(connections: int = 1, slots: int = 1) -> Iterator[tuple[Wire, list[Raw]]]:
    """A wire, and the connections ``slots`` of a rank 1 that the test plays."""
    with ExitStack() as stack:
        wire = Wire(connections)
        stack.callback(wire.close)
        wire.connect(0, [wire.native.address(), NOWHERE])
        raws = [stack.enter_context(Raw(wire.port)) for _ in range(slots)]
        for slot, raw in enumerate(raws):
            raw.say(hello(wire.nonce, 1, slot=slot))
        yield wire, raws
