"""The network interfaces where a rank listens, and over which it reaches the others."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from typing import NamedTuple

from qccl.base.errors import ArgumentError
from qccl.meeting.sockets import is_loopback

__all__ = ["LOOPBACK", "Network", "own_address"]

LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915


class Network(NamedTuple):
    """The facts that decide where a rank listens, and how it reaches the others.

    Attributes:
        master: a host that all ranks reach; None: unknown.
        is_local: all ranks are on this machine, and in its network namespace.
        can_share_memory: the ranks are local, and can share memory, so that UCX needs no network.
        is_alone: no other rank is on this machine.
    """

    master: str | None = None
    is_local: bool = False
    can_share_memory: bool = False
    is_alone: bool = False

    @classmethod
    def towards(
        cls, master: str | None, *, is_local: bool = False, can_share_memory: bool = False, is_alone: bool = False
    ) -> Network:
        """The network that leads to ``master``; a loopback address means that all ranks are on this machine."""
        return cls(master, is_local or (master is not None and is_loopback(master)), can_share_memory, is_alone)

    @property
    def interfaces(self) -> str | None:
        """The network interfaces to use, as QCCL_NET names them; None: all. Raises ArgumentError for unknown ones."""
        wanted = _wanted_interface()
        if wanted or self.is_local:
            return wanted or LOOPBACK
        return _interface_to(self.master) if self.master and not _rdma_devices() else None

    def own_host(self) -> str:
        """This machine's address or name for the other ranks."""
        chosen = _address_of(_wanted_interface().partition(",")[0])
        if chosen:
            return chosen
        if self.is_local:
            return "::1" if self.master == "::1" else "127.0.0.1"
        host = self.master or socket.gethostname()
        own = _address_towards(host)
        # the way leads over the loopback interface, so host is this machine
        return own if own and not is_loopback(own) else host


def own_address(network: Network, known: str | None = None) -> str | None:
    """This machine's numeric address for gloo; None: unknown, or gloo finds it by GLOO_SOCKET_IFNAME.

    A name is not enough: in Debian's /etc/hosts a machine's own name is 127.0.1.1. ``known``: the address at which
    another machine has reached this one.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    if not network.is_local and not _wanted_interface() and known:
        return known
    found = _address_towards(network.own_host())
    return found if found and (network.is_local or not is_loopback(found)) else None


def _wanted_interface() -> str:
    """The network interfaces that QCCL_NET names; empty if it is not set. Raises ArgumentError for unknown ones."""
    wanted = os.environ.get("QCCL_NET", "")
    there = {name for _, name in socket.if_nameindex()} | set(_rdma_devices())
    unknown = [name for name in wanted.split(",") if wanted and name.partition(":")[0] not in there]
    if unknown:
        raise ArgumentError(
            f"QCCL_NET={wanted!r}: this machine has no network interface {unknown[0]!r}; it has "
            f"{', '.join(sorted(there))}"
        )
    return wanted


def _rdma_devices() -> list[str]:
    return os.listdir("/sys/class/infiniband") if os.path.isdir("/sys/class/infiniband") else []


def _interface_to(host: str) -> str | None:
    """The network interface that leads to ``host``; None if that is this machine itself, or unknown."""
    own = _address_towards(host)
    if own and not is_loopback(own):
        for _, name in socket.if_nameindex():
            if _address_of(name) == own:
                return name
    return None


def _address_of(interface: str) -> str | None:
    """The IPv4 address of a network interface."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(request[20:24])
    return None


def _address_towards(host: str) -> str | None:
    """The address of this machine that ``host`` sees; None: unknown."""
    with contextlib.suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    return None
