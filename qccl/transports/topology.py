"""Where ranks are: which of them share a machine, and a network."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import NamedTuple

from qccl.transports.base import numbered

__all__ = ["Topology", "find_topology"]


class Topology(NamedTuple):
    """What is known of the ranks of a group; the attributes of a Group and of a Transport."""

    local_rank: int
    local_size: int
    nodes: tuple[int, ...]
    shares_memory: bool


def find_topology(rank: int, allgather: Callable[[bytes], list[bytes]]) -> Topology:
    """Collective: every rank tells the others where it is; ranks of one machine may be behind links of their own."""
    try:
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        network = 0
    found = allgather(f"{socket.gethostname()}\n{network}".encode())
    hosts = [each.split(b"\n")[0] for each in found]
    local_rank, local_size = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    return Topology(local_rank, local_size, numbered(found), len(set(found)) == 1)
