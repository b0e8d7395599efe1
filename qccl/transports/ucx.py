"""Ranks connected by UCX: shared memory on one machine, TCP between machines, and no MPI.

UCX is the library below the networks of MPICH and Open MPI. libucp is taken from the first of these places that has
it: the process (the wheels of MPICH and Open MPI bring one, and a second one cannot be loaded beside it), the wheel
``libucx-cu12``, the system.

When a rank fails:

- UCX finds a rank whose process has ended: at once over TCP, after a keepalive (about a second) over shared memory.
  Every rank that waits for the lost rank raises PeerLost with its number. UCX's keepalive takes a process that nobody
  has reaped to be alive, so a rank that has waited for two seconds also looks at the others' sockets (watch.py).
- The deadlines of the others find a rank that only stops answering.
- An orderly close ends connections, too. The engine's control message says that before (engine/control.py), so the
  end of a connection counts as a loss only for ranks that still wait for a message.
- The ranks that are left agree on a new group (regroup.py), and each connects a new worker: regroup().

Ranks that share a machine and its network open no port to other machines (``is_local``): they listen on the loopback
interface, and UCX uses no other one beside shared memory. If they can share memory, UCX opens no port at all. Otherwise
each listens at the address that the others use.

Settings in the environment (UCX_TLS, UCX_NET_DEVICES and all others) take precedence over those set here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from qccl import _host
from qccl.base.errors import EngineError
from qccl.meeting import descriptors
from qccl.meeting.network import LOOPBACK, Network
from qccl.meeting.regroup import MembershipSocket
from qccl.transports.connected import ConnectedTransport, Faults

__all__ = ["UcxTransport", "load_library", "memory_wire", "version"]

#: The reasons: error handling turns shared memory off unless the first two settings allow it; TCP's default segments of
#: 8 KiB cost a quarter of a fast link; the default keepalive of 20 s finds a killed rank too late; and without CONN_NB
#: a rank would wait a round trip for its connection to each other rank, one after another.
_SETTINGS = {
    "SYSV_ERROR_HANDLING": "y",
    "POSIX_ERROR_HANDLING": "y",
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "512K",
    "KEEPALIVE_INTERVAL": "1s",
    "TCP_CONN_NB": "y",
}
#: settings read when the library is loaded: no signal handlers (for crashes, and SIGHUP), no messages about lost ranks
_LOAD_SETTINGS = {"UCX_HANDLE_ERRORS": "none", "UCX_DEBUG_SIGNO": "0", "UCX_LOG_LEVEL": "fatal"}
_LIBRARY = "libucp.so.0"
#: the variable with the ports of UCX's TCP
_PORTS = "UCX_TCP_PORT_RANGE"
#: UCX's transports between processes that share memory, which open no port
_IN_MEMORY = "sm,self"
#: descriptors that UCX opens at its start. With fewer it ends the process, or starts without TCP, as only peers notice
_DESCRIPTORS = 16
#: the first release that connects processes by TCP over the loopback interface alone
_LOOPBACK_TCP = (1, 22)


@cache
def load_library() -> ctypes.CDLL:
    """Load libucp. Raises EngineError with the reason if that fails."""
    for name, value in _LOAD_SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        return ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        pass
    reasons = []
    for path in _candidates():
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            reasons.append(str(error))
    raise EngineError(f"UCX cannot be used ({'; '.join(reasons)}); install qccl[ucx]")


def _candidates() -> list[str]:
    """The wheel's file, if there is one, and the name by which the system's loader finds its own.

    ctypes.util.find_library() would start a compiler, and need a folder for temporary files, which containers may lack.
    """
    wheel = importlib.util.find_spec("libucx")
    paths = [Path(place) / "lib" / _LIBRARY for place in (wheel and wheel.submodule_search_locations) or ()]
    return [*(str(path) for path in paths if path.exists()), _LIBRARY]


def version() -> str:
    """The library's version, e.g. "1.22.0". Raises EngineError if there is no library."""
    get = load_library().ucp_get_version_string
    get.restype = ctypes.c_char_p
    return str(get().decode())


