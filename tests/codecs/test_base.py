"""Specifications of codecs, their sizes, and the public encode and decode."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from codec_table import ALL

from qccl import codecs
from qccl.base import dtypes
from qccl.base.errors import ArgumentError, CodecError
from qccl.codecs import (
    Cast,
    Dithering,
    ErrorFeedback,
    MinMax,
    Momentum,
    NoCodec,
    OneBit,
    RandomK,
    TopK,
    Trellis,
    TwoRounds,
)

FEEDBACK = ErrorFeedback(OneBit())
BOTH = Momentum(ErrorFeedback(MinMax(bits=2, bucket=64)), 0.5)
NATURAL = Dithering(5, "natural", "l2", seed=3)
WORDS = {"byteps_dithering_partition": "natural", "byteps_dithering_normalize": "l2"}
EVERY = [
    OneBit(64, "scale"),
    Cast("float8_e5m2"),
    NATURAL,
    TopK(0.01),
    TopK(5, 64),
    RandomK(0.25, 64, (1 << 64) - 1, True),
    NoCodec(),
    *(
        MinMax(bits, bucket, rounding, seed)
        for bits, bucket, rounding, seed in itertools.product(
            (1, 8), (8, 1024, 1 << 24, "shard"), ("nearest", "stochastic"), (0, (1 << 64) - 1)
        )
    ),
]


@pytest.mark.parametrize(
    ("spec", "codec"),
    [
        ("none", NoCodec()),
        ("minmax", MinMax()),
        ("minmax8", MinMax(8, 1024, "nearest", 0)),
        (" minmax4:bucket=256, rounding=stochastic, seed=7 ", MinMax(4, 256, "stochastic", 7)),
        ("minmax:bits=3", MinMax(3)),
        ("minmax2:bucket=shard", MinMax(2, "shard")),
        ({"compressor": "minmax", "bits": "4", "seed": "7"}, MinMax(4, seed=7)),
        ({"byteps_compressor": "minmax4", "byteps_bucket": 64}, MinMax(4, 64)),
        ({"compressor": "none"}, NoCodec()),
        (MinMax(5), MinMax(5)),
        ("onebit:bucket=512,reconstruct=mean", OneBit(512, "mean")),
        ({"compressor": "onebit", "scaling": "true"}, OneBit(reconstruct="scale")),
        ({"byteps_compressor_type": "onebit", "byteps_compressor_onebit_scaling": "False"}, OneBit()),
        ("cast", Cast("float16")),
        ("cast:dtype=float8_e4m3", Cast("float8_e4m3")),
        ("dithering:k=7", Dithering(7)),
        ({"compressor": "dithering", "k": "5", "partition": "natural", "normalize": "l2", "seed": "3"}, NATURAL),
        ({"byteps_compressor_type": "dithering", "byteps_compressor_k": "5", "byteps_seed": 3} | WORDS, NATURAL),
        ({"compressor": "dithering", "k": 5, "partition": "1", "normalize": "1", "seed": 3}, NATURAL),
        ("topk:k=0.01", TopK(0.01)),
        ({"byteps_compressor_type": "topk", "byteps_compressor_k": "3"}, TopK(3)),
        ("randomk:k=8,block=64,seed=7,scale=true", RandomK(8, 64, 7, True)),
        ({"compressor": "randomk", "k": "8", "scaling": "true", "seed": "7"}, RandomK(8, seed=7, scale=True)),
        ("onebit+ef", FEEDBACK),
        (" onebit + ef ", FEEDBACK),
        ({"compressor": "onebit", "ef": "vanilla"}, FEEDBACK),
        ({"byteps_compressor": "onebit", "byteps_error_feedback_type": "vanilla"}, FEEDBACK),
        ("onebit+nesterov", Momentum(OneBit(), 0.9)),
        ("onebit+ef+nesterov", Momentum(FEEDBACK, 0.9)),
        ("minmax2:bucket=64+ef+nesterov:mu=0.5", BOTH),
        (
            {"compressor": "minmax", "bits": "2", "bucket": 64, "ef": "vanilla", "momentum": "nesterov", "mu": "0.5"},
            BOTH,
        ),
        (
            {
                "byteps_compressor": "minmax2",
                "byteps_bucket": "64",
                "byteps_error_feedback_type": "vanilla",
                "byteps_momentum_type": "nesterov",
                "byteps_momentum_mu": "5e-1",
            },
            BOTH,
        ),
        (BOTH, BOTH),
        ("onebit+ef:beta=1,dtype=float32", FEEDBACK),
        ("onebit+ef:beta=0.95", ErrorFeedback(OneBit(), 0.95)),
        ({"compressor": "onebit", "ef": "vanilla", "ef_beta": "0.95"}, ErrorFeedback(OneBit(), 0.95)),
        (
            "cast:dtype=float16+ef:dtype=bfloat16,beta=5e-1+nesterov:mu=0.5",
            Momentum(ErrorFeedback(Cast("float16"), 0.5, "bfloat16"), 0.5),
        ),
        (
            {"compressor": "cast", "dtype": "float16", "ef": "vanilla", "ef_dtype": "bfloat16"},
            ErrorFeedback(Cast("float16"), 1, "bfloat16"),
        ),
        ("minmax2:seed=1+nesterov:mu=1e-3", Momentum(MinMax(bits=2, seed=1), 0.001)),
        ("minmax2+nesterov:mu=0", Momentum(MinMax(bits=2), 0)),
        ("trellis2/trellis4", TwoRounds(Trellis(2), Trellis(4))),
        ("trellis2/bits=4", TwoRounds(Trellis(2), Trellis(4))),
        ("topk:k=8,block=64/k=9", TwoRounds(TopK(8, 64), TopK(9, 64))),
        ("topk:k=8,block=64,values=exp4/topk:k=9,block=64", TwoRounds(TopK(8, 64, "exp4"), TopK(9, 64))),
        ("minmax2/minmax8+ef", ErrorFeedback(TwoRounds(MinMax(2), MinMax(8)))),
        ("minmax2/minmax8+ef+nesterov", Momentum(ErrorFeedback(TwoRounds(MinMax(2), MinMax(8))))),
    ],
    ids=str,
)
def test_specifications(spec: Any, codec: codecs.Codec) -> None:
    assert codecs.get(spec) == codec and hash(codecs.get(spec)) == hash(codec)
    assert codecs.get(codec.spec()) == codec and eval(repr(codec), vars(codecs)) == codec
    assert codecs.identity(codec) == codec.spec()


@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_spec_and_repr_are_inverses(codec: codecs.Codec) -> None:
    assert codecs.get(codec.spec()) == codec
    assert eval(repr(codec), vars(codecs)) == codec
    assert len({codec, codecs.get(codec.spec())}) == 1
    as_dict = {"compressor": codec.name} | dataclasses.asdict(codec)  # type: ignore[call-overload]
    assert codecs.get(as_dict) == codec
    assert codecs.get({f"byteps_{key}": str(value) for key, value in as_dict.items()}) == codec


@pytest.mark.parametrize("name", ["topk", "randomk"])
def test_a_fraction_of_one_keeps_all_and_a_count_of_one_an_element(name: str) -> None:
    kind = codecs.CODECS[name]
    alls = [kind(k=1.0), kind(k=np.float64(1)), *map(codecs.get, (f"{name}:k=1.0", f"{name}:k=1.", f"{name}:k=1e0"))]
    alls += [codecs.get({"compressor": name, "k": k}) for k in ("1.0", 1.0)]
    ones = [kind(k=1), kind(k=np.int64(1)), codecs.get(f"{name}:k=1")]
    ones += [codecs.get({"compressor": name, "k": k}) for k in ("1", 1)]
    assert len(set(alls)) == len(set(ones)) == 1 and alls[0] != ones[0]
    x = np.arange(1, 20_001, dtype=np.float32)  # a whole block, and a part
    for codec, kept in ((alls[0], x.size), (ones[0], 2)):
        for same in (codec, codecs.get(codec.spec()), eval(repr(codec), vars(codecs))):
            wire = same.encode(x)
            assert wire.nbytes == same.encoded_nbytes(x.size, "float32")
            assert np.count_nonzero(same.decode(wire, x.size, "float32")) == kept


def test_the_second_round_has_the_fraction_of_the_first() -> None:
    """Also of blocks of another length."""
    assert codecs.get("topk:k=1.0/block=4096") == codecs.TwoRounds(TopK(1.0), TopK(1.0, 4096))
    assert codecs.get("topk:k=8,block=64/k=1.0+ef").spec() == "topk:k=8,block=64/topk:k=64,block=64+ef"
    assert codecs.get("randomk:k=8,scaling=true/k=0.5") == codecs.get("randomk:k=8,scale=true/randomk:k=0.5,scale=true")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("minmx8", r"there is no codec 'minmx8'; the codecs are .*nvfp4\. Did you mean 'minmax'\?"),
        ("", "there is no codec ''"),
        ("minmax9", "bits=9 is not possible; allowed are the integers 1 to 8"),
        ("minmax0", "bits=0"),
        ("minmax8:bukcet=8", r"no key 'bukcet'; its keys: bits, bucket, rounding, seed\. Did you mean 'bucket'\?"),
        ("minmax8:bucket=0", "bucket=0 is not possible; allowed are multiples of 8"),
        ("minmax8:bucket=12", "bucket=12"),
        ("minmax8:bucket=33554432", "bucket=33554432"),
        ("minmax8:bucket=1e3", r"bucket=1000\.0"),
        ("minmax8:bucket=column", "bucket='column'"),
        ("minmax8:rounding=up", "rounding='up' is not known; allowed are nearest, stochastic"),
        ("minmax8:seed=-1", "seed=-1"),
        ("minmax8:seed=18446744073709551616", "seed="),
        ("minmax8:bits=4", "gives 'bits' twice"),
        ("minmax8:seed=1,seed=2", "gives 'seed' twice"),
        ("minmax8:bucket", "'bucket' is not key=value"),
        ("minmax8:", "is not key=value"),
        ("none8", "none has no bits"),
        ("none:bits=8", "none has no key 'bits'; its keys: none"),
        ({"bits": 8}, "lacks the key 'compressor'"),
        ("topk", "topk needs the key 'k'; its keys: k, block, values"),
        ("dithering", "dithering needs the key 'k'"),
        ({"compressor": "randomk", "seed": "7"}, "randomk needs the key 'k'"),
        ("topk:k=0", "k=0 is not possible; allowed are a fraction, .* up to 1.0 .all., or the number of elements"),
        ("topk:k=8.0", "k=8.0 is not possible; allowed are a fraction, written with a decimal point"),
        ("topk:k=1.5", "k=1.5"),
        ("topk:k=inf", "k=inf is not possible"),
        ("randomk:k=nan", "k=nan is not possible"),
        ({"compressor": "onebit", "scaling": [True]}, r"scaling=\[True\] is not possible; allowed are True, False"),
        ("topk:k=65,block=64", "each block, 1 to 64"),
        ("topk:k=3,block=12", "block=12 is not possible; allowed are multiples of 8"),
        ("topk:k=3,seed=1", "topk has no key 'seed'; its keys: k, block, values"),
        ("dithering:k=128", "k=128 is not possible; allowed are the integers 1 to 127"),
        ("dithering:k=32,partition=natural", "k=32 is not possible; allowed are the integers 1 to 31"),
        ("dithering:k=3,partition=square", "partition='square' is not possible; allowed are linear, natural, 0, 1"),
        ("dithering:k=3,normalise=l2", r"no key 'normalise'; .* Did you mean 'norm'\?"),
        ("randomk:k=3,scale=2", "scale=2 is not possible; allowed are true and false"),
        ("onebit:reconstruct=median", "reconstruct='median' is not known; allowed are sign, scale, mean, midpoint"),
        ({"compressor": "onebit", "scaling": "maybe"}, "scaling='maybe' is not possible; allowed are True, False"),
        ("cast:dtype=int8", "dtype='int8' is not known; allowed are float16, bfloat16, float8_e4m3, float8_e5m2"),
        ({"compressor": "minmax", "bits": True}, "bits=True"),
        ({"bits": 8, "byteps_bits": 8, "compressor": "minmax"}, "gives 'bits' twice"),
        (8, "a codec is a string, a dict or a Codec, not int"),
        # decorators
        ("onebit+", "there is no decorator ''; the decorators are ef, nesterov"),
        ("onebit+eff", "no decorator 'eff'.*Did you mean 'ef'"),
        ("onebit+nestrov", "Did you mean 'nesterov'"),
        ("onebit+ef:mu=1", "ef has no key 'mu'; its keys: beta, dtype"),
        ("onebit+ef:beta=0", "ef: beta=0 is not possible; allowed are numbers above 0, up to 1"),
        ("onebit+ef:beta=1.01", "ef: beta=1.01 is not possible"),
        ("onebit+ef:beta=nan", "ef: beta=nan is not possible"),
        ("onebit+ef:dtype=float16", "ef: dtype='float16' is not possible; allowed are float32, bfloat16"),
        ({"compressor": "onebit", "ef_beta": "0.5"}, "gives ef_beta, ef_dtype without ef; add ef='vanilla'"),
        ("onebit+nesterov:nu=0.5", "nesterov has no key 'nu'; its keys: mu"),
        ("onebit+nesterov:mu", "is not key=value"),
        ("onebit+nesterov:mu=1", "mu=1 is not possible; allowed are numbers from 0 to below 1"),
        ("onebit+nesterov:mu=-0.1", "mu=-0.1 is not possible"),
        ("onebit+nesterov:mu=nan", "mu=nan is not possible"),
        ("onebit+nesterov:mu=true", "mu=True is not possible"),
        ("onebit+ef+ef", r"write onebit\+ef\+nesterov"),
        ("onebit+nesterov+ef", r"momentum follows \+ef; write onebit\+ef\+nesterov"),
        ("onebit+nesterov+ef+nesterov", r"momentum follows \+ef"),
        ("onebit+ef+nesterov+nesterov", "has momentum already"),
        ("+ef", "there is no codec ''"),
        ("ef+onebit", "there is no codec 'ef'"),
        ({"compressor": "onebit", "ef": "vanila"}, "ef='vanila' is not possible; give 'vanilla'"),
        ({"compressor": "onebit", "ef": "vanilla", "error_feedback_type": "vanilla"}, "once"),
        ({"compressor": "onebit", "momentum": "heavy"}, "momentum='heavy' is not possible; give 'nesterov'"),
        ({"compressor": "onebit", "mu": "0.9"}, "gives mu without momentum"),
        ({"compressor": "onebit", "ef": "vanilla", "mu": "0.9"}, "gives mu without momentum"),
        ({"compressor": "onebit", "momentum": "nesterov", "mu": "0.9", "momentum_mu": "0.9"}, "or twice"),
        # a codec for each round
        ("minmax2/minmax4/minmax8", "has 2 times '/'; an all-reduce has two rounds: write A/B"),
        ("minmax2/", "there is no codec ''"),
        ("minmax2/minmix4", "there is no codec 'minmix4'.*Did you mean 'minmax'"),
        ("minmax2/k=4", "minmax has no key 'k'; its keys: bits"),
        ("minmax2+ef/minmax4", "no decorator 'ef/minmax4'"),
    ],
)
def test_wrong_specifications(spec: Any, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        codecs.get(spec)


def test_parameters_are_checked_by_the_class_itself() -> None:
    for wrong in ({"bits": 0}, {"bits": 2.0}, {"bucket": 4}, {"bucket": True}, {"rounding": "down"}, {"seed": "7"}):
        with pytest.raises(CodecError):
            MinMax(**wrong)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (MinMax(np.int64(4), np.uint16(256), seed=np.uint64(2**63)), MinMax(4, 256, seed=2**63)),
        (codecs.Trellis(np.int8(3), np.int32(512), np.array(64), np.int16(2)), codecs.Trellis(3, 512, 64, 2)),
        (codecs.Cast("float8_e4m3", np.int64(64)), codecs.Cast("float8_e4m3", 64)),
        (codecs.OneBit(np.int64(64)), codecs.OneBit(64)),
        (codecs.Dithering(np.int64(3), seed=np.int64(1)), codecs.Dithering(3, seed=1)),
        (TopK(np.float64(0.25), np.int64(64)), TopK(0.25, 64)),
        (TopK(np.float32(1), np.int64(64)), TopK(64, 64)),
        (RandomK(np.uint8(5), scale=np.True_), RandomK(5, scale=True)),
        (codecs.get({"compressor": "topk", "k": np.int64(5)}), TopK(5)),
        (codecs.Momentum(MinMax(), np.float64(0.5)), codecs.Momentum(MinMax(), 0.5)),
        (codecs.Momentum(MinMax(), 0), codecs.get("minmax8+nesterov:mu=0.0")),
    ],
    ids=repr,
)
def test_numbers_of_other_libraries_are_pythons(given: codecs.Codec, plain: codecs.Codec) -> None:
    """Ranks compare specifications, and kernels take Python's numbers."""
    assert (given, hash(given), given.spec(), repr(given)) == (plain, hash(plain), plain.spec(), repr(plain))
    assert "np." not in repr(given)
    x = np.random.default_rng(0).standard_normal(600).astype(np.float32)
    assert given.encode(x).tobytes() == plain.encode(x).tobytes()


