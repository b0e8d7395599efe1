"""Broadcast: the root's codes go down a tree of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from qccl.arguments import integer, one_of
from qccl.chunks import NETWORK, ChunkPolicy
from qccl.codecs.base import Codec
from qccl.collectives.operands import Arrays, CallerBuffers, Group
from qccl.collectives.partitions import HOP_NBYTES, partition
from qccl.collectives.rounds import alone, assemble, decode_chunk, encode_chunk, pipeline
from qccl.collectives.spec import CollectiveSpec, check_root, common
from qccl.collectives.wire import Encoding, exchange
from qccl.dtypes import DType
from qccl.errors import ArgumentError
from qccl.schedule import Buffer, Op, Schedule, Span

__all__ = ["TREES", "BroadcastSpec", "broadcast", "choose_tree"]

#: the trees of broadcast
TREES = ("chain", "binomial")

#: bytes of a chunk, about
_CHUNK_NBYTES = 96 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastSpec(CollectiveSpec):
    """Arguments of quantized_broadcast."""

    name = "broadcast"

    root: int
    algorithm: str

    @classmethod
    def from_arguments(cls, *shared: Any, root: int = 0, algorithm: str = "auto") -> Self:
        """Check the arguments; ``shared`` are those of common()."""
        one_of(algorithm, ("auto", *TREES), "algorithm")
        return cls(**common(*shared), root=integer(root, "root"), algorithm=algorithm)

    def buffers(self, rank: int, size: int, *, in_place: bool = False) -> CallerBuffers:
        """See CollectiveSpec; only the root has an input."""
        check_root(self.root, size)
        return CallerBuffers.alike((self.count,), self.dtype, in_place=in_place or rank != self.root)

    def _schedule(self, group: Group, buffers: CallerBuffers, chunking: ChunkPolicy) -> Schedule:
        tree = self.algorithm
        if tree == "auto":
            tree = choose_tree(self.count, group.size, self.dtype, self.codec)
        return broadcast(group, buffers, self.codec, root=self.root, tree=tree, chunking=chunking)


def choose_tree(count: int, size: int, dtype: DType, codec: Codec) -> str:
    """The tree that "auto" stands for, by the bytes that pass before the last rank has everything.

    In a binomial tree the encoded vector is sent log2(size) times, one after the other; in a chain it is sent once, and
    then a chunk of it size - 2 times. Each hop adds the bytes that a link carries in its time.
    """
    nbytes, depth = codec.encoded_nbytes(count, dtype), (size - 1).bit_length()
    chunk = min(nbytes, _CHUNK_NBYTES)
    chain = nbytes + (size - 2) * chunk + (size - 1) * HOP_NBYTES
    return "chain" if chain <= depth * (nbytes + HOP_NBYTES) else "binomial"


def broadcast(
    group: Group,
    buffers: CallerBuffers,
    codec: Codec,
    *,
    root: int = 0,
    tree: str = "chain",
    chunking: ChunkPolicy = NETWORK,
) -> Schedule:
    """The root encodes once; the codes go down a "chain" of ranks, chunk by chunk, or a "binomial" tree.

    The root keeps the values that the others decode, so that all hold the same bits. In a chain each rank sends the
    encoded vector at most once, and the last one has it size - 1 hops of a chunk later; in a tree the root sends it
    log2(size) times, in as many hops. Only the root may have an "input".
    """
    check_root(root, group.size)
    (count,) = buffers.counts
    encoding = Encoding(partition(count, 1, codec, chunking), codec, buffers.dtype, chunking.depth)
    if group.size == 1 or count == 0:
        return assemble(tree, group, buffers, alone(buffers, codec))
    parent, children = _family(group, root, tree)
    relay = _Relay(root, parent, children, encoding)
    chunks = encoding.partition.chunks
    if parent is None:

        def encode_own(k: int) -> Iterator[Op]:
            return encode_chunk(encoding, 0, k, buffers.source, relay.wire(k), 0, buffers.target)

        ops = pipeline(chunks, (0, encode_own), (0, relay.exchange))
    else:

        def decode_one(k: int) -> Iterator[Op]:
            return relay.decode(k, buffers.target)

        ops = pipeline(chunks, (0, relay.exchange), (1, decode_one)) + tuple(relay.exchange(chunks))
    return assemble(tree, group, buffers, ops, relay)


def _family(group: Group, root: int, tree: str) -> tuple[int | None, list[int]]:
    """The parent (None: the root) and the children of a rank, the child with the most descendants first."""
    if tree not in TREES:
        raise ArgumentError(f"tree is {tree!r}; there are chain and binomial")
    size = group.size
    index = (group.rank - root) % size
    if tree == "chain":
        parent, children = index - 1, [index + 1]
    else:
        distances = [1 << j for j in range(index.bit_length(), size.bit_length())]
        parent, children = index - (1 << max(index.bit_length() - 1, 0)), [index + distance for distance in distances]
    return (
        None if index == 0 else (parent + root) % size,
        [(child + root) % size for child in children if child < size],
    )


class _Relay:
    """A rank receives wires from its parent and passes them on to its children."""

    def __init__(self, root: int, parent: int | None, children: Sequence[int], encoding: Encoding) -> None:
        self._root, self._parent, self._children, self._encoding = root, parent, children, encoding
        self._slots = encoding.slots("relay", 1, least_depth=2)  # one is received while another is passed on

    def buffers(self) -> dict[str, Buffer]:
        """The wire buffer."""
        return self._slots.buffers()

    def wire(self, k: int) -> Span:
        """The wire of chunk ``k``."""
        return self._slots.span(k, 0, self._encoding.nbytes(0, k))

    def exchange(self, k: int) -> Iterator[Op]:
        """Receive chunk ``k`` and pass on the one before; the root sends chunk ``k``."""
        passed, received = (k, k) if self._parent is None else (k - 1, k)
        chunks = range(self._encoding.partition.chunks)
        sends = dict.fromkeys(self._children, self.wire(passed)) if passed in chunks else {}
        receives = {self._parent: self.wire(received)} if self._parent is not None and received in chunks else {}
        yield from exchange(sends, receives)

    def decode(self, k: int, target: Arrays) -> Iterator[Op]:
        """Decode chunk ``k``."""
        yield from decode_chunk(self._encoding, 0, k, self.wire(k), target, self._root)
