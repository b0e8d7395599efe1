"""Threads that share an operation make the bytes that one makes."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from codec_table import TABLE

import qccl
from qccl import _host, codecs
from qccl.base import dtypes
from qccl.codecs.base import Codec

_COUNT = 4 * (1 << 16) + 1003
_SOURCES = 2
_CODECS = [
    *(codecs.get(spec) for spec in ("none", "minmax8", "minmax3:rounding=stochastic", "minmax4:bucket=shard")),
    *(codecs.get(rows[0].spec) for rows in TABLE.values()),
    codecs.get("trellis"),
]


def _run(codec: Codec, dtype: dtypes.DType, threads: int) -> list[bytes]:
    """The results of an encode, a decode, a decode that adds, and a reduce with and without state."""
    rng = np.random.default_rng(0)
    storage = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype.name]
    values = rng.standard_normal(_COUNT).astype(np.float32)
    own = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype.name == "bfloat16" else values.astype(storage)
    wires = [np.full(codec.encoded_nbytes(_COUNT, dtype), 0xA5, np.uint8) for _ in range(_SOURCES + 2)]
    decoded, added, total, state_buffers = np.empty_like(own), own.copy(), np.empty_like(own), np.empty_like(own)
    residual, left = rng.standard_normal(_COUNT).astype(np.float32), np.empty(_COUNT, np.float32)
    arrays = [own, decoded, added, total, state_buffers, residual, left, *wires]
    memory = _host.Memory(len(arrays))
    memory.threads = threads
    for i, array in enumerate(arrays):
        memory[i] = array.ctypes.data
    kernel, code, first = codec.host(), dtype.code, len(arrays) - len(wires)
    sources = [(first + i, 0) for i in range(_SOURCES)]
    for i, wire in enumerate(sources):
        _host.Encode(memory, kernel, code, (0, 0), wire, _COUNT, 0, 0, i)()
    _host.Decode(memory, kernel, code, sources[0], (1, 0), _COUNT, False)()
    _host.Decode(memory, kernel, code, sources[1], (2, 0), _COUNT, True, 0, 0, 1)()
    reduce = memory, kernel, code, sources, (0, 0), 1
    end = _COUNT, 0, 0.5, 0, 1, 0, [0, 1], 0
    _host.Reduce(*reduce, (first + _SOURCES, 0), (3, 0), *end)()
    _host.Reduce(*reduce, (first + _SOURCES + 1, 0), (4, 0), *end, ((5, 0), (6, 0)))()
    return [array.tobytes() for array in arrays]


@pytest.mark.parametrize("dtype", dtypes.DTYPES, ids=str)
@pytest.mark.parametrize("codec", _CODECS, ids=lambda codec: codec.spec())
def test_as_one_thread(codec: Codec, dtype: dtypes.DType) -> None:
    assert _run(codec, dtype, threads=3) == _run(codec, dtype, threads=1)


def test_several_callers_share_the_helpers() -> None:
    codec = codecs.get("minmax4")
    expected = _run(codec, dtypes.FLOAT32, threads=1)
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(_run, codec, dtypes.FLOAT32, threads) for threads in (2, 3, 4, 5) * 4]
        assert all(each.result(timeout=60) == expected for each in found)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_has_helpers_of_its_own() -> None:
    codec = codecs.get("minmax4")
    expected = _run(codec, dtypes.FLOAT32, threads=3)  # the parent has helpers by now
    if (child := os.fork()) == 0:
        try:
            os._exit(_run(codec, dtypes.FLOAT32, threads=3) != expected)
        finally:  # of an exception, with which the child would go on with the tests
            os._exit(2)
    deadline = time.monotonic() + 30
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the fork's operation did not end within 30 s")
        time.sleep(0.01)
    assert ended[1] == 0


@pytest.mark.parametrize(
    ("setting", "threads"), [("3", 3), (" 4,2", 4), ("", None), ("0", None), ("-2", None), ("many", None)]
)
def test_the_threads_of_a_rank(setting: str, threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no number from 1 does not count, as in OpenMP; then the ranks of a machine share its processors."""
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    found = qccl.run_ranks(2, lambda comm: comm._session.engine.threads)
    assert found == [threads or 4] * 2
