"""A program between two sockets, for tests: what goes over a network, and how often its direction changes."""

from __future__ import annotations

import itertools
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

Place = tuple[str, int]


class Tap:
    """Listens at ``place``, passes on all bytes between its callers and ``to``, and keeps them.

    Attributes:
        connections: of each one the parts that it passed on, with their direction: 0 to the called side, 1 from there.
    """

    def __init__(self, to: Place) -> None:
        self.connections: list[list[tuple[int, bytes]]] = []
        self._to, self._over = to, False
        self._server = socket.create_server(("127.0.0.1", 0))
        self.place: Place = self._server.getsockname()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Tap:
        self._run(self._accept)
        return self

    def __exit__(self, *exception: object) -> None:
        self._over = True
        for thread in self._threads:
            thread.join(10)
        self._server.close()

    def said(self, direction: int) -> bytes:
        """All that went in this direction."""
        return b"".join(part for parts in self.connections for number, part in parts if number == direction)

    def round_trips(self) -> list[float]:
        """Of each connection: one to connect, and half of one for each time that the direction changes."""
        return [1 + len(list(itertools.groupby(parts, lambda each: each[0]))) / 2 for parts in self.connections]

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        self._server.settimeout(0.02)
        while not self._over:
            with suppress(OSError):
                self._run(self._pass_on, self._server.accept()[0])

    def _pass_on(self, caller: socket.socket) -> None:
        parts: list[tuple[int, bytes]] = []
        self.connections.append(parts)
        with caller, suppress(OSError), socket.create_connection(self._to, timeout=60) as called:
            while not self._over:
                for direction, side, other in ((0, caller, called), (1, called, caller)):
                    if select.select([side], [], [], 0.005)[0]:
                        part = side.recv(1 << 16)
                        if not part:
                            return
                        parts.append((direction, part))
                        other.sendall(part)