def _config(network: Network) -> list[tuple[str, str]]:
    """The library's settings, without those that the environment has."""
    settings = dict(_SETTINGS)
    interfaces = network.interfaces
    release = tuple(int(number) for number in re.findall(r"\d+", version())[:2])
    if (
        interfaces == LOOPBACK
        and "UCX_TLS" in os.environ
        and release < _LOOPBACK_TCP
        and not os.environ.get("QCCL_NET")
    ):
        interfaces = None  # shared memory needs no TCP beside it
    if interfaces:
        settings["NET_DEVICES"] = interfaces
    if interfaces == LOOPBACK and network.can_share_memory and not os.environ.get("QCCL_NET"):
        settings["TLS"] = _IN_MEMORY
    return [(name, value) for name, value in settings.items() if f"UCX_{name}" not in os.environ]


def memory_wire(membership: MembershipSocket) -> _host.GroupWire:
    """A wire that is not connected yet, by shared memory alone: it opens no port. Raises EngineError."""
    version()  # loads the library
    settings = {name: value for name, value in _SETTINGS.items() if f"UCX_{name}" not in os.environ}
    return _wire([*settings.items(), ("TLS", _IN_MEMORY)], membership)


def _wire(config: list[tuple[str, str]], membership: MembershipSocket) -> _host.GroupWire:
    """A wire with these settings that is not connected yet. Raises EngineError."""
    library = load_library()
    functions = [_address(library, name) for name in _host.ucx_function_names()]
    descriptors.allow(0)
    if reason := descriptors.exhausted(_DESCRIPTORS):
        raise EngineError(f"UCX {version()} did not start: {reason}")
    try:
        return _host.ucx_wire(functions, config, Faults(membership, "UCX", _text))
    except _host.WireError as error:
        reason = descriptors.exhausted() or "see the settings UCX_* of the environment"
        if ports := os.environ.get(_PORTS):
            reason += f" ({_PORTS}={ports} must have two free ports for each rank of this machine)"
        raise EngineError(
            f"UCX {version()} did not start: {error}; {reason}; UCX_LOG_LEVEL=warn shows what UCX says"
        ) from error


class UcxTransport(ConnectedTransport):
    """One rank of a group over UCX."""

    name = "ucx"
    eager_nbytes = 8 << 10

    @classmethod
    def _start(cls, network: Network, membership: MembershipSocket, secret: bytes | None) -> _host.GroupWire:
        return _wire(_config(network), membership)

    @classmethod
    def _listens(cls, network: Network) -> tuple[str, Sequence[int]]:
        """Listen at a port of UCX_TCP_PORT_RANGE, which a firewall lets through, unless UCX needs the only one."""
        found = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", os.environ.get(_PORTS, ""))
        if found is None or network.is_local:
            return network.own_host(), ()
        first, last = int(found[1]), min(int(found[2]), 65535)
        return network.own_host(), range(first, last + 1) if 0 < first < last else ()

    @classmethod
    def _connections(cls, network: Network) -> int:
        """One connection over TCP, without which UCX may end the process; none in shared memory."""
        return 1 if not network.is_local or "UCX_TLS" in os.environ else 0

    def _ended(self, ranks: list[int]) -> list[int]:
        return self._watch.ended(ranks)

    def _no_network(self, reason: str) -> str:
        why = descriptors.exhausted() or "see QCCL_NET and the settings UCX_* of the environment"
        return f"UCX has no network from rank {self.rank} to {reason}; {why}; UCX_LOG_LEVEL=warn shows what UCX says"


def _address(library: ctypes.CDLL, name: str) -> int:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    except AttributeError:
        raise EngineError(f"UCX {version()} has no function {name}; qccl needs version 1.10 or later") from None


def _text(status: int) -> str:
    function = load_library().ucs_status_string
    function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_byte]
    return str(function(status).decode())
