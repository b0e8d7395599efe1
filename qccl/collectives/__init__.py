"""Collectives: pure functions of (rank, size, count, dtype, codec, ...) that return a Schedule."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from qccl.codecs.base import Codec
from qccl.collectives.allreduce import one_shot, two_round
from qccl.dtypes import DType
from qccl.schedule import Schedule

__all__ = ["ALLREDUCE", "choose_allreduce"]

#: the algorithms of all-reduce by name
ALLREDUCE: MappingProxyType[str, Callable[..., Schedule]] = MappingProxyType(
    {"one_shot": one_shot, "two_round": two_round}
)

#: bytes that a link carries in the time of one more step: 20 us at 10 Gbit/s, 5 us at 5 GB/s of shared memory
_STEP_NBYTES = 24 * 1024
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
