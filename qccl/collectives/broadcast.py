"""Broadcast: codes go down a tree of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from qccl.arguments import integer, one_of
from qccl.arrays import Values
from qccl.codecs.base import Codec
from qccl.collectives.allreduce import STEP_NBYTES
from qccl.collectives.layout import DEFAULT_DEPTH, CallerBuffers, Encoding, partition, pipeline
from qccl.collectives.rounds import Combine, Relay, alone, checked, encode
from qccl.collectives.spec import CollectiveSpec, check_root, common
from qccl.dtypes import DType
from qccl.errors import ArgumentError
from qccl.schedule import Op, Schedule

__all__ = ["TREES", "BroadcastSpec", "broadcast", "choose_tree"]

#: the trees of broadcast
TREES = ("chain", "binomial")
#: bytes of a chunk, about
_CHUNK_NBYTES = 96 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastSpec(CollectiveSpec):
    """Parameters of quantized_broadcast."""

    name = "broadcast"

    root: int
    algorithm: str

    @classmethod
    def from_arguments(cls, *shared: Any, root: int = 0, algorithm: str = "auto") -> Self:
        """Check the arguments."""
        one_of(algorithm, ("auto", *TREES), "algorithm")
        return cls(**common(*shared), root=integer(root, "root"), algorithm=algorithm)

    def counts(self, rank: int, size: int) -> dict[str, int]:
        """See CollectiveSpec; there is an input on the root alone."""
        check_root(self.root, size)
        both = {"input": self.count, "output": self.count}
        return both if rank == self.root else {"output": self.count}

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> tuple[bool, dict[str, int]]:
        """See CollectiveSpec."""
        if rank == self.root:
            return CollectiveSpec.bind(self, arrays, rank, size)
        return True, {"output": arrays["output"].address}

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        """See CollectiveSpec."""
        tree = self.algorithm
        if tree == "auto":
            tree = choose_tree(self.count, size, self.dtype, self.codec)
        return broadcast(
            *(rank, size, self.count, self.dtype, self.codec),
            root=self.root,
            tree=tree,
            in_place=in_place,
            chunk_elements=self._chunk(default_chunk),
        )


def choose_tree(count: int, size: int, dtype: DType, codec: Codec) -> str:
    """The tree of broadcast that "auto" stands for: by what the line of the last rank waits for.

    In a binomial tree the encoded vector is sent log2(size) times one after the other; in a chain once, and then a
    chunk size - 2 times. A step counts as many bytes as a link carries meanwhile.
    """
    nbytes, depth = codec.encoded_nbytes(count, dtype), (size - 1).bit_length()
    chunk = min(nbytes, _CHUNK_NBYTES)
    chain = nbytes + (size - 2) * chunk + (size - 1) * STEP_NBYTES
    return "chain" if chain <= depth * (nbytes + STEP_NBYTES) else "binomial"


def broadcast(
    rank: int,
    size: int,
    count: int,
    dtype: DType,
    codec: Codec,
    *,
    root: int = 0,
    tree: str = "chain",
    in_place: bool = False,
    chunk_elements: int | None = None,
    depth: int = DEFAULT_DEPTH,
) -> Schedule:
    """The root encodes once; the codes go down a "chain" of ranks, chunk by chunk, or a "binomial" tree.

    The root keeps what the others get: all hold the same bits. In a chain each rank sends the encoded vector at most
    once, and the last one has it size - 1 steps of a chunk later; in a tree the root sends it log2(size) times, in as
    many steps. Other ranks than the root have "output" alone.
    """
    checked(rank, size, "sum", 1.0, depth, count)
    check_root(root, size)
    caller = CallerBuffers.make(in_place or rank != root)
    buffers = caller.buffers((count,), dtype)
    if size == 1 or count == 0:
        return Schedule(tree, rank, size, buffers, alone(codec, caller, (count,), Combine()))
    encoding = Encoding(partition(count, 1, codec, chunk_elements), codec, dtype)
    parent, children = _family(rank, size, root, tree)
    relay = Relay(root, parent, children, encoding, depth)
    chunks = encoding.layout.chunks
    if parent is None:

        def encode_own(k: int) -> Iterator[Op]:
            return encode(encoding, 0, k, caller.source, relay.wire(k), 0, caller.target)

        ops = pipeline(chunks, (0, encode_own), (0, relay.exchange))
    else:

        def decode_one(k: int) -> Iterator[Op]:
            return relay.decode(k, caller.target)

        ops = pipeline(chunks, (0, relay.exchange), (1, decode_one)) + tuple(relay.exchange(chunks))
    return Schedule(tree, rank, size, buffers | relay.buffers(), ops)


def _family(rank: int, size: int, root: int, tree: str) -> tuple[int | None, list[int]]:
    """Parent (None: the root) and children of a rank; of the children, the one with the most descendants first."""
    if tree not in ("chain", "binomial"):
        raise ArgumentError(f"tree is {tree!r}; there are chain and binomial")
    place = (rank - root) % size
    if tree == "chain":
        parent, children = place - 1, [place + 1]
    else:
        steps = [1 << j for j in range(place.bit_length(), size.bit_length())]
        parent, children = place - (1 << max(place.bit_length() - 1, 0)), [place + step for step in steps]
    return (
        None if place == 0 else (parent + root) % size,
        [(child + root) % size for child in children if child < size],
    )