@pytest.mark.parametrize("wrong", [np.True_, np.float32(4), np.array([4]), "4", None, 4j], ids=repr)
def test_what_is_no_integer(wrong: Any) -> None:
    with pytest.raises(CodecError, match="bits="):
        MinMax(wrong)


def test_sizes_are_those_of_the_kernels() -> None:
    """Python and C++ each define the format of a wire once; the sizes must agree."""
    for codec in [*EVERY, *(codecs.get(row.spec) for row in ALL)]:
        bucket = codec.granule
        counts = {0, 1, 7, 8, 9, 1000, bucket - 1, bucket, bucket + 1, 3 * bucket, 5 * bucket + 13, 100_003}
        for count, dtype in itertools.product(counts, dtypes.DTYPES):
            found = codec.host().wire_nbytes(count, dtype.code)
            assert codec.encoded_nbytes(count, dtype) == found, f"{codec}: {count} {dtype}"


def test_encoded_nbytes_of_what_cannot_be() -> None:
    for count in (-1, 2.0, "3", None):
        with pytest.raises(ArgumentError, match=f"count is {count!r}; it must be an integer, 0 or more"):
            codecs.MinMax().encoded_nbytes(count, "float32")
    for call in (-1, 1 << 64, "0", 1.0):
        with pytest.raises(ArgumentError, match="the number of a collective is an integer"):
            codecs.MinMax().encode(np.ones(3, np.float32), call)
    assert type(codecs.NoCodec().encoded_nbytes(np.int32(3), "float32")) is int
    with pytest.raises(ArgumentError, match="float64"):
        codecs.NoCodec().encoded_nbytes(1, "float64")


