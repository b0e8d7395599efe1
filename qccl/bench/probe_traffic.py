"""The traffic by which ``qccl-bench doctor --measure`` measures a network, over connections that are there already."""

from __future__ import annotations

import selectors
import socket
import statistics
import time
from collections.abc import Sequence

from qccl.bench.tcp_counters import Counters, abort, counters

__all__ = ["Ranks", "flood", "ping"]

#: the sender, and the receiver
Ranks = tuple[int, int]
#: seconds in which a phase ends at the latest beyond its own time
_GRACE_SECONDS = 5.0
#: messages there and back, at most, and the time in which no further one starts
_PINGS, _PING_SECONDS, _PING_NBYTES = 21, 1.0, 8
#: seconds without a byte after which a transfer has ended: the packet that says so may be lost
_QUIET_SECONDS = 0.5
#: the part of a transfer whose rate does not count
_SLOW_START = 0.4
_BLOCK = 256 << 10


def ping(outs: Sequence[tuple[Ranks, socket.socket]], echoes: Sequence[socket.socket]) -> list[tuple[Ranks, float]]:
    """Send a small message there and back over each of ``outs``, some times, while echoing those of ``echoes``.

    Closes all connections. Returns the median seconds of each pair.
    """
    times: dict[Ranks, list[float]] = {pair: [] for pair, _ in outs}
    begun: dict[Ranks, float] = {}
    end = time.monotonic() + _PING_SECONDS
    with selectors.DefaultSelector() as selector:
        for connection in echoes:
            selector.register(connection, selectors.EVENT_READ)
        for pair, connection in outs:
            selector.register(connection, selectors.EVENT_READ, pair)
            begun[pair] = time.perf_counter()
            connection.sendall(bytes(_PING_NBYTES))
        while selector.get_map():
            if time.monotonic() > end + 2 * _GRACE_SECONDS:
                raise TimeoutError("a rank does not answer")
            for key, _ in selector.select(_GRACE_SECONDS):
                connection, pair = _socket_of(key), key.data
                message = connection.recv(_PING_NBYTES, socket.MSG_WAITALL)
                if message and pair is not None:
                    times[pair].append(time.perf_counter() - begun[pair])
                if not message or (pair is not None and (len(times[pair]) == _PINGS or time.monotonic() > end)):
                    selector.unregister(connection)
                    connection.close()
                    continue
                if pair is not None:
                    begun[pair] = time.perf_counter()
                connection.sendall(message)
    # the first message may have waited for the other rank
    return [(pair, statistics.median(each[1:] or each)) for pair, each in times.items() if each]


def flood(outs: Sequence[socket.socket], ins: Sequence[socket.socket], seconds: float) -> tuple[float, Counters]:
    """Send over ``outs`` for so long, and receive over ``ins`` until they end; closes all.

    Returns the bytes per second that were received, without the begin, and the packets sent and lost. The rate is 0 if
    next to nothing came after the begin.
    """
    block, room = memoryview(bytes(_BLOCK)), memoryview(bytearray(_BLOCK))
    received, counted = _Received(seconds * _SLOW_START), Counters()
    end = time.monotonic() + seconds
    is_sending = True
    with selectors.DefaultSelector() as selector:
        for connection, event in (
            *((each, selectors.EVENT_WRITE) for each in outs),
            *((each, selectors.EVENT_READ) for each in ins),
        ):
            connection.setblocking(False)
            selector.register(connection, event)
        while selector.get_map():
            now = time.monotonic()
            if is_sending and now >= end:
                is_sending = False
                for connection in outs:
                    selector.unregister(connection)
                    counted += counters(connection) or Counters()
                    abort(connection)
            if now > end + _GRACE_SECONDS:
                raise TimeoutError("a rank does not stop sending")
            ready = selector.select(max(0.0, end - now) if is_sending else _QUIET_SECONDS)
            if not ready and not is_sending:
                break
            for key, event in ready:
                connection = _socket_of(key)
                if event & selectors.EVENT_WRITE:
                    connection.send(block)
                elif not received.add(_receive(connection, room)):
                    selector.unregister(connection)
    for connection in ins:
        abort(connection)
    return received.rate, counted


def _socket_of(key: selectors.SelectorKey) -> socket.socket:
    assert isinstance(key.fileobj, socket.socket)
    return key.fileobj


def _receive(connection: socket.socket, room: memoryview) -> int:
    """The number of bytes that came; 0: the other side has ended."""
    try:
        return connection.recv_into(room)
    except ConnectionResetError:
        return 0


class _Received:
    """Counts the bytes that come, and their rate from some seconds after the first ones on."""

    def __init__(self, skipped: float) -> None:
        self._skipped = skipped
        self._begin = 0.0
        self._from: tuple[float, int] | None = None
        self._last = (0.0, 0)

    def add(self, nbytes: int) -> int:
        """Count these bytes, and return them."""
        if nbytes:
            now = time.monotonic()
            self._begin = self._begin or now
            self._last = now, self._last[1] + nbytes
            if self._from is None and now >= self._begin + self._skipped:
                self._from = self._last
        return nbytes

    @property
    def rate(self) -> float:
        """Bytes per second; 0 if next to nothing came."""
        if self._from is None or self._last[0] <= self._from[0]:
            return 0.0
        return (self._last[1] - self._from[1]) / (self._last[0] - self._from[0])
