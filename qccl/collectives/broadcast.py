"""Broadcast: the root's codes go down a tree of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from qccl.base.arrays import Values
from qccl.base.errors import ArgumentError
from qccl.codecs.base import Codec
from qccl.collectives.chunks import ChunkPolicy
from qccl.collectives.operands import CallerBuffers, RankGroup
from qccl.collectives.partitions import HOP_NBYTES, partition
from qccl.collectives.rounds import alone, assemble, decode_all, encode_all, pipeline
from qccl.collectives.schedule import Schedule
from qccl.collectives.spec import Call, CollectiveSpec, check_root, input_and_output
from qccl.collectives.wire import Encoding, Slots, exchange, to_all

__all__ = ["BroadcastSpec", "broadcast"]

#: approximate bytes of a chunk
_CHUNK_NBYTES = 96 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastSpec(CollectiveSpec):
    """Arguments of quantized_broadcast."""

    name = "broadcast"
    algorithms = ("chain", "binomial")

    root: int = 0
    algorithm: str = "auto"

    def choose(self, size: int) -> str:
        """Choose by the bytes that pass one after the other before the last rank has everything.

        In a binomial tree the encoded vector is sent log2(size) times, one after the other; in a chain it is sent once,
        and then a chunk of it size - 2 times. A hop counts as the bytes that a link carries in the hop's time.
        """
        nbytes, depth = self.codec.encoded_nbytes(self.count, self.dtype), (size - 1).bit_length()
        chunk = min(nbytes, _CHUNK_NBYTES)
        chain = nbytes + (size - 2) * chunk + (size - 1) * HOP_NBYTES
        return "chain" if chain <= depth * (nbytes + HOP_NBYTES) else "binomial"

    @classmethod
    def named(cls, call: Call) -> dict[str, Values]:
        """See CollectiveSpec; only the root has an input."""
        return input_and_output(call.find, *call.arrays, reads=call.rank == call.own["root"])

    def buffers(self, rank: int, size: int, *, in_place: bool = False) -> CallerBuffers:
        """See CollectiveSpec; only the root has an input."""
        check_root(self.root, size)
        return CallerBuffers.alike((self.count,), self.dtype, in_place=in_place or rank != self.root)

    def _schedule(self, group: RankGroup, buffers: CallerBuffers, chunking: ChunkPolicy) -> Schedule:
        tree = self.algorithm_for(group.size)
        return broadcast(group, buffers, self.codec, root=self.root, tree=tree, chunking=chunking)


def broadcast(
    group: RankGroup,
    buffers: CallerBuffers,
    codec: Codec,
    *,
    root: int = 0,
    tree: str = "chain",
    chunking: ChunkPolicy,
) -> Schedule:
    """The root encodes once; the codes go down a "chain" of ranks, chunk by chunk, or a "binomial" tree.

    The root keeps the values that the others decode, so that all hold the same bits. In a chain each rank sends the
    encoded vector at most once, and the last one has it size - 1 hops of a chunk later; in a tree the root sends it
    log2(size) times, in log2(size) hops. Only the root may have an "input".
    """
    encoding = Encoding(partition(buffers.counts, 1, (codec,), chunking), codec, buffers.dtype, chunking.depth)
    if group.size == 1 or not any(buffers.counts):
        return assemble(tree, group, buffers, alone(buffers, codec))
    parent, children = _family(group, root, tree)
    slots = Slots(encoding, "relay", {root: 0}, least_depth=2)  # a chunk is received while another one is sent
    sends = to_all(children, slots)
    if parent is None:
        ops = pipeline((0, encode_all(slots, buffers.source, keep=buffers.target)), (0, exchange(sends, [])))
    else:  # receive a chunk and pass on the one before
        *relay, last = exchange([{}, *sends], to_all([parent], slots))
        ops = pipeline((0, relay), (1, decode_all(slots, buffers.target))) + tuple(last)
    return assemble(tree, group, buffers, ops, slots)


def _family(group: RankGroup, root: int, tree: str) -> tuple[int | None, list[int]]:
    """The parent (None: the root) and the children of a rank, the child with the most descendants first."""
    if tree not in BroadcastSpec.algorithms:
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
