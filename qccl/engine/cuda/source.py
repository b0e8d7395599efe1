"""The CUDA engine's launches as data: kernel names, geometry, jobs, and the source that NVRTC compiles.

A launch does several operations of one kind at once; a job is one operation. The kernels are templates in
``kernels/cuda/``: bucket.h for every codec, kernels.h for codecs with a tile, state.h for state, run.h for the begin
and the end of a run. A kernel's name is the C++ expression of one instance. The structured types below repeat
``kernels/cuda/jobs.h``. This module needs no GPU and no CUDA library, so tests compile and emulate kernels anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from qccl.base.dtypes import DType
from qccl.base.errors import CodecError, EngineError
from qccl.codecs.base import Kernel, Tile
from qccl.collectives.schedule import Commit, Decode, Encode, Op, Reduce, Schedule, Span, State

__all__ = [
    *("ADDRESSES", "ADDRESS_KERNEL", "BEGIN_KERNEL", "BLOCK_OF_JOB", "BUFFER_REF", "CALL_NBYTES", "CALL_WORD"),
    *("DECODE_JOB", "DIRECT_BUFFERS", "ENCODE_JOB", "END_KERNEL", "FAILED_WORD", "LR_WORD", "MANY_BUFFERS"),
    *("MEMORY_WORDS", "NONFINITE_KERNEL", "PARAMETERS", "REDUCE_JOB", "TABLE_WORD", "THREADS"),
    *("Launch", "Shape", "launch", "source"),
]

#: threads of a block
THREADS = 256
_MOST = THREADS * 32
#: bytes of scratch in which the units of a bucket gather its range
_RANGE_NBYTES = 8

#: buffers whose addresses a kernel's Memory argument has. Its further words are the addresses of a table with the other
#: buffers' addresses and of the flags (flags.py), the learning rate, and the address of the call's number
DIRECT_BUFFERS = 28
TABLE_WORD = 28
FAILED_WORD = 29
LR_WORD = 30
CALL_WORD = 31
MEMORY_WORDS = 32

#: the first kernel of every run, which stores the call's number (qccl_begin in kernels/cuda/run.h). Its arguments: the
#: address of CALL_NBYTES bytes for that number and the count of replays, or null; u64 the number; u32 whether it is a
#: replay of a graph; the address of the flags (flags.py); u32 the number of the run
BEGIN_KERNEL = "qccl_begin"
CALL_NBYTES = 16
#: the last kernel of every run, one block, which poisons the results after a failure (qccl_end there). Its arguments:
#: Memory; the address of the sizes of results in bytes; u32 whether it is a replay; the address of the flags; u32 the
#: number of the run; u32 the number of sizes
END_KERNEL = "qccl_end"

#: NVRTC's option for the kernels of programs with more buffers than DIRECT_BUFFERS
MANY_BUFFERS = "-DQCCL_MANY_BUFFERS"

#: the kernel that stores addresses in the table; arguments: address, ADDRESSES times u64 by value, u32 their number
ADDRESS_KERNEL = "qccl_addresses"
ADDRESSES = 480


#: the kernel that finds the first element that is NaN or infinite; arguments: address, u64 number of elements, u32
#: bytes of one, u32 bits of its exponent, address of a u64 that it lowers to the index, u32 number of blocks
NONFINITE_KERNEL = "qccl_nonfinite"


def _record(*fields: tuple[str, Any]) -> np.dtype[Any]:
    """Make a structured type; each pair has the names of fields, separated by spaces, and their type."""
    return np.dtype([(name, kind) for names, kind in fields for name in names.split()])


BUFFER_REF = _record(("offset", "<u8"), ("buffer rank", "<u4"))
ENCODE_JOB = _record(("src wire", BUFFER_REF), ("count index", "<u8"), ("round rank units scratch", "<u4"))
DECODE_JOB = _record(("wire dst", BUFFER_REF), ("count index", "<u8"), ("round rank units itemsize", "<u4"))
REDUCE_JOB = _record(
    *(("own wire out", BUFFER_REF), ("count index", "<u8"), ("round rank units scratch", "<u4")),
    *(("first_source source_count own_index", "<u4"), ("scale", "<f4"), ("source_round unused", "<u4")),
)
STATE_JOB = _record(
    *(("reduce", REDUCE_JOB), ("residual new_residual momentum new_momentum", BUFFER_REF)),
    ("mu beta", "<f4"),
)
BLOCK_OF_JOB = _record(("job number", "<u4"))
PARAMETERS = _record(
    *(("seed bucket scratch", "<u8"), ("units_per_bucket", "<u4"), ("options", ("<u4", 6)), ("scratch_words", "<u4")),
    ("blocks", "<u8"),
)

#: elements for each block of threads in commit()
COMMITTED = 4096
_NO_BUFFER = 0xFFFFFFFF
_FOLDER = Path(__file__).parents[2] / "kernels"
_OPTIONS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space", f"-I{_FOLDER}")
_TYPES = {"float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16"}

#: a function that returns the buffer's number and the byte offset of a span
Locate = Callable[[Span], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A unit of work: ``lanes`` threads, each with ``vectors`` times 16 bytes of values (see ``tile.h``)."""

    lanes: int
    vectors: int

    def __str__(self) -> str:
        return f"qccl::Shape<{self.lanes}, {self.vectors}>"

    def capacity(self, itemsize: int) -> int:
        """The number of elements of ``itemsize`` bytes."""
        return self.lanes * self.vectors * 16 // itemsize


