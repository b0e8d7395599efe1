"""The rate at which kernels move bytes, compared with a copy on the device. Only bytes that must move are counted."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from device import Mirror
from reports import report

from qccl import codecs
from qccl.base import dtypes
from qccl.base.dtypes import DType
from qccl.codecs.base import Codec
from qccl.collectives.schedule import Buffer, Decode, Encode, Op, Reduce, Role, Schedule, Span
from qccl.engine.base import Bound, Request
from qccl.engine.cuda.libraries import HOST_TO_DEVICE, ON_DEVICE, cuda_libraries

_PEERS = 7
_KINDS = ("encode", "decode", "reduce")
_TILED = ("minmax8", "minmax4", "minmax8:rounding=stochastic", "cast:dtype=float8_e4m3", "onebit", "none")
#: what is measured of each codec; trellis' search takes many times as long as a copy
_SPECS = {**dict.fromkeys(_TILED, _KINDS), "trellis4": ("decode",)}


def _schedule(kind: str, codec: Codec, dtype: DType, count: int, jobs: int) -> tuple[Schedule, int]:
    """``jobs`` independent operations of one launch, together larger than the cache; and the bytes they must move.

    "fill" makes the wires that "decode" and "reduce" read.
    """
    nbytes = codec.encoded_nbytes(count, dtype)
    slot = -(-nbytes // 64) * 64
    buffers = {
        "values": Buffer(jobs * count, dtype, Role.INPUT),
        "wires": Buffer(jobs * _PEERS * slot, None, Role.OUTPUT),
        "sums": Buffer(jobs * count, dtype, Role.OUTPUT),
        "codes": Buffer(jobs * slot, None, Role.OUTPUT),
    }
    ops: list[Op] = []
    for job in range(jobs):
        values, sums = (Span(name, job * count, (job + 1) * count) for name in ("values", "sums"))
        wires = [Span("wires", (job * _PEERS + p) * slot, (job * _PEERS + p) * slot + nbytes) for p in range(_PEERS)]
        wire = Span("codes", job * slot, job * slot + nbytes)
        match kind:
            case "fill":
                ops += [Encode(codec, values, each, 0) for each in wires]
            case "encode":
                ops.append(Encode(codec, values, wire, 0))
            case "decode":
                ops.append(Decode(codec, wires[0], sums))
            case "reduce":
                ops.append(Reduce(codec, tuple(wires), values, 1, wire, sums))
    size = count * dtype.itemsize
    moved = {"encode": size + nbytes, "decode": nbytes + size, "reduce": (_PEERS + 1) * nbytes + 2 * size}
    return Schedule("bandwidth", 0, 1, buffers, tuple(ops)), jobs * moved.get(kind, 0)


def measure(mebibytes: int = 64, jobs: int = 8, repeats: int = 20) -> dict[str, Any]:
    """Bytes per second of each kernel on ``jobs`` arrays of ``mebibytes``, and the share of the copy's rate."""
    chosen = dict.fromkeys((dtypes.FLOAT32, dtypes.BFLOAT16, dtypes.FLOAT16), _SPECS)
    return {"peers": _PEERS} | _rates(chosen, mebibytes, jobs, repeats)


def first_figures(mebibytes: int = 64, jobs: int = 4, repeats: int = 10) -> dict[str, Any]:
    """The rate of a copy and of two kernels on ``jobs`` arrays of ``mebibytes``, in seconds rather than minutes."""
    return _rates({dtypes.BFLOAT16: {"minmax4": ("encode",), "minmax8": ("reduce",)}}, mebibytes, jobs, repeats)


def _rates(
    chosen: Mapping[DType, Mapping[str, Sequence[str]]], mebibytes: int, jobs: int, repeats: int
) -> dict[str, Any]:
    """The rates of a copy and of kernels: of each element type, the codecs with what is measured of them."""
    from qccl.engine.cuda.engine import CudaEngine

    stream, engine = cuda_libraries().cupy.cuda.Stream(non_blocking=True), CudaEngine(Mirror(1), 60.0)
    copied = _copy_rate(stream, jobs * mebibytes << 20, repeats)
    figures: dict[str, Any] = {"copy_gb_per_s": report("copy_gb_per_s", copied / 1e9)}
    for dtype, specs in chosen.items():
        count = (mebibytes << 20) // dtype.itemsize
        memory = _memory(dtype, count * jobs)
        for spec, kinds in specs.items():
            codec = codecs.get(spec)
            _run(engine, _schedule("fill", codec, dtype, count, jobs)[0], memory, stream)()
            for kind in kinds:
                schedule, moved = _schedule(kind, codec, dtype, count, jobs)
                rate = moved / _seconds(_run(engine, schedule, memory, stream), stream, repeats)
                found = {"gb_per_s": rate / 1e9, "share_of_copy": rate / copied}
                figures[f"{kind} {spec} {dtype}"] = report(f"{kind} {spec} {dtype}", found)
        del memory
    engine.close(30)
    return figures


def _copy_rate(stream: Any, nbytes: int, repeats: int) -> float:
    """Bytes per second that the device's copy reads and writes."""
    gpu = cuda_libraries()
    source, target = (gpu.cupy.cuda.alloc(nbytes) for _ in range(2))
    gpu.runtime.memset(source.ptr, 1, nbytes)
    arguments = (target.ptr, source.ptr, nbytes, ON_DEVICE, stream.ptr)
    return 2 * nbytes / _seconds(lambda: gpu.runtime.memcpyAsync(*arguments), stream, repeats)


def _memory(dtype: DType, count: int) -> dict[str, Any]:
    """Buffers large enough for any codec, with normally distributed values, because zeros run faster."""
    gpu = cuda_libraries()
    nbytes = count * dtype.itemsize + (1 << 20)
    memory = {name: gpu.cupy.cuda.alloc(nbytes) for name in ("values", "sums", "codes")}
    memory["wires"] = gpu.cupy.cuda.alloc(_PEERS * nbytes)
    pool = np.random.default_rng(1).standard_normal(1 << 24, dtype=np.float32)
    if dtype is dtypes.BFLOAT16:
        pool = (pool.view(np.uint32) >> 16).astype(np.uint16)
    pool = pool.astype(dtype.name) if dtype is dtypes.FLOAT16 else pool
    for start in range(0, nbytes, pool.nbytes):
        part = min(pool.nbytes, nbytes - start)
        gpu.runtime.memcpy(memory["values"].ptr + start, pool.ctypes.data, part, HOST_TO_DEVICE)
    return memory


def _run(engine: Any, schedule: Schedule, memory: dict[str, Any], stream: Any) -> Callable[[], None]:
    program = engine.compile(schedule)
    addresses = {name: memory[name].ptr for name in schedule.buffers}
    bound, request = Bound(addresses, "bandwidth"), Request(timeout=60.0)

    def run() -> None:
        engine.start(program, bound, request, streams=(stream.ptr,))

    return run


def _seconds(run: Callable[[], object], stream: Any, repeats: int) -> float:
    """The time of one of ``repeats`` consecutive runs, as a graph, so that the host's time does not count."""
    cuda = cuda_libraries().cupy.cuda
    run()
    stream.synchronize()
    stream.begin_capture()
    for _ in range(repeats):
        run()
    graph = stream.end_capture()
    times = []
    for _ in range(4):
        begin, end = cuda.Event(), cuda.Event()
        begin.record(stream)
        graph.launch(stream)
        end.record(stream)
        stream.synchronize()
        times.append(cuda.get_elapsed_time(begin, end) / 1e3 / repeats)
    return statistics.median(times[1:])
