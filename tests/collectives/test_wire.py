"""Bytes on the wire, counted at the transport, against the formulas of docs/algorithms.md; and error bounds."""

from __future__ import annotations

import numpy as np
import pytest
from sent_bytes import sent_by_each

import qccl
from qccl.codecs import get
from qccl.dtypes import FLOAT32

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


def test_errors_are_within_the_bounds() -> None:
    """One encoding of each peer's values in a reduce-scatter; one in all that only move values."""
    n, codec = 4, get("minmax5:bucket=64")
    rng = np.random.default_rng(3)
    x = rng.standard_normal((n, n * 1000)).astype(np.float32)
    bound = np.stack([codec.error_bound(part) for part in x.reshape(n * n, 1000)]).reshape(n, n * 1000)
    exact = x.astype(np.float64).sum(axis=0)
    rounding = n * 2.0**-23 * np.abs(x).astype(np.float64).sum(axis=0)

    def run(comm: qccl.Communicator) -> tuple[np.ndarray, ...]:
        scattered, spread, swapped = (np.empty(count, np.float32) for count in (1000, 4000, 4000))
        comm.quantized_reduce_scatter(x[comm.rank].copy(), scattered, codec=codec)
        comm.quantized_all_gather(x[0][1000 * comm.rank :][:1000].copy(), spread, codec=codec)
        comm.quantized_all_to_all(x[comm.rank].copy(), swapped, codec=codec)
        return scattered, spread, swapped

    for rank, (scattered, spread, swapped) in enumerate(qccl.run_ranks(n, run)):
        own = slice(1000 * rank, 1000 * (rank + 1))
        others = bound[:, own].sum(axis=0) - bound[rank, own]
        assert (np.abs(scattered - exact[own]) <= others + rounding[own]).all()
        assert (np.abs(spread - x[0].astype(np.float64)) <= bound[0]).all()
        wanted, allowed = x[:, own].reshape(-1), bound[:, own].reshape(-1)
        assert (np.abs(swapped - wanted.astype(np.float64)) <= allowed).all()
        assert np.abs(scattered - exact[own]).max() > 0
