"""Peer exchange: each rank names the ranks that it sends to and receives from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from qccl.arguments import integer, integers
from qccl.arrays import Values, check_disjoint
from qccl.collectives.peers import peer_exchange
from qccl.errors import ArgumentError
from qccl.schedule import Schedule
from qccl.signatures.base import Signature, common

__all__ = ["PeerExchange"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerExchange(Signature):
    """Parameters of peer_exchange, with this rank's peers; the arrays are "input", "applied" and "replica j"."""

    name = "peer_exchange"

    send_to: tuple[int, ...]
    receive_from: tuple[int, ...]
    applied: bool

    @classmethod
    def make(cls, *given: Any, send_to: Collection[int], receive_from: Collection[int], applied: bool) -> PeerExchange:
        """Check the arguments."""
        to = tuple(sorted(integers(send_to, "send_to")))
        back = tuple(sorted(integer(peer, "each key of replicas") for peer in receive_from))
        return cls(**common(*given), send_to=to, receive_from=back, applied=applied)

    def _shown(self) -> dict[str, Any]:
        shown = Signature._shown(self)
        del shown["send_to"], shown["receive_from"], shown["applied"]
        return shown

    def pairs(self, rank: int, size: int) -> tuple[str, ...]:
        """See Signature: which of the two sends to the other."""

        def said(peer: int) -> str:
            sends = {rank: peer in self.send_to, peer: peer in self.receive_from}
            a, b = sorted(sends)
            return f"; {a} {_sends(sends[a])} {b} and {b} {_sends(sends[b])} {a}"

        return tuple("" if peer == rank else said(peer) for peer in range(size))

    def counts(self, rank: int, size: int) -> dict[str, int]:
        """See Signature."""
        for what, peers in (("send_to", self.send_to), ("replicas", self.receive_from)):
            for peer in peers:
                if peer == rank or not 0 <= peer < size:
                    which = ", which is this rank" if peer == rank else ""
                    raise ArgumentError(
                        f"{what} names rank {peer}{which}; peers are the other ranks of the communicator, of 0 to "
                        f"{size - 1}"
                    )
            if len(set(peers)) < len(peers):
                raise ArgumentError(f"{what} names a rank twice: {list(peers)}")
        names = ["input", *(["applied"] if self.applied else []), *(f"replica {peer}" for peer in self.receive_from)]
        return dict.fromkeys(names, self.count)

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> tuple[bool, dict[str, int]]:
        """See Signature."""
        check_disjoint([values for name, values in arrays.items() if name != "input"], [arrays["input"]])
        return False, {name: values.address for name, values in arrays.items()}

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        """See Signature."""
        return peer_exchange(
            *(rank, size, self.count, self.dtype, self.codec),
            send_to=self.send_to,
            receive_from=self.receive_from,
            applied=self.applied,
            chunk_elements=self._chunk(default_chunk),
        )


def _sends(yes: bool) -> str:
    return "sends to" if yes else "does not send to"
