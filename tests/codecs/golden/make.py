"""Writes wire.json: small wires of every codec, as the oracle makes them. Run by hand when the wire format is extended;
a change of an existing entry is a change of the format.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import oracle
from codec_table import ALL, TABLE

FILE = Path(__file__).with_name("wire.json")


def values(dtype: str) -> np.ndarray:
    """21 values: two full groups of eight and a part of one, with zeros, both signs and one large value."""
    x = np.array([(7 * i * i) % 23 - 11 + i / 8 for i in range(21)], np.float32)
    x[4], x[5], x[18] = 0.0, -0.0, 300.0
    return oracle.from_float(x, dtype)


def specimens() -> list[tuple[str, oracle.Codec, str]]:
    found: list[tuple[str, oracle.Codec, str]] = [("none", None, dtype) for dtype in ("float32", "bfloat16")]
    for bits in range(1, 9):
        found.append((f"minmax{bits}:bucket=16", oracle.MinMax(bits, 16), "float32"))
        spec = f"minmax{bits}:bucket=8,rounding=stochastic,seed={bits}"
        found.append((spec, oracle.MinMax(bits, 8, True, bits), "float16"))
    found.append(("minmax4:bucket=shard", oracle.MinMax(4, "shard"), "bfloat16"))
    for codec in ALL:
        if codec.bucket == 16 or all(row.bucket != 16 for row in TABLE[codec.name]):
            found += [(codec.spec, codec, dtype) for dtype in ("float32", "float16")]
    return found


def main() -> None:
    counter, given, wires = oracle.RngCounter(call=5), {}, []
    for spec, codec, dtype in specimens():
        x = values(dtype)
        wire = oracle.encode(codec, x, dtype, counter)
        decoded = oracle.decode(codec, wire, x.size, dtype, counter=counter)
        given[dtype] = x.tobytes().hex()
        wires.append({"codec": spec, "dtype": dtype, "wire": wire.tobytes().hex(), "decoded": decoded.tobytes().hex()})
    document = {"call": counter.call, "values": given, "wires": wires}
    FILE.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
