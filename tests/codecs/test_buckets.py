"""Laws of the codecs of codec_table: what is not finite, sums that overflow, and the error bound."""

from __future__ import annotations

import dataclasses

import kernel_calls
import numpy as np
import oracle
import pytest
from codec_table import ALL, TABLE
from kernel_calls import FINITE_KINDS, KINDS, hard_values
from oracle import RngCounter
from oracle_buckets import Bucketed

import qccl
from qccl import codecs

EVERY = pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.spec)


def test_every_codec_has_a_row() -> None:
    assert set(TABLE) == set(codecs.CODECS) - {"none", "minmax"}
    for codec in ALL:
        found = codecs.get(codec.spec)
        assert dataclasses.asdict(found) == dataclasses.asdict(codec)  # type: ignore[call-overload]


@EVERY
def test_what_is_not_finite_spoils_its_bucket_and_no_other(codec: Bucketed) -> None:
    """If the exact value is not finite, the decoded one is not either."""
    found = codecs.get(codec.spec)
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        x = np.random.default_rng(0).standard_normal(3 * codec.bucket).astype(np.float32)
        spots = codec.bucket + np.arange(0, codec.bucket, max(codec.bucket // 3, 1))
        x[spots] = bad
        y = found.decode(found.encode(x), x.size, "float32")
        assert not np.isfinite(y[spots]).any()
        assert np.isfinite(y[: codec.bucket]).all() and np.isfinite(y[2 * codec.bucket :]).all()


@EVERY
def test_a_sum_that_overflows_in_fp32_does_not_come_out_finite(codec: Bucketed) -> None:
    """The sum of own and decoded values determines it; docs/algorithms.md names the codecs for which that matters."""
    rng, counter = np.random.default_rng(0), RngCounter(round=1)
    x = (rng.uniform(1e38, 3.4e38, 2 * codec.bucket) * rng.choice([-1, 1], 2 * codec.bucket)).astype(np.float32)
    wire = oracle.encode(codec, x, "float32")
    with np.errstate(over="ignore", invalid="ignore"):
        decoded = oracle.decode(codec, wire, x.size, "float32")
        total = x + decoded
        arguments = codec, [wire], x, 0, x.size, "float32"
        _, out = kernel_calls.reduce(*arguments, counter=counter, makers=[RngCounter()])
    assert out is not None
    spoiled = ~np.isfinite(total)
    assert not np.isfinite(out[spoiled]).any()
    assert spoiled.any() or "reconstruct=sign" in codec.spec


@EVERY
@pytest.mark.parametrize("kind", FINITE_KINDS)
def test_bound_holds(codec: Bucketed, kind: str) -> None:
    found = codecs.get(codec.spec)
    x = hard_values(kind, 2 * codec.bucket + 13, "float32", np.random.default_rng(KINDS.index(kind)))
    y = found.decode(found.encode(x), x.size, "float32").astype(np.float64)
    bound = found.error_bound(x)
    finite = np.isfinite(bound)
    assert finite.all() or kind in ("huge", "constant", "overflowing sums", "blocks apart")
    with np.errstate(invalid="ignore"):
        excess = np.where(finite, np.abs(y - x) - bound, 0)
    assert excess.max() <= 0, f"element {excess.argmax()} by {excess.max()}"


@pytest.mark.parametrize(
    "spec", ["onebit", "topk:k=0.1,block=64", "randomk:k=0.1,block=64", "dithering:k=3,norm=l2", "trellis2:outliers=0"]
)
def test_such_a_sum_may_stay_finite_within_the_bound(spec: str) -> None:
    """With a codec that decodes to less than the value, as docs/algorithms.md explains."""
    codec, rng = codecs.get(spec), np.random.default_rng(0)
    xs = [np.where(rng.random(2048) < 0.3, 1.8e38, 1e35).astype(np.float32) for _ in range(2)]
    exact = xs[0].astype(np.float64) + xs[1]

    def call(comm: qccl.Communicator) -> np.ndarray:
        return comm.quantized_allreduce(xs[comm.rank].copy(), codec=codec, algorithm="one_shot")

    with np.errstate(over="ignore"):
        found = qccl.run_ranks(2, call)[0]
    finite = np.isfinite(found) & (exact > 3.5e38)
    assert finite.any()
    error = np.abs(found[finite] - exact[finite])
    assert (error <= sum(codec.error_bound(x) for x in xs)[finite] * (1 + 2.0**-20)).all()
