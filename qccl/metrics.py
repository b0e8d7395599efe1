"""The totals of a process's calls for Prometheus: an endpoint at the port that QCCL_METRICS names.

It is an environment variable, like QCCL_RECORDS, so that it also works for communicators that PyTorch or another
library makes, and needs no change of the program.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator

from qccl.engine.tallies import CallStats
from qccl.errors import ArgumentError
from qccl.lifetime import Registry, members
from qccl.statistics import Statistics
from qccl.transports.sockets import Place, host_and_port, place_text

__all__ = ["COUNTERS", "GROUP_SIZE", "VARIABLE", "Endpoint", "check_setting", "serve"]

_LOG = logging.getLogger(__name__)

#: the environment variable that names the port of a machine's first rank, or "host:port"
VARIABLE = "QCCL_METRICS"
#: who may connect where the variable is a port alone: this machine
_HOST = "127.0.0.1"
#: counters: name, field of CallStats, meaning
COUNTERS = (
    ("qccl_calls_total", "calls", "Calls that have ended; on CUDA, calls that were started."),
    ("qccl_elements_total", "elements", "Elements of the calls' vectors."),
    ("qccl_raw_bytes_total", "raw_nbytes", "Bytes of the values that were sent, without a codec."),
    ("qccl_sent_bytes_total", "sent_nbytes", "Bytes of encoded data that were sent."),
    ("qccl_call_seconds_total", "seconds", "Seconds from begin to end of the calls."),
    ("qccl_computing_seconds_total", "computing_seconds", "Of these, in encoding, decoding and reducing."),
    (
        "qccl_waiting_seconds_total",
        "waiting_seconds",
        "Of these, while the program waited and the call did not compute.",
    ),
    ("qccl_hidden_seconds_total", "hidden_seconds", "Of these, while the program did its own work."),
)
GROUP_SIZE = "qccl_group_size"

#: for one request and its answer
_REQUEST_SECONDS = 2.0
_MOST_REQUEST_BYTES = 8192
#: between two looks at whether the communicators still exist
_LOOK_SECONDS = 1.0
_BACKLOG = 8
_LAST_PORT = 65535


def check_setting() -> None:
    """Raise ArgumentError if QCCL_METRICS is neither a port nor "host:port"."""
    _place()


def _place() -> Place | None:
    """Host and port of the machine's first rank; None: QCCL_METRICS is not set. Raises ArgumentError."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    found = host_and_port(text if ":" in text else f"{_HOST}:{text}")
    if found is None:
        raise ArgumentError(
            f"{VARIABLE} is {text!r}; set it to the port of each machine's first rank, 1 to 65535, or to 'host:port'"
        )
    return found


def serve(statistics: Statistics, local_rank: int, *, is_thread: bool) -> Endpoint | None:
    """Let this process's endpoint show a group, if QCCL_METRICS is set; the endpoint, for Endpoint.remove().

    The first group of the process opens it, at the port plus the ``local_rank``. Ranks that are threads (``is_thread``)
    have one each. A port that cannot be opened is logged: the calls go on without it.
    """
    wanted = _place()
    if wanted is None:
        return None
    host, port = wanted
    with _lock:
        is_open = {each.port: each for each in _endpoints if each.is_open}
        others = () if is_thread else tuple(is_open.values())
        endpoint = is_open.get(port + local_rank) or next(iter(others), None)
        if endpoint is None:
            try:
                endpoint = Endpoint((host, port + local_rank))
            except OSError as error:
                _LOG.warning("no metrics at %s: %s", place_text((host, port + local_rank)), error)
                return None
        endpoint.add(statistics)
        return endpoint


