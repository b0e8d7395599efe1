"""The topology of a group: the ranks that share a machine and a network namespace."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from qccl.base.machine_name import machine_name

__all__ = ["Topology", "find_topology", "machine", "memory_id", "network_id"]


class Topology(NamedTuple):
    """The topology attributes of a Transport (transports/base.py)."""

    local_rank: int
    local_size: int
    nodes: tuple[int, ...]
    shares_memory: bool


def machine() -> str:
    """This process's machine and network namespace: 64 hexadecimal digits, the first half for the machine."""
    return _digest(f"{machine_name()} {_boot()}") + _digest(str(_network()))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"qccl machine").hexdigest()


def find_topology(rank: int, found: Sequence[str]) -> Topology:
    """The topology of ranks whose machine() values are ``found``."""
    hosts = [each[: len(each) // 2] for each in found]
    local_rank, local_size = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    numbers: dict[str, int] = {}  # machine -> number, in the order of first appearance
    nodes = tuple(numbers.setdefault(each, len(numbers)) for each in found)
    return Topology(local_rank, local_size, nodes, len(numbers) == 1)


def network_id() -> str:
    """Equal for two processes that reach each other by the loopback interface; empty if that is not known."""
    boot, network = _boot(), _network()
    return f"{boot} {network}" if boot and network else ""


def memory_id() -> str:
    """Equal for two processes of one machine that can share memory in every way; empty if that is not known."""
    try:
        return f"{_namespace('ipc')} {_namespace('pid')} {os.stat('/dev/shm').st_dev}"
    except OSError:
        return ""


def _boot() -> str:
    """The boot id of this machine's kernel, because machines may have equal host names; empty: unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _network() -> int:
    """The number of this process's network namespace on its machine; 0: unknown."""
    try:
        return _namespace("net")
    except OSError:
        return 0


def _namespace(kind: str) -> int:
    return os.stat(f"/proc/self/ns/{kind}").st_ino