@dataclass(frozen=True, slots=True)
class _Tiling:
    """The division of a job into units: buckets of ``bucket`` elements (0: all), each of ``units_per_bucket`` units."""

    shape: Shape
    bucket: int
    units_per_bucket: int = 1
    capacity: int = 0

    def units(self, count: int) -> int:
        buckets, rest = divmod(count, self.bucket or count + 1)
        return buckets * self.units_per_bucket + -(-rest // self.capacity)


@dataclass(frozen=True)
class Launch:
    """Kernels that do several operations at once, one after the other with the same geometry and arguments.

    Attributes:
        kernels: the kernels' names; empty if there is nothing to do.
        jobs, blocks, sources: tables for the device's memory; ``sources`` may be empty.
        parameters: passed by value; the engine fills in "scratch" and "blocks", addresses.
        scratch_nbytes: size of the kernels' scratch.
        clears_scratch: whether the scratch must be zero before each run of the launch.
        draws: whether the kernels use random numbers, and so read the call's number.

    The arguments of each kernel are the addresses of ``jobs`` and ``sources``, ``parameters``, and MEMORY_WORDS words
    by value, which lead to all buffers.
    """

    kernels: tuple[str, ...]
    jobs: np.ndarray[Any, Any]
    parameters: np.ndarray[Any, Any]
    blocks: np.ndarray[Any, Any]
    sources: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0, BUFFER_REF))
    scratch_nbytes: int = 0
    clears_scratch: bool = False
    draws: bool = False

    @property
    def geometry(self) -> tuple[int, ...]:
        """The grid, block and bytes of dynamic shared memory, in cuLaunchKernel's order."""
        return (len(self.blocks), 1, 1, THREADS, 1, 1, 0)