class Endpoint:
    """Answers ``GET /metrics`` on one port, as long as it has groups to show. One request at a time.

    Attributes:
        port: that it listens at.
        is_open: it still answers.
    """

    def __init__(self, place: Place) -> None:
        """Raises OSError if the port cannot be opened."""
        if place[1] > _LAST_PORT:
            raise OSError(f"the last port is {_LAST_PORT}")
        family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        self._listener = socket.create_server(place, family=family, backlog=_BACKLOG)
        self._listener.settimeout(_LOOK_SECONDS)
        self.port: int = self._listener.getsockname()[1]
        self.is_open = True
        self._groups = weakref.WeakSet[Statistics]()
        self._thread = threading.Thread(target=self._serve, name=f"qccl metrics {self.port}", daemon=True)
        _endpoints.add(self)

    def add(self, statistics: Statistics) -> None:
        """Show a group from now on."""
        self._groups.add(statistics)
        if self._thread.ident is None:
            self._thread.start()

    def remove(self, statistics: Statistics) -> None:
        """Show a group no longer; the last one closes the port."""
        with _lock:
            self._groups.discard(statistics)
            if not self._groups:
                self.close()

    def close(self) -> None:
        """Close the port. A request under way is still answered."""
        self.is_open = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()
        _endpoints.discard(self)

    def _serve(self) -> None:
        while self.is_open:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                with _lock:
                    if not self._groups:  # the program has dropped its communicators without closing them
                        self.close()
                continue
            except OSError:
                if self.is_open:
                    time.sleep(_LOOK_SECONDS)  # too many open files, for example
                continue
            with connection, contextlib.suppress(OSError):
                self._answer(connection, time.monotonic() + _REQUEST_SECONDS)

    def _answer(self, connection: socket.socket, deadline: float) -> None:
        status, body = "200 OK", ""
        match _request_line(connection, deadline):
            case ["GET", "/metrics", _]:
                body = "".join(f"{line}\n" for line in self.lines())
            case ["GET", _, _]:
                status = "404 Not Found"
            case [_, _, _]:
                status = "405 Method Not Allowed\r\nAllow: GET"
            case _:
                status = "400 Bad Request"
        content = body.encode()
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        connection.sendall(head.encode() + content)

    def lines(self) -> Iterator[str]:
        """The answer, in Prometheus' text format."""
        groups = sorted(members(self._groups), key=lambda each: (each.group, each.rank))
        totals = [(group, call) for group in groups for call in group.totals()]
        yield f"# HELP {GROUP_SIZE} Ranks of the group."
        yield f"# TYPE {GROUP_SIZE} gauge"
        for group in groups:
            yield f"{GROUP_SIZE}{{{_labels(group)}}} {group.size}"
        for name, field, text in COUNTERS:
            yield f"# HELP {name} {text}"
            yield f"# TYPE {name} counter"
            for group, call in totals:
                value = getattr(call, field)
                if value is not None:
                    yield f"{name}{{{_labels(group, call)}}} {value!r}"


def _request_line(connection: socket.socket, deadline: float) -> list[str]:
    """Method, path and version of a request; another list if it is none, or is too long or too late."""
    request = b""
    while b"\r\n\r\n" not in request:
        left = deadline - time.monotonic()
        if left <= 0 or len(request) > _MOST_REQUEST_BYTES:
            return []
        connection.settimeout(left)
        part = connection.recv(_MOST_REQUEST_BYTES)
        if not part:
            return []
        request += part
    words = request.partition(b"\r\n")[0].decode("latin-1").split(" ")
    return words if words[-1].startswith("HTTP/1.") else []


def _labels(group: Statistics, call: CallStats | None = None) -> str:
    labels = {"group": group.group, "rank": str(group.rank)}
    if call is not None:
        labels |= {"collective": call.collective, "codec": call.codec}
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _forked(endpoint: Endpoint) -> None:
    """In a child of os.fork(): the port and its thread belong to the parent."""
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held it
    endpoint.is_open = False
    endpoint._listener.close()


#: guards the list of endpoints and the groups that they show
_lock = threading.RLock()
_endpoints: Registry[Endpoint] = Registry(at_fork=_forked)
