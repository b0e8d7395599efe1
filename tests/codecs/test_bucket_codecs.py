"""The codecs of codec_table against the oracle: bit for bit, on hard data, for every element type."""

from __future__ import annotations

import dataclasses

import kernel_calls
import numpy as np
import oracle
import pytest
from codec_table import ALL, TABLE
from kernel_calls import DTYPES, KINDS, OPS, assert_same_bits, hard_values
from oracle import RngCounter
from oracle_buckets import Bucketed, TopK

import qccl
from qccl import codecs
from qccl.errors import ArgumentError

pytestmark = pytest.mark.starts_first

EVERY = pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.spec)


def counts(codec: Bucketed) -> list[int]:
    """0, 1, and counts around the size of one and of several buckets."""
    return sorted({0, 1, 7, 13, codec.bucket - 1, codec.bucket, codec.bucket + 1, 3 * codec.bucket + 13})


def test_every_codec_has_a_row() -> None:
    assert set(TABLE) == set(codecs.CODECS) - {"none", "minmax"}
    for codec in ALL:
        found = codecs.get(codec.spec)
        assert dataclasses.asdict(found) == dataclasses.asdict(codec)  # type: ignore[call-overload]


@EVERY
@pytest.mark.parametrize("dtype", DTYPES)
def test_encode_and_decode(codec: Bucketed, dtype: str) -> None:
    rng = np.random.default_rng([ALL.index(codec), DTYPES.index(dtype)])
    for i, count in enumerate(counts(codec)):
        for kind in KINDS if count < 3000 else [KINDS[i % len(KINDS)], "special", "huge"]:
            x, before = (hard_values(kind, count, dtype, rng) for _ in range(2))
            counter = RngCounter(*rng.integers(0, 1000, 3).tolist(), 8 * int(rng.integers(0, 1 << 33)))
            what = f"{kind}, {count} {dtype}"
            wire = oracle.encode(codec, x, dtype, counter)
            assert_same_bits(kernel_calls.encode(codec, x, dtype, counter), wire, f"wire of {what}")
            for add_to in (None, before):
                found = kernel_calls.decode(codec, wire, count, dtype, add_to, counter)
                assert_same_bits(found, oracle.decode(codec, wire, count, dtype, add_to, counter), f"values of {what}")


@EVERY
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce(codec: Bucketed, dtype: str) -> None:
    rng = np.random.default_rng([ALL.index(codec), DTYPES.index(dtype)])
    for _ in range(8):
        reduce_case(rng, codec, dtype)


def reduce_case(rng: np.random.Generator, codec: Bucketed, dtype: str) -> None:
    kind, count = str(rng.choice(KINDS)), int(rng.choice(counts(codec)[1:]))
    counter = RngCounter(*rng.integers(0, 1000, 3).tolist(), 8 * int(rng.integers(0, 1 << 20)))
    ranks = rng.permutation(9)[: rng.integers(0, 5)].tolist()
    makers = [RngCounter(counter.call, 2, rank, counter.index) for rank in ranks]
    wires = [oracle.encode(codec, hard_values(kind, count, dtype, rng), dtype, maker) for maker in makers]
    has_own = not wires or bool(rng.random() < 0.7)
    own = hard_values(kind, count, dtype, rng) if has_own else None
    own_index = int(rng.integers(0, len(wires) + 1)) if has_own else 0
    op = "sum" if codecs.get(codec.spec).sparse else str(rng.choice(OPS))
    scale = float(rng.choice([1, 1, 1 / 3]))
    encoded = bool(rng.random() < 0.7)
    with_out = not encoded or bool(rng.random() < 0.8)
    arguments = (codec, wires, own, own_index, count, dtype)
    options = {"op": op, "scale": scale, "encoded": encoded, "counter": counter, "makers": makers}
    in_place = has_own and with_out and bool(rng.random() < 0.5)
    wire, out = kernel_calls.reduce(*arguments, **options, in_place=in_place, with_out=with_out)
    wanted_wire, wanted_out = oracle.reduce(*arguments, **options)
    what = f"{op} * {scale} of {len(wires)} wires, own {has_own} at {own_index}: {kind}, {count} {dtype}"
    assert_same_bits(wire, wanted_wire, f"wire of {what}")
    assert_same_bits(out, wanted_out if with_out else None, f"out of {what}")


@EVERY
@pytest.mark.parametrize("dtype", DTYPES)
def test_foreign_bytes_decode_as_the_oracles(codec: Bucketed, dtype: str) -> None:
    rng = np.random.default_rng([ALL.index(codec), DTYPES.index(dtype)])
    for count in counts(codec)[1:]:
        wire = rng.integers(0, 256, kernel_calls.wire_nbytes(codec, count, dtype), np.uint8)
        if rng.random() < 0.3:
            wire[:] = rng.integers(0, 4)
        counter = RngCounter(rank=int(rng.integers(0, 9)))
        found = kernel_calls.decode(codec, wire, count, dtype, counter=counter)
        assert_same_bits(found, oracle.decode(codec, wire, count, dtype, counter=counter), f"{count} {dtype}")


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
        _, out = kernel_calls.reduce(
            codec,
            [wire],
            x,
            0,
            x.size,
            "float32",
            op="sum",
            scale=1,
            encoded=True,
            counter=counter,
            makers=[RngCounter()],
        )
    assert out is not None
    spoiled = ~np.isfinite(total)
    assert not np.isfinite(out[spoiled]).any()
    assert spoiled.any() or "reconstruct=sign" in codec.spec


