"""Connections to other ranks by a relay (qccl-relay), for processes that cannot reach each other.

All of this is used only where QCCL_RELAY names a relay. A process that wants to be called has connections that wait at
the relay (RelayListener); who calls it is joined to one of them (call_by_relay()). Nothing here reads or protects what
is then sent: that is TLS between the two processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Mapping
from typing import NamedTuple

from qccl.errors import ArgumentError, EngineError
from qccl.transports.relay_protocol import ENDED, GREETING_NBYTES, JOINED, Hello, Role, reason, relay_key
from qccl.transports.secret import Secret, derive, token_key
from qccl.transports.sockets import Place, check_connected, connect, host_and_port, place_text
from qccl.transports.timed import receive, send

__all__ = ["Relay", "RelayListener", "Ways", "call_by_relay", "relay_of"]

#: how long a process tries to reach another one directly where there is a relay, and then waits at the relay
_DIRECT_SECONDS, _RELAY_SECONDS = 2.0, 1.5
#: how long it waits for the relay's answer whether another process has ended
_ASK_SECONDS = 1.0
#: between two connections to a relay of which the first one has failed
_RETRY_SECONDS = 0.5
#: connections of one listener that wait at the relay. More callers wait there, until the next ones have come
_WAITING = 4
#: TCP looks whether the relay is there after so many seconds of silence, and gives up after some seconds more
_IDLE_SECONDS = 5

_libc = ctypes.CDLL(None, use_errno=True)
_CLOCK_MONOTONIC = 1


class Relay(NamedTuple):
    """A relay, and the key with which this process may use it.

    Attributes:
        place: its address in numbers.
        key: of relay_protocol.relay_key().
        name: as QCCL_RELAY has it, for messages.
    """

    place: Place
    key: Secret
    name: str


def relay_of(environ: Mapping[str, str] = os.environ) -> Relay | None:
    """The relay that QCCL_RELAY names; None: it names none.

    Raises ArgumentError for something else than "host:port", and where there is no token; EngineError where the host
    cannot be found.
    """
    text = environ.get("QCCL_RELAY", "")
    if not text:
        return None
    place, token = host_and_port(text), token_key(environ)
    if place is None:
        raise ArgumentError(f'QCCL_RELAY={text!r} is not the address of a relay, "host:port"')
    if token is None:
        raise ArgumentError(
            "QCCL_RELAY is set, but no token: a relay takes only processes that have the job's token, which also "
            "encrypts what they send. Set QCCL_TOKEN_FILE or QCCL_TOKEN on all ranks"
        )
    try:
        found = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0][4]
    except OSError as error:
        raise EngineError(f"QCCL_RELAY={text!r}: the host cannot be found ({error})") from error
    return Relay((str(found[0]), place[1]), relay_key(token), text)


def call_by_relay(relay: Relay, name: bytes, seconds: float) -> socket.socket:
    """A connection to the process that waits at the relay under ``name``. Raises OSError if none comes in time."""
    connection, answer = _call(relay, Role.CALLER, name, seconds)
    try:
        if answer != JOINED:
            raise ConnectionError(reason(answer))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        connection.close()
        raise
    return connection


def _call(relay: Relay, role: Role, name: bytes, seconds: float) -> tuple[socket.socket, bytes]:
    """A connection to the relay, and its answer. Raises OSError if none comes in time."""
    deadline = time.monotonic() + seconds
    connection = connect(relay.place, seconds)
    try:
        greeting = receive(connection, GREETING_NBYTES, deadline)
        send(connection, Hello.make(role, name, relay.key, greeting).packed(), deadline)
        return connection, receive(connection, 1, deadline)
    except BaseException:
        connection.close()
        raise


class Ways:
    """How a process calls others, and is called: directly, or by the relay where there is one and the other way fails.

    Both sides must have the same ``secret``, which names their connections at the relay, and the same ``purpose``.
    """

    def __init__(self, relay: Relay | None = None, secret: bytes = b"", purpose: str = "") -> None:
        self.relay, self._secret, self._purpose = relay, secret, purpose
        self._only_by_relay: set[Place] = set()

    def needs_relay(self, place: Place) -> bool:
        """Whether ``place`` was reached last by the relay, and not directly."""
        return place in self._only_by_relay

    def listener(self, server: socket.socket, place: Place) -> socket.socket | RelayListener:
        """A socket at which the callers of ``place`` come, by either way; ``server`` is where they come directly."""
        return server if self.relay is None else RelayListener(server, self.relay, self._name(place))

    def connect(self, place: Place, seconds: float) -> socket.socket:
        """A connection. Raises the direct way's OSError if both fail.

        Where there is a relay each way has some seconds, whatever ``seconds`` is. A place that was reached by the relay
        alone is called there first from then on.
        """
        if self.relay is None:
            return connect(place, seconds)
        if place in self._only_by_relay:
            with contextlib.suppress(OSError):
                return call_by_relay(self.relay, self._name(place), _RELAY_SECONDS)
            self._only_by_relay.discard(place)
        try:
            return connect(place, min(seconds, _DIRECT_SECONDS))
        except OSError as error:
            try:
                connection = call_by_relay(self.relay, self._name(place), _RELAY_SECONDS)
            except OSError as by_relay:
                error.add_note(f"by the relay {self.relay.name}: {by_relay}")
                raise error from None
            self._only_by_relay.add(place)
            return connection

    def has_ended(self, place: Place) -> bool:
        """Whether the relay says that the process which listened at ``place`` has ended. Takes a second at most."""
        if self.relay is None:
            return False
        try:
            connection, answer = _call(self.relay, Role.ASKER, self._name(place), _ASK_SECONDS)
        except OSError:
            return False
        connection.close()
        return answer == ENDED

    def _name(self, place: Place) -> bytes:
        return derive(self._secret, f"relay {self._purpose} {place_text(place)}")


class _Timer:
    """A descriptor that can be read when a time has come."""

    def __init__(self) -> None:
        self._descriptor = _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")

    def fileno(self) -> int:
        return int(self._descriptor)

    def set(self, seconds: float) -> None:
        whole, rest = divmod(max(seconds, 1e-3), 1)
        _libc.timerfd_settime(self._descriptor, 0, struct.pack("@qqqq", 0, 0, int(whole), int(1e9 * rest)), None)

    def take(self) -> None:
        """That it has come is no news any more."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, 8)

    def close(self) -> None:
        os.close(self._descriptor)


