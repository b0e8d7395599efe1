"""A plain transfer of the same bytes: the baseline of a call behind a link."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np

from qccl.bench.calls import Wiring

if TYPE_CHECKING:
    from qccl.communicator import Communicator
    from qccl.transports.base import Transport

__all__ = ["Bulk"]

_TAG = 20_000


class Bulk:
    """Plain transfers among the ranks of ``comm``, over a duplicate of its transport (a collective constructor).

    Every rank sends to all ranks on other nodes at once, and receives from them.
    """

    def __init__(self, comm: Communicator, wiring: Wiring) -> None:
        self._wiring = wiring
        mine = cast("Transport", comm.transport).split(0, comm.rank, comm.timeout)  # the engine polls the other one
        assert mine is not None
        self._transport, self._timeout = mine, comm.timeout

    def bind(self, nbytes: int) -> Callable[[], object]:
        """A function that runs one transfer, in which every link carries ``nbytes``."""
        t, wiring = self._transport, self._wiring
        peers = wiring.peers(t.rank)
        each = {rank: -(-nbytes // wiring.transfers(rank)) for rank in (t.rank, *peers)}
        out = np.ones(each[t.rank], np.uint8)
        inbox = {peer: np.empty(each[peer], np.uint8) for peer in peers}
        sent, received = out.ctypes.data, {peer: memory.ctypes.data for peer, memory in inbox.items()}

        def transfer() -> None:
            for peer in peers:
                t.receive(peer, _TAG, received[peer], inbox[peer].nbytes, peer)
            for peer in peers:
                t.send(peer, _TAG, sent, out.nbytes, peer)
            left, idle = 2 * len(peers), 0
            while left:
                completed = len(t.poll(idle=idle))
                left -= completed
                idle = 0 if completed else idle + 1

        return transfer

    def settle(self) -> None:
        """Collective, after the transfers of a turn: drive the transport until all ranks have what was sent to them.

        A send may have ended with its bytes still in the transport, which moves them only when it is polled.
        """
        self._transport.allgather(b"", self._timeout)

    def close(self) -> None:
        """Release the transport, after the last transfer on every rank."""
        self._transport.close()
