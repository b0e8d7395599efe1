"""Decorators of codecs: their spelling and stacking; a single encoding is the inner codec's."""

from __future__ import annotations

import re

import numpy as np
import pytest

from qccl.codecs import Cast, ErrorFeedback, MinMax, Momentum, OneBit, get
from qccl.codecs.feedback import feedback_of, momentum_of, state_nbytes
from qccl.dtypes import BFLOAT16, FLOAT16, FLOAT32
from qccl.errors import CodecError

FEEDBACK = ErrorFeedback(OneBit())
BOTH = Momentum(ErrorFeedback(MinMax(bits=2, bucket=64)), 0.5)


@pytest.mark.parametrize(
    "spec, expected",
    [
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
    ],
    ids=str,
)
def test_spellings_of_the_same_codec(spec, expected):
    codec = get(spec)
    assert codec == expected and hash(codec) == hash(expected)
    assert get(codec.spec()) == codec
    assert eval(repr(codec)) == codec


@pytest.mark.parametrize(
    "spec, reason",
    [
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
    ],
    ids=str,
)
def test_errors_say_what_is_possible(spec, reason):
    with pytest.raises(CodecError, match=reason):
        get(spec)


def test_decorators_go_around_codecs():
    for make in (ErrorFeedback, Momentum):
        with pytest.raises(CodecError, match=re.escape(f"{make.__name__} takes a Codec, not 'onebit'")):
            make("onebit")
    with pytest.raises(CodecError, match=r"momentum follows \+ef"):
        ErrorFeedback(Momentum(OneBit()))


def test_what_a_codec_remembers():
    assert [get(s).state_names for s in ("onebit", "onebit+ef", "onebit+nesterov", "onebit+ef+nesterov")] == [
        (),
        ("residual",),
        ("momentum",),
        ("residual", "momentum"),
    ]
    assert get("onebit+ef+nesterov").plain == get("onebit").plain == OneBit()
    assert [feedback_of(get(s)) for s in ("onebit+nesterov", "onebit+ef:beta=0.5,dtype=bfloat16+nesterov")] == [
        (1, FLOAT32),
        (0.5, BFLOAT16),
    ]
    assert [state_nbytes(get(s)) for s in ("onebit", "onebit+ef", "onebit+ef:dtype=bfloat16+nesterov")] == [0, 4, 6]
    assert [momentum_of(get(s)) for s in ("onebit", "onebit+ef", "onebit+ef+nesterov:mu=0.25")] == [0, 0, 0.25]


@pytest.mark.parametrize("spec", ["minmax3:bucket=64", "minmax2:bucket=shard", "onebit:bucket=32"])
def test_one_encoding_is_that_of_the_codec_inside(spec):
    inner, outer = get(spec), get(spec + "+ef+nesterov")
    x = np.linspace(-1, 3, 1000, dtype=np.float32)
    assert (outer.granule, outer.splittable) == (inner.granule, inner.splittable)
    assert [outer.encoded_nbytes(n, FLOAT16) for n in (0, 1, 999)] == [
        inner.encoded_nbytes(n, FLOAT16) for n in (0, 1, 999)
    ]
    wire = outer.encode(x)
    assert np.array_equal(wire, inner.encode(x))
    assert np.array_equal(outer.decode(wire, x.size, FLOAT32), inner.decode(wire, x.size, FLOAT32))
    assert np.array_equal(outer.error_bound(x), inner.error_bound(x))