class _Waiting:
    """A connection to the relay that waits for a caller."""

    def __init__(self, relay: Relay, name: bytes) -> None:
        self._relay, self._name = relay, name
        self._received = b""
        self._is_connected = self._has_said = False
        family = socket.AF_INET6 if ":" in relay.place[0] else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        for option, value in ((socket.TCP_KEEPIDLE, _IDLE_SECONDS), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 4)):
            self.socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(BlockingIOError):
            self.socket.connect(relay.place)

    @property
    def events(self) -> int:
        """What it waits for."""
        return select.EPOLLIN if self._is_connected else select.EPOLLOUT

    def is_joined(self) -> bool:
        """Whether a caller has come; goes on as far as it can without waiting. Raises OSError where the relay ends."""
        if not self._is_connected:
            check_connected(self.socket)
            self._is_connected = True
        try:
            if not self._has_said:
                self._received += self._receive(GREETING_NBYTES - len(self._received))
                if len(self._received) < GREETING_NBYTES:
                    return False
                hello = Hello.make(Role.LISTENER, self._name, self._relay.key, self._received)
                self.socket.sendall(hello.packed())  # the first bytes of a connection find room
                self._has_said = True
            answer = self._receive(1)
        except BlockingIOError:
            return False
        if answer != JOINED:
            raise ConnectionError(reason(answer))
        return True

    def _receive(self, nbytes: int) -> bytes:
        found = self.socket.recv(nbytes)
        if not found:
            raise ConnectionError(errno.ECONNRESET, "the relay has closed the connection")
        return found


class RelayListener:
    """A listening socket to which callers of the relay come, too, in the form of a socket that never blocks.

    It can be read, for select, when a caller may have come, or when a connection to the relay must be made again.
    """

    def __init__(self, server: socket.socket, relay: Relay, name: bytes) -> None:
        """From now on ``server`` belongs to this object."""
        self._server, self._relay, self._name = server, relay, name
        server.setblocking(False)
        self._waiting: dict[int, _Waiting] = {}
        self._next_dial = 0.0
        self._timer = _Timer()
        self._epoll: select.epoll | None = select.epoll()
        self._epoll.register(server, select.EPOLLIN)
        self._epoll.register(self._timer, select.EPOLLIN)
        self._dial()

    def __enter__(self) -> RelayListener:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def fileno(self) -> int:
        """For select; -1 when it is closed."""
        return -1 if self._epoll is None else self._epoll.fileno()

    def setblocking(self, flag: bool) -> None:
        """It never blocks."""

    def close(self) -> None:
        """Idempotent. In a child of os.fork() this leaves the parent's connections as they are."""
        if self._epoll is None:
            return
        self._epoll.close()
        self._epoll = None
        self._timer.close()
        self._server.close()
        for each in self._waiting.values():
            each.socket.close()
        self._waiting.clear()

    def accept(self) -> tuple[socket.socket, object]:
        """A connection and its address. Raises BlockingIOError where none waits, or what socket.accept() raises."""
        if self._epoll is None:
            raise OSError(errno.EBADF, "this socket is closed")
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._server.fileno():
                with contextlib.suppress(BlockingIOError):
                    return self._server.accept()
            elif descriptor == self._timer.fileno():
                self._timer.take()
            elif (connection := self._advance(descriptor)) is not None:
                self._dial()
                return connection, self._relay.place
        self._dial()
        raise BlockingIOError

    def _advance(self, descriptor: int) -> socket.socket | None:
        """The connection if a caller has been joined to it."""
        waiting = self._waiting[descriptor]
        assert self._epoll is not None
        try:
            if not waiting.is_joined():
                self._epoll.modify(descriptor, waiting.events)
                return None
        except OSError:
            self._remove(descriptor).close()
            self._next_dial = time.monotonic() + _RETRY_SECONDS
            return None
        return self._remove(descriptor)

    def _remove(self, descriptor: int) -> socket.socket:
        assert self._epoll is not None
        self._epoll.unregister(descriptor)
        return self._waiting.pop(descriptor).socket

    def _dial(self) -> None:
        """Begin the connections that are missing, or set the timer."""
        assert self._epoll is not None
        while len(self._waiting) < _WAITING:
            left = self._next_dial - time.monotonic()
            if left > 0:
                return self._timer.set(left)
            try:
                waiting = _Waiting(self._relay, self._name)
            except OSError:
                self._next_dial = time.monotonic() + _RETRY_SECONDS
                continue
            self._waiting[waiting.socket.fileno()] = waiting
            self._epoll.register(waiting.socket, waiting.events)
