"""The kernels of the fake GPU: they run the jobs of a launch by the host's codecs, and demand its exact shape."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qccl import _host
from qccl.base import dtypes
from qccl.engine.cuda import source as cs

_NOWHERE = 0xFFFFFFFF
_DTYPES = {"Float32": dtypes.FLOAT32, "Float16": dtypes.FLOAT16, "BFloat16": dtypes.BFLOAT16}
_OPS = {"sum": 0, "min": 1, "max": 2}


def kind_of(name: str) -> str:
    """A kernel's operation: encode, decode, reduce, reduce_with_state, commit, copy, or BEGIN_KERNEL or END_KERNEL."""
    return name.removeprefix("qccl::").removeprefix("bucket_").partition("<")[0]


def work(name: str, geometry: tuple[int, ...], arguments: int) -> Callable[[], None]:
    """A function that runs kernel ``name``. Arguments by value are read now, as by cuLaunchKernel.

    ``geometry``: the grid, the block, and the bytes of dynamic shared memory. If they are not exactly those that the
    kernel needs, raises AssertionError, or the function that is returned does.
    """
    kinds, run = _OF_RUNS.get(name, ("QQPM", None))
    pointers = (ctypes.c_void_p * len(kinds)).from_address(arguments)
    given = [_argument(kind, pointers[i] or 0) for i, kind in enumerate(kinds)]
    blocks = geometry[0] if run is None else given[-1] if name == cs.NONFINITE_KERNEL else 1
    threads = 1 if name == cs.BEGIN_KERNEL else cs.THREADS
    assert geometry == (blocks, 1, 1, threads, 1, 1, 0), (name, geometry)
    return functools.partial(_run_jobs, name, blocks, *given) if run is None else functools.partial(run, *given)


def _argument(kind: str, address: int) -> Any:
    """An argument: integers of 64 and 32 bits (Q, I), addresses (A), parameters (P), or the memory of jobs (M)."""
    match kind:
        case "A":
            return ctypes.string_at(address, 8 * cs.ADDRESSES)
        case "P":
            return np.frombuffer(ctypes.string_at(address, cs.PARAMETERS.itemsize), cs.PARAMETERS)[0]
        case "M":
            return _Bases((ctypes.c_uint64 * cs.MEMORY_WORDS).from_address(address))
    return int.from_bytes(ctypes.string_at(address, 8 if kind == "Q" else 4), "little")


def _run_jobs(name: str, grid: int, jobs: int, sources: int, parameters: Any, memory: _Bases) -> None:
    table = _jobs(name, jobs, int(parameters["blocks"]), grid)
    if "Pass::range" in name:  # the next pass does everything
        _touch_scratch(int(parameters["scratch"]))
    else:
        _run(name, table, sources, parameters, memory)


