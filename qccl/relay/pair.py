"""Two joined connections: what comes over one is sent over the other, through a buffer of one part each way."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time

from qccl.relay.jobs import Job
from qccl.transports.sockets import Place, place_text

__all__ = ["Pair", "Side", "configure"]

#: read at a time, and so the most that is kept for a receiver that is slower
_PART_NBYTES = 64 << 10
#: how long one direction may go on, without a byte, after the other one has ended
_HALF_CLOSED_SECONDS = 10.0
#: a machine is gone to which TCP has sent something so often in vain, which takes 5 seconds or more
_MOST_RETRANSMITS = 5
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 4))
#: bytes in the kernel's buffer that TCP has not sent yet, about
_NOT_SENT_NBYTES = 128 << 10
_NOTSENT_LOWAT = 25  # TCP_NOTSENT_LOWAT, which Python 3.11 does not name
#: of struct tcp_info: how often in a row TCP has sent something in vain; one byte
_RETRANSMITS = 2

_part = memoryview(bytearray(_PART_NBYTES))


def configure(connection: socket.socket) -> None:
    """Set TCP's options: BBR where the kernel allows it, little in its buffer, a look for machines that are gone."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _NOT_SENT_NBYTES)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")


class Side:
    """One connection of a pair.

    Attributes:
        address: of the process, for the log.
        nbytes: that it has sent.
        is_held: it is not read, because its job has used up its rate.
    """

    def __init__(self, connection: socket.socket, address: Place) -> None:
        self.socket, self.address = connection, address
        self.nbytes = 0
        self.is_held = False
        self.has_ended = False  # it sends nothing more
        self.rest = b""  # what it has still to be sent
        self.other = self

    @property
    def events(self) -> int:
        """What the poller waits for."""
        reads = not (self.has_ended or self.is_held or self.other.rest)
        return (select.EPOLLIN if reads else 0) | (select.EPOLLOUT if self.rest else 0)

    def forward(self) -> int:
        """Read once, and send it to the other side; returns the number of bytes. Raises OSError where one is broken."""
        got = self.socket.recv_into(_part)
        if not got:
            self.has_ended = True
            self.other.pass_end()
            return 0
        self.nbytes += got
        self.other.send(_part[:got])
        return got

    def send(self, content: memoryview | bytes) -> None:
        """Send what the system takes, and keep the rest."""
        try:
            sent = self.socket.send(content)
        except BlockingIOError:
            sent = 0
        self.rest = bytes(content[sent:])

    def flush(self) -> None:
        """Send what was kept."""
        if self.rest:
            self.send(self.rest)
            self.pass_end()

    def pass_end(self) -> None:
        """Tell this side that nothing more comes, if that is so."""
        if self.other.has_ended and not self.rest:
            with contextlib.suppress(OSError):  # it has closed its connection, which the poller tells
                self.socket.shutdown(socket.SHUT_WR)

    def is_dead(self) -> bool:
        """Whether its machine confirms nothing. One whose process does not read does confirm that there is no room."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RETRANSMITS + 1)
        return info[_RETRANSMITS] >= _MOST_RETRANSMITS


class Pair:
    """Two processes of a job, joined.

    Attributes:
        sides: the caller, and the one that it has called.
        name: under which they were joined.
        active_at: when a byte was forwarded last.
    """

    def __init__(self, job: Job, name: bytes, caller: Side, listener: Side) -> None:
        self.job, self.name, self.sides = job, name, (caller, listener)
        caller.other, listener.other = listener, caller
        self.began_at = self.active_at = time.monotonic()

    def serve(self, side: Side, events: int) -> None:
        """Forward what a side has, and send it what was kept. Raises OSError when the pair has ended; 0: in order."""
        if events & select.EPOLLOUT:
            side.flush()
        if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) and side.events & select.EPOLLIN:
            self.job.spend(side.forward())
        elif events & select.EPOLLERR or (events & select.EPOLLHUP and not side.has_ended):
            raise OSError(errno.ECONNRESET, "a rank has broken its connection off")
        self.active_at = time.monotonic()
        if all(each.has_ended and not each.other.rest for each in self.sides):
            raise OSError(0, "the ranks closed it")

    def fault(self, now: float, idle_seconds: float) -> str:
        """Why the relay must end it; nothing: it need not."""
        silence = now - self.active_at
        if silence > idle_seconds:
            return f"nothing came for {idle_seconds:.0f} s"
        if any(each.has_ended for each in self.sides) and silence > _HALF_CLOSED_SECONDS:
            return "one rank closed it"
        return next((f"{place_text(each.address)} is gone" for each in self.sides if each.is_dead()), "")

    def close(self) -> None:
        """Close both connections."""
        for each in self.sides:
            each.socket.close()

    def __str__(self) -> str:
        caller, listener = self.sides
        seconds = time.monotonic() - self.began_at
        return (
            f"{place_text(caller.address)} and {place_text(listener.address)}, {seconds:.1f} s, "
            f"{caller.nbytes} bytes there and {listener.nbytes} back"
        )
