"""The codecs that go bucket by bucket, one row each: the oracle's, with parameters that differ in kind.

What is listed here is tested against the oracle on all element types and instruction sets, with foreign bytes
(test_bucket_codecs.py); its wire is held (golden/, those with buckets of 16); it keeps the laws of all-reduce; and its
device kernels are emulated and compiled.
"""

from __future__ import annotations

from oracle_buckets import Bucketed, OneBit

RECONSTRUCTIONS = ("sign", "scale", "mean", "midpoint")

#: by the name of the codec
TABLE: dict[str, list[Bucketed]] = {
    "onebit": [OneBit(bucket, reconstruct) for bucket in (8, 16, 1024, 8200) for reconstruct in RECONSTRUCTIONS],
}

ALL = [codec for rows in TABLE.values() for codec in rows]
