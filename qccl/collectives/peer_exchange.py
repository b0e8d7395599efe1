"""Peer exchange: each rank names the ranks that it sends to and receives from, and adds what it receives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from qccl.arguments import integer, integers
from qccl.arrays import Values, check_disjoint
from qccl.codecs.base import Codec
from qccl.collectives.layout import DEFAULT_DEPTH, Arrays, Encoding, exchange, partition, pipeline
from qccl.collectives.rounds import checked, decode, encode
from qccl.collectives.spec import CollectiveSpec, common
from qccl.dtypes import DType
from qccl.errors import ArgumentError
from qccl.schedule import Buffer, Op, Role, Schedule, Span

__all__ = ["PeerExchangeSpec", "peer_exchange"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerExchangeSpec(CollectiveSpec):
    """Parameters of peer_exchange, with this rank's peers; the arrays are "input", "applied" and "replica j"."""

    name = "peer_exchange"

    send_to: tuple[int, ...]
    receive_from: tuple[int, ...]
    applied: bool

    @classmethod
    def from_arguments(
        cls, *shared: Any, send_to: Collection[int], receive_from: Collection[int], applied: bool
    ) -> Self:
        """Check the arguments."""
        to = tuple(sorted(integers(send_to, "send_to")))
        back = tuple(sorted(integer(peer, "each key of replicas") for peer in receive_from))
        return cls(**common(*shared), send_to=to, receive_from=back, applied=applied)

    def _shown(self) -> dict[str, Any]:
        shown = CollectiveSpec._shown(self)
        del shown["send_to"], shown["receive_from"], shown["applied"]
        return shown

    def pairs(self, rank: int, size: int) -> tuple[str, ...]:
        """See CollectiveSpec: which of the two sends to the other."""

        def said(peer: int) -> str:
            sends = {rank: peer in self.send_to, peer: peer in self.receive_from}
            a, b = sorted(sends)
            return f"; {a} {_sends(sends[a])} {b} and {b} {_sends(sends[b])} {a}"

        return tuple("" if peer == rank else said(peer) for peer in range(size))

    def counts(self, rank: int, size: int) -> dict[str, int]:
        """See CollectiveSpec."""
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
        """See CollectiveSpec."""
        check_disjoint([values for name, values in arrays.items() if name != "input"], [arrays["input"]])
        return False, {name: values.address for name, values in arrays.items()}

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        """See CollectiveSpec."""
        return peer_exchange(
            *(rank, size, self.count, self.dtype, self.codec),
            send_to=self.send_to,
            receive_from=self.receive_from,
            applied=self.applied,
            chunk_elements=self._chunk(default_chunk),
        )


def _sends(yes: bool) -> str:
    return "sends to" if yes else "does not send to"


def peer_exchange(
    rank: int,
    size: int,
    count: int,
    dtype: DType,
    codec: Codec,
    *,
    send_to: Sequence[int],
    receive_from: Sequence[int],
    applied: bool = True,
    chunk_elements: int | None = None,
    depth: int = DEFAULT_DEPTH,
) -> Schedule:
    """Encode "input" once, add the code to "applied", send it to some ranks, and add what comes to "replica j".

    One step. Each rank sends the encoded vector to each of ``send_to``, whatever the number of ranks. A rank's
    "applied" and its replicas elsewhere get the same code added: if they were equal to the bit, they still are.
    """
    checked(rank, size, "sum", 1.0, depth, count)
    buffers = {"input": Buffer(count, dtype, Role.INPUT)}
    if applied:
        buffers["applied"] = Buffer(count, dtype, Role.OUTPUT)
    buffers |= {f"replica {peer}": Buffer(count, dtype, Role.OUTPUT) for peer in receive_from}
    encoding = Encoding(partition(count, 1, codec, chunk_elements), codec, dtype)
    own = encoding.slots("send", 1, depth)
    ring = encoding.slots("recv", len(receive_from), depth)

    def wire(k: int) -> Span:
        return own.span(k, 0, encoding.nbytes(0, k))

    def received(k: int) -> dict[int, Span]:
        return {peer: ring.span(k, i, encoding.nbytes(0, k)) for i, peer in enumerate(receive_from)}

    def make(k: int) -> Iterator[Op]:
        if applied or send_to:
            yield from encode(encoding, 0, k, Arrays(("input",)), wire(k))

    def move(k: int) -> Iterator[Op]:
        yield from exchange(dict.fromkeys(send_to, wire(k)), received(k))

    def add(k: int) -> Iterator[Op]:
        if applied:
            yield from decode(encoding, 0, k, wire(k), Arrays(("applied",)), rank, accumulate=True)
        for peer, code in received(k).items():
            yield from decode(encoding, 0, k, code, Arrays((f"replica {peer}",)), peer, accumulate=True)

    ops = pipeline(encoding.layout.chunks, (0, make), (0, move), (min(1, depth - 1), add)) if count else ()
    slots = {each.name: each.buffer() for each, used in ((own, applied or send_to), (ring, receive_from)) if used}
    return Schedule("peer_exchange", rank, size, buffers | slots, ops)
