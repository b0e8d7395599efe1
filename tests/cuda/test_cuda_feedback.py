"""Error feedback and momentum on the device: kernels emulated, byte for byte the host's; calls on the fake GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator

import fake_cuda
import fake_kernels
import numpy as np
import pytest
from codec_table import TABLE
from cuda_ranks import ranks
from emulator import Emulator
from kernel_calls import KINDS, hard_values
from spans import Arrays

import qccl
from qccl import _host, codecs, dtypes
from qccl.codecs import Codec
from qccl.codecs.floats import from_float32, storage, to_float32
from qccl.cuda import source as cuda_source
from qccl.cuda.source import Launch
from qccl.dtypes import BFLOAT16, FLOAT32, DType
from qccl.schedule import Commit, Reduce, State, StateBuffer

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


class Operations:
    """Reduces with state of a few counts as one launch, and the same on the host, in a copy of the memory."""

    def __init__(self, codec: Codec, dtype: DType, variant: str, kept_as: DType) -> None:
        """``kept_as`` is the element type of residuals."""
        self.codec, self.dtype, self.variant, self.kept_as = codec, dtype, VARIANTS[variant], kept_as
        self.rng = np.random.default_rng([sum(map(ord, codec.spec() + variant)), dtype.code])
        self.arrays = Arrays(False, self.rng)
        bucket = codec.kernel().bucket
        counts = (1, 700) if not bucket else (bucket + 5, 1) if bucket > 4000 else (1, bucket - 1, 2 * bucket + 13)
        self.ops = [self._reduce(count) for count in counts]
        self.call = int(self.rng.integers(0, 1 << 40))

    @property
    def launch(self) -> Launch:
        return cuda_source.launch(self.ops, RANK, self.dtype, self.arrays.place)

    def check(self, emulator: Emulator) -> None:
        memory = _host.Memory(3)
        copies = [buffer.copy() for buffer in self.arrays.buffers]
        for i, copy in enumerate(copies):
            memory[i] = copy.ctypes.data
        memory.call, memory.lr = self.call, LR
        for op in self.ops:
            self._on_host(memory, op)
        emulator.run(self.launch, self.arrays, self.call, lr=LR)
        self.arrays.check_guards()
        self._compare(copies)

    def _compare(self, copies: list[np.ndarray]) -> None:
        """NaNs of the state may be any: a run that makes one does not keep it."""
        for op in self.ops:
            assert op.state is not None
            state = {c.new: c.dtype for c in (op.state.residual, op.state.momentum) if c is not None}
            for span in (*state, op.wire, op.out):
                if span is None:
                    continue
                number, offset = self.arrays.place(span)
                kind = storage(state[span]) if span in state else np.uint8
                itemsize = 1 if span is op.wire else self.dtype.itemsize
                size = len(span) * (state[span].itemsize if span in state else itemsize)
                found, expected = (
                    memory[number][offset : offset + size].copy().view(kind) for memory in (self.arrays.buffers, copies)
                )
                if span in state:
                    found, expected = (to_float32(x, state[span]) for x in (found, expected))
                    nan = np.isnan(found)
                    assert np.array_equal(nan, np.isnan(expected))
                    found, expected = (np.where(nan, np.float32(0), x).view(np.uint32) for x in (found, expected))
                assert np.array_equal(found, expected)

    def _on_host(self, memory: object, op: Reduce) -> None:
        at, state = self.arrays.place, op.state
        assert state is not None
        places = [c and (at(c.old), at(c.new)) for c in (state.residual, state.momentum)]
        wire, out = (None if span is None else at(span) for span in (op.wire, op.out))
        assert op.own is not None
        _host.Reduce(
            *(memory, self.codec.host(), self.dtype.code, [at(src) for src in op.srcs], at(op.own), op.own_index),
            *(wire, out, len(op.own), 0, op.scale, op.index, op.round, RANK, op.src_ranks, op.src_round),
            *(*places, state.mu, state.beta, self.kept_as.code),
        )()

    def _reduce(self, count: int) -> Reduce:
        sources, own_index, encoded, with_out, residual, momentum, scale = self.variant
        name, index = self.dtype.name, 8 * count
        nbytes = self.codec.encoded_nbytes(count, name)
        makers = (7, 0, 1)[:sources]
        wires = tuple(self.arrays.add(self._wire(count, index, maker)) for maker in makers)
        own = self.arrays.add(self._values(count, name))
        kept = self._carried(count, self.kept_as) if residual else None
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
        return hard_values(self.rng.choice(KINDS), count, dtype, self.rng)

    def _carried(self, count: int, dtype: DType) -> StateBuffer:
        old, new = self.rng.standard_normal(count).astype(np.float32), np.full(count, 9, np.float32)
        return StateBuffer(*(self.arrays.add(from_float32(x, dtype)) for x in (old, new)), dtype)


def cases() -> Iterator[tuple[str, DType, str, DType]]:
    """The element types of values and of residuals take turns."""
    for i, spec in enumerate(SPECS):
        for j, variant in enumerate(VARIANTS):
            yield spec, dtypes.DTYPES[(i + j) % 3], variant, (FLOAT32, BFLOAT16)[(i + j // 2) % 2]


CASES = list(cases())


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    names = [name for spec, *case in CASES for name in Operations(codecs.get(spec), *case).launch.kernels]
    commits = [f"qccl::commit<qccl::{t}, qccl::Pass::{p}>" for t in ("Float32", "Float16") for p in ("range", "codes")]
    return Emulator([*names, *commits], tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize(("spec", "dtype", "variant", "kept_as"), CASES, ids=str)
def test_bytes_are_the_hosts(emulator: Emulator, spec: str, dtype: DType, variant: str, kept_as: DType) -> None:
    Operations(codecs.get(spec), dtype, variant, kept_as).check(emulator)


@pytest.mark.parametrize("dtype", [dtypes.FLOAT32, dtypes.FLOAT16], ids=str)
@pytest.mark.parametrize("spoilt", [None, 0, 4095, 4096, 8999])
@pytest.mark.parametrize("by", [np.nan, -np.inf, "a failure"])
def test_commit(emulator: Emulator, dtype: DType, spoilt: int | None, by: float | str) -> None:
    rng = np.random.default_rng(0)
    arrays = Arrays(True, rng)
    output = rng.standard_normal(9000).astype(dtype.name)
    failed = spoilt is not None and by == "a failure"
    if spoilt is not None and not failed:
        output[spoilt] = by
    guards = [arrays.add(np.ones(5, dtype.name)), arrays.add(output)]
    old, new = (rng.standard_normal((2, 5000)).astype(np.float32) for _ in range(2))
    types = (BFLOAT16, FLOAT32)
    old, new = ([from_float32(x, kind) for x, kind in zip(xs, types, strict=True)] for xs in (old, new))
    state_buffers = [StateBuffer(arrays.add(a), arrays.add(b), t) for a, b, t in zip(old, new, types, strict=True)]
    launch = cuda_source.launch([Commit(tuple(guards), tuple(state_buffers))], RANK, dtype, arrays.place)
    emulator.run(launch, arrays, 0, failed=failed)
    arrays.check_guards()
    for i, each in enumerate(state_buffers):
        wanted = new[i] if spoilt is None else old[i]
        assert np.array_equal(arrays.take(each.old, wanted.dtype), wanted)
        assert np.array_equal(arrays.take(each.new, wanted.dtype), new[i])


# -- calls -----------------------------------------------------------------------------------------------------------

CODEC = "minmax3:bucket=64+ef:beta=0.9,dtype=bfloat16+nesterov"


def steps(comm: qccl.Communicator, device: bool) -> tuple[list[bytes], dict]:
    found = []
    for step in range(4):
        x = np.random.default_rng([step, comm.rank]).standard_normal(3000).astype(np.float32)
        x[17] = np.nan if step == 2 and comm.rank == 0 else 0
        array = fake_cuda.array(x, comm.rank) if device else x
        comm.quantized_allreduce(array, codec=CODEC, key="a", lr=0.5 / (step + 1), chunk=640, algorithm="two_round")
        found.append(array)
    state = comm.state_dict()["keys"]["a"]
    return [each.get().tobytes() if device else each.tobytes() for each in found], state


@pytest.mark.parametrize(("n", "seed"), [(1, 0), (2, 0), (3, 1)])
def test_calls_and_state_are_the_hosts_whatever_the_order(n: int, seed: int) -> None:
    world = fake_cuda.World()
    world.random.seed(seed)
    with fake_cuda.installed(world, fake_kernels.work):
        on_device = ranks(n, lambda comm: steps(comm, True))
    on_host = qccl.run_ranks(n, lambda comm: steps(comm, False))
    for (bytes_there, state_there), (bytes_here, state_here) in zip(on_device, on_host, strict=True):
        assert bytes_there == bytes_here
        assert state_there["values"].keys() == state_here["values"].keys()
        for name, values in state_here["values"].items():
            assert np.array_equal(state_there["values"][name], values)


def test_a_call_that_fails_keeps_the_state_before_it() -> None:
    """The transfers of a call that is aborted leave garbage, which must not become a residual."""

    def calls(comm: qccl.Communicator) -> tuple[dict, dict] | None:
        xs = [fake_cuda.array(np.arange(300, dtype=np.float32), comm.rank) for _ in range(2)]
        comm.quantized_allreduce(xs[0], codec=CODEC, key="a")
        comm.check()
        before = comm.state_dict()["keys"]["a"]["values"]
        comm.barrier()
        if comm.rank == 1:
            time.sleep(1.0)
            return None
        comm.quantized_allreduce(xs[1], codec=CODEC, key="a", timeout=0.3)
        with pytest.raises(qccl.CollectiveTimeout):
            comm.check()
        world.finish(lambda: world.is_idle(0))
        assert np.isnan(xs[1].get()).all()
        return before, comm.state_dict()["keys"]["a"]["values"]

    world = fake_cuda.World()
    with fake_cuda.installed(world, fake_kernels.work):
        before, after = ranks(2, calls)[0]
        assert before.keys() == after.keys() and before["residual"].any()
        assert all(np.array_equal(before[name], after[name]) for name in before)


def test_ranks_that_load_different_numbers_of_calls_are_noticed() -> None:
    """Also in a call that was made before: random numbers are keyed by it, so the ranks agree anew."""

    def calls(comm: qccl.Communicator) -> None:
        def call() -> None:
            comm.quantized_allreduce(fake_cuda.array(np.ones(300, np.float32), comm.rank), codec="randomk:k=0.1")
            comm.check()

        call()
        comm.load_state_dict(comm.state_dict() | {"calls": 9 if comm.rank else 4})
        with pytest.raises(qccl.MismatchError, match=r"\+3 calls|\+8 calls"):
            call()

    with fake_cuda.installed(fake_cuda.World(), fake_kernels.work):
        assert ranks(2, calls) == [None, None]


def test_state_is_saved_loaded_and_forgotten_on_the_device() -> None:
    def calls(comm: qccl.Communicator) -> None:
        def call() -> bytes:
            x = fake_cuda.array(np.arange(300, dtype=np.float32), comm.rank)
            comm.quantized_allreduce(x, codec=CODEC, key="a")
            comm.check()
            return x.get().tobytes()

        first = call()
        saved = comm.state_dict()
        second = call()
        assert second != first
        comm.load_state_dict(saved)
        found, wanted = (state["keys"]["a"]["values"]["residual"] for state in (comm.state_dict(), saved))
        assert np.array_equal(found, wanted)
        assert call() == second
        comm.reset("a")
        assert call() == first

    with fake_cuda.installed(fake_cuda.World(), fake_kernels.work):
        assert ranks(2, calls) == [None, None]
