"""Element types, as libraries name them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from qccl import codecs
from qccl.base import dtypes
from qccl.base.errors import ArgumentError


@pytest.mark.parametrize(
    "given",
    ["float16", "half", 6, np.int64(6), np.float16, np.dtype("float16"), dtypes.FLOAT16, "torch.float16"],
    ids=repr,
)
def test_element_types_as_libraries_have_them(given: Any) -> None:
    assert dtypes.get(given) is dtypes.FLOAT16
    assert codecs.NoCodec().encoded_nbytes(5, given) == 10


def test_bfloat16_of_ml_dtypes() -> None:
    assert dtypes.get(ml_dtypes.bfloat16) is dtypes.get(np.dtype(ml_dtypes.bfloat16)) is dtypes.BFLOAT16


@pytest.mark.parametrize(
    "given", ["float64", 3, 7.5, None, [], np.int32, "torch.int8", object()], ids=lambda given: repr(given)[:17]
)
def test_what_is_no_element_type(given: Any) -> None:
    with pytest.raises(ArgumentError, match="the element types are float32"):
        dtypes.get(given)


def test_numbers_of_kernels_and_of_nccl():
    assert [(each.itemsize, each.code, each.nccl) for each in dtypes.DTYPES] == [(4, 0, 7), (2, 1, 6), (2, 2, 9)]
    for each, numbers in zip(dtypes.DTYPES, (np.float32, np.float16, ml_dtypes.bfloat16), strict=True):
        info = ml_dtypes.finfo(numbers)
        assert (each.mantissa_bits, each.min_exponent) == (info.nmant, info.minexp) and dtypes.get(each.nccl) is each
