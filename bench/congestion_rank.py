"""A rank of bench/congestion.py: times all-reduces, or the same bytes through plain TCP sockets."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from runs import report

import qccl

#: warm-up calls, the fewest timed calls, and about the seconds after which no more are made
_WARM, _FEWEST, _SECONDS = 2, 4, 15.0
_NUMBER = struct.Struct("<d")


def main(task: dict[str, Any]) -> None:
    """Print the seconds of each call, as rank 0 sees them."""
    with _sockets(task) if task["transport"] == "sockets" else _communicator(task) as (call, greatest):
        begin = time.perf_counter()
        for _ in range(_WARM):
            call()
        each = greatest((time.perf_counter() - begin) / _WARM)
        seconds = []
        for _ in range(max(_FEWEST, min(task["calls"], int(_SECONDS / each)))):
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
    if os.environ["RANK"] == "0":
        report([{"seconds": seconds}])


@contextlib.contextmanager
def _communicator(task: dict[str, Any]) -> Iterator[tuple[Callable[[], object], Callable[[float], float]]]:
    """Yield two functions: one makes the all-reduces, the other returns the greatest of the ranks' numbers."""
    os.environ["QCCL_WAN_CONGESTION"] = task["tcp"]
    with qccl.init("host") as comm:
        x = np.random.default_rng(comm.rank).standard_normal((task["in_flight"], task["count"]), np.float32)
        out = np.empty_like(x)

        def call() -> None:
            if task["in_flight"] == 1:
                comm.quantized_allreduce(x[0], out[0], codec=task["codec"])
                return
            how = {"codec": task["codec"], "async_op": True}
            for work in [comm.quantized_allreduce(a, b, **how) for a, b in zip(x, out, strict=True)]:
                work.wait()

        def greatest(number: float) -> float:
            return max(_NUMBER.unpack(each)[0] for each in comm.allgather(_NUMBER.pack(number)))

        yield call, greatest


@contextlib.contextmanager
def _sockets(task: dict[str, Any]) -> Iterator[tuple[Callable[[], object], Callable[[float], float]]]:
    """Yield the same functions over plain sockets: two rounds carry an all-reduce's bytes, in equal shares."""
    share = task["nbytes"] // 2 // task["connections"]
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(each) for each in _connected(task["connections"])]

        def call() -> None:
            for _ in range(2):
                _exchange(connections, [bytes(share)] * len(connections))

        def greatest(number: float) -> float:
            # over all sockets, because packets lost while connecting may have changed their order on one rank
            theirs = _exchange(connections, [_NUMBER.pack(number)] * len(connections))
            return max(number, *_NUMBER.unpack(theirs[0]))

        yield call, greatest


def _connected(count: int) -> list[socket.socket]:
    """Connect the two ranks; rank 0 listens at its address."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":
        with socket.create_server(place, backlog=count) as server:
            server.settimeout(60)
            found = [server.accept()[0] for _ in range(count)]
    else:
        found = [_connect(place) for _ in range(count)]
    for each in found:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        each.setblocking(False)
    return found


def _connect(place: tuple[str, int]) -> socket.socket:
    """Connect to the other rank, which may not listen yet."""
    end = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(place, timeout=60)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _exchange(connections: Sequence[socket.socket], given: Sequence[bytes]) -> list[bytearray]:
    """Send bytes through each connection while as many arrive; returns the bytes that arrived."""
    arrived = [bytearray() for _ in connections]
    left = [memoryview(each) for each in given]
    with selectors.DefaultSelector() as selector:
        for index, each in enumerate(connections):
            selector.register(each, selectors.EVENT_READ | selectors.EVENT_WRITE, index)
        while selector.get_map():
            for key, events in selector.select():
                index, each = key.data, connections[key.data]
                if events & selectors.EVENT_WRITE and left[index]:
                    left[index] = left[index][each.send(left[index]) :]
                if events & selectors.EVENT_READ:
                    part = each.recv(min(1 << 16, len(given[index]) - len(arrived[index])))
                    if not part:
                        raise ConnectionError("the other rank has closed a connection")
                    arrived[index] += part
                waits_for = selectors.EVENT_WRITE if left[index] else 0
                waits_for |= selectors.EVENT_READ if len(arrived[index]) < len(given[index]) else 0
                if not waits_for:
                    selector.unregister(each)
                elif waits_for != key.events:
                    selector.modify(each, waits_for, index)
    return arrived


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
