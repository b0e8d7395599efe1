"""Cuts the connections of a group at random while its ranks call, and checks every bit."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import socket
import struct
import subprocess
import time
from contextlib import suppress

from wan_groups import Group, group

_LIBC = ctypes.CDLL(None)
#: how a connection is cut; "kill" by the system, as an administrator may
HOW = ("shutdown", "writing", "reading", "reset", *(["kill"] if os.geteuid() == 0 and shutil.which("ss") else []))


def _connections(ports: list[int]) -> list[socket.socket]:
    """Copies of this process's sockets that are connected to one of ``ports``, or come from there."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))  # it is not closed by another thread meanwhile
            try:
                if copy.getpeername()[1] in ports or copy.getsockname()[1] in ports:
                    found.append(copy)
                    continue
            except (OSError, IndexError):
                pass
            copy.close()
    return found


def _cut_one(connection: socket.socket, how: str) -> None:
    if how == "reset":
        _LIBC.connect(connection.fileno(), struct.pack("H14x", socket.AF_UNSPEC), 16)
    elif how == "kill":
        own, other = connection.getsockname()[1], connection.getpeername()[1]
        command = ["ss", "-K", "-t", "-n", "-H", f"sport = :{own} and dport = :{other}"]
        subprocess.run(command, capture_output=True, timeout=30, check=False)
    else:
        ways = {"shutdown": socket.SHUT_RDWR, "writing": socket.SHUT_WR, "reading": socket.SHUT_RD}
        connection.shutdown(ways[how])


def cut(ports: list[int], chosen: random.Random) -> int:
    """Cut one or some connections; their number."""
    connections, count = _connections(ports), 0
    for connection in chosen.sample(connections, min(len(connections), chosen.choice([1, 1, 1, 2, 5, 100]))):
        with suppress(OSError):
            _cut_one(connection, chosen.choice(HOW))
            count += 1
    for connection in connections:
        connection.close()
    return count


def run(size: int, secret: bytes | None, seconds: float, seed: int, pause: float = 0.03) -> tuple[int, int]:
    """A group whose connections are cut every ``pause`` seconds, about. Returns the numbers of calls and cuts."""
    chosen, cuts = random.Random(seed), 0
    with group(size, secret, seed=seed) as ranks:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not _has_failed(ranks):
            time.sleep(chosen.expovariate(1 / pause))
            cuts += cut(ranks.ports, chosen)
    return ranks.calls[0], cuts


def _has_failed(ranks: Group) -> bool:
    return any(end.done() for end in ranks.ends)
