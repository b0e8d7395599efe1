"""The base of transports whose wire is native code: over MPI, UCX and between sites."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence

from qccl import _host
from qccl.meeting.topology import find_topology
from qccl.transports.base import Transport

__all__ = ["NativeTransport"]

#: empty polls before a rank with a processor of its own stops spinning. Ranks that share memory spin for longer than a
#: nap takes; otherwise the nap of one rank would make the others nap, and so on for many calls
_SPINS = 600
_SHARED_SPINS = 2000


class NativeTransport(Transport):
    """A Transport whose ``wire`` numbers transfers, and whose callers name them by tokens of any type."""

    wire: _host.MpiWire | _host.GroupWire

    def _own(self, wire: _host.MpiWire | _host.GroupWire) -> None:
        """Take ownership of a wire, which close() or abort() ends."""
        self.wire = wire
        self._tokens: dict[int, Hashable] = {}
        self._number = 0

    def send(self, peer: int, tag: int, address: int, nbytes: int, token: Hashable) -> None:
        """Start a send of the native wire, which knows it by a number instead of the token."""
        if self._gone:
            self._check_alive()
        self.wire.send(peer, tag, address, nbytes, self._add(token))

    def receive(self, peer: int, tag: int, address: int, nbytes: int, token: Hashable, *, arrived: int = 0) -> None:
        """Start a receive of the native wire, which knows it by a number instead of the token."""
        if self._gone:
            self._check_alive()
        self.wire.receive(peer, tag, address, nbytes, self._add(token), arrived)

    def poll(self, *, idle: int) -> Sequence[Hashable]:
        """Return the tokens of the transfers whose numbers the native wire returns."""
        done = self.wire.poll(idle)
        return [self._tokens.pop(number) for number in done] if done else ()

    def _add(self, token: Hashable) -> int:
        self._number += 1
        self._tokens[self._number] = token
        return self._number

    def _set_topology(self, machines: Sequence[str]) -> None:
        """Set the attributes of the topology, and how long the wire spins."""
        topology = find_topology(self.rank, machines)
        self.local_rank, self.local_size, self.nodes, self.shares_memory = topology
        if self.local_size <= len(os.sched_getaffinity(0)):
            self.wire.set_spins(_SHARED_SPINS if self.shares_memory else _SPINS)
