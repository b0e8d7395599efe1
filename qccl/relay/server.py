"""The relay's loop: it hears who calls, joins two connections with one name, and lets pairs forward.

One thread, which never waits for one connection alone. Everything that a caller can use is limited: the callers that
have not proved to belong to a job, their bytes and seconds, the connections of a job, and the memory of a pair.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from qccl.relay.jobs import Job
from qccl.relay.pair import Pair, Side, configure
from qccl.transports.relay_protocol import ENDED, FULL, HELLO_NBYTES, JOINED, NO_KEY, NOT_ENDED, Hello, Role, greeting
from qccl.transports.sockets import Place, place_text

__all__ = ["Limits", "Relay", "Totals"]

_log = logging.getLogger("qccl.relay")

#: how long a caller may take to say who it is, and how many may do so at once
HELLO_SECONDS = 5.0
MOST_UNKNOWN = 256
#: connections of one name and role that wait, at most: the oldest is dropped first
MOST_OF_A_NAME = 64
#: names whose listeners have ended that are remembered, at most: the oldest is forgotten first
MOST_ENDED = 4096
#: connections that are accepted in one turn
_MOST_ACCEPTED = 64
#: between two looks at what has taken too long, and at jobs that have used up their rate
_TICK_SECONDS, _RATE_SECONDS = 1.0, 0.01


class Limits(NamedTuple):
    """What the relay allows.

    Attributes:
        connections: of all jobs, at once.
        of_a_job: connections of one job, at once.
        idle_seconds: a pair without a byte is closed after so long.
        rate: bytes per second of one job, in both directions together; None: any.
    """

    connections: int = 4096
    of_a_job: int = 2048
    idle_seconds: float = 3600.0
    rate: float | None = None


class Totals(NamedTuple):
    """What the relay does at one moment.

    Attributes:
        pairs, waiting, unknown: connections that are joined (two each), that wait, and that have not said who they are.
        joined, refused: pairs and callers since the start.
        nbytes: that it has forwarded since the start.
    """

    pairs: int
    waiting: int
    unknown: int
    joined: int
    refused: int
    nbytes: int

    def __str__(self) -> str:
        return (
            f"{self.pairs} pairs, {self.waiting} connections wait, {self.unknown} have not said who they are; "
            f"since the start {self.joined} pairs, {self.nbytes} bytes, {self.refused} callers refused"
        )


class _Caller:
    """A connection that is not joined: at first nobody knows whose it is, then it waits (``hello``)."""

    def __init__(self, connection: socket.socket, address: Place) -> None:
        self.socket, self.address = connection, address
        self.nonce = os.urandom(16)
        self.received = b""
        self.since = time.monotonic()
        self.hello: Hello | None = None

    def read(self) -> Hello | None:
        """What it says, when all of it has come.

        Raises ConnectionError for something else, and where the connection is broken; EOFError where it was closed.
        """
        part = self.socket.recv(HELLO_NBYTES + 1 - len(self.received))
        if not part:
            raise EOFError
        self.received += part
        if len(self.received) > HELLO_NBYTES:
            raise ConnectionError("it says more than it may")
        if len(self.received) < HELLO_NBYTES:
            return None
        found = Hello.of(self.received)
        if found is None:
            raise ConnectionError("it speaks another protocol")
        return found


class Relay:
    """One relay. serve() runs until stop() is called, by a handler of a signal or by another thread."""

    def __init__(self, listener: socket.socket, jobs: Sequence[Job], limits: Limits) -> None:
        """``listener`` belongs to the relay from now on; ``jobs`` are those that may use it."""
        self._listener, self._limits = listener, limits
        self.jobs = {job.id: job for job in jobs}
        self._poller = select.epoll()
        self._watched: dict[int, Callable[[int], None]] = {}  # by descriptor
        self._events: dict[int, int] = {}
        self._unknown: dict[_Caller, None] = {}  # the oldest first, like the following
        self._waiting: dict[tuple[bytes, bytes, Role], dict[_Caller, None]] = {}
        self._ended: dict[tuple[bytes, bytes], None] = {}
        self._pairs: dict[Pair, None] = {}
        self._sole: dict[tuple[bytes, bytes], Pair] = {}
        self._held: list[tuple[Pair, Side]] = []
        self._joined = self._refused = 0
        self._listens = True
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_stopped = False
        listener.setblocking(False)
        self._watch(listener, self._accept, select.EPOLLIN)
        self._poller.register(self._wakeup, select.EPOLLIN)

    @property
    def place(self) -> Place:
        """Where it listens."""
        host, port, *_ = self._listener.getsockname()
        return host, port

    def totals(self) -> Totals:
        """What it does now."""
        waiting = sum(map(len, self._waiting.values()))
        nbytes = sum(job.nbytes for job in self.jobs.values())
        return Totals(len(self._pairs), waiting, len(self._unknown), self._joined, self._refused, nbytes)

    def stop(self) -> None:
        """Let serve() return."""
        self._is_stopped = True
        with contextlib.suppress(OSError):  # it has returned before
            os.eventfd_write(self._wakeup, 1)

    def serve(self, each_second: Callable[[], object] = lambda: None) -> None:
        """Run until stop(), and then close everything. ``each_second`` is called about that often."""
        try:
            next_tick = time.monotonic()
            while not self._is_stopped:
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + _TICK_SECONDS
                    self._tick(time.monotonic())
                    each_second()
                left = next_tick - time.monotonic()
                for descriptor, events in self._poller.poll(max(0.0, min(left, _RATE_SECONDS) if self._held else left)):
                    if descriptor in self._watched:
                        self._watched[descriptor](events)
                self._resume()
        finally:
            self._close()

    def _close(self) -> None:
        for pair in list(self._pairs):
            self._end(pair, "the relay stops")
        for caller in [*self._unknown, *(each for callers in self._waiting.values() for each in callers)]:
            caller.socket.close()
        self._listener.close()
        self._poller.close()
        os.close(self._wakeup)

    def _watch(self, connection: socket.socket, serve: Callable[[int], None], events: int) -> None:
        """Call ``serve`` when one of ``events`` has come, or the connection is broken."""
        descriptor = connection.fileno()
        known = self._events.get(descriptor)
        self._watched[descriptor] = serve
        if known is None:
            self._poller.register(descriptor, events)
        elif known != events:
            self._poller.modify(descriptor, events)
        self._events[descriptor] = events

    def _forget(self, connection: socket.socket) -> None:
        """Watch a connection no longer."""
        descriptor = connection.fileno()
        if self._events.pop(descriptor, None) is not None:
            self._poller.unregister(descriptor)
            del self._watched[descriptor]

    # -- callers ---------------------------------------------------------------------------------------------------

    def _accept(self, _: int) -> None:
        for _ in range(_MOST_ACCEPTED):
            try:
                connection, (host, port, *_rest) = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause()
                return  # otherwise the caller has gone
            caller = _Caller(connection, (host, port))
            try:
                configure(connection)
                connection.send(greeting(caller.nonce))
            except OSError:
                connection.close()
                continue
            if len(self._unknown) >= MOST_UNKNOWN:
                self._drop_unknown()
            self._unknown[caller] = None
            self._watch(connection, partial(self._hear, caller), select.EPOLLIN)

    def _drop_unknown(self) -> None:
        """The oldest one from the host that has most: who floods the relay takes the place of himself."""
        most, _ = Counter(each.address[0] for each in self._unknown).most_common(1)[0]
        self._refuse(next(each for each in self._unknown if each.address[0] == most))

    def _pause(self) -> None:
        """Accept nothing until the next tick: the system has no room for another connection."""
        self._listens = False
        self._watch(self._listener, self._accept, 0)
        if self._unknown:
            self._drop_unknown()

    def _hear(self, caller: _Caller, _: int) -> None:
        """Something has come from a caller that is not joined. One that waits has nothing to say."""
        try:
            hello = caller.read()
        except BlockingIOError:
            return
        except EOFError:
            self._refuse(caller)
            return self._note_end(caller)
        except OSError:
            return self._refuse(caller)
        if hello is None:
            return
        job = self.jobs.get(hello.job)
        if job is None or not hello.is_proved(job.key, caller.nonce):
            return self._refuse(caller, NO_KEY)
        if hello.role is Role.ASKER:
            return self._dismiss(caller, ENDED if (hello.job, hello.name) in self._ended else NOT_ENDED)
        connections = sum(each.connections for each in self.jobs.values())
        if job.connections >= self._limits.of_a_job or connections >= self._limits.connections:
            _log.warning("job %s: no room for a connection from %s", job.name, place_text(caller.address))
            return self._refuse(caller, FULL)
        del self._unknown[caller]
        job.connections += 1
        caller.hello = hello
        if hello.role.is_sole:
            self._end_predecessors(job, hello)
        self._join_or_wait(job, caller, hello)

    def _refuse(self, caller: _Caller, answer: bytes = b"") -> None:
        """Close a connection that is not joined, after a last ``answer``; it counts unless it waited."""
        self._refused += caller.hello is None
        self._dismiss(caller, answer)

    def _dismiss(self, caller: _Caller, answer: bytes) -> None:
        if caller.hello is None:
            self._unknown.pop(caller, None)
        else:
            self._leave(caller, caller.hello)
            self.jobs[caller.hello.job].connections -= 1
        self._forget(caller.socket)
        with contextlib.suppress(OSError), caller.socket:
            if answer:
                caller.socket.send(answer)

    def _note_end(self, caller: _Caller) -> None:
        """The machine of a listener that waited has closed its connection in order.

        A process closes the connections that wait only when it ends, and then all of them. Where a network fails,
        connections are reset or silent.
        """
        hello = caller.hello
        if hello is None or hello.role is not Role.LISTENER or (hello.job, hello.name, hello.role) in self._waiting:
            return
        self._ended[hello.job, hello.name] = None
        if len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    def _leave(self, caller: _Caller, hello: Hello) -> None:
        """It waits no longer."""
        key = hello.job, hello.name, hello.role
        callers = self._waiting[key]
        del callers[caller]
        if not callers:
            del self._waiting[key]

    def _end_predecessors(self, job: Job, hello: Hello) -> None:
        """A rank that comes again has given its last connection up, whether that waits or was joined."""
        for caller in list(self._waiting.get((hello.job, hello.name, hello.role), ())):
            self._refuse(caller)
        if pair := self._sole.get((job.id, hello.name)):
            self._end(pair, "a rank has made a new connection")

    # -- pairs -----------------------------------------------------------------------------------------------------

    def _join_or_wait(self, job: Job, caller: _Caller, hello: Hello) -> None:
        """Join it to the one that came last, whose way through its network is the freshest."""
        if hello.role is Role.LISTENER:
            self._ended.pop((hello.job, hello.name), None)
        while others := self._waiting.get((hello.job, hello.name, hello.role.other)):
            other = next(reversed(others))
            self._leave(other, hello._replace(role=hello.role.other))
            self._forget(other.socket)
            try:
                other.socket.send(JOINED)
            except OSError:  # it has gone
                other.socket.close()
                job.connections -= 1
            else:
                return self._join(job, hello, caller, other)
        callers = self._waiting.setdefault((hello.job, hello.name, hello.role), {})
        callers[caller] = None
        if len(callers) > MOST_OF_A_NAME:
            self._refuse(next(iter(callers)), FULL)

    def _join(self, job: Job, hello: Hello, caller: _Caller, other: _Caller) -> None:
        """Forward between two processes from now on. The other one knows it."""
        self._forget(caller.socket)
        first, second = (caller, other) if hello.role.is_caller else (other, caller)
        pair = Pair(job, hello.name, Side(first.socket, first.address), Side(second.socket, second.address))
        self._pairs[pair] = None
        if hello.role.is_sole:
            self._sole[job.id, hello.name] = pair
        self._joined += 1
        job.pairs += 1
        for side in pair.sides:
            self._update(pair, side)
        try:
            caller.socket.send(JOINED)
        except OSError:
            self._end(pair, "a rank has gone")

    def _forward(self, pair: Pair, side: Side, events: int) -> None:
        try:
            pair.serve(side, events)
            if not pair.job.may_send(self._limits.rate) and not side.is_held:
                side.is_held = True
                self._held.append((pair, side))
            for each in pair.sides:
                self._update(pair, each)
        except BlockingIOError:
            pass  # there was nothing after all
        except OSError as error:
            self._end(pair, error.strerror or str(error))

    def _update(self, pair: Pair, side: Side) -> None:
        """What the poller waits for."""
        if side.has_ended and not side.rest:
            self._forget(side.socket)  # the poller would tell the end again and again
        else:
            self._watch(side.socket, partial(self._forward, pair, side), side.events)

    def _end(self, pair: Pair, why: str) -> None:
        """Close both connections, and say in one line what the pair was."""
        if pair not in self._pairs:
            return
        del self._pairs[pair]
        if self._sole.get((pair.job.id, pair.name)) is pair:
            del self._sole[pair.job.id, pair.name]
        for side in pair.sides:
            self._forget(side.socket)
        pair.job.connections -= 2
        pair.job.pairs -= 1
        _log.info("job %s: %s; %s", pair.job.name, pair, why)
        pair.close()

    # -- by time ---------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Read pairs again whose job may send again."""
        held, self._held = self._held, []
        for pair, side in held:
            if pair not in self._pairs:
                continue
            if pair.job.may_send(self._limits.rate):
                side.is_held = False
                self._update(pair, side)
            else:
                self._held.append((pair, side))

    def _tick(self, now: float) -> None:
        """Close what has taken too long."""
        if not self._listens:
            self._listens = True
            self._watch(self._listener, self._accept, select.EPOLLIN)
        for caller in [each for each in self._unknown if now - each.since > HELLO_SECONDS]:
            self._refuse(caller)
        for pair in list(self._pairs):
            if why := pair.fault(now, self._limits.idle_seconds):
                self._end(pair, why)
