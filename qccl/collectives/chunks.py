"""The size and number of chunks. Callers give the size in elements, engines mostly in bytes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import count as naturals

from qccl.base.dtypes import FLOAT32
from qccl.base.errors import ArgumentError
from qccl.codecs.base import Codec

__all__ = ["BETWEEN_SITES", "DEFAULT_DEPTH", "GPU", "NETWORK", "ChunkPolicy", "shared_memory", "size_before"]

#: wire slots per peer. If all chunks were posted at once, the second round would queue behind the first in TCP. Two to
#: eight slots take the same time, so a few large ones are better than many small ones
DEFAULT_DEPTH = 3


@dataclass(frozen=True, slots=True)
class ChunkPolicy:
    """Decides how many chunks a part of a vector has. Each engine has a policy; a caller's ``chunk=`` makes another.

    With ``values`` the size is fixed, whatever the codec. Otherwise the bytes of the codes decide: there are as many
    chunks as ``small`` allows, but at most ``enough``, unless chunks would then be larger than ``large``. Chunks are
    made equal afterwards, so these are limits.

    Attributes:
        values: bytes of a chunk's values, counted as float32; None: the bytes of codes decide.
        small: most bytes of codes in a small chunk.
        small_sent: like ``small``, for the bytes that a rank sends in a round for one chunk: a code to each other part.
        enough: most chunks of a part, unless ``large`` or ``slots`` demand more.
        enough_alone: like ``enough``, for a vector that is a single part: one rank sends or receives it as a whole, or
            ranks pass it on, as in a broadcast; 0: ``enough``.
        large: most bytes of codes in a chunk.
        slots: most bytes of all wire slots of an all-reduce, unless chunks would become smaller than ``small``.
        ramp: in two levels chunks grow from ``small`` to ``ramp`` times that, and shrink again; 0: they are equal.
        depth: wire slots per peer.
    """

    values: int | None = None
    small: int = 1
    small_sent: float = 1
    enough: int = 1
    enough_alone: int = 0
    large: int = sys.maxsize
    slots: int = sys.maxsize
    ramp: int = 0
    depth: int = DEFAULT_DEPTH

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ArgumentError(f"depth is {self.depth}; there must be 1 wire slot per peer (2 to overlap) or more")

    @staticmethod
    def of_elements(elements: int, depth: int = DEFAULT_DEPTH) -> ChunkPolicy:
        """A policy with chunks of this many elements, or of one granule."""
        return ChunkPolicy(values=elements * FLOAT32.itemsize, depth=depth)

    def chunks(self, granules: int, parts: int, codec: Codec) -> int:
        """The number of chunks of a part of ``granules`` granules, one of ``parts``.

        A codec that cannot be split (one range for a whole shard) gets one chunk.
        """
        if not codec.splittable:
            return 1
        if self.values is not None:
            return max(1, -(-granules // max(1, self.values // (codec.granule * FLOAT32.itemsize))))
        nbytes = codec.encoded_nbytes(granules * codec.granule, FLOAT32)
        small = min(-(-nbytes // self.small), round(nbytes * max(parts - 1, 1) / self.small_sent))
        large = -(-nbytes // min(self.large, self.slot(parts)))
        enough = self.enough if parts > 1 else self.enough_alone or self.enough
        return max(1, min(small, max(large, enough), granules))

    def ramped(self, granules: int, parts: int, codec: Codec) -> tuple[int, int]:
        """Like chunks(), for two levels: the number of chunks, and the ratio of the largest one to the first.

        If chunks grow, ``small`` and ``slots`` alone decide.
        """
        if not (self.ramp and codec.splittable):
            return self.chunks(granules, parts, codec), 1
        nbytes = codec.encoded_nbytes(granules * codec.granule, FLOAT32)
        ramp = max(1, min(self.ramp, self.slot(parts) // self.small))
        return next(n for n in naturals(1) if size_before(n, n, ramp) * self.small >= nbytes), ramp

    def slot(self, parts: int) -> int:
        """The size of a chunk's codes, in bytes, with which all wire slots of an all-reduce take ``slots`` bytes."""
        return self.slots // (self.depth * (3 * parts - 2))

    def with_chunk(self, elements: int, ranks: int, codec: Codec) -> ChunkPolicy:
        """The policy for a caller's ``chunk=`` of this many elements.

        Large chunks have fewer wire slots per peer: between sites on 8 ranks, 36 slots of 1 MiB would take 792 MiB. The
        slots of an all-reduce take no more than with this policy's own chunks, or there are DEFAULT_DEPTH per peer.
        """
        nbytes = codec.encoded_nbytes(max(elements, codec.granule), FLOAT32)
        fitting = self.depth * max(self.slot(ranks), self.small) // nbytes
        return ChunkPolicy.of_elements(elements, min(self.depth, max(fitting, DEFAULT_DEPTH)))


