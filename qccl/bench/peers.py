"""Other systems' compressors: one encode and decode by their published formulas, in NumPy.

Each function returns the decoded values; ``PEERS`` has the encoded sizes. Rounding is to nearest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

#: an array of float32; the type checker cannot follow NumPy's arithmetic
Values = Any

__all__ = ["PEERS", "Peer"]

f32 = np.float32


@dataclass(frozen=True)
class Peer:
    """A system's compressor.

    Attributes:
        bits: bits per element.
        bucket: elements that share a header; 0: all elements.
        header: bytes of a header.
        run: maps float32 values to decoded values; both have an axis of buckets and an axis of elements.
    """

    name: str
    bits: int
    bucket: int
    header: int
    run: Callable[[Values], Values]

    def decode(self, x: Values) -> Values:
        """``x`` after encoding and decoding; whole buckets only."""
        size = self.bucket or x.size
        if x.size % size:
            raise ValueError(f"{self.name}: {x.size} values are not whole buckets of {size}")
        return self.run(x.reshape(-1, size)).reshape(-1)

    def nbytes(self, count: int) -> float:
        """The encoded size of ``count`` elements."""
        return count * self.bits / 8 + self.header * count / (self.bucket or count)


def _ends(x: Values) -> tuple[Values, Values]:
    return x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)


def _largest(x: Values) -> Values:
    return np.abs(x).max(axis=1, keepdims=True)


def _over(a: Values | np.float32, b: Values) -> Values:
    """The quotient, or 0 where the divisor is 0."""
    return np.divide(a, b, out=np.zeros_like(b), where=b > 0)


def cgx(bits: int) -> Callable[[Values], Values]:
    """``unit = (max - min) / (2^b - 1)``, codes ``floor((x - min) / unit + 1/2)``; a range of 0 decodes to ``min``."""

    def run(x: Values) -> Values:
        low, high = _ends(x)
        unit = (high - low) / f32(2**bits - 1)
        codes = np.minimum(np.floor(_over(f32(1), unit) * (x - low) + f32(0.5)), f32(2**bits - 1))
        return np.where(unit < f32(1e-10), low, low + codes * unit)

    return run


def fbgemm(x: Values) -> Values:
    """FBGEMM's rows: codes of eight bits, scale and bias in fp32 behind each row."""
    low, high = _ends(x)
    scale = (high - low) / f32(255)
    return np.rint((x - low) * _over(f32(1), scale)) * scale + low


def absmax(x: Values) -> Values:
    """Signed bytes, scaled by the largest magnitude."""
    scale = _largest(x) / f32(127)
    return np.rint(x * _over(f32(1), scale)) * scale


def bagua(x: Values) -> Values:
    """``s = 255 / (max - min + 1e-7)``; codes ``min(rint(x s), rint(max s))``, less ``rint(max s) - 255``."""
    low, high = _ends(x)
    s = f32(255) / (high - low + f32(1e-7))
    return np.minimum(np.rint(x * s), np.rint(high * s)) / s


def hivemind(x: Values) -> Values:
    """256 cells of six standard deviations around the mean; each decodes to the mean of its values."""
    centre = x.mean()
    step = f32(6) * x.std() / f32(256)
    codes = np.clip(np.rint((x - centre) / step) + f32(128), 0, 255).astype(np.int64)
    number = np.bincount(codes.reshape(-1), minlength=256)
    total = np.bincount(codes.reshape(-1), weights=x.reshape(-1), minlength=256)
    return (total / np.maximum(number, 1)).astype(f32)[codes]


def pccl(x: Values) -> Values:
    """One range for all values, in 255 steps; codes are truncated, not rounded."""
    low, high = _ends(x)
    scale = (high - low) / f32(255)
    return np.trunc((x - low) / scale) * scale + low


def torchft(x: Values) -> Values:
    """float8 e4m3, each row scaled to a largest magnitude of 448."""
    scale = _over(f32(448), _largest(x))
    mantissa, exponent = np.frexp(x * scale)
    place = np.ldexp(f32(1), np.maximum(exponent, -5) - 4)  # three bits of mantissa; subnormals below 2^-6
    rounded = np.rint(np.ldexp(mantissa, exponent) / place) * place
    return _over(f32(1), scale) * np.clip(rounded, -448, 448)


def deepspeed4(x: Values) -> Values:
    """Sixteen steps over twice the largest magnitude, codes -8 to 7."""
    scale = f32(16) / (f32(2) * _largest(x) + f32(1e-5))
    return np.clip(np.rint(x * scale), -8, 7) / scale


def cntk(x: Values) -> Values:
    """One bit; each side of zero decodes to its mean."""
    below = x < 0

    def mean(chosen: Any) -> Values:
        return np.where(chosen, x, 0).sum(axis=1, keepdims=True) / np.maximum(chosen.sum(axis=1, keepdims=True), 1)

    decoded: Values = np.where(below, mean(below), mean(~below))
    return decoded.astype(f32)


def byteps(x: Values) -> Values:
    """One bit; plus or minus the mean magnitude."""
    scale = np.abs(x).mean(axis=1, keepdims=True)
    return np.where(x < 0, -scale, scale)


def deepspeed1(x: Values) -> Values:
    """One bit; plus or minus the root of the mean square."""
    scale = np.sqrt(np.square(x).mean(axis=1, keepdims=True))
    return np.where(x < 0, -scale, scale)


#: all compressors, with the bucket sizes that their systems use
PEERS = (
    Peer("FBGEMM row 32", 8, 32, 8, fbgemm),
    Peer("CGX 8 bit / 512", 8, 512, 8, cgx(8)),
    Peer("int8 absmax / 1024", 8, 1024, 4, absmax),
    Peer("Bagua", 8, 0, 32, bagua),
    Peer("hivemind uniform8", 8, 0, 1024, hivemind),
    Peer("PCCL min-max", 8, 0, 8, pccl),
    Peer("torchft fp8 / 1024", 8, 1024, 4, torchft),
    Peer("CGX 4 bit / 1024", 4, 1024, 8, cgx(4)),
    Peer("DeepSpeed int4 / 2048", 4, 2048, 4, deepspeed4),
    Peer("CGX 2 bit / 1024", 2, 1024, 8, cgx(2)),
    Peer("CNTK 1 bit / 1024", 1, 1024, 8, cntk),
    Peer("BytePS 1 bit", 1, 0, 4, byteps),
    Peer("DeepSpeed 1 bit", 1, 0, 4, deepspeed1),
)
