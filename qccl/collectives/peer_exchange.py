"""Peer exchange: each rank sends codes along the edges of a directed graph; receivers add them to their replicas."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from qccl.base.arrays import Values, check_disjoint
from qccl.base.dtypes import DType
from qccl.base.errors import ArgumentError
from qccl.codecs.base import Codec
from qccl.collectives.arguments import integer, integers
from qccl.collectives.chunks import ChunkPolicy
from qccl.collectives.operands import Arrays, CallerBuffers, RankGroup
from qccl.collectives.partitions import partition
from qccl.collectives.rounds import assemble, decode_part, encode_all, merged, pipeline
from qccl.collectives.schedule import Buffer, Role, Schedule, buffer_name
from qccl.collectives.spec import Binding, Call, CollectiveSpec
from qccl.collectives.wire import Encoding, Slots, exchange, to_all

__all__ = ["PeerExchangeSpec", "peer_buffers", "peer_exchange"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerExchangeSpec(CollectiveSpec):
    """Arguments of peer_exchange, with this rank's peers; the arrays are "input", "applied" and "replica j"."""

    name = "peer_exchange"
    keeps_state = True

    send_to: tuple[int, ...]
    receive_from: tuple[int, ...]
    applied: bool

    @classmethod
    def from_arguments(
        cls, *shared: Any, send_to: Collection[int], receive_from: Collection[int], applied: bool
    ) -> Self:
        """See CollectiveSpec."""
        to = tuple(sorted(integers(send_to, "send_to")))
        back = tuple(sorted(integer(peer, "each key of replicas") for peer in receive_from))
        return cls.checked(*shared, send_to=to, receive_from=back, applied=applied)

    @classmethod
    def named(cls, call: Call) -> dict[str, Values]:
        """See CollectiveSpec; the arrays of the call are ``z``, ``applied`` and one for each of ``receive_from``."""
        z, applied, *replicas = call.arrays
        call.own["receive_from"] = peers = call.own.pop("replicas")
        arrays = {"input": call.find(z, "z", writable=False)}
        if applied is not None:
            arrays["applied"] = call.find(applied, "applied")
        for peer, replica in zip(peers, replicas, strict=True):
            arrays[f"replica {peer}"] = call.find(replica, f"replicas[{peer}]")
        call.own["applied"] = applied is not None
        return arrays

    def _shown(self) -> dict[str, Any]:
        shown = CollectiveSpec._shown(self)
        del shown["send_to"], shown["receive_from"], shown["applied"]
        return shown

    def state_owner(self, algorithm: str) -> str:
        """Add the receivers, because the residual is what these ranks still lack."""
        return f"{CollectiveSpec.state_owner(self, algorithm)} to {list(self.send_to)}, applied={self.applied}"

    def pairs(self, rank: int, size: int) -> tuple[str, ...]:
        """For each pair of ranks, the directions in which codes go."""

        def edges(peer: int) -> str:
            sends = {rank: peer in self.send_to, peer: peer in self.receive_from}
            a, b = sorted(sends)
            return f"; {a} {_sends(sends[a])} {b} and {b} {_sends(sends[b])} {a}"

        return tuple("" if peer == rank else edges(peer) for peer in range(size))

    def buffers(self, rank: int, size: int, *, in_place: bool = False) -> CallerBuffers:
        """See CollectiveSpec."""
        for keyword, peers in (("send_to", self.send_to), ("replicas", self.receive_from)):
            for peer in peers:
                if peer == rank or not 0 <= peer < size:
                    which = ", which is this rank" if peer == rank else ""
                    raise ArgumentError(
                        f"{keyword} names rank {peer}{which}; peers are the other ranks of the communicator, of 0 to "
                        f"{size - 1}"
                    )
            if len(set(peers)) < len(peers):
                raise ArgumentError(f"{keyword} names a rank twice: {list(peers)}")
        return peer_buffers(self.count, self.dtype, self.receive_from, applied=self.applied)

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> Binding:
        """Check that the arrays to which codes are added do not overlap ``z`` or each other."""
        check_disjoint([values for name, values in arrays.items() if name != "input"], [arrays["input"]])
        return Binding(False, {name: values.address for name, values in arrays.items()})

    def _schedule(self, group: RankGroup, buffers: CallerBuffers, chunking: ChunkPolicy) -> Schedule:
        peers = {"send_to": self.send_to, "receive_from": self.receive_from}
        return peer_exchange(group, buffers, self.codec, chunking=chunking, **peers)


def _sends(yes: bool) -> str:
    return "sends to" if yes else "does not send to"


def peer_buffers(count: int, dtype: DType, receive_from: Sequence[int], *, applied: bool = True) -> CallerBuffers:
    """The buffers of peer_exchange(): "input", "applied" if it is wanted, and "replica j" for each peer j."""
    declared = {"input": Buffer(count, dtype, Role.INPUT)}
    if applied:
        declared["applied"] = Buffer(count, dtype, Role.OUTPUT)
    declared |= {buffer_name("replica", peer): Buffer(count, dtype, Role.OUTPUT, peer) for peer in receive_from}
    source, updated = Arrays(("input",)), Arrays(tuple(declared)[1:])
    return CallerBuffers(dtype, (count,), source, updated, declared, guard=("input",))


def peer_exchange(
    group: RankGroup,
    buffers: CallerBuffers,
    codec: Codec,
    *,
    send_to: Sequence[int],
    receive_from: Sequence[int],
    chunking: ChunkPolicy,
) -> Schedule:
    """Encode "input" once, add the code to "applied", send it to some ranks, and add received codes to "replica j".

    Each rank sends the encoded vector to each of ``send_to``, in one hop. A rank's "applied" and its replicas on other
    ranks get the same code added, so replicas that had equal bits keep equal bits.
    """
    applied = "applied" in buffers.declared
    encoding = Encoding(partition(buffers.counts, 1, (codec,), chunking), codec, buffers.dtype, chunking.depth)
    send = Slots(encoding, "send", {group.rank: 0} if applied or send_to else {})
    recv = Slots(encoding, "recv", dict.fromkeys(receive_from, 0))

    adds = []
    for slots in (send, recv) if applied else (recv,):
        for maker in slots.parts:
            name = "applied" if maker == group.rank else buffer_name("replica", maker)
            adds.append(decode_part(slots, maker, Arrays((name,)), accumulate=True))
    exchanges = exchange(to_all(send_to, send), recv.wires)
    stages = (0, encode_all(send, buffers.source)), (0, exchanges), (encoding.lag, merged(*adds))
    ops = pipeline(*stages) if any(buffers.counts) else ()
    return assemble("peer_exchange", group, buffers, ops, send, recv)