def test_granule_and_splittable() -> None:
    assert (MinMax(8, 256).granule, MinMax(8, 256).splittable) == (256, True)
    assert (MinMax(8, "shard").granule, MinMax(8, "shard").splittable) == (1024, False)
    assert (NoCodec().granule, NoCodec().splittable) == (1024, True)


def test_encode_takes_any_shape_and_the_three_types() -> None:
    x = (np.arange(24, dtype=np.float32) % 2 * 3).reshape(4, 6)  # ends of the range, which are exact
    codec = MinMax(8, 8)
    assert (codec.encode(x) == codec.encode(x.reshape(-1))).all()
    assert (codec.encode(x[:, ::2]) == codec.encode(np.ascontiguousarray(x[:, ::2]))).all()
    bf16 = x.astype(ml_dtypes.bfloat16)
    wire = codec.encode(bf16)
    assert (codec.encode(bf16.view(np.uint16), dtype="bfloat16") == wire).all()
    decoded = codec.decode(wire, 24, "bfloat16")
    assert decoded.dtype == np.uint16
    assert (decoded.view(ml_dtypes.bfloat16) == bf16.reshape(-1)).all()
    half = codec.decode(codec.encode(x.astype(np.float16)), 24, "float16")
    assert half.dtype == np.float16 and (half == x.reshape(-1)).all()
    assert codec.encode(np.empty(0, np.float32)).size == 0 == codec.decode(np.empty(0, np.uint8), 0, "float32").size


