"""How many chunks a call on a GPU has if the caller gives no chunk size."""

from __future__ import annotations

__all__ = ["default_chunks"]

#: what a chunk costs in each round beside its transfer, in seconds: an NCCL group takes 20 to 30 us whatever its size,
#: and a launch about 5 us; two rounds have three launches
_GROUP_SECONDS = 25e-6
_LAUNCH_SECONDS = 5e-6
_OVERHEAD_SECONDS = _GROUP_SECONDS + 1.5 * _LAUNCH_SECONDS
#: bytes per second that a GPU sends: PCIe 4, or a network card of 200 Gbit/s. NVLink is ten times as fast, so fewer
#: chunks would be better there, but that is where compression pays least
_BANDWIDTH = 25e9
#: the transfer of a chunk takes this many times its overhead, so that the overhead is at most a third of a round
_TRANSFER_PER_OVERHEAD = 2
#: more chunks gain nothing: the first encoding and the last decoding, which overlap with nothing, are then 1/16
_MOST_CHUNKS = 16
#: bytes of codes in the largest chunk, however many chunks that makes; it limits the wire slots, (3 parts - 2) times 3
_LARGEST_CHUNK = 4 << 20


def default_chunks(nbytes: int, parts: int) -> int:
    """The number of chunks of a shard whose codes have ``nbytes``, one of ``parts`` shards.

    In a round a rank sends a chunk of every other shard, so a chunk's transfer takes (parts - 1) / _BANDWIDTH times its
    bytes. The chunks are as many as their overhead allows, because kernels then overlap with transfers. With a single
    part, such as that of a broadcast, the rank sends to one peer at a time.
    """
    sent = nbytes * max(parts - 1, 1)
    least = _TRANSFER_PER_OVERHEAD * _OVERHEAD_SECONDS * _BANDWIDTH
    return max(1, min(round(sent / least), _MOST_CHUNKS), -(-nbytes // _LARGEST_CHUNK))
