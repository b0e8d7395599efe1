"""The size of chunks, which a caller gives in elements and an engine mostly in bytes, and the number that follows."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from qccl.base.dtypes import FLOAT32
from qccl.base.errors import ArgumentError
from qccl.codecs.base import Codec

__all__ = ["BETWEEN_SITES", "DEFAULT_DEPTH", "GPU", "NETWORK", "ChunkPolicy", "shared_memory"]

#: wire slots per peer. With all chunks posted at once the second round queues behind the first in TCP. Two to eight
#: take the same time, so a few large slots are better than many small ones
DEFAULT_DEPTH = 3


@dataclass(frozen=True, slots=True)
class ChunkPolicy:
    """Decides how many chunks a part of a vector has. Each engine supplies one, and a caller's ``chunk=`` is one.

    With ``values`` a chunk has so many, whatever the codec. Otherwise the bytes of the codes decide: chunks are small,
    but at most ``enough``, or as many as ``large`` ones are needed. Chunks are then made equal, so these are limits.

    Attributes:
        values: bytes of a chunk's values, counted as float32; None if the others decide.
        small: bytes of codes in a small chunk, at most.
        small_sent: the same for all that a rank sends in a round for one chunk, which has as many messages as other
            parts; on average, because the number of chunks is rounded to the nearest.
        enough: chunks of a part, of which more are made only where ``large`` or ``slots`` ask for it.
        enough_alone: the same for a vector that is a single part, which one rank sends or receives as a whole, or which
            ranks pass on, as in a broadcast; 0: ``enough``.
        large: bytes of codes in a large chunk, at most.
        slots: bytes of all wire slots of an all-reduce, at most, unless chunks are smaller than ``small`` then.
        ramp: in two levels chunks grow from ``small`` to so many times that, and shrink again; 0: they are equal there,
            too.
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
        """Chunks of so many elements, or of one granule."""
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

    def slot(self, parts: int) -> int:
        """The bytes of codes in a chunk with which the wire slots of an all-reduce fill ``slots``."""
        return self.slots // (self.depth * (3 * parts - 2))


#: Over a network. A message costs 10 to 30 us over TCP, so few are better if the link is fast (10 Gbit/s, 2 ranks:
#: 10 ms with 20 KiB, 7 with 40, 5 with 160), but the first and the last chunk overlap with nothing; fewer than 9 lose
#: 1% at 1 Gbit/s. In two levels a chunk passes through the node before and after the link: large chunks at the ends
#: delay the start and the finish, and small ones everywhere cost processor time.
NETWORK = ChunkPolicy(small=48 << 10, enough=9, large=160 << 10, slots=3 << 20, ramp=4)

#: Between sites. A small chunk is one frame of the transport `wan`: a lost packet delays its own chunk, and the second
#: round of the others goes on. So there are as many slots as chunks, or a delayed chunk would keep the slot of a later
#: one. 1% of lost packets, 100 Mbit/s, 25 ms, 4 MiB, 16 connections: 207 ms instead of 244 with the chunks of NETWORK
BETWEEN_SITES = ChunkPolicy(small=15 << 10, enough=36, large=160 << 10, slots=12 << 20, ramp=4, depth=36)


def shared_memory(ranks: int) -> ChunkPolicy:
    """Where ranks share memory: transfers there are fast, so overlap gains less than more messages cost.

    The wire slots of an all-reduce have 3 MiB with 8-bit codes, if a chunk then has at least 40 Ki elements.
    """
    return ChunkPolicy(values=max(160 << 10, (12 << 20) // (DEFAULT_DEPTH * (3 * ranks - 2))))


#: microseconds that a chunk costs in each round, beside its transfer and its kernels: an NCCL group takes the host 20
#: to 30 whatever its size, and a launch about 5; two rounds have three launches
_GPU_OVERHEAD = 25 + 1.5 * 5
#: microseconds of a transfer between machines. NCCL's protocol LL takes 3 to 5, but sends and receives between machines
#: have no buffers for it, so small messages take as long as others (graph/tuning.cc and transport/net.cc of NCCL 2.30)
_GPU_NETWORK_LATENCY = 14


def _between_gpus(bandwidth: float, enough: int, large: int = 4 << 20, latency: float = 0) -> ChunkPolicy:
    """The transfer of a chunk takes twice as long as its overhead, which is then at most a third of a round.

    ``bandwidth`` of a rank is in bytes per microsecond. ``large``, and 136 MiB together, limit the wire slots.
    """
    small_sent = 2 * (_GPU_OVERHEAD + latency) * bandwidth
    return ChunkPolicy(small_sent=small_sent, enough=enough, enough_alone=16, large=large, slots=136 << 20)


#: Between GPUs, by the slowest link between two ranks. In a round among all ranks, further chunks hide only the kernels
#: of the first and the last one, and each takes the host 65 us or more: by a model of 64 MiB in 8-bit codes on 8 ranks,
#: 2 chunks take 0.17 ms over NVLink of H100s (9 chunks 0.6), 3 chunks 1.5 to 1.7 ms over PCIe 4 (16 chunks 1.8 to 1.9),
#: and 2 chunks 2.9 ms at 100 Gbit/s (16 chunks 3.5). A vector that passes from rank to rank as a whole needs more.
#:
#: NVLink has 200 to 400 GB/s, but kernels take as long as transfers. PCIe is version 4; a network has 100 Gbit/s.
GPU = {
    "NVLink": _between_gpus(100e3, enough=2, large=8 << 20),
    "PCIe": _between_gpus(25e3, enough=3),
    "network": _between_gpus(12.5e3, enough=2, latency=_GPU_NETWORK_LATENCY),
}
