"""The schedule of peer exchange: codes go along the edges of a directed graph, and are added where they arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qccl.codecs.base import Codec
from qccl.collectives.layout import DEFAULT_DEPTH, Arrays, Encoding, exchange, partition, pipeline
from qccl.collectives.rounds import checked, decode, encode
from qccl.dtypes import DType
from qccl.schedule import Buffer, Op, Role, Schedule, Span

__all__ = ["peer_exchange"]


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