def test_encode_and_decode_refuse_what_does_not_fit() -> None:
    codec = MinMax(8, 8)
    with pytest.raises(ArgumentError, match="float64"):
        codec.encode(np.zeros(4))
    with pytest.raises(ArgumentError, match="an array of int32 cannot be read as float32"):
        codec.encode(np.zeros(4, np.int32), dtype="float32")
    with pytest.raises(ArgumentError, match="an array of >f4 cannot be read as float32"):
        codec.encode(np.zeros(4, ">f4"))
    with pytest.raises(ArgumentError, match="an array of >u2 cannot be read as bfloat16"):
        codec.encode(np.zeros(4, ">u2"), dtype="bfloat16")
    with pytest.raises(CodecError, match="the wire of 5 float32 is 16 bytes of uint8, not 12 of uint8"):
        codec.decode(np.zeros(12, np.uint8), 5, "float32")
    with pytest.raises(CodecError, match="not 16 of float32"):
        codec.decode(np.zeros(16, np.float32), 5, "float32")


@pytest.mark.parametrize(
    "spec",
    [
        *("minmax8", "minmax1", "minmax4:rounding=stochastic", "none", "cast", "topk:k=0.3", "randomk:k=0.5"),
        *(f"onebit:reconstruct={name}" for name in ("sign", "scale", "mean", "midpoint")),
        *("dithering:k=127", "dithering:k=7,partition=natural"),
    ],
)
def test_never_beyond_the_greatest_magnitude(spec: str) -> None:
    """Values at the end of float16 stay finite; docs/algorithms.md names these codecs."""
    x = np.random.default_rng(0).uniform(-65504, 65504, 4099).astype(np.float16)
    x[::7], x[3::11] = 65504, -65504
    x[1024:2048] = 65504
    codec = codecs.get(spec)
    decoded = codec.decode(codec.encode(x, call=5), x.size, "float16", call=5)
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("codec", [NoCodec(), *(codecs.get(row.spec) for row in ALL)], ids=lambda codec: codec.spec())
def test_a_tile_that_is_not_by_bucket_has_independent_elements(codec: codecs.Codec) -> None:
    """Another first element changes no other one, so the device may divide a bucket anywhere."""
    tile, x = codec.kernel().tile, np.linspace(1, 2, 64, dtype=np.float32)
    if tile is None or tile.by_bucket:
        return
    first = codec.decode(codec.encode(x), x.size, "float32")
    x[0] = 30_000
    assert codec.decode(codec.encode(x), x.size, "float32")[1:].tobytes() == first[1:].tobytes()