def size_before(k: int, chunks: int, ramp: int) -> int:
    """The total size of the first ``k`` of ``chunks`` ramped chunks, in units of the first one."""

    def rise(n: int) -> int:
        growing = min(n, ramp)
        return growing * (growing + 1) // 2 + (n - growing) * ramp

    half = (chunks + 1) // 2
    return rise(k) if k <= half else rise(half) + rise(chunks - half) - rise(chunks - k)


#: Over a network. A message costs 10 to 30 us over TCP, so few large chunks are better if the link is fast (10 Gbit/s,
#: 2 ranks: 10 ms with 20 KiB, 7 with 40, 5 with 160). But the first and the last chunk overlap with nothing: fewer than
#: 9 chunks lose 1% at 1 Gbit/s. In two levels a chunk passes through the node before and after the link: large chunks
#: at the ends delay the start and the finish, and small ones everywhere cost processor time.
NETWORK = ChunkPolicy(small=48 << 10, enough=9, large=160 << 10, slots=3 << 20, ramp=4)

#: Between sites. A small chunk is one frame of the transport `wan`: a lost packet delays its own chunk, and the second
#: round of the others goes on. So there are as many slots as chunks, or a delayed chunk would keep the slot of a later
#: one. 1% of lost packets, 100 Mbit/s, 25 ms, 4 MiB, 16 connections: 207 ms instead of 244 with the chunks of NETWORK
BETWEEN_SITES = ChunkPolicy(small=15 << 10, enough=36, large=160 << 10, slots=12 << 20, ramp=4, depth=36)


def shared_memory(ranks: int) -> ChunkPolicy:
    """The policy for ranks that share memory. Transfers are fast, so overlap gains less than more messages cost.

    The wire slots of an all-reduce take 3 MiB with 8-bit codes, but a chunk has at least 40 Ki elements.
    """
    return ChunkPolicy(values=max(160 << 10, (12 << 20) // (DEFAULT_DEPTH * (3 * ranks - 2))))


#: microseconds that a chunk costs in each round, beside its transfer and its kernels: an NCCL group takes the host 20
#: to 30 whatever its size, and a launch about 5; two rounds have three launches
_GPU_OVERHEAD = 25 + 1.5 * 5
#: microseconds of a transfer between machines. NCCL's protocol LL takes 3 to 5, but sends and receives between machines
#: have no buffers for it, so small messages take as long as others (graph/tuning.cc and transport/net.cc of NCCL 2.30)
_GPU_NETWORK_LATENCY = 14


def _between_gpus(bandwidth: float, enough: int, large: int = 4 << 20, latency: float = 0) -> ChunkPolicy:
    """A policy in which a chunk's transfer takes twice as long as its overhead, at most a third of a round.

    ``bandwidth``: bytes per microsecond of a rank. ``large`` limits a wire slot; all of them have at most 136 MiB.
    """
    small_sent = 2 * (_GPU_OVERHEAD + latency) * bandwidth
    return ChunkPolicy(small_sent=small_sent, enough=enough, enough_alone=16, large=large, slots=136 << 20)


#: Policies between GPUs, by the slowest link between two ranks. In a round among all ranks, more chunks hide only the
#: kernels of the first and the last chunk, and each chunk takes the host 65 us or more. A model of 64 MiB in 8-bit
#: codes on 8 ranks says: 2 chunks take 0.17 ms over NVLink of H100s (9 chunks 0.6), 3 chunks 1.5 to 1.7 ms over PCIe 4
#: (16 chunks 1.8 to 1.9), and 2 chunks 2.9 ms at 100 Gbit/s (16 chunks 3.5). A vector that passes from rank to rank as
#: a whole needs more. NVLink has 200 to 400 GB/s, but kernels take as long as transfers. PCIe is version 4; a network
#: has 100 Gbit/s.
GPU = {
    "NVLink": _between_gpus(100e3, enough=2, large=8 << 20),
    "PCIe": _between_gpus(25e3, enough=3),
    "network": _between_gpus(12.5e3, enough=2, latency=_GPU_NETWORK_LATENCY),
}
