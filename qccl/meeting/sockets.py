"""TCP sockets: addresses as text, listening only where the other ranks call, and safe connects."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import random
import resource
import socket
from collections.abc import Sequence
from typing import Any

from qccl.base.deadline import Deadline

__all__ = [
    "BACKLOG",
    "LONGEST_SECONDS",
    "check_connected",
    "connect",
    "host_and_port",
    "host_of",
    "is_abandoned",
    "is_host",
    "is_loopback",
    "listen",
    "listen_at",
    "own_end",
    "place_text",
    "seats",
    "send_at_once",
]

Place = tuple[str, int]
#: most connections that wait until a process accepts them
BACKLOG = 1024
#: most seconds of one wait for a socket: the system's calls accept less than 2**31 ms
LONGEST_SECONDS = 1e6


def host_of(text: str) -> str:
    """The host of an address, without the brackets around an IPv6 address beside a port."""
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


def host_and_port(text: object) -> Place | None:
    """The parts of "host:port" or "[address]:port"; None for any other text."""
    host, _, port = str(text).rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 65536
    return (host_of(host), int(port)) if is_host(host_of(host)) and is_port else None


def is_host(text: str) -> bool:
    """Whether ``text`` has the form of a name, with labels of 1 to 63 bytes, or of an address, without brackets."""
    with contextlib.suppress(UnicodeError):
        return bool(text.encode("idna")) and text.isprintable() and not set(text) & {"[", "]"}
    return False


def place_text(place: Place) -> str:
    """The reverse of host_and_port()."""
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine for every machine: "localhost", or an address of the loopback interface.

    A machine's own name is not loopback, even if it resolves to such an address (127.0.1.1 in Debian's /etc/hosts).
    """
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return False


def connect(place: Place, timeout: float) -> socket.socket:
    """A connection to ``place``. Raises ConnectionRefusedError if nobody listens.

    All addresses of a name share the timeout.
    """
    _check_host(place[0])
    deadline = Deadline(min(timeout, LONGEST_SECONDS))
    addresses = [info[4] for info in socket.getaddrinfo(*place, type=socket.SOCK_STREAM)]
    for left in range(len(addresses), 1, -1):
        with contextlib.suppress(OSError):
            return _connect(addresses.pop(0), deadline.remaining(0.001) / left)
    return _connect(addresses[0], deadline.remaining(0.001))


def _connect(address: Any, timeout: float) -> socket.socket:
    number = socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
    connection = socket.create_connection(number, timeout=timeout)
    try:
        check_connected(connection)
    except OSError:
        connection.close()
        raise
    send_at_once(connection)
    return connection


def own_end(descriptor: int) -> str:
    """The numeric address of this end of a TCP connection."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        return str(connection.getsockname()[0]).removeprefix("::ffff:")


def send_at_once(connection: socket.socket) -> None:
    """Turn off Nagle's algorithm, in which a message waits a round trip for the acknowledgement of the one before."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def check_connected(connection: socket.socket) -> None:
    """Raise the error with which a connect has ended: ConnectionRefusedError if nobody listens.

    A socket that calls a port from which the system takes the ports of callers may get this very port, and is then
    connected to itself. That counts as refused.
    """
    error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))  # Python picks the subclass by the number
    if connection.getsockname() == connection.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there: the socket called itself")


def is_abandoned(family: int, place: tuple[str, int] | tuple[str, int, int, int]) -> bool:
    """Whether ``place`` is an address of this machine, and nobody listens there, whatever a firewall answers.

    False for other machines, and for a second address of one network.
    """
    host = place[0]
    with (
        contextlib.suppress(OSError),
        socket.socket(family, socket.SOCK_STREAM) as free,
        socket.socket(family, socket.SOCK_DGRAM) as route,
    ):
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections then do not block the port
        free.bind(place)
        route.connect(place)  # sends nothing; needed because ip_nonlocal_bind allows addresses of other machines
        return is_loopback(host) or route.getsockname()[0] == host
    return False


def listen(host: str = "", port: int = 0, *, is_local: bool = False) -> socket.socket:
    """A listening socket at the address of ``host``, or at all addresses of this machine if others may call another
    one.

    It listens at all if ``host`` is not an address of this machine; if it is a name with several addresses, such as
    IPv6 and IPv4, because another machine may know only one of them; and if it is a name for a loopback address,
    because it may mean this machine's network address on other machines. ``is_local``: there are no other machines.
    Port 0: any free port. Raises OSError, with errno.EADDRINUSE if the port is used.
    """
    if host:
        _check_host(host)
    with contextlib.suppress(socket.gaierror):
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)
        family, _, _, _, found = infos[0]
        is_one = len({info[4][0] for info in infos}) == 1
        if host and (is_local or is_loopback(host) or (is_one and not is_loopback(str(found[0])))):
            try:
                return socket.create_server(found[:2], family=family, backlog=BACKLOG)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("", port), backlog=BACKLOG)


def listen_at(host: str, ports: Sequence[int], *, is_local: bool = False) -> socket.socket:
    """Listen at one of ``ports``, or at any port if there are none; see listen(). Raises OSError if all are used."""
    if not ports:
        return listen(host, is_local=is_local)
    for port in random.sample(ports, len(ports)):  # ranks that start together try different ports
        with contextlib.suppress(OSError):
            return listen(host, port)
    raise OSError(
        errno.EADDRINUSE,
        f"all ports from {min(ports)} to {max(ports)} are used; give UCX_TCP_PORT_RANGE or QCCL_WAN_ADVERTISE two for "
        f"each communicator of each rank of this machine, and two more",
    )


def _check_host(host: str) -> None:
    """Raise socket.gaierror for texts at which the system's functions would raise a ValueError."""
    if not is_host(host):
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} cannot be the name of a host")


def seats() -> int:
    """How many unknown callers may hold a connection at once: a part of the process's descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 256 if soft == resource.RLIM_INFINITY else max(8, min(256, soft // 8))
