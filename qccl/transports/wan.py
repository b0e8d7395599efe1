"""Ranks at different sites, over encrypted TCP connections that are made again when they break.

The networks between sites have latency, loss and strangers. docs/architecture/wan.md says how it works and why. Native
code (kernels/wires/wan/wire.h) has several connections for each pair of ranks: one for short messages, and others that
share the long ones, each as much as it can carry. The rank with the higher number calls the other; if that fails, the
other calls, so it suffices that one of them can be reached. Ranks of one machine that share memory exchange their
messages by UCX instead: behind the address of its wire between sites a rank gives an id of its memory (_memory_id()),
and the address of its wire in memory.

A rank is lost when it closes its connections, when its process has ended on the same machine, or when it could not be
reached for a minute. A process that is busy or stopped is not lost, because its machine answers; the deadline counts
for it.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Sequence

from qccl import _host
from qccl.base.errors import ArgumentError, EngineError
from qccl.meeting import tls, topology
from qccl.meeting.callers import HELLO_SECONDS
from qccl.meeting.network import Network
from qccl.meeting.regroup import MembershipSocket
from qccl.meeting.secret import derive
from qccl.meeting.sockets import host_of, is_host, listen_at, seats
from qccl.transports.choice import obstacle
from qccl.transports.connected import ConnectedTransport, Faults
from qccl.transports.ucx import memory_wire

__all__ = ["WanTransport", "congestion_control", "memory_obstacle"]

_log = logging.getLogger("qccl")

#: connections for long messages between two ranks: with BBR, which measures the bandwidth, and without, where loss
#: slows each connection down
_WITH_BBR, _WITHOUT = 2, 48
_MOST_CONNECTIONS = 64
#: seconds after which a rank that cannot be reached is lost
_AWAY_SECONDS = 60.0
#: names in UCX_TLS that allow shared memory
_SHARED_MEMORY = {"all", "sm", "shm", "mm", "posix", "sysv"}


def congestion_control() -> str:
    """TCP's congestion control for this transport: "bbr" if the kernel allows it; empty: the kernel's default.

    BBR measures the bandwidth; CUBIC, which is usually the default, takes every lost packet for congestion.
    QCCL_WAN_CONGESTION names another one. Raises ArgumentError if the kernel does not allow that.
    """
    wanted = os.environ.get("QCCL_WAN_CONGESTION", "")
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, os.fsencode(wanted or "bbr"))
        except OSError as error:
            if wanted:
                raise ArgumentError(
                    f"QCCL_WAN_CONGESTION={wanted!r}: this kernel does not allow it ({error}); see "
                    f"/proc/sys/net/ipv4/tcp_allowed_congestion_control"
                ) from error
            return ""
    return wanted or "bbr"


def _connection_count() -> int:
    """The number of connections for long messages. Raises ArgumentError for an invalid QCCL_WAN_CONNECTIONS."""
    wanted = os.environ.get("QCCL_WAN_CONNECTIONS", "")
    if not wanted:
        return _WITH_BBR if congestion_control() == "bbr" else _WITHOUT
    if not wanted.isdecimal() or not 1 <= int(wanted) <= _MOST_CONNECTIONS:
        raise ArgumentError(f"QCCL_WAN_CONNECTIONS={wanted!r} is not a number of connections, 1 to {_MOST_CONNECTIONS}")
    return int(wanted)


def _advertised() -> tuple[str, range] | None:
    """The host and the ports of QCCL_WAN_ADVERTISE; None if it is not set. Raises ArgumentError."""
    text = os.environ.get("QCCL_WAN_ADVERTISE", "")
    if not text:
        return None
    host, _, ports = text.rpartition(":")
    found = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", ports)
    if not (found and is_host(host_of(host)) and 0 < int(found[1]) < int(found[2]) < 65536):
        raise ArgumentError(
            f'QCCL_WAN_ADVERTISE={text!r} is not "host:first-last": the host and at least two ports that are forwarded '
            f"to the same ports of this machine"
        )
    return host_of(host), range(int(found[1]), int(found[2]) + 1)


class WanTransport(ConnectedTransport):
    """One rank of a group over TCP connections between sites."""

    name = "wan"
    eager_nbytes = 8 << 10
    is_between_sites = True

    @classmethod
    def _start(cls, network: Network, membership: MembershipSocket, secret: bytes | None) -> _host.GroupWire:
        memory = None if network.is_alone else _memory_wire(membership)
        suffix = b"\0".join([b"", _memory_id(), memory.address()]) if memory else b""
        sites = _sites_wire(network, membership, secret, suffix)
        return _host.mixed_wire(memory, sites) if memory else sites

    @classmethod
    def _listens(cls, network: Network) -> tuple[str, Sequence[int]]:
        return _advertised() or super()._listens(network)

    @classmethod
    def _connections(cls, network: Network) -> int:
        return _connection_count() + 2

    def _connect_wire(self, addresses: list[bytes]) -> None:
        parts = [address.split(b"\0", 2) for address in addresses]
        own = parts[self.rank][1:2]
        #: the ranks that share memory with this one
        self._near = [r for r, each in enumerate(parts) if r != self.rank and each[1:2] == own and any(each[2:])]
        self.sends_ahead = [rank for rank in range(self.size) if rank not in self._near]  # UCX keeps all for the others
        for rank in self._near:
            sites, _, memory = parts[rank]
            parts[rank] = [sites + b"\0" + memory]  # a near rank needs no connection between sites
        super()._connect_wire([each[0] for each in parts])

    def _no_network(self, reason: str) -> str:
        hint = "; UCX_TLS=tcp keeps ranks of one machine from sharing memory" if "UCX" in reason else ""
        return super()._no_network(reason) + hint

    @property
    def carrier(self) -> str:
        """The carrier, with the ranks that UCX reaches."""
        return f"{self.name}; ucx with {', '.join(map(str, self._near))}" if self._near else self.name

    def _ended(self, ranks: list[int]) -> list[int]:
        """Find ended processes of this machine alone: elsewhere a refusing firewall looks like the end of a process."""
        assert self.membership is not None
        near = self._watch.ended([rank for rank in ranks if rank in self._near])
        return [rank for rank in ranks if rank in near or self.membership.has_left_port(rank)]


def memory_obstacle() -> str:
    """The reason why this rank uses TCP inside its machine, too; empty if it shares memory by UCX."""
    if not _SHARED_MEMORY & {*(os.environ.get("UCX_TLS") or "all").split(",")}:
        return f"UCX_TLS={os.environ['UCX_TLS']} names no shared memory"
    return obstacle("ucx") or ("" if _memory_id() else "this system does not say who can share memory")


def _memory_id() -> bytes:
    """A text that is equal for ranks that can share memory; empty: unknown."""
    shared = topology.memory_id() if topology.network_id() else ""
    return f"{topology.machine()} {shared} {os.geteuid()}".encode() if shared else b""


def _memory_wire(membership: MembershipSocket) -> _host.GroupWire | None:
    """The wire to the ranks of this machine; None if they use TCP."""
    reason = memory_obstacle()
    if not reason:
        try:
            return memory_wire(membership)
        except EngineError as error:
            reason = str(error)
    _log.info("the ranks of this machine exchange their messages over TCP: %s", reason)
    return None


def _sites_wire(network: Network, membership: MembershipSocket, secret: bytes | None, suffix: bytes) -> _host.GroupWire:
    """The wire between sites; its address ends with ``suffix``. Raises EngineError, ArgumentError and OSError."""
    host, ports = WanTransport._listens(network)
    connections = _connection_count()
    control = congestion_control()
    functions = tls.functions() if secret else []
    try:
        with listen_at(host, ports, is_local=network.is_local) as listener:
            port = listener.getsockname()[1]
            number = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
            wire = _host.wan_wire(
                listener.fileno(),
                f"{os.urandom(16).hex()} {connections}\n{number!s} {port}".encode() + suffix,
                functions,
                derive(secret, "wan") if secret else None,
                control,
                connections,
                _AWAY_SECONDS,
                seats(),
                HELLO_SECONDS,
                Faults(membership, "wan", os.strerror),
            )
            listener.detach()  # the wire owns it
            return wire
    except _host.StreamError as error:
        raise EngineError(f"wan cannot encrypt: {error}") from error
