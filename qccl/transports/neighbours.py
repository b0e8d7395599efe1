"""The ranks of a group over wan that share memory, and exchange their messages by UCX.

A rank tells its address for shared memory by an Invitation, beside the address of its wire between sites. When the
group is connected between sites, each rank says which others it has reached by memory. Two that have reached each other
use it from then on. So both decide the same, whatever goes wrong on one side.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

from qccl import _host
from qccl.errors import ArgumentError, EngineError, MismatchError
from qccl.transports.invitation import Invitation, invite
from qccl.transports.regroup import MembershipSocket
from qccl.transports.ucx import memory_wire

__all__ = ["Memory", "Neighbours", "joint", "may_share_memory", "start_memory"]

_log = logging.getLogger("qccl")

#: between the address of the wire between sites and the invitation
_SEPARATOR = b"\0"


class Memory(NamedTuple):
    """A wire for shared memory that is not connected yet, and how the others find it.

    Attributes:
        wire: UCX's.
        descriptor: of the file that the invitation is for.
        suffix: of the address of the wire between sites.
    """

    wire: _host.PartWire
    descriptor: int
    suffix: bytes


def may_share_memory() -> bool:
    """Whether the user allows it. Raises ArgumentError for a QCCL_WAN_SHARED_MEMORY that is neither 0 nor 1."""
    wanted = os.environ.get("QCCL_WAN_SHARED_MEMORY") or "1"
    if wanted not in ("0", "1"):
        raise ArgumentError(f"QCCL_WAN_SHARED_MEMORY={wanted!r} is neither 0 nor 1")
    return wanted == "1"


def start_memory(membership: MembershipSocket) -> Memory | None:
    """None where this process cannot share memory, or must not. Raises ArgumentError as may_share_memory() does."""
    if not may_share_memory():
        return None
    try:
        wire = memory_wire(membership)
    except EngineError as error:
        _log.info("the ranks of this machine exchange their messages over TCP: %s", error)
        return None
    invited = invite(wire.address())
    if invited is None:
        wire.close(0)
        return None
    invitation, descriptor = invited
    return Memory(wire, descriptor, _SEPARATOR + invitation.text())


class Neighbours:
    """What the ranks of a new group have said about shared memory.

    Attributes:
        sites: by rank, the addresses of the wires between sites. There ranks of one machine need no more than one
            connection for long messages.
    """

    def __init__(self, rank: int, addresses: Sequence[bytes]) -> None:
        """``addresses``: by rank, each with the suffix if it has one."""
        self._size = len(addresses)
        parts = [address.partition(_SEPARATOR) for address in addresses]
        invitations = [Invitation.parse(suffix) for _, _, suffix in parts]
        own = invitations[rank]
        self._candidates: dict[int, Invitation] = {
            other: each
            for other, each in enumerate(invitations)
            if own is not None and each is not None and other != rank and each.machine == own.machine
        }
        self.sites = [
            _with_one_connection(part[0]) if other in self._candidates else part[0] for other, part in enumerate(parts)
        ]

    def reach(self, wire: _host.GroupWire) -> bytes:
        """Connect the wire's memory to the ranks that can be reached; returns what to tell the others of it."""
        found = {rank: each.content() for rank, each in self._candidates.items()}
        if isinstance(wire, _host.MixedWire):
            try:
                wire.reach([found.get(rank, b"") for rank in range(self._size)])
            except _host.WireError as error:
                _log.warning("the ranks of this machine exchange their messages over TCP: UCX does not reach %s", error)
                found = {}
        return b"".join(b"1" if found.get(rank) else b"0" for rank in range(self._size))


def joint(rank: int, told: Sequence[bytes]) -> frozenset[int]:
    """The ranks that ``rank`` has reached, and that have reached it. Raises MismatchError for nonsense."""
    for other, each in enumerate(told):
        if len(each) != len(told) or set(each) - set(b"01"):
            raise MismatchError(f"rank {other} does not say with which ranks it shares memory; use one version of qccl")
    return frozenset(other for other in range(len(told)) if told[rank][other] == told[other][rank] == ord("1"))


def _with_one_connection(address: bytes) -> bytes:
    """Of a wire between sites: its nonce and number of connections, then where it listens."""
    head, line, places = address.partition(b"\n")
    return head.partition(b" ")[0] + b" 1" + line + places
