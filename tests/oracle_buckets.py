"""What the codecs that go bucket by bucket compute, in NumPy, written from their formulas (see ``oracle.py``)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from oracle import NAN, Place, Sparse, f32, pack, unpack

NO_BYTES = np.zeros(0, np.uint8)


def sum_of(x: np.ndarray) -> np.float32:
    """In the order of docs/wire-format.md: 256 lanes, tiles of 2048, lanes folded in halves."""
    lanes = np.zeros(256, f32)
    for start in range(0, x.size, 2048):
        tile = np.zeros(256, f32)
        for row in range(start, min(start + 2048, x.size), 256):
            part = x[row : min(row + 256, x.size)]
            tile[: part.size] += part
        lanes = lanes + tile
    while lanes.size > 1:
        half = lanes.size // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]


def numbers(*x: float) -> np.ndarray:
    return np.array(x, "<f4").view(np.uint8)


class Bucketed:
    """The wire of a codec: the first parts of all buckets, padding, the second parts of all."""

    name: ClassVar[str]
    bucket: int

    @property
    def spec(self) -> str:
        fields = dataclasses.asdict(self)  # type: ignore[call-overload]
        return f"{self.name}:" + ",".join(f"{key}={value}" for key, value in fields.items())

    def sizes(self, count: int, dtype: str) -> tuple[int, int]:
        """Bytes of a bucket of ``count`` elements in the two parts."""
        raise NotImplementedError

    def encode_bucket(self, x: np.ndarray, dtype: str, place: Place) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def decode_bucket(
        self, codes: np.ndarray, meta: np.ndarray, count: int, dtype: str, place: Place
    ) -> np.ndarray | Sparse:
        raise NotImplementedError

    def encode(self, x: np.ndarray, dtype: str, place: Place) -> np.ndarray:
        codes, metas = [NO_BYTES], [NO_BYTES]
        for start in range(0, x.size, self.bucket):
            where = dataclasses.replace(place, index=place.index + start)
            code, meta = self.encode_bucket(x[start : start + self.bucket], dtype, where)
            assert (code.size, meta.size) == self.sizes(min(self.bucket, x.size - start), dtype)
            codes.append(code)
            metas.append(meta)
        first, second = np.concatenate(codes), np.concatenate(metas)
        padding = np.zeros(-first.size % 4 if second.size else 0, np.uint8)
        return np.concatenate([first, padding, second])

    def decode(self, wire: np.ndarray, count: int, dtype: str, place: Place) -> np.ndarray | Sparse:
        starts = range(0, count, self.bucket)
        sizes = [self.sizes(min(self.bucket, count - start), dtype) for start in starts]
        code, meta = 0, wire.size - sum(size for _, size in sizes)
        parts = []
        for start, (code_size, meta_size) in zip(starts, sizes, strict=True):
            n = min(self.bucket, count - start)
            where = dataclasses.replace(place, index=place.index + start)
            found = self.decode_bucket(
                wire[code : code + code_size].copy(), wire[meta : meta + meta_size].copy(), n, dtype, where
            )
            parts.append(found)
            code, meta = code + code_size, meta + meta_size
        if any(isinstance(part, Sparse) for part in parts):
            indices = [part.indices + start for part, start in zip(parts, starts, strict=True)]
            return Sparse(np.concatenate(indices), np.concatenate([part.values for part in parts]))
        return np.concatenate([np.zeros(0, f32), *parts])


@dataclass(frozen=True)
class OneBit(Bucketed):
    bucket: int = 1024
    reconstruct: str = "sign"
    name: ClassVar[str] = "onebit"

    def sizes(self, count: int, dtype: str) -> tuple[int, int]:
        return (count + 7) // 8, 8 if self.reconstruct in ("mean", "midpoint") else 4

    def encode_bucket(self, x: np.ndarray, dtype: str, place: Place) -> tuple[np.ndarray, np.ndarray]:
        if not np.isfinite(x).all():
            return np.zeros((x.size + 7) // 8, np.uint8), numbers(*[NAN] * (self.sizes(1, dtype)[1] // 4))
        return pack((x < 0).astype(np.int64), 1), numbers(*self.sides(x))

    def sides(self, x: np.ndarray) -> list[np.float32]:
        most = abs(x).max()
        pre = f32(2.0**-64) if most >= f32(2.0**64) else f32(2.0**64) if most < f32(2.0**-64) else f32(1)

        def mean(chosen: np.ndarray) -> np.float32:
            if not chosen.any():
                return f32(0)
            found = sum_of(np.where(chosen, x, f32(0)) * pre) / f32(chosen.sum())
            return np.clip(found, -most * pre, most * pre) * (f32(1) / pre)

        if self.reconstruct == "sign":
            return [f32(1)]
        if self.reconstruct == "scale":
            return [np.minimum(sum_of(abs(x) * pre) / f32(x.size), most * pre) * (f32(1) / pre)]
        if self.reconstruct == "mean":
            return [mean(x < 0), mean(~(x < 0))]
        ordered = x[np.lexsort((~np.signbit(x), x))]
        least, greatest = ordered[0], ordered[-1]
        return [f32(0.75) * least + f32(0.25) * greatest, f32(0.25) * least + f32(0.75) * greatest]

    def decode_bucket(
        self, codes: np.ndarray, meta: np.ndarray, count: int, dtype: str, place: Place
    ) -> np.ndarray | Sparse:
        sides = meta.view("<f4")
        lower = sides[0] if sides.size == 2 else -sides[0]
        return np.where(unpack(codes, count, 1) == 1, lower, sides[-1]).astype(f32)