def _jobs(name: str, address: int, blocks_address: int, grid: int) -> np.ndarray:
    """The table of jobs. Checks that the grid has as many blocks as the jobs' units need, in the order of the jobs."""
    assert grid > 0, name
    blocks = np.frombuffer(ctypes.string_at(blocks_address, grid * cs.BLOCK_OF_JOB.itemsize), cs.BLOCK_OF_JOB)
    count = int(blocks["job"].max()) + 1
    assert count <= grid, "the grid is larger than the table of blocks"
    record = {"encode": cs.ENCODE_JOB, "reduce": cs.REDUCE_JOB, "reduce_with_state": cs.STATE_JOB}.get(
        kind_of(name), cs.DECODE_JOB
    )
    table = np.frombuffer(ctypes.string_at(address, count * record.itemsize), record)
    units = (table["reduce"] if record is cs.STATE_JOB else table)["units"].astype(np.int64)
    shape = re.search(r"Shape<(\d+)", name)  # without one, a block does one unit
    needed = -(-units * (int(shape[1]) if shape else cs.THREADS) // cs.THREADS)
    assert needed.sum() == grid, f"{name}: {needed.sum()} blocks are needed, not {grid}"
    assert (blocks["job"] == np.repeat(np.arange(count), needed)).all()
    assert (blocks["number"] == np.concatenate([np.arange(n) for n in needed])).all()
    return table


class _Bases:
    """The addresses of buffers by number."""

    def __init__(self, words: Any) -> None:
        self.words = list(words)

    def __getitem__(self, number: int) -> int:
        if number < cs.DIRECT_BUFFERS:
            return int(self.words[number])
        return ctypes.c_uint64.from_address(self.words[cs.TABLE_WORD] + 8 * (number - cs.DIRECT_BUFFERS)).value


def _numbers(refs: np.ndarray) -> set[int]:
    """The numbers of all buffers in a table of jobs or of sources."""
    if refs.dtype == cs.BUFFER_REF:
        return {int(number) for number in refs["buffer"]} - {_NOWHERE}
    fields = [refs[name] for name in refs.dtype.names or () if refs[name].dtype.names]
    return {number for field in fields for number in _numbers(field)}


# -- as kernels/cuda/run.h ---------------------------------------------------------------------------------------------


def _store_addresses(table: int, values: bytes, count: int) -> None:
    ctypes.memmove(table, values, 8 * count)


def _find_nonfinite(address: int, count: int, itemsize: int, exponent: int, first: int, blocks: int) -> None:
    bits = np.frombuffer(ctypes.string_at(address, count * itemsize), f"u{itemsize}")
    if (bad := np.flatnonzero((bits & exponent) == exponent)).size:
        ctypes.c_uint64.from_address(first).value = int(bad[0])


def _begin(words: int, value: int, replay: int, flags: int, number: int) -> None:
    if words:
        found = (ctypes.c_uint64 * 2).from_address(words)
        found[0] = value + found[1] if replay else value
        found[1] += replay
    if not replay:
        (ctypes.c_uint32 * 3).from_address(flags)[1] = number


def _end(memory: _Bases, address: int, replay: int, flags: int, number: int, count: int) -> None:
    found = (ctypes.c_uint32 * 3).from_address(flags)
    if found[0]:
        for buffer, nbytes in enumerate((ctypes.c_uint64 * count).from_address(address)):
            ctypes.memset(memory[buffer], 0xFF, nbytes)
    if not replay:
        found[2] = number


#: the kernels around runs: the kinds of their arguments
_OF_RUNS: dict[str, tuple[str, Callable[..., None]]] = {
    cs.BEGIN_KERNEL: ("QQIQI", _begin),
    cs.END_KERNEL: ("MQIQII", _end),
    cs.ADDRESS_KERNEL: ("QAI", _store_addresses),
    cs.NONFINITE_KERNEL: ("QQIIQI", _find_nonfinite),
}

# -- jobs --------------------------------------------------------------------------------------------------------------


def _touch_scratch(address: int) -> None:
    """Check that the engine cleared the scratch, and write to it as the range pass does."""
    word = ctypes.c_uint64.from_address(address)
    assert word.value == 0, "scratch was not zero"
    word.value = 1


def _run(name: str, table: np.ndarray, sources: int, parameters: Any, memory: _Bases) -> None:
    kind = kind_of(name)
    if kind == "copy":
        for job in table:
            ctypes.memmove(_address(job["dst"], memory), _address(job["wire"], memory), int(job["count"]))
        return
    numbers = _numbers(table)
    if kind.startswith("reduce"):
        reduces = table["reduce"] if kind == "reduce_with_state" else table
        wires = int((reduces["first_source"] + reduces["source_count"]).max())
        numbers |= _numbers(np.frombuffer(ctypes.string_at(sources, wires * cs.BUFFER_REF.itemsize), cs.BUFFER_REF))
    host = _host.Memory(max(numbers) + 1)
    for number in numbers:
        host[number] = memory[number]
    host.call = ctypes.c_uint64.from_address(memory.words[cs.CALL_WORD]).value
    host.lr = ctypes.c_float.from_buffer_copy(memory.words[cs.LR_WORD].to_bytes(8, "little")).value
    dtype = next(_DTYPES[t] for t in re.findall(r"qccl::(\w+)", name) if t in _DTYPES)
    if kind == "commit":
        guards = [
            (dtype.code, _buffer_ref(job["wire"]), int(job["count"]))
            for job in table
            if _buffer_ref(job["dst"]) is None
        ]
        if ctypes.c_uint32.from_address(memory.words[cs.FAILED_WORD]).value:
            return
        copies = [
            (_buffer_ref(job["wire"]), _buffer_ref(job["dst"]), int(job["itemsize"]) * int(job["count"]))
            for job in table
        ]
        _host.Commit(host, guards, [each for each in copies if each[1] is not None])()
        return
    codec = _codec(name, parameters)
    for job in table:
        if kind == "reduce_with_state":
            state = [_state_buffers(job, each) for each in ("residual", "momentum")]
            state += [float(job["mu"]), float(job["beta"]), _DTYPES[re.findall(r"qccl::(\w+)>$", name)[0]].code]
            _reduce(name, host, codec, dtype.code, job["reduce"], sources, int(job["reduce"]["count"]), state)
            continue
        n = int(job["count"])
        if kind == "encode":
            key = tuple(int(job[field]) for field in ("index", "round", "rank"))
            _host.Encode(host, codec, dtype.code, _buffer_ref(job["src"]), _buffer_ref(job["wire"]), n, *key)()
        elif kind == "decode":
            accumulate = name.endswith("true>")
            key = tuple(int(job[field]) for field in ("index", "round", "rank"))
            _host.Decode(
                host, codec, dtype.code, _buffer_ref(job["wire"]), _buffer_ref(job["dst"]), n, accumulate, *key
            )()
        else:
            _reduce(name, host, codec, dtype.code, job, sources, n)


def _state_buffers(job: Any, kind: str) -> tuple[Any, Any] | None:
    old = _buffer_ref(job[kind])
    return None if old is None else (old, _buffer_ref(job[f"new_{kind}"]))


def _reduce(
    name: str, host: Any, codec: Any, code: int, job: Any, sources: int, count: int, state: Sequence[Any] = ()
) -> None:
    first, number = int(job["first_source"]), int(job["source_count"])
    table = np.frombuffer(ctypes.string_at(sources, (first + number) * cs.BUFFER_REF.itemsize), cs.BUFFER_REF)[first:]
    own, wire, out = (_buffer_ref(job[field]) for field in ("own", "wire", "out"))
    found = re.search(r"Combine::(\w+)", name)
    op = _OPS[found[1]] if found else 0
    index = int(job["own_index"]) if own is not None else 0
    key = tuple(int(job[field]) for field in ("index", "round", "rank"))
    wires = [_buffer_ref(each) for each in table]
    makers = [int(rank) for rank in table["rank"]], int(job["source_round"])
    _host.Reduce(
        host, codec, code, wires, own, index, wire, out, count, op, float(job["scale"]), *key, *makers, *state
    )()


def _buffer_ref(place: Any) -> tuple[int, int] | None:
    buffer = int(place["buffer"])
    return None if buffer == _NOWHERE else (buffer, int(place["offset"]))


def _address(place: Any, memory: _Bases) -> int:
    return memory[int(place["buffer"])] + int(place["offset"])


def _codec(name: str, parameters: Any) -> Any:
    """The codec by its C++ type; the type of a tile begins with the codec's."""
    found = re.match(r"qccl::\w+<qccl::(\w+?)(Tile)?[<,]", name)
    assert found, name
    options = [int(option) for option in parameters["options"]]
    return _host.CompiledCodec(found[1], int(parameters["bucket"]), int(parameters["seed"]), options)
