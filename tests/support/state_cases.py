"""Reductions with state, and its commits, for emulated CUDA kernels, with the host's results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from codec_table import TABLE
from kernel_calls import KINDS, hard_values
from kernel_cases import Runs
from spans import Arrays

from qccl import _host, codecs, dtypes
from qccl.codecs.floats import from_float32, storage, to_float32
from qccl.cuda import source as cuda_source
from qccl.dtypes import BFLOAT16, FLOAT32, DType
from qccl.schedule import Commit, Reduce, Span, State, StateBuffer

__all__ = ["COMMITS", "STATE_CASES", "CommitCase", "Commits", "StateCase", "StateOperations"]

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


class StateOperations:
    """Reduces with state of a few counts as one launch, and the same on the host, in a copy of the memory."""

    def __init__(self, case: StateCase) -> None:
        self.case, self.codec, self.dtype = case, codecs.get(case.spec), case.dtype
        self.rng = np.random.default_rng([sum(map(ord, self.codec.spec() + case.variant)), case.dtype.code])
        self.arrays = Arrays(False, self.rng)
        bucket = self.codec.kernel().bucket
        counts = (1, 700) if not bucket else (bucket + 5, 1) if bucket > 4000 else (1, bucket - 1, 2 * bucket + 13)
        self.ops = [self._reduce(count) for count in counts]
        self.call = int(self.rng.integers(0, 1 << 40))
        self.launches = {"reduce with state": cuda_source.launch(self.ops, RANK, self.dtype, self.arrays.place)}
        self._wanted = self._on_host()

    def check(self, emulator: Runs, kinds: Iterable[str] | None = None, seed: int = 0) -> None:
        """NaNs of the state may be any: a run that makes one does not keep it."""
        for kind in self.launches if kinds is None else kinds:
            emulator.run(self.launches[kind], self.arrays, self.call, seed, LR)
        self.arrays.check_guards()
        for op in self.ops:
            assert op.state is not None
            state = {c.new: c.dtype for c in (op.state.residual, op.state.momentum) if c is not None}
            for span in (*state, op.wire, op.out):
                if span is not None:
                    self._compare(span, state.get(span), 1 if span is op.wire else self.dtype.itemsize)

    def _compare(self, span: Span, kept_as: DType | None, itemsize: int) -> None:
        number, offset = self.arrays.place(span)
        size = len(span) * (kept_as.itemsize if kept_as else itemsize)
        found, expected = (
            memory[number][offset : offset + size].copy().view(storage(kept_as) if kept_as else np.uint8)
            for memory in (self.arrays.buffers, self._wanted)
        )
        if kept_as:
            found, expected = (to_float32(x, kept_as) for x in (found, expected))
            nan = np.isnan(found)
            assert np.array_equal(nan, np.isnan(expected)), self.case
            found, expected = (np.where(nan, np.float32(0), x).view(np.uint32) for x in (found, expected))
        assert np.array_equal(found, expected), self.case

    def _on_host(self) -> list[np.ndarray]:
        """The buffers after the operations on the host."""
        memory = _host.Memory(3)
        copies = [buffer.copy() for buffer in self.arrays.buffers]
        for i, copy in enumerate(copies):
            memory[i] = copy.ctypes.data
        memory.call, memory.lr = self.call, LR
        for op in self.ops:
            self._reduce_on_host(memory, op)
        return copies

    def _reduce_on_host(self, memory: object, op: Reduce) -> None:
        at, state = self.arrays.place, op.state
        assert state is not None
        places = [c and (at(c.old), at(c.new)) for c in (state.residual, state.momentum)]
        wire, out = (None if span is None else at(span) for span in (op.wire, op.out))
        assert op.own is not None
        _host.Reduce(
            *(memory, self.codec.host(), self.dtype.code, [at(src) for src in op.srcs], at(op.own), op.own_index),
            *(wire, out, len(op.own), 0, op.scale, op.index, op.round, RANK, op.src_ranks, op.src_round),
            *(*places, state.mu, state.beta, self.case.kept_as.code),
        )()

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
        values, wire = (
            self._values(count, self.dtype.name),
            np.empty(self.codec.encoded_nbytes(count, self.dtype), np.uint8),
        )
        memory = _host.Memory(2)
        memory[0], memory[1] = values.ctypes.data, wire.ctypes.data
        key = (index, 0, maker)
        _host.Encode(memory, self.codec.host(), self.dtype.code, (0, 0), (1, 0), count, *key)()
        return wire

    def _values(self, count: int, dtype: str) -> np.ndarray:
        return hard_values(self.case.kind or self.rng.choice(KINDS), count, dtype, self.rng)

    def _carried(self, count: int, dtype: DType) -> StateBuffer:
        old, new = self.rng.standard_normal(count).astype(np.float32), np.full(count, 9, np.float32)
        return StateBuffer(*(self.arrays.add(from_float32(x, dtype)) for x in (old, new)), dtype)


@dataclass(frozen=True)
class CommitCase:
    """The element type of the guarded result, which of its elements is bad, and by what."""

    dtype: DType
    spoilt: int | None
    by: float | str

    def __str__(self) -> str:
        return f"commit-{self.dtype}-{self.spoilt}-{self.by}"


class Commits:
    """The commit of two state buffers, which a spoilt result or a failure prevents."""

    def __init__(self, case: CommitCase) -> None:
        self.case = case
        rng = np.random.default_rng(0)
        self.arrays = Arrays(True, rng)
        output = rng.standard_normal(9000).astype(case.dtype.name)
        self._failed = case.spoilt is not None and case.by == "a failure"
        if case.spoilt is not None and not self._failed:
            output[case.spoilt] = case.by
        guards = [self.arrays.add(np.ones(5, case.dtype.name)), self.arrays.add(output)]
        types = (BFLOAT16, FLOAT32)
        self._old, self._new = (
            [from_float32(rng.standard_normal(5000).astype(np.float32), kind) for kind in types] for _ in range(2)
        )
        self._buffers = [
            StateBuffer(self.arrays.add(old), self.arrays.add(new), kind)
            for old, new, kind in zip(self._old, self._new, types, strict=True)
        ]
        commit = Commit(tuple(guards), tuple(self._buffers))
        self.launches = {"commit": cuda_source.launch([commit], RANK, case.dtype, self.arrays.place)}

    def check(self, emulator: Runs, kinds: Iterable[str] | None = None, seed: int = 0) -> None:
        for kind in self.launches if kinds is None else kinds:
            emulator.run(self.launches[kind], self.arrays, 0, seed, failed=self._failed)
        self.arrays.check_guards()
        for each, old, new in zip(self._buffers, self._old, self._new, strict=True):
            wanted = new if self.case.spoilt is None else old
            assert np.array_equal(self.arrays.take(each.old, wanted.dtype), wanted), self.case
            assert np.array_equal(self.arrays.take(each.new, wanted.dtype), new), self.case


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
