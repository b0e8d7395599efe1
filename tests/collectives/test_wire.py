"""Bytes on the wire, counted at the transport, against the formulas of docs/algorithms.md."""

from __future__ import annotations

import numpy as np
import pytest
from sent_bytes import sent_by_each

import qccl
from qccl.base.dtypes import FLOAT32
from qccl.codecs import get

CODEC = get("minmax4:bucket=64")
COUNT = 64 * 8 * 7 * 6


def encoded(count: int) -> int:
    return CODEC.encoded_nbytes(count, FLOAT32)


def ones(count: int) -> np.ndarray:
    return np.ones(count, np.float32)


@pytest.mark.parametrize("n", [2, 4, 7])
def test_reduce_scatter_and_all_gather_send_half_of_an_allreduce(n: int) -> None:
    half = (n - 1) * encoded(COUNT) // n
    options = {"codec": CODEC, "chunk": 256}
    assert sent_by_each(n, lambda c: c.quantized_reduce_scatter(ones(COUNT), **options)) == [half] * n
    assert sent_by_each(n, lambda c: c.quantized_all_gather(ones(COUNT // n), ones(COUNT), **options)) == [half] * n
    whole = sent_by_each(n, lambda c: c.quantized_allreduce(ones(COUNT), algorithm="two_round", **options))
    assert whole == [2 * half] * n
    whole = sent_by_each(n, lambda c: c.quantized_allreduce(ones(COUNT), algorithm="one_shot", **options))
    assert whole == [(n - 1) * encoded(COUNT)] * n


@pytest.mark.parametrize("n", [2, 4, 7])
def test_all_to_all(n: int) -> None:
    found = sent_by_each(n, lambda c: c.quantized_all_to_all(ones(COUNT), ones(COUNT), codec=CODEC))
    assert found == [(n - 1) * encoded(COUNT // n)] * n


@pytest.mark.parametrize("n", [2, 5, 8])
def test_broadcast(n: int) -> None:
    """In a chain all but the last send once; in a tree the root sends log2(n) times, rounded up."""
    for root in (0, n - 1):
        options = {"root": root, "codec": CODEC, "chunk": 256}
        found = sent_by_each(n, lambda c, o=options: c.quantized_broadcast(ones(COUNT), algorithm="chain", **o))
        assert found[root - 1] == 0 and sum(found) == (n - 1) * encoded(COUNT) and max(found) == encoded(COUNT)
        found = sent_by_each(n, lambda c, o=options: c.quantized_broadcast(ones(COUNT), algorithm="binomial", **o))
        assert found[root] == (n - 1).bit_length() * encoded(COUNT) and sum(found) == (n - 1) * encoded(COUNT)


@pytest.mark.parametrize("n", [2, 4, 7])
def test_reduce(n: int) -> None:
    def reduce(algorithm: str) -> list[int]:
        return sent_by_each(n, lambda c: c.quantized_reduce(ones(COUNT), root=1, codec=CODEC, algorithm=algorithm))

    others = [encoded(COUNT)] * (n - 1)
    assert reduce("one_shot") == [*others[:1], 0, *others[1:]]
    assert reduce("two_round") == [*others[:1], (n - 1) * encoded(COUNT) // n, *others[1:]]


def test_coalesced() -> None:
    """As much as one vector of whole buckets, plus the padding between the segments of several arrays in a message."""
    xs = [COUNT, 64 * 4, 64 * 8]

    def call(comm: qccl.Communicator) -> None:
        comm.quantized_allreduce_coalesced([ones(n) for n in xs], codec=CODEC, algorithm="one_shot")

    found = sent_by_each(3, call)
    exact = 2 * sum(encoded(n) for n in xs)
    assert len(set(found)) == 1 and exact <= found[0] <= exact + 2 * 16 * (len(xs) - 1)
