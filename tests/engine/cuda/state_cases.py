"""Reductions with state, and its commits, for CUDA kernels without a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import kernel_calls
import numpy as np
from codec_table import TABLE, oracle_of
from kernel_calls import KINDS, hard_values
from kernel_cases import Arrays, Case, Operations, Prepared
from oracle import RngCounter

from qccl import codecs
from qccl.base import dtypes
from qccl.base.dtypes import BFLOAT16, FLOAT32, DType
from qccl.codecs.floats import from_float32
from qccl.collectives.schedule import Commit, Reduce, State, StateBuffer
from qccl.engine.cuda import source as cuda_source

__all__ = ["COMMITS", "STATE_CASES", "AnyCase", "CommitCase", "Commits", "StateCase", "StateOperations", "prepared"]

RANK, LR, MU, BETA = 2, 0.3, 0.9, 0.95

#: what is reduced: number of codes, own values' place (None: none), wire, out, residual, momentum, scale
VARIANTS = {
    "a sender": (0, 0, True, False, True, True, 1.0),
    "a sender without momentum": (0, 0, True, False, True, False, 1.0),
    "an owner": (2, 1, True, True, True, True, 1 / 3),
    "an owner without momentum": (3, 3, True, True, True, False, 1.0),
    "an owner whose sum is not encoded": (2, 1, False, True, False, True, 1 / 3),
    "momentum alone": (0, 0, True, False, False, True, 1.0),
    "a rank alone": (0, 0, False, True, False, True, 0.5),
}
SPECS = (
    "none",
    "minmax1:bucket=24",
    "minmax3:bucket=8200",
    "minmax8:bucket=1000,rounding=stochastic,seed=6",
    "minmax5:bucket=shard",
    *(rows[i].spec for rows in TABLE.values() for i in (0, len(rows) // 2)),
)


@dataclass(frozen=True)
class StateCase:
    """A codec, the element types of values and residuals, what is reduced, and the kind of values (None: several)."""

    spec: str
    dtype: DType
    variant: str
    kept_as: DType
    kind: str | None = None

    def __str__(self) -> str:
        return f"{self.spec}-{self.dtype}-{self.variant}-{self.kept_as}"


class StateOperations(Prepared):
    """Reduces with state of a few counts as one launch. NaNs of the state may be any: a run that makes one drops it."""

    lr = LR

    def __init__(self, case: StateCase) -> None:
        self.case, self.codec, self.dtype = case, codecs.get(case.spec), case.dtype
        self.rng = np.random.default_rng([sum(map(ord, self.codec.spec() + case.variant)), case.dtype.code])
        self.arrays, self.any_nan = Arrays(False, self.rng), {}
        self.call = int(self.rng.integers(0, 1 << 40))
        bucket = self.codec.kernel().bucket
        counts = (1, 700) if not bucket else (bucket + 5, 1) if bucket > 4000 else (1, bucket - 1, 2 * bucket + 13)
        ops = [self._reduce(count) for count in counts]
        self.launches = {"reduce with state": cuda_source.launch(ops, RANK, self.dtype, self.arrays.place)}

    def _reduce(self, count: int) -> Reduce:
        sources, own_index, encoded, with_out, residual, momentum, scale = VARIANTS[self.case.variant]
        name, index = self.dtype.name, 8 * count
        nbytes = self.codec.encoded_nbytes(count, name)
        makers = (7, 0, 1)[:sources]
        wires = tuple(self.arrays.add(self._wire(count, index, maker)) for maker in makers)
        own = self.arrays.add(self._values(count, name))
        kept = self._carried(count, self.case.kept_as) if residual else None
        state = State(kept, self._carried(count, FLOAT32) if momentum else None, MU, BETA)
        wire = self.arrays.add(np.full(nbytes, 0x3C, np.uint8)) if encoded else None
        out = self.arrays.add(self._values(count, name)) if with_out else None
        return Reduce(*(self.codec, wires, own, own_index, wire, out, "sum", scale, index, 1, makers, 0), state=state)

    def _wire(self, count: int, index: int, maker: int) -> np.ndarray:
        values = self._values(count, self.dtype.name)
        return kernel_calls.encode(
            oracle_of(self.codec), values, self.dtype.name, RngCounter(self.call, 0, maker, index)
        )

    def _values(self, count: int, dtype: str) -> np.ndarray:
        return hard_values(self.case.kind or self.rng.choice(KINDS), count, dtype, self.rng)

    def _carried(self, count: int, dtype: DType) -> StateBuffer:
        old, new = self.rng.standard_normal(count).astype(np.float32), np.full(count, 9, np.float32)
        kept = StateBuffer(*(self.arrays.add(from_float32(x, dtype)) for x in (old, new)), dtype)
        self.any_nan[kept.new] = dtype
        return kept


@dataclass(frozen=True)
class CommitCase:
    """The element type of the guarded result, which of its elements is bad, and by what."""

    dtype: DType
    spoilt: int | None
    by: float | str

    def __str__(self) -> str:
        return f"commit-{self.dtype}-{self.spoilt}-{self.by}"


class Commits(Prepared):
    """The commit of two state buffers, which a spoilt result or a failure prevents."""

    def __init__(self, case: CommitCase) -> None:
        rng = np.random.default_rng(0)
        self.case, self.arrays, self.any_nan = case, Arrays(True, rng), {}
        output = rng.standard_normal(9000).astype(case.dtype.name)
        self.failed = case.spoilt is not None and case.by == "a failure"
        if case.spoilt is not None and not self.failed:
            output[case.spoilt] = case.by
        guards = (self.arrays.add(np.ones(5, case.dtype.name)), self.arrays.add(output))
        kept = []
        for dtype in (BFLOAT16, FLOAT32):
            old, new = (from_float32(rng.standard_normal(5000).astype(np.float32), dtype) for _ in range(2))
            kept.append(StateBuffer(self.arrays.add(old), self.arrays.add(new), dtype))
        launch = cuda_source.launch([Commit(guards, tuple(kept))], RANK, case.dtype, self.arrays.place)
        self.launches = {"commit": launch}


AnyCase = Case | StateCase | CommitCase


def prepared(case: AnyCase) -> Prepared:
    match case:
        case Case():
            return Operations(case)
        case StateCase():
            return StateOperations(case)
    return Commits(case)


def state_cases() -> Iterator[StateCase]:
    """The element types of values and of residuals take turns."""
    for i, spec in enumerate(SPECS):
        for j, variant in enumerate(VARIANTS):
            yield StateCase(spec, dtypes.DTYPES[(i + j) % 3], variant, (FLOAT32, BFLOAT16)[(i + j // 2) % 2])


STATE_CASES = list(state_cases())
COMMITS = [
    CommitCase(dtype, spoilt, by)
    for dtype in (dtypes.FLOAT32, dtypes.FLOAT16)
    for spoilt in (None, 0, 4095, 4096, 8999)
    for by in (np.nan, -np.inf, "a failure")
]
