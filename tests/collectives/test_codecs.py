"""Every codec in every collective: the same bits where they must be, whatever the chunks."""

from __future__ import annotations

import numpy as np
import pytest
from collective_cases import BUCKETED

import qccl
from qccl import codecs
from qccl.bench.codec import DEFAULT_CODECS
from qccl.bench.params import codec_list

#: a new codec is among them as soon as it is registered
CODECS = codecs.examples()
COUNTS = [1000, 7, 1994]


def every_call(comm: qccl.Communicator, codec: str, chunk: int | None) -> tuple[list[bytes], list[bytes]]:
    """What all ranks must have alike, and what differs."""
    options = {"codec": codec, "chunk": chunk}
    x = np.random.default_rng(comm.rank).standard_normal(sum(COUNTS)).astype(np.float32)
    part, gathered = np.empty(COUNTS[comm.rank], np.float32), np.empty_like(x)
    comm.quantized_reduce_scatter(x, part, counts=COUNTS, **options)
    alike = [comm.quantized_all_gather(part, gathered, counts=COUNTS, **options)]
    alike.append(comm.quantized_broadcast(x.copy(), root=1, **options))
    swapped = comm.quantized_all_to_all(x[:3000], np.empty(3000, np.float32), **options)
    reduced = x.copy()
    comm.quantized_reduce(reduced, root=2, **options)
    alike += comm.quantized_allreduce_coalesced([x.copy(), x[:13].copy()], **options)
    for layout in ("leader", "sharded"):
        for algorithm in ("one_shot", "two_round"):
            levels = {"node_ids": [0, 0, 1], "layout": layout, "algorithm": algorithm}
            alike.append(comm.hierarchical_allreduce(x.copy(), **levels, **options))
    return [each.tobytes() for each in alike], [each.tobytes() for each in (part, swapped, reduced)]


@pytest.mark.parametrize("codec", CODECS)
def test_same_bits_on_all_ranks_and_for_any_chunk(codec: str) -> None:
    by_chunk = [qccl.run_ranks(3, lambda comm, c=chunk: every_call(comm, codec, c)) for chunk in (None, 512)]
    assert by_chunk[0] == by_chunk[1]
    (alike, _), *others = by_chunk[0]
    assert all(found == alike for found, _ in others)


@pytest.mark.parametrize("codec", CODECS)
def test_replicas_follow_their_models(codec: str) -> None:
    def run(comm: qccl.Communicator) -> tuple[bytes, bytes]:
        z = np.random.default_rng(comm.rank).standard_normal(3001).astype(np.float32)
        model, replica = np.zeros_like(z), np.zeros_like(z)
        around = {"send_to": [(comm.rank + 1) % 3], "replicas": {(comm.rank - 1) % 3: replica}}
        for _ in range(2):
            comm.peer_exchange(z, applied=model, codec=codec, **around)
        return model.tobytes(), replica.tobytes()

    found = qccl.run_ranks(3, run)
    for rank in range(3):
        assert found[rank][1] == found[rank - 1][0]


def test_every_registered_codec_is_here_and_in_the_laws_and_in_the_benchmark() -> None:
    assert {codecs.get(spec).name for spec in CODECS} == set(codecs.CODECS)
    assert {codecs.get(spec).name for spec in BUCKETED} == set(codecs.CODECS) - {"none", "minmax"}
    assert {codecs.get(spec).name for spec in codec_list(DEFAULT_CODECS)} == set(codecs.CODECS)
