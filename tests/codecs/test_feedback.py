"""Decorators of codecs: their spelling and stacking; a single encoding is the inner codec's."""

from __future__ import annotations

import re

import numpy as np
import pytest

from qccl.base.dtypes import BFLOAT16, FLOAT16, FLOAT32
from qccl.base.errors import CodecError
from qccl.codecs import ErrorFeedback, Momentum, OneBit, get
from qccl.codecs.feedback import feedback_of, momentum_of


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
