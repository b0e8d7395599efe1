"""Partitions of vectors, wire slots, and the order of a pipeline."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest

from qccl.base.dtypes import FLOAT32
from qccl.codecs import MinMax, NoCodec
from qccl.collectives.chunks import NETWORK, ChunkPolicy
from qccl.collectives.operands import RankGroup
from qccl.collectives.partitions import partition
from qccl.collectives.rounds import pipeline
from qccl.collectives.schedule import Decode, Span
from qccl.collectives.wire import ALIGNMENT, Encoding, Slots

COUNTS = [0, 1, 7, 8, 9, 100, 1000, 4096]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("chunk", [1, 8, 24, 10_000])
def test_chunks_tile_the_vector(count: int, parts: int, chunk: int) -> None:
    """In order, without gaps, at multiples of the bucket, no larger than asked, and balanced."""
    partitioned = partition([count], parts, [MinMax(bucket=8)], ChunkPolicy.of_elements(chunk))
    shards = [partitioned.segments(part) for part in range(parts)]
    chunks = [segment for shard in shards for segment in shard]
    assert [i for segment in chunks for i in range(segment.start, segment.stop)] == list(range(count))
    assert all(segment.start % 8 == 0 and segment.index == segment.start for segment in chunks)
    granules = [-(-sum(map(len, shard)) // 8) for shard in shards]
    assert max(granules) - min(granules) <= 1
    assert max(map(len, chunks), default=0) <= max(chunk, 8)
    assert partitioned.chunks == 1 or max(granules) * 8 > (partitioned.chunks - 1) * max(chunk // 8, 1) * 8


@pytest.mark.parametrize("count", [1, 1000, 70_001, 1 << 20, 4 << 20, 64 << 20])
@pytest.mark.parametrize("parts", [1, 2, 7, 64])
def test_the_default_chunks_of_two_levels_are_small_at_both_ends(count: int, parts: int) -> None:
    """48 KiB of codes first and last, up to 192 between, less where there are many parts; nothing is left out."""
    codec = MinMax(8)
    partitioned = partition([count], parts, (NoCodec(), codec), NETWORK, ramped=True)
    edges = [min(bound * partitioned.granule, count) for bound in partitioned.bounds]
    bucket = codec.encoded_nbytes(partitioned.granule, FLOAT32)
    for part in range(parts):
        chunks = partitioned.segments(part)
        if not chunks:
            assert edges[part] == edges[part + 1]
            continue
        assert all(a.stop == b.start for a, b in pairwise(chunks))
        assert (chunks[0].start, chunks[-1].stop) == (edges[part], edges[part + 1])
        sizes = [codec.encoded_nbytes(len(chunk), FLOAT32) for chunk in chunks]
        assert max(sizes[0], sizes[-1]) <= (48 << 10) + bucket
        assert max(sizes) <= (192 << 10) + 2 * bucket
        assert 3 * (3 * parts - 2) * (max(sizes) - 2 * bucket) <= max(3 << 20, 3 * (3 * parts - 2) * (48 << 10))
    if (count, parts) == (4 << 20, 1):
        assert partitioned.chunks <= 26, "most are large: of 48 KiB there would be 87"


def test_the_work_of_planning_grows_with_the_arrays_not_with_arrays_times_chunks() -> None:
    def calls(arrays: int) -> int:
        """Number of function calls, of C functions too, that find the segments of arrays in as many chunks."""
        partitioned = partition([8] * arrays, 2, [MinMax(bucket=8)], ChunkPolicy.of_elements(8))
        assert partitioned.chunks == arrays // 2
        events: list[str] = []
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, argument: events.append(event))
        try:
            segments = partitioned.segments(1)
        finally:
            sys.setprofile(before)
        assert [segment.array for segment in segments] == list(range(arrays // 2, arrays))
        return sum(event in ("call", "c_call") for event in events)

    assert calls(800) < 2.2 * calls(400)


@pytest.mark.parametrize("counts", [[0], [0, 9, 0, 0, 17, 8, 0], [1, 0, 1, 0, 40, 3], [5] * 30])
@pytest.mark.parametrize("chunk", [8, 24, 1000])
def test_each_element_of_each_array_is_in_one_segment(counts: list[int], chunk: int) -> None:
    """Arrays without elements, also several at the border of a chunk, have no segments."""
    partitioned = partition(counts, 3, [MinMax(bucket=8)], ChunkPolicy.of_elements(chunk))
    for groups in ([[0], [1], [2]], [[0, 1, 2]], [[2, 0], [], [1]]):
        grouped = partitioned.grouped(groups)
        segments = [segment for part in range(grouped.parts) for segment in grouped.segments(part)]
        elements = sorted((each.array, i) for each in segments for i in range(each.start, each.stop))
        assert elements == [(array, i) for array, count in enumerate(counts) for i in range(count)]
        assert all(segments) and all(segment.start % 8 == 0 for segment in segments)


def test_slot_sizes() -> None:
    """Aligned, large enough for every chunk, in rows that are used again, and no more rows than chunks."""
    partitioned = partition([3000], 3, [MinMax(bucket=8)], ChunkPolicy.of_elements(300))
    for depth, rows in ((2, 2), (9, 4)):
        encoding = Encoding(partitioned, NoCodec(), FLOAT32, depth)
        slots = Slots(encoding, "ring", {0: 0, 1: 1, 2: 2})
        assert encoding.slot_nbytes % ALIGNMENT == 0 and partitioned.chunks == 4
        assert slots.buffers()["ring"].nbytes == 3 * rows * encoding.slot_nbytes
        spans = [slots.wires[k][part] for k in range(4) for part in range(3)]
        assert [span.start for span in spans] == [i % (3 * rows) * encoding.slot_nbytes for i in range(12)]
        for part in range(3):
            for k in range(partitioned.chunks):
                length = sum([len(segment) for segment in partitioned.segments(part) if segment.chunk == k])
                assert encoding.nbytes[part][k] == 4 * length <= encoding.slot_nbytes
                assert len(slots.wires[k][part]) == encoding.nbytes[part][k]


def test_peers_are_rotated() -> None:
    """At each position of the order, every rank is the peer of exactly one other."""
    others = [RankGroup.of_all(rank, 5).others for rank in range(5)]
    assert others[2] == (3, 4, 0, 1)
    for position in range(4):
        assert {each[position] for each in others} == set(range(5))


def test_pipeline_order() -> None:
    def stage(name: str) -> Decode:
        return Decode(NoCodec(), Span(name, 0, 4), Span("out", 0, 1))

    ops = pipeline((0, [[stage(f"a{k}")] for k in range(3)]), (1, [[stage(f"b{k}")] for k in range(3)]))
    assert [op.wire.buffer for op in ops] == ["a0", "a1", "b0", "a2", "b1", "b2"]