@EVERY
@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("one NaN", "one infinity", "special", "bit patterns")])
def test_bound_holds(codec: Bucketed, kind: str) -> None:
    found = codecs.get(codec.spec)
    x = hard_values(kind, 2 * codec.bucket + 13, "float32", np.random.default_rng(KINDS.index(kind)))
    y = found.decode(found.encode(x), x.size, "float32").astype(np.float64)
    bound = found.error_bound(x)
    finite = np.isfinite(bound)
    assert finite.all() or kind in ("huge", "constant", "overflowing sums")
    with np.errstate(invalid="ignore"):
        excess = np.where(finite, np.abs(y - x) - bound, 0)
    assert excess.max() <= 0, f"element {excess.argmax()} by {excess.max()}"


@pytest.mark.parametrize(
    "spec",
    ["onebit", "topk:k=0.1,block=64", "randomk:k=0.1,block=64", "dithering:k=3,norm=l2", "trellis2:outliers=0"],
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


#: of a block of 16,384 elements, the host looks at every 32nd before it selects the greatest ones
@pytest.mark.parametrize("great", ["every 32nd", "all but every 32nd", "every 32nd and a few", "none"])
@pytest.mark.parametrize("k", [1, 164, 2048])
def test_the_greatest_are_found_where_a_sample_misleads(great: str, k: int) -> None:
    n = 16384
    x = np.random.default_rng(k).permutation(n).astype(np.float32) + 1
    each = np.arange(n) % 32 == 0
    scale = {
        "every 32nd": np.where(each, 1e6, 1),
        "all but every 32nd": np.where(each, 1, 1e6),
        "every 32nd and a few": np.where(each | (np.arange(n) < k), 1e6, 0),
        "none": np.zeros(n),
    }
    x *= scale[great].astype(np.float32)
    codec = codecs.get(f"topk:k={k}")
    expected = np.zeros_like(x)
    chosen = np.argsort(-x, kind="stable")[:k]
    expected[chosen] = x[chosen]
    np.testing.assert_array_equal(codec.decode(codec.encode(x), n, "float32"), expected)


@pytest.mark.parametrize("n", [100, 16384])
@pytest.mark.parametrize("missing", [-1, 0, 1, 5, 40])
def test_topk_of_values_that_are_mostly_zeros(n: int, missing: int) -> None:
    """Among zeros the first ones are kept, here -0 and 0 in turns, where ``missing`` more values are wanted."""
    k, rng = 40, np.random.default_rng([n, missing + 1])
    x = np.where(np.arange(n) % 2, -0.0, 0.0).astype(np.float32)
    places = np.sort(rng.choice(n, k - missing, replace=False))
    x[places] = rng.permutation(k - missing) + 1
    codec = TopK(k)
    wire = kernel_calls.encode(codec, x, "float32", RngCounter())
    assert_same_bits(wire, oracle.encode(codec, x, "float32"), "wire")
    chosen = np.sort(np.argsort(-abs(x), kind="stable")[:k])
    assert wire[-4 * k :].tobytes() == x[chosen].tobytes()


@pytest.mark.parametrize("magnitudes", [1, 2, 3, 20])
@pytest.mark.parametrize("k", [1, 100, 164, 3000])
def test_topk_of_few_magnitudes(k: int, magnitudes: int) -> None:
    """Many ties: no bound separates exactly the elements that are kept, and the first ones are."""
    rng = np.random.default_rng([k, magnitudes])
    levels = (2.0 ** rng.integers(-149, 127, magnitudes)).astype(np.float32)
    x = rng.choice(levels, 16384) * rng.choice(np.array([-1, 1], np.float32), 16384)
    codec = TopK(k)
    assert_same_bits(kernel_calls.encode(codec, x, "float32", RngCounter()), oracle.encode(codec, x, "float32"), "wire")


@pytest.mark.parametrize("codec", [TopK(164), TopK(64, 4096, "exp4")], ids=lambda codec: codec.spec)
def test_buckets_around_the_caches_leave_nothing_to_the_next_one(codec: TopK) -> None:
    """The host decodes 2**20 floats or more by way of one bucket's memory; here two buckets are invalid or infinite."""
    rng, count = np.random.default_rng(1), (1 << 20) + 5
    x, before = (rng.standard_normal(count).astype(np.float32) for _ in range(2))
    x[3 * codec.bucket] = np.inf
    before[::5003] = np.array([0xFFC12345], np.uint32).view(np.float32)
    wire = oracle.encode(codec, x, "float32")
    stride = kernel_calls.wire_nbytes(codec, codec.bucket, "float32")
    wire[5 * stride : 6 * stride] = rng.integers(0, 256, stride, np.uint8)
    for add_to in (None, before):
        found = kernel_calls.decode(codec, wire, count, "float32", add_to)
        assert np.isnan(found[3 * codec.bucket : 4 * codec.bucket]).all()
        assert_same_bits(
            found, oracle.decode(codec, wire, count, "float32", add_to), f"values, added {add_to is before}"
        )


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("spec", ["topk:k=0.1", "randomk:k=3+ef"])
def test_sparse_codes_have_no_min_and_no_max(spec: str, op: str) -> None:
    def call(comm: qccl.Communicator) -> None:
        comm.quantized_allreduce(np.ones(100, np.float32), codec=spec, op=op, key="x" if "+" in spec else None)

    with pytest.raises(ArgumentError, match=f"op '{op}' is not possible with {spec[:5]}.*use sum or avg"):
        qccl.run_ranks(1, call)
    with pytest.raises(ValueError, match=r"a sparse codec allows 0 \(sum\) only"):
        kernel_calls.reduce(
            TABLE["topk"][0],
            [],
            np.ones(8, np.float32),
            0,
            8,
            "float32",
            op=op,
            scale=1,
            encoded=True,
            counter=RngCounter(),
        )
