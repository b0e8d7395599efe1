"""The number of chunks that each engine's policy, and a caller's ``chunk=``, gives: all ranks must agree on it."""

from __future__ import annotations

import pytest

from qccl.chunks import GPU, NETWORK, ChunkPolicy, shared_memory
from qccl.codecs import MinMax, get
from qccl.collectives.partitions import partition

COUNTS = (0, 100_000, 1 << 20, 6_553_600, 64 << 20)

#: parts and codec -> the chunks of a shard of COUNTS over a network, in shared memory, on a GPU, with chunk=100_000
CHOSEN = {
    (1, "none"): ((1, 9, 26, 160, 1639), (1, 1, 1, 7, 64), (1, 1, 3, 16, 64), (1, 2, 11, 66, 676)),
    (1, "minmax8"): ((1, 3, 9, 41, 413), (1, 1, 1, 7, 64), (1, 1, 1, 4, 17), (1, 2, 11, 66, 676)),
    (1, "minmax4"): ((1, 2, 9, 21, 208), (1, 1, 1, 7, 64), (1, 1, 1, 2, 16), (1, 2, 11, 66, 676)),
    (1, "trellis2"): ((1, 1, 6, 11, 111), (1, 1, 1, 7, 64), (1, 1, 1, 1, 11), (1, 2, 11, 67, 683)),
    (2, "none"): ((1, 5, 13, 80, 820), (1, 1, 2, 13, 128), (1, 1, 1, 8, 32), (1, 1, 6, 33, 338)),
    (2, "minmax8"): ((1, 2, 9, 21, 207), (1, 1, 2, 13, 128), (1, 1, 1, 2, 16), (1, 1, 6, 33, 338)),
    (2, "minmax4"): ((1, 1, 6, 11, 104), (1, 1, 2, 13, 128), (1, 1, 1, 1, 10), (1, 1, 6, 33, 338)),
    (2, "trellis2"): ((1, 1, 3, 9, 56), (1, 1, 2, 13, 128), (1, 1, 1, 1, 6), (1, 1, 6, 34, 342)),
    (8, "none"): ((1, 2, 11, 67, 683), (1, 1, 3, 18, 179), (1, 1, 2, 14, 16), (1, 1, 2, 9, 85)),
    (8, "minmax8"): ((1, 1, 3, 17, 172), (1, 1, 3, 18, 179), (1, 1, 1, 4, 16), (1, 1, 2, 9, 85)),
    (8, "minmax4"): ((1, 1, 2, 9, 87), (1, 1, 3, 18, 179), (1, 1, 1, 2, 16), (1, 1, 2, 9, 85)),
    (8, "trellis2"): ((1, 1, 1, 5, 46), (1, 1, 3, 18, 179), (1, 1, 1, 1, 10), (1, 1, 2, 9, 86)),
    (64, "none"): ((1, 1, 2, 9, 86), (1, 1, 1, 3, 26), (1, 1, 3, 16, 16), (1, 1, 1, 2, 11)),
    (64, "minmax8"): ((1, 1, 1, 3, 22), (1, 1, 1, 3, 26), (1, 1, 1, 4, 16), (1, 1, 1, 2, 11)),
    (64, "minmax4"): ((1, 1, 1, 2, 11), (1, 1, 1, 3, 26), (1, 1, 1, 2, 16), (1, 1, 1, 2, 11)),
    (64, "trellis2"): ((1, 1, 1, 1, 6), (1, 1, 1, 3, 26), (1, 1, 1, 1, 11), (1, 1, 1, 2, 11)),
}


@pytest.mark.parametrize(("parts", "codec"), CHOSEN)
def test_chosen_numbers(parts: int, codec: str) -> None:
    policies = (NETWORK, shared_memory(parts), GPU, ChunkPolicy.of_elements(100_000))
    chosen = (tuple(partition([count], parts, [get(codec)], policy).chunks for count in COUNTS) for policy in policies)
    assert tuple(chosen) == CHOSEN[parts, codec]


def test_chosen_numbers_in_two_levels() -> None:
    """Ramped over a network alone."""
    policies = (NETWORK, shared_memory(4), GPU, ChunkPolicy.of_elements(100_000))
    layouts = [partition([64 << 20], 4, (get("none"), MinMax(8)), policy, ramped=True) for policy in policies]
    assert [(layout.ramp, layout.chunks) for layout in layouts] == [(2, 173), (1, 161), (1, 16), (1, 169)]


@pytest.mark.parametrize("parts", [2, 3, 8, 64])
def test_chunks_on_a_gpu(parts: int) -> None:
    """One chunk if that is all that pays, three from a few MiB on, and never chunks of more than 4 MiB of codes."""
    codec = get("none")  # 4 KiB of codes in each of its granules
    numbers = [GPU.chunks(granules, parts, codec) for granules in (0, 1, 1280, 1 << 18, 1 << 22)]
    assert numbers[:2] == [1, 1] and numbers[2] >= 3 and numbers[3:] == [1 << 8, 1 << 12]
    assert numbers == sorted(numbers)


def test_a_chunk_is_one_granule_at_least() -> None:
    assert ChunkPolicy.of_elements(1).chunks(5, 2, MinMax(bucket=64)) == 5
    assert NETWORK.chunks(1, 1, get("none")) == GPU.chunks(1, 1, get("none")) == 1
