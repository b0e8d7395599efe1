"""The number of chunks that each engine's policy, and a caller's ``chunk=``, gives: all ranks must agree on it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qccl.base.dtypes import FLOAT32
from qccl.codecs import MinMax, get
from qccl.collectives.allreduce import AllReduceSpec
from qccl.collectives.chunks import BETWEEN_SITES, DEFAULT_DEPTH, GPU, NETWORK, ChunkPolicy, shared_memory
from qccl.collectives.partitions import partition
from qccl.collectives.wire import ALIGNMENT

CODECS = [get(spec) for spec in ("none", "minmax8", "minmax4", "trellis2", "minmax8:bucket=shard")]
CALLERS = ChunkPolicy.of_elements(100_000)
POLICIES = (NETWORK, BETWEEN_SITES, *GPU.values(), CALLERS, shared_memory(4), shared_memory(64))


#: of any order of magnitude
GRANULES = st.integers(0, 17).flatmap(lambda bits: st.integers(0, 1 << bits))


@pytest.mark.parametrize("policy", POLICIES, ids=range(len(POLICIES)))
@given(GRANULES, st.integers(1, 5).flatmap(lambda bits: st.integers(1, 1 << bits)), st.sampled_from(CODECS))
def test_chunks_are_within_the_limits_of_their_policy(policy: ChunkPolicy, granules: int, parts: int, codec) -> None:
    """Small, but at most ``enough``, or as many as large ones are needed; or of so many values."""
    chunks = policy.chunks(granules, parts, codec)
    assert 1 <= chunks <= max(1, granules) and chunks <= policy.chunks(granules + 1, parts, codec)
    nbytes = codec.encoded_nbytes(granules * codec.granule, FLOAT32)
    large = min(policy.large, policy.slot(parts))
    enough = policy.enough if parts > 1 else policy.enough_alone or policy.enough
    if not codec.splittable:
        assert chunks == 1
    elif policy.values is not None:
        values = codec.granule * FLOAT32.itemsize
        assert -(-granules // chunks) * values <= max(policy.values, values)
        assert chunks == 1 or granules * values > (chunks - 1) * (policy.values - values)
    else:
        sent = nbytes * max(parts - 1, 1)
        are_small = chunks * policy.small >= nbytes or (chunks + 0.5) * policy.small_sent >= sent or chunks >= granules
        assert are_small or (chunks >= enough and chunks * large >= nbytes)
        assert chunks == 1 or ((chunks - 1) * policy.small < nbytes and (chunks - 0.5) * policy.small_sent <= sent)
        assert chunks <= enough or (chunks - 1) * large < nbytes


def test_chunks_in_two_levels_grow_over_a_network_alone() -> None:
    policies = (NETWORK, shared_memory(4), GPU["network"], ChunkPolicy.of_elements(100_000))
    layouts = [partition([64 << 20], 4, (get("none"), MinMax(8)), policy, ramped=True) for policy in policies]
    assert [layout.ramp > 1 for layout in layouts] == [True, False, False, False]


def test_a_named_chunk_size_keeps_the_depth_of_the_policy() -> None:
    """Between sites each chunk has a slot of its own, whoever sets the size of the chunks."""
    spec = AllReduceSpec.from_arguments(80 * 1024, "float32", "none", 1024, algorithm="two_round")
    for policy in (NETWORK, BETWEEN_SITES):
        found = spec.schedule(0, 2, in_place=True, chunking=policy).buffers.values()
        wires = sum(buffer.size for buffer in found if buffer.dtype is None)
        assert wires == 4 * policy.depth * 4096  # 3 n - 2 rows of slots


@pytest.mark.parametrize("codec", ["none", "minmax8", "minmax1"])
@pytest.mark.parametrize("size", [2, 8])
def test_large_named_chunks_have_fewer_slots(size: int, codec: str) -> None:
    """All wire slots together take what the policy allows, or three slots per peer."""
    for chunk in (16 << 10, 256 << 10, 1 << 20):
        spec = AllReduceSpec.from_arguments(size * 40 * chunk, "float32", codec, chunk, algorithm="two_round")
        found = spec.schedule(0, size, in_place=True, chunking=BETWEEN_SITES).buffers.values()
        wires = sum(buffer.size for buffer in found if buffer.dtype is None)
        three = DEFAULT_DEPTH * (3 * size - 2) * (spec.codec.encoded_nbytes(chunk, FLOAT32) + ALIGNMENT)
        assert wires <= max(BETWEEN_SITES.slots, three)