def source(names: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """The source of the kernels ``names`` for NVRTC, and its options except the architecture.

    The source begins with a digest of all included files, and the names, so it can be the key of a cache of compiled
    code. The caller must not add ``-ftz=true``, as CuPy's RawModule does.
    """
    head = "".join(f"// {line}\n" for line in (_digest(), *names))
    return head + '#include "cuda/kernels.h"\n', _OPTIONS


@cache
def _digest() -> str:
    digest = hashlib.sha256()
    for path in sorted((*_FOLDER.glob("*.h"), *_FOLDER.glob("cuda/*.h"), *_FOLDER.glob("codecs/**/*.h"))):
        digest.update(str(path.relative_to(_FOLDER)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def launch(ops: Sequence[Op], rank: int, dtype: DType, locate: Locate) -> Launch:
    """Make the launch of operations of one kind, which differ in spans, counts and indices only.

    ``rank`` keys random numbers, and ``dtype`` is the element type of the values. Raises EngineError for operations
    without a kernel.
    """
    match ops[0]:
        case Commit():
            return _commit(ops[0], dtype, locate)
        case Encode():
            return _encode([op for op in ops if isinstance(op, Encode) and len(op.src)], rank, dtype, locate)
        case Decode():
            return _decode([op for op in ops if isinstance(op, Decode) and len(op.dst)], dtype, locate)
        case Reduce():
            return _reduce([op for op in ops if isinstance(op, Reduce) and _count(op)], rank, dtype, locate)
    raise EngineError(f"no kernel does the operation {type(ops[0]).__name__}")


def check_codecs(schedule: Schedule) -> None:
    """Raise CodecError if a codec has no device code."""
    for op in schedule.ops:
        if isinstance(op, (Encode, Decode, Reduce)) and op.codec.slow:
            raise CodecError(
                f"{op.codec!r} is written in Python, and runs on the host only; pass host arrays, or write the codec "
                f"in C++ (docs/adding-a-codec.md)"
            )


def _encode(ops: Sequence[Encode], rank: int, dtype: DType, locate: Locate) -> Launch:
    if not ops:
        return _nothing(ENCODE_JOB)
    kernel = ops[0].codec.kernel()
    if kernel.copies:
        return _copy([(op.src, op.wire, len(op.src)) for op in ops], dtype, locate)
    jobs = np.zeros(len(ops), ENCODE_JOB)
    _set_buffers(jobs, locate, src=[op.src for op in ops], wire=[op.wire for op in ops])
    _set_counters(jobs, [len(op.src) for op in ops], ops, rank)
    tile = kernel.tile
    if tile is None or tile.encoder is None:
        names: tuple[str, ...] = (f"qccl::bucket_encode<{_types(kernel.type, dtype)}>",)
        return _launch(names, jobs, kernel, _whole_buckets(kernel), draws=kernel.draws, scratch=4 * kernel.scratch)
    tiling = _tiling(tile, kernel.bucket, dtype, [len(op.src) for op in ops], encodes=True)
    names = _passes("encode", tile.encoder, dtype, tiling)
    return _launch(names, jobs, kernel, tiling, draws=kernel.draws)


def _decode(ops: Sequence[Decode], dtype: DType, locate: Locate) -> Launch:
    if not ops:
        return _nothing(DECODE_JOB)
    kernel, accumulate = ops[0].codec.kernel(), ops[0].accumulate
    if kernel.copies and not accumulate:
        return _copy([(op.wire, op.dst, len(op.dst)) for op in ops], dtype, locate)
    counts = [len(op.dst) for op in ops]
    jobs = np.zeros(len(ops), DECODE_JOB)
    _set_buffers(jobs, locate, wire=[op.wire for op in ops], dst=[op.dst for op in ops])
    jobs["count"] = counts
    for name in ("index", "round", "rank"):
        jobs[name] = [getattr(op, name) for op in ops]
    variant = str(accumulate).lower()
    if kernel.tile is None:
        tiling, name = _whole_buckets(kernel), f"qccl::bucket_decode<{_types(kernel.type, dtype)}, {variant}>"
    else:
        tiling = _tiling(kernel.tile, kernel.bucket, dtype, counts, encodes=False)
        name = f"qccl::decode<{_types(kernel.tile.decoder, dtype)}, {tiling.shape}, {variant}>"
    return _launch((name,), jobs, kernel, tiling, draws=ops[0].codec.decoder_draws)


def _reduce(ops: Sequence[Reduce], rank: int, dtype: DType, locate: Locate) -> Launch:
    if not ops:
        return _nothing(REDUCE_JOB)
    first = ops[0]
    alone = not first.srcs and first.wire is None and first.state is None
    if alone and first.scale == 1:  # one rank: its values stay
        return _copy([(op.own, op.out, _count(op)) for op in ops if op.own and op.out], dtype, locate)
    kernel = first.codec.kernel()
    jobs = np.zeros(len(ops), REDUCE_JOB)
    _set_buffers(jobs, locate, **{name: [getattr(op, name) for op in ops] for name in ("own", "wire", "out")})
    _set_counters(jobs, [_count(op) for op in ops], ops, rank)
    sources = np.zeros(sum(len(op.srcs) for op in ops), BUFFER_REF)
    spans = [span for op in ops for span in op.srcs]
    if spans:
        sources["buffer"], sources["offset"] = zip(*(locate(span) for span in spans), strict=True)
        sources["rank"] = [maker for op in ops for maker in op.src_ranks or (0,) * len(op.srcs)]
    jobs["source_count"] = [len(op.srcs) for op in ops]
    jobs["first_source"] = np.cumsum(jobs["source_count"]) - jobs["source_count"]
    jobs["source_round"] = [op.src_round for op in ops]
    jobs["own_index"] = [_NO_BUFFER if op.own is None else op.own_index for op in ops]
    jobs["scale"] = [op.scale for op in ops]
    if first.state is not None:
        return _reduce_with_state(ops, jobs, sources, dtype, locate)
    variant = f", qccl::Combine::{first.op}"
    draws = (first.wire is not None and kernel.draws) or first.codec.decoder_draws
    tile = kernel.tile
    if tile is None or tile.encoder is None:
        names: tuple[str, ...] = (f"qccl::bucket_reduce<{_types(kernel.type, dtype)}{variant}>",)
        scratch = 4 * (kernel.bucket + kernel.scratch)
        return _launch(names, jobs, kernel, _whole_buckets(kernel), sources=sources, draws=draws, scratch=scratch)
    tiling = _tiling(tile, kernel.bucket, dtype, [_count(op) for op in ops], encodes=first.wire is not None)
    names = _passes("reduce", tile.encoder, dtype, tiling, variant)
    return _launch(names, jobs, kernel, tiling, sources=sources, draws=draws)


def _reduce_with_state(
    ops: Sequence[Reduce], reductions: np.ndarray[Any, Any], sources: np.ndarray[Any, Any], dtype: DType, locate: Locate
) -> Launch:
    """Make the launch of reductions with state."""
    codec, states = ops[0].codec, [op.state or State() for op in ops]
    kernel = codec.kernel()
    tile = kernel.tile
    jobs = np.zeros(len(ops), STATE_JOB)
    for name in ("residual", "momentum"):
        state_buffers = [getattr(state, name) for state in states]
        old, new = ([each and getattr(each, end) for each in state_buffers] for end in ("old", "new"))
        _set_buffers(jobs, locate, **{name: old, f"new_{name}": new})
    jobs["mu"], jobs["beta"] = [state.mu for state in states], [state.beta for state in states]
    first = states[0].residual
    residual = f", qccl::{_TYPES['float32' if first is None else first.dtype.name]}"
    draws = (ops[0].wire is not None and kernel.draws) or codec.decoder_draws
    if tile is None or tile.encoder is None:
        names: tuple[str, ...] = (f"qccl::bucket_reduce_with_state<{_types(kernel.type, dtype)}{residual}>",)
        tiling, scratch = _whole_buckets(kernel), 4 * (kernel.bucket + kernel.scratch)
    else:
        counts = [_count(op) for op in ops]
        # momentum and residual take registers, too
        tiling = _tiling(tile, kernel.bucket, dtype, counts, encodes=ops[0].wire is not None, vectors=2)
        names, scratch = _passes("reduce_with_state", tile.encoder, dtype, tiling, residual), 0
    launch = _launch(names, reductions, kernel, tiling, sources=sources, draws=draws, scratch=scratch)
    jobs["reduce"] = reductions
    return replace(launch, jobs=jobs)


def _commit(op: Op, dtype: DType, locate: Locate) -> Launch:
    """Make a launch of two passes: the first checks all output, the second copies the new state if that is finite."""
    if not isinstance(op, Commit):
        raise EngineError(f"{type(op).__name__} is not a Commit")
    spans: list[tuple[Span, Span | None]] = [(span, None) for span in op.guard]
    spans += [(each.new, each.old) for each in op.state_buffers]
    jobs = np.zeros(len(spans), DECODE_JOB)
    _set_buffers(jobs, locate, wire=[a for a, _ in spans], dst=[b for _, b in spans])
    jobs["count"] = [len(a) for a, _ in spans]
    jobs["units"] = [-(-len(a) // COMMITTED) for a, _ in spans]
    jobs["itemsize"][len(op.guard) :] = [each.dtype.itemsize for each in op.state_buffers]
    names = tuple(f"qccl::commit<qccl::{_TYPES[dtype.name]}, qccl::Pass::{each}>" for each in ("range", "codes"))
    parameters, blocks = np.zeros((), PARAMETERS), _blocks(jobs["units"], 1)
    return Launch(names, jobs, parameters, blocks, scratch_nbytes=_RANGE_NBYTES, clears_scratch=True)


def _copy(spans: Sequence[tuple[Span, Span, int]], dtype: DType, locate: Locate) -> Launch:
    """Make a launch that copies bytes between buffers, unless source and destination are the same."""
    spans = [(a, b, count) for a, b, count in spans if locate(a) != locate(b)]
    if not spans:
        return _nothing(DECODE_JOB)
    shape = Shape(32, 4)
    tiling = _Tiling(shape, shape.capacity(1), 1, shape.capacity(1))
    jobs = np.zeros(len(spans), DECODE_JOB)
    _set_buffers(jobs, locate, wire=[a for a, _, _ in spans], dst=[b for _, b, _ in spans])
    jobs["count"] = [count * dtype.itemsize for _, _, count in spans]
    return _launch((f"qccl::copy<{shape}>",), jobs, Kernel("copy"), tiling)


def _nothing(job: np.dtype[Any]) -> Launch:
    return Launch((), np.zeros(0, job), np.zeros((), PARAMETERS), np.zeros(0, BLOCK_OF_JOB))


def _launch(
    names: tuple[str, ...],
    jobs: np.ndarray[Any, Any],
    kernel: Kernel,
    tiling: _Tiling,
    *,
    sources: np.ndarray[Any, Any] | None = None,
    draws: bool = False,
    scratch: int = 0,
) -> Launch:
    """Set the units and the scratch of jobs, and make their launch; ``scratch`` is bytes for each bucket."""
    counts = [int(count) for count in jobs["count"]]
    units = [tiling.units(count) for count in counts]
    if sum(units) >= 1 << 31:  # the greatest grid
        raise EngineError(f"{sum(counts)} elements are too many for one launch with {kernel}; use smaller chunks")
    jobs["units"] = units
    ranges = len(names) > 1
    scratch_nbytes = 0
    if ranges or scratch:
        buckets = [-(-count // (tiling.bucket or count)) for count in counts]
        jobs["scratch"] = np.cumsum(buckets) - buckets
        scratch_nbytes = (scratch or _RANGE_NBYTES) * sum(buckets)
    parameters = np.zeros((), PARAMETERS)
    parameters["seed"] = kernel.seed
    parameters["bucket"], parameters["units_per_bucket"] = tiling.bucket, tiling.units_per_bucket
    parameters["options"][: len(kernel.options)], parameters["scratch_words"] = kernel.options, kernel.scratch
    blocks = _blocks(jobs["units"], THREADS // tiling.shape.lanes)
    table = np.zeros(0, BUFFER_REF) if sources is None else sources
    return Launch(names, jobs, parameters, blocks, table, scratch_nbytes, ranges, draws)


def _blocks(units: np.ndarray[Any, Any], per_block: int) -> np.ndarray[Any, Any]:
    """The blocks of a launch in the order of its jobs, each with its number in the job."""
    counts = -(-units.astype(np.int64) // per_block)
    job = np.repeat(np.arange(len(counts)), counts)
    blocks = np.zeros(len(job), BLOCK_OF_JOB)
    blocks["job"] = job
    blocks["number"] = np.arange(len(job)) - (np.cumsum(counts) - counts)[job]
    return blocks


def _whole_buckets(kernel: Kernel) -> _Tiling:
    """A block of threads for each bucket, whatever its size."""
    return _Tiling(Shape(THREADS, 1), kernel.bucket, 1, kernel.bucket)


def _tiling(
    tile: Tile, bucket: int, dtype: DType, counts: Sequence[int], *, encodes: bool, vectors: int = 4
) -> _Tiling:
    """Divide jobs into units. A bucket that fits is one unit if its codes depend on it; others have ``vectors``."""
    if not tile.by_bucket:
        shape = Shape(32, vectors)
        capacity = shape.capacity(dtype.itemsize)
        return _Tiling(shape, capacity, 1, capacity)
    largest = bucket or max(counts)
    shape = _shape(min(largest, _MOST if encodes else THREADS * 4), dtype.itemsize)
    capacity = shape.capacity(dtype.itemsize)
    return _Tiling(shape, bucket, -(-largest // capacity), capacity)


def _shape(elements: int, itemsize: int) -> Shape:
    """The smallest shape that holds ``elements``: part of a warp with one vector each, a warp, or a block."""
    vectors = -(-elements * itemsize // 16)
    if vectors <= 16:
        return Shape(_power_of_two(vectors), 1)
    lanes = 32 if elements <= 1024 else THREADS
    return Shape(lanes, _power_of_two(-(-vectors // lanes)))


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def _passes(kind: str, encoder: str, dtype: DType, tiling: _Tiling, more: str = "") -> tuple[str, ...]:
    """The kernels that encode: one, or two if the units of a bucket must first gather its range."""
    needs_two = tiling.units_per_bucket > 1 and tiling.shape.lanes == THREADS
    passes = ("range", "codes") if needs_two else ("whole",)
    arguments = f"{_types(encoder, dtype)}, {tiling.shape}"
    return tuple(f"qccl::{kind}<{arguments}, qccl::Pass::{each}{more}>" for each in passes)


def _types(codec: str, dtype: DType) -> str:
    return f"qccl::{codec}, qccl::{_TYPES[dtype.name]}"


def _count(op: Reduce) -> int:
    values = op.out if op.own is None else op.own
    if values is None:
        raise EngineError("a Reduce needs own values or an output; without them its count is unknown")
    return len(values)


def _set_buffers(jobs: np.ndarray[Any, Any], locate: Locate, **spans: Sequence[Span | None]) -> None:
    """Fill in the jobs' buffers, one field for each list of spans."""
    for name, column in spans.items():
        for job, span in zip(jobs[name], column, strict=True):
            buffer, offset = (_NO_BUFFER, 0) if span is None else locate(span)
            job["buffer"], job["offset"] = buffer, offset


def _set_counters(jobs: np.ndarray[Any, Any], counts: Sequence[int], ops: Sequence[Encode | Reduce], rank: int) -> None:
    """Fill in counts, and the counters of the random numbers."""
    bad = next((op.index for op in ops if op.index % 8), None)
    if bad is not None:
        raise EngineError(f"index {bad} is not a multiple of 8, the granule of all buckets")
    jobs["count"] = counts
    jobs["index"] = [op.index for op in ops]
    jobs["round"] = [op.round for op in ops]
    jobs["rank"] = rank
