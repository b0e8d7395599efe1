"""The codecs that go bucket by bucket, one row each: the oracle's, with parameters that differ in kind.

What is listed here is tested against the oracle on all element types and instruction sets, with foreign bytes
(test_bucket_codecs.py); its wire is held (golden/, those with buckets of 16); it keeps the laws of all-reduce; and its
device kernels are emulated and compiled.
"""

from __future__ import annotations

from oracle_buckets import Bucketed, OneBit
from oracle_trellis import Trellis

RECONSTRUCTIONS = ("sign", "scale", "mean", "midpoint")

#: bits, bucket, block, outliers
TRELLIS = (
    *((8, 2048, 128, 4), (7, 200, 64, 0), (6, 1024, 32, 16), (5, 2048, 256, 1), (4, 2048, 512, 2), (3, 48, 1024, 3)),
    *((2, 2048, 2048, 8), (1, 2048, 128, 4)),
)

#: by the name of the codec
TABLE: dict[str, list[Bucketed]] = {
    "onebit": [OneBit(bucket, reconstruct) for bucket in (8, 16, 1024, 8200) for reconstruct in RECONSTRUCTIONS],
    "trellis": [Trellis(*parameters) for parameters in TRELLIS],
}

ALL = [codec for rows in TABLE.values() for codec in rows]
