"""The trellis codec in NumPy, written from the formulas in docs/wire-format.md (see ``oracle.py``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from oracle import NAN, RngCounter, f32, pack, unpack
from oracle_buckets import Bucketed, Values, numbers

SEQUENCES = 32
NO_OUTLIER = 0xFFE00000
TINY, HUGE = f32(2.0**-100), f32(2.0**125)
REACH = {1: f32(0.4375), 2: f32(0.6875), 3: f32(0.84375), 4: f32(0.9375)}


@dataclass(frozen=True)
class Trellis(Bucketed):
    bits: int = 8
    bucket: int = 2048
    block: int = 128
    outliers: int = 4
    name: ClassVar[str] = "trellis"

    @property
    def top(self) -> int:
        return 2 ** (self.bits + 1) - 1

    def blocks(self, count: int) -> list[slice]:
        return [slice(start, min(start + self.block, count)) for start in range(0, count, self.block)]

    def sizes(self, count: int, dtype: str) -> tuple[int, int]:
        blocks = len(self.blocks(count))
        return (count * self.bits + 7) // 8, 8 + 4 * self.outliers + (blocks + 3) // 4 * 4

    # levels

    def units(self, shares: np.ndarray, scale: np.float32) -> np.ndarray:
        """The unit of each block, half of its highest level, times ``pre``."""
        part = ((shares.astype(np.uint32) + 1777) << 19).view(f32)
        with np.errstate(over="ignore", invalid="ignore"):
            unit = part * (scale * pre(scale)) * (f32(0.5) * REACH.get(self.bits, f32(1)))
        return np.where(shares == 0, f32(0), unit)

    def level(self, number: np.ndarray) -> np.ndarray:
        u = (2 * number - self.top).astype(f32) * (f32(1) / f32(self.top))
        return u * (f32(1) + u * u)

    def window(self, position: np.ndarray) -> np.ndarray:
        z = np.clip(position, f32(-2), f32(2))
        s = z * z
        u = z * (f32(0.987) + s * f32(0.9056)) / (f32(1) + s * (f32(1.6856) + s * f32(0.093)))
        half = f32(0.5) * f32(self.top)
        return np.clip(np.trunc(u * half + half).astype(np.int64) - 1, 0, self.top - 3)

    # a bucket

    def encode_bucket(self, x: np.ndarray, dtype: str, counter: RngCounter) -> tuple[np.ndarray, np.ndarray]:
        blocks = self.blocks(x.size)
        shares = np.zeros((len(blocks) + 3) // 4 * 4, np.uint8)
        words = np.full(self.outliers, NO_OUTLIER, np.uint32)
        if not np.isfinite(x).all():
            codes = np.zeros((x.size * self.bits + 7) // 8, np.uint8)
            return codes, np.concatenate([numbers(NAN, 0), words.view(np.uint8), shares])
        middles = (
            [x[b].min() + (x[b].max() - x[b].min()) * f32(0.5) for b in blocks] if abs(x).max() < HUGE else [f32(0)]
        )
        centre = sorted(middles)[(len(middles) - 1) // 2] + f32(0)
        d = x - centre
        for k in range(self.outliers if abs(d).max() >= TINY else 0):
            i = int(abs(d).argmax())
            if d[i] == 0:
                break
            words[k] = outlier(i, d[i])
            d[i] = 0
        scale = abs(d).max()
        for k, b in enumerate(blocks):
            shares[k] = share(abs(d[b]).max(), scale)
        unit = np.repeat(self.units(shares[: len(blocks)], scale), self.block)[: x.size]
        inverse = np.divide(f32(1), unit, out=np.zeros_like(unit), where=unit > 0)
        codes = pack(self.search(d * pre(scale) * inverse), self.bits)
        return codes, np.concatenate([numbers(centre, scale), words.view(np.uint8), shares])

    def search(self, positions: np.ndarray) -> np.ndarray:
        """The codes of least squared error of each sequence, by the Viterbi algorithm."""
        steps = -(-positions.size // SEQUENCES)
        padded = np.zeros(steps * SEQUENCES, f32)
        padded[: positions.size] = positions
        z = padded.reshape(steps, SEQUENCES)
        window = self.window(z)
        candidates = np.stack([window + (c - window) % 4 for c in range(4)])
        errors = z - self.level(candidates)
        errors = errors * errors
        cost = np.full((4, SEQUENCES), f32(1e30))
        cost[0] = 0
        turns = np.zeros((steps, 4, SEQUENCES), np.int64)
        for t in range(steps):
            following = np.empty_like(cost)
            for state in range(4):
                bit, before = divmod(state, 2)
                ways = [cost[2 * before + that] + errors[2 * (bit ^ that) + before, t] for that in (0, 1)]
                turns[t, state] = ways[1] < ways[0]
                following[state] = np.minimum(*ways)
            cost = following
        bit, before = np.divmod(cost.argmin(axis=0), 2)
        codes = np.zeros((steps, SEQUENCES), np.int64)
        lanes = np.arange(SEQUENCES)
        for t in reversed(range(steps)):
            that = turns[t, 2 * bit + before, lanes]
            codes[t] = candidates[2 * (bit ^ that) + before, t, lanes] // 4 * 2 + bit
            bit, before = before, that
        return codes.reshape(-1)[: positions.size]

    def decode_bucket(self, codes: np.ndarray, meta: np.ndarray, count: int, dtype: str, counter: RngCounter) -> Values:
        centre, scale = meta[:8].view("<f4")
        words = meta[8 : 8 + 4 * self.outliers].view("<u4")
        shares = meta[8 + 4 * self.outliers :][: len(self.blocks(count))]
        code = unpack(codes, count, self.bits)
        earlier = np.concatenate([np.zeros(2 * SEQUENCES, np.int64), code])
        before, that = earlier[SEQUENCES : SEQUENCES + count], earlier[:count]
        number = code // 2 * 4 + 2 * ((code ^ that) & 1) + (before & 1)
        unit = np.repeat(self.units(shares, scale), self.block)[:count]
        with np.errstate(over="ignore", invalid="ignore"):
            y = self.level(number) * unit * (f32(1) / pre(scale)) + centre
            for word in reversed(words):
                element, distance = int(word >> 21), np.uint32((int(word) << 11) & 0xFFFFFFFF).view(f32)
                if element < count and distance != 0:
                    y[element] = distance + centre
        return y


def pre(scale: np.float32) -> np.float32:
    return f32(2.0**100) if scale < TINY else f32(1)


def share(distance: np.float32, scale: np.float32) -> int:
    """The share of the scale, rounded up to four bits of mantissa."""
    if distance == 0:
        return 0
    bits = int((distance * pre(scale) / (scale * pre(scale))).view(np.uint32))
    return max(-(-bits // 2**19) - 1777, 1)


def outlier(element: int, distance: np.float32) -> int:
    """The element's number, and the distance with twelve bits of mantissa, never infinite."""
    bits = int(abs(distance).view(np.uint32))
    kept, rest = divmod(bits, 2**11)
    kept += rest > 2**10 or (rest == 2**10 and kept % 2 == 1)
    kept = min(kept, 0x7F7FFFFF >> 11)
    return element << 21 | int(distance < 0) << 20 | kept
