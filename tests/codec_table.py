"""The codecs that go bucket by bucket, one row each: the oracle's, with parameters that differ in kind.

Whatever is listed here is tested by test_bucket_codecs.py (against the oracle, on all element types and instruction
sets, with foreign bytes), test_codec_golden.py (those with buckets of 16), the laws of all-reduce, the emulated device and its compiler.
"""

from __future__ import annotations

from oracle_buckets import Bucketed, OneBit

RECONSTRUCTIONS = ("sign", "scale", "mean", "midpoint")

#: by the name of the codec
TABLE: dict[str, list[Bucketed]] = {
    "onebit": [OneBit(bucket, reconstruct) for bucket in (8, 16, 1024, 8200) for reconstruct in RECONSTRUCTIONS],
}

ALL = [codec for rows in TABLE.values() for codec in rows]
