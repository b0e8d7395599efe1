"""All codecs but ``none`` and ``minmax``, one row each: the oracle's, with parameters that differ in kind.

What is listed here is tested against the oracle on all element types and instruction sets, with foreign bytes
(test_kernels.py); its wire is held (golden/, those with buckets of 16); it keeps the laws of all-reduce; and its
device kernels are emulated and compiled.
"""

from __future__ import annotations

import dataclasses
import itertools

import oracle
from oracle_blocks import MXFP4, MXFP8, NVFP4, Levels
from oracle_buckets import Bucketed, Cast, Dithering, OneBit, RandomK, TopK
from oracle_trellis import Trellis

from qccl.codecs import Codec, get

TYPES = ("float16", "bfloat16", "float8_e4m3", "float8_e5m2")
RECONSTRUCTIONS = ("sign", "scale", "mean", "midpoint")

#: bits, bucket, block, outliers
TRELLIS = (
    *((8, 2048, 128, 4), (7, 200, 64, 0), (6, 1024, 32, 16), (5, 2048, 256, 1), (4, 2048, 512, 2), (3, 48, 1024, 3)),
    *((2, 2048, 2048, 8), (1, 2048, 128, 4)),
)

#: bits, block, bucket, rounding, seed
LEVELS = (
    *((2, 16, 16, "nearest", 0), (3, 16, 16, "stochastic", 3), (4, 16, 16, "nearest", 0), (4, 16, 48, "stochastic", 1)),
    *((2, 64, 1024, "nearest", 0), (3, 32, 1024, "nearest", 0), (4, 32, 1024, "nearest", 0)),
    *((3, 128, 128, "nearest", 0), (2, 128, 1024, "stochastic", 7), (4, 64, 192, "stochastic", 2)),
)

#: by the name of the codec
TABLE: dict[str, list[Bucketed]] = {
    "cast": [Cast(dtype, bucket) for dtype, bucket in itertools.product(TYPES, (8, 16, 1024))],
    "dithering": [
        *(Dithering(k, partition, norm, 16, 7) for k, partition, norm in [(1, "linear", "max"), (5, "natural", "l2")]),
        *(Dithering(k, "linear", norm, 256, k) for k, norm in itertools.product((3, 4, 15, 31, 127), ("max", "l2"))),
        *(Dithering(k, "natural", norm, 256, k) for k, norm in itertools.product((1, 7, 31), ("max", "l2"))),
        Dithering(63, "linear", "l2", 8200),
    ],
    "onebit": [OneBit(bucket, reconstruct) for bucket in (8, 16, 1024, 2600, 8200) for reconstruct in RECONSTRUCTIONS],
    "randomk": [
        *(RandomK(k, block, 3, scale) for k, block, scale in [(3, 16, False), (0.3, 16, True), (0.01, 1000, True)]),
        *(RandomK(k, block, 3, scale) for k, block, scale in [(40, 40, False), (1, 8, True), (0.9, 1024, False)]),
    ],
    "topk": [
        *(TopK(k, block) for k, block in [(3, 16), (0.3, 16), (1, 8), (8, 8), (0.02, 256), (0.5, 264), (7, 1024)]),
        *(TopK(k, block) for k, block in [(0.01, 8200), (0.999, 1024), (0.002, 65544)]),
        *(TopK(k, block, "float16") for k, block in [(3, 16), (1, 8), (64, 1000), (0.01, 8200)]),
        *(TopK(k, block, "exp4") for k, block in [(3, 16), (8, 8), (0.3, 264), (64, 4096), (0.5, 8200)]),
    ],
    "trellis": [Trellis(*parameters) for parameters in TRELLIS],
    "levels": [Levels(*parameters) for parameters in LEVELS],
    "mxfp8": [MXFP8(type) for type in ("e4m3", "e5m2")],
    "mxfp4": [MXFP4()],
    "nvfp4": [NVFP4(bucket) for bucket in (16, 48, 1024)],
}

ALL = [codec for rows in TABLE.values() for codec in rows]


def with_small_buckets(largest: int) -> list[Bucketed]:
    """About three rows of each codec, where possible with buckets of which a short vector has several."""
    found = []
    for rows in TABLE.values():
        small = [row for row in rows if row.bucket <= largest] or rows
        found += small[:: max(1, len(small) // 3)]
    return found


_KINDS = {rows[0].name: type(rows[0]) for rows in TABLE.values()}


def oracle_of(codec: Codec) -> oracle.Codec:
    """The oracle of one of qccl's codecs."""
    fields = dataclasses.asdict(codec)  # type: ignore[call-overload]
    if codec.name == "none":
        return None
    if codec.name == "minmax":
        return oracle.MinMax(fields["bits"], fields["bucket"], fields["rounding"] == "stochastic", fields["seed"])
    return _KINDS[codec.name](**fields)


def oracle_codec(spec: str) -> oracle.Codec:
    return oracle_of(get(spec))
