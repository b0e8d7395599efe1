"""The totals of a process's calls for Prometheus: an endpoint at the port that QCCL_METRICS names.

QCCL_METRICS is an environment variable, like QCCL_RECORDS, so it also works for communicators that PyTorch or another
library makes, and needs no change of the program. prometheus_client writes the text and answers the requests.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from qccl.base.errors import ArgumentError
from qccl.base.lifetime import Registry, members
from qccl.meeting.sockets import Place, host_and_port, place_text
from qccl.observe.statistics import Statistics

__all__ = ["COUNTERS", "GROUP_SIZE", "VARIABLE", "Endpoint", "check_setting", "serve"]

_LOG = logging.getLogger(__name__)

#: the environment variable that names the port of a machine's first rank, or "host:port"
VARIABLE = "QCCL_METRICS"
#: the address to listen at if the variable is a port alone: only this machine can connect
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
_GROUP_LABELS = ("group", "rank")
_CALL_LABELS = (*_GROUP_LABELS, "collective", "codec")
#: seconds after which a silent caller's thread ends
_SILENT_SECONDS = 2.0


def check_setting() -> None:
    """Raise ArgumentError if QCCL_METRICS is neither a port nor "host:port", or prometheus_client is not installed."""
    if _place() is not None:
        _client()


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


def _client(module: str = "prometheus_client") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ArgumentError(
            f'{VARIABLE} needs prometheus_client ({error}); pip install "qccl[metrics]", or unset {VARIABLE}'
        ) from error


def serve(statistics: Statistics, local_rank: int, *, is_thread: bool) -> Endpoint | None:
    """Let this process's endpoint show a group, if QCCL_METRICS is set; returns the endpoint, for Endpoint.remove().

    The first group of the process opens the endpoint, at the port plus the ``local_rank``. Ranks that are threads
    (``is_thread``) have one each. If the port cannot be opened, the log says so, and calls go on.
    """
    wanted = _place()
    if wanted is None:
        return None
    host, port = wanted
    with _lock:
        is_open = {each.port: each for each in _endpoints}
        others = () if is_thread else tuple(is_open.values())
        endpoint = is_open.get(port + local_rank) or next(iter(others), None)
        if endpoint is None:
            try:
                endpoint = Endpoint((host, port + local_rank))
            except (OSError, OverflowError, RuntimeError) as error:  # e.g. a port above 65535, no thread
                _LOG.warning("no metrics at %s: %s", place_text((host, port + local_rank)), error)
                return None
        endpoint.add(statistics)
        return endpoint


class Endpoint:
    """A server on one port, until its last group is removed; a collector of prometheus_client. ``port``: its number."""

    def __init__(self, place: Place) -> None:
        """Open the port. Raises OSError or OverflowError if that fails."""
        client = _client()
        registry = client.CollectorRegistry()
        registry.register(self)
        self._groups = weakref.WeakSet[Statistics]()
        self._server, _ = client.start_http_server(place[1], place[0], registry)
        self.port: int = self._server.server_port
        handler = self._server.RequestHandlerClass
        self._server.RequestHandlerClass = type("Handler", (handler,), {"timeout": _SILENT_SECONDS})
        self._server.handle_error = lambda *_: None  # the program's output must not show broken connections
        _endpoints.add(self)

    def add(self, statistics: Statistics) -> None:
        """Show a group from now on."""
        self._groups.add(statistics)

    def remove(self, statistics: Statistics) -> None:
        """Show a group no longer; the last one closes the port. Requests under way are still answered."""
        with _lock:
            self._groups.discard(statistics)
            if not self._groups and self in _endpoints:
                _endpoints.discard(self)
                self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the server's thread
                self._server.shutdown()
                self._server.server_close()

    def collect(self) -> Iterator[Any]:
        """The metrics, for prometheus_client."""
        core = _client("prometheus_client.core")
        groups = sorted(members(self._groups), key=lambda each: (each.group, each.rank))
        totals = [(group, call) for group in groups for call in group.totals()]
        sizes = core.GaugeMetricFamily(GROUP_SIZE, "Ranks of the group.", labels=_GROUP_LABELS)
        for group in groups:
            sizes.add_metric((group.group, str(group.rank)), group.size)
        yield sizes
        for name, field, text in COUNTERS:
            counter = core.CounterMetricFamily(name, text, labels=_CALL_LABELS)
            for group, call in totals:
                if (value := getattr(call, field)) is not None:
                    counter.add_metric((group.group, str(group.rank), call.collective, call.codec), value)
            yield counter


def _forked(endpoint: Endpoint) -> None:
    """In a child of os.fork(): the port and its threads belong to the parent."""
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held the old lock
    endpoint._server.server_close()


#: guards the list of endpoints and the groups that they show
_lock = threading.RLock()
_endpoints: Registry[Endpoint] = Registry(at_fork=_forked)
