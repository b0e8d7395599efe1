"""An oracle of all-reduce with error feedback and momentum in NumPy, from shards, rounds and formulas."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import oracle
from codec_table import oracle_of
from laws import shards
from oracle import RngCounter, f32, from_float, to_float

from qccl.codecs import get
from qccl.codecs.feedback import feedback_of, momentum_of

Codec = oracle.Codec


def oracle_codec(spec: str) -> Codec:
    """The oracle's codec for ``spec`` without decorators."""
    return oracle_of(get(spec).plain)


@dataclass
class Rank:
    """The state of one rank: fp32 of the vector's length, or None if its codec has no state of that kind."""

    residual: np.ndarray | None
    momentum: np.ndarray | None

    def copy(self) -> Rank:
        return Rank(*(None if a is None else a.copy() for a in (self.residual, self.momentum)))


def ranks_without_state(spec: str, ranks: int, count: int) -> list[Rank]:
    """The state of ``ranks`` ranks before the first call."""
    state_names = get(spec).state_names

    def zeros(kind: str) -> np.ndarray | None:
        return np.zeros(count, f32) if kind in state_names else None

    return [Rank(zeros("residual"), zeros("momentum")) for _ in range(ranks)]


@dataclass
class Group:
    """All ranks of an all-reduce of ``count`` elements, step after step."""

    spec: str
    ranks: int
    count: int
    dtype: str
    algorithm: str
    op: str = "sum"
    call: int = 0
    kept: list[Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kept = ranks_without_state(self.spec, self.ranks, self.count)

    def step(self, inputs: list[np.ndarray], lr: float = 1.0) -> np.ndarray:
        """The result of one call. State changes if the result is finite. bfloat16 is uint16."""
        with np.errstate(all="ignore"):
            return self._step(inputs, f32(lr))

    def _step(self, inputs: list[np.ndarray], lr: np.float32) -> np.ndarray:
        kept = [k.copy() for k in self.kept]
        values = [with_momentum(k, to_float(x, self.dtype), self.spec) for k, x in zip(kept, inputs, strict=True)]
        scale = f32(1 / self.ranks) if self.op == "avg" else f32(1)
        if self.ranks == 1:
            result = from_float(values[0] * scale, self.dtype) if kept[0].momentum is not None else inputs[0].copy()
        elif self.algorithm == "one_shot":
            terms = [
                self._coded(k, x, slice(0, self.count), r, 0, lr)
                for r, (k, x) in enumerate(zip(kept, values, strict=True))
            ]
            result = from_float(total(terms) * scale if scale != 1 else total(terms), self.dtype)
        else:
            result = np.empty_like(inputs[0])
            for owner, shard in enumerate(shards(self.count, self.ranks, get(self.spec).granule)):
                if shard.start == shard.stop:
                    continue
                terms = [
                    x[shard] if r == owner else self._coded(k, x, shard, r, 0, lr)
                    for r, (k, x) in enumerate(zip(kept, values, strict=True))
                ]
                x = np.empty(self.count, f32)
                x[shard] = total(terms) * scale if scale != 1 else total(terms)
                decoded = self._coded(kept[owner], x, shard, owner, 1, lr)
                result[shard] = from_float(decoded, self.dtype)
        self.call += 1
        if np.isfinite(to_float(result, self.dtype)).all():
            self.kept = kept
        return result

    def _coded(self, kept: Rank, x: np.ndarray, part: slice, rank: int, round_: int, lr: np.float32) -> np.ndarray:
        """The decoded values of a part of ``x`` with its residual; round 1 is also rounded to the element type."""
        counter = RngCounter(self.call, round_, rank, part.start)
        return coded(kept, x, part, self.spec, self.dtype, counter, lr, rounded=bool(round_))


def with_momentum(kept: Rank, x: np.ndarray, spec: str) -> np.ndarray:
    """``m = mu m + x``, then ``x + mu m``."""
    if kept.momentum is None:
        return x
    mu = f32(momentum_of(get(spec)))
    momentum = mu * kept.momentum + x
    kept.momentum = finite(momentum)
    return x + mu * momentum


def finite(state: np.ndarray) -> np.ndarray:
    """New state as it is stored, with 0 in place of infinity and NaN."""
    return np.where(np.isfinite(state), state, f32(0))


def coded(
    kept: Rank, x: np.ndarray, part: slice, spec: str, dtype: str, counter: RngCounter, lr: np.float32, *, rounded: bool
) -> np.ndarray:
    """The decoded values of a part of ``x`` with its residual; ``rounded``: it is of those in the element type.

    A residual is multiplied by beta and divided by the learning rate when it is added, and rounded to its own type when
    it is stored.
    """
    codec = oracle_codec(spec)
    beta, kept_as = feedback_of(get(spec))
    v = x[part] if kept.residual is None else x[part] + kept.residual[part] * (f32(beta) * (f32(1) / lr))
    if codec is None:
        decoded = to_float(from_float(v, dtype), dtype)
    else:
        wire = oracle.encode_any(codec, v, dtype, counter)
        decoded = oracle.combine("sum", None, oracle.wire_floats(codec, wire, v.size, dtype, counter), v.size)
    if kept.residual is not None:
        received = to_float(from_float(decoded, dtype), dtype) if rounded else decoded
        kept.residual[part] = finite(to_float(from_float((v - received) * lr, kept_as.name), kept_as.name))
    return decoded


def total(terms: list[np.ndarray]) -> np.ndarray:
    """The sum in rank order, beginning with the first term itself."""
    result = terms[0]
    for term in terms[1:]:
        result = result + term
    return result
