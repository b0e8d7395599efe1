"""Collectives: pure functions of (rank, size, count, dtype, codec, ...) that return a Schedule."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from qccl.codecs.base import Codec
from qccl.collectives.allreduce import one_shot, two_round
from qccl.collectives.rooted import reduce_one_shot, reduce_two_round
from qccl.dtypes import DType
from qccl.schedule import Schedule

__all__ = ["ALLREDUCE", "REDUCE", "TREES", "choose_allreduce", "choose_inter", "choose_reduce", "choose_tree"]

#: the algorithms of all-reduce by name
ALLREDUCE: MappingProxyType[str, Callable[..., Schedule]] = MappingProxyType(
    {"one_shot": one_shot, "two_round": two_round}
)

#: the algorithms of reduce by name
REDUCE: MappingProxyType[str, Callable[..., Schedule]] = MappingProxyType(
    {"one_shot": reduce_one_shot, "two_round": reduce_two_round}
)
#: the trees of broadcast
TREES = ("chain", "binomial")

#: bytes that a link carries in the time of one more step: 20 us at 10 Gbit/s, 5 us at 5 GB/s of shared memory
_STEP_NBYTES = 24 * 1024
#: bytes of a chunk, about
_CHUNK_NBYTES = 96 * 1024
#: encoded bytes above which two ranks do better in two rounds: both algorithms send as much, but one_shot codes a fifth
#: more elements, which costs 10 to 25% in shared memory (as measured, the two meet at 64 KiB)
_TWO_RANKS_NBYTES = 48 * 1024


def choose_allreduce(count: int, size: int, dtype: DType, codec: Codec) -> str:
    """The algorithm that "auto" stands for: "one_shot" where its extra bytes cost less than a second step.

    Of a vector encoded in E bytes, one_shot sends (size-1) E in one step and two_round 2 (size-1)/size E in two. With
    two ranks both send E, and what one_shot costs is computation.
    """
    nbytes = codec.encoded_nbytes(count, dtype)
    if size <= 2:
        return "one_shot" if nbytes <= _TWO_RANKS_NBYTES else "two_round"
    extra = (size - 1) * (size - 2) * nbytes
    return "one_shot" if extra <= size * _STEP_NBYTES else "two_round"


def choose_inter(count: int, nodes: int, parts: int, dtype: DType, codec: Codec) -> str:
    """The algorithm between nodes that "auto" stands for.

    Two nodes send the same bytes either way, and one_shot quantises once, as ByteGrad has it.
    """
    return "one_shot" if nodes <= 2 else choose_allreduce(-(-count // parts), nodes, dtype, codec)


def choose_reduce(count: int, size: int, dtype: DType, codec: Codec) -> str:
    """The algorithm of reduce that "auto" stands for, by the bytes that the root receives.

    In one_shot (size-1) E, in two_round 2 (size-1)/size E in one more step. With two ranks one_shot has nothing against
    it.
    """
    return "one_shot" if size <= 2 else choose_allreduce(count, size, dtype, codec)


def choose_tree(count: int, size: int, dtype: DType, codec: Codec) -> str:
    """The tree of broadcast that "auto" stands for: by what the line of the last rank waits for.

    In a binomial tree the encoded vector is sent log2(size) times one after the other; in a chain once, and then a
    chunk size - 2 times. A step counts as many bytes as a link carries meanwhile.
    """
    nbytes, depth = codec.encoded_nbytes(count, dtype), (size - 1).bit_length()
    chunk = min(nbytes, _CHUNK_NBYTES)
    chain = nbytes + (size - 2) * chunk + (size - 1) * _STEP_NBYTES
    return "chain" if chain <= depth * (nbytes + _STEP_NBYTES) else "binomial"
