"""topk and randomk: the greatest elements, and elements drawn without replacement.

Statistics of randomk are close to standard normal numbers (or chi-squares made into one) for a perfect generator, and
bounded by 6: a perfect one fails with probability 2e-9 each (chi-squares: 1e-8).
"""

from __future__ import annotations

import itertools

import kernel_calls
import numpy as np
import oracle
import pytest
from codec_table import TABLE
from kernel_calls import assert_same_bits
from oracle import RngCounter
from oracle_buckets import RandomK as RandomKOracle
from oracle_buckets import TopK

import qccl
from qccl import codecs
from qccl.base.errors import ArgumentError
from qccl.codecs import RandomK

BOUND = 6.0


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
        kernel_calls.reduce(TABLE["topk"][0], [], np.ones(8, np.float32), 0, 8, "float32", op=op)


@pytest.mark.parametrize(("k", "block"), [(1, 8), (3, 8), (10, 40), (13, 104), (32, 256)])
def test_random_k_draws_without_replacement_and_alike(k: int, block: int) -> None:
    """Every element as often as any other, and (for larger blocks) every pair."""
    draws = 4000
    codec = RandomKOracle(k, block, seed=5)
    counts, pairs = np.zeros(block), np.zeros((block, block))
    for call in range(draws):
        found = codec.indices(block, RngCounter(call=call))
        assert len(set(found.tolist())) == k
        counts[found] += 1
        pairs[np.ix_(found, found)] += 1
    expected = draws * k / block
    # of k draws without replacement the counts vary by the share (1 - k/n), and sum to a constant
    chi = ((counts - expected) ** 2).sum() / (expected * (1 - k / block)) * (block - 1) / block
    assert abs(chi - (block - 1)) / np.sqrt(2 * (block - 1)) < BOUND
    if block >= 100:
        p = k * (k - 1) / (block * (block - 1))
        upper = pairs[np.triu_indices(block, 1)]
        assert abs(((upper - draws * p) ** 2 / (draws * p * (1 - p))).mean() - 1) < 0.15
        assert np.abs(upper - draws * p).max() / np.sqrt(draws * p) < BOUND + 2  # few expected: skewed to the right


def test_random_k_differs_by_everything_that_keys_it() -> None:
    codec = RandomKOracle(32, 256, seed=5)
    places = [RngCounter(*counter) for counter in itertools.product((0, 1), (0, 1), (0, 1), (0, 256, 1 << 32))]
    drawn = [codec.indices(256, counter) for counter in places] + [
        RandomKOracle(32, 256, seed=6).indices(256, places[0])
    ]
    for a, b in itertools.combinations(drawn, 2):
        common = len(set(a.tolist()) & set(b.tolist()))
        assert common < 4 + BOUND * 2 and a.tolist() != b.tolist()  # 4 expected, deviation 1.75


def test_scaled_random_k_is_unbiased() -> None:
    calls, count = 3000, 128
    codec = RandomK(0.25, 128, seed=2, scale=True)
    x = np.random.default_rng(0).uniform(1, 2, count).astype(np.float32)
    total = np.zeros(count)
    for call in range(calls):
        total += codec.decode(codec.encode(x, call), count, "float32", call=call)
    error = (total / calls - x) / (x * np.sqrt(3 / calls))  # each is 4 x with probability 1/4
    assert np.abs(error).max() < BOUND
