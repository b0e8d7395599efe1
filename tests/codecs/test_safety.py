"""Invalid arguments, threads: the kernels never access memory outside their buffers."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import patience
import pytest

from qccl import _host, codecs


@pytest.mark.processes
def test_no_access_outside_the_buffers() -> None:
    """Every buffer ends at an inaccessible page; a stray access kills the script."""
    script = Path(__file__).with_name("guard_pages.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "no stray access\n"), done.stderr


def make(**changes: Any) -> None:
    """A Reduce of two wires, with changes."""
    arguments: dict[str, Any] = {
        "memory": _host.Memory(3),
        "codec": codecs.MinMax().host(),
        "dtype_code": 0,
        "srcs": [(0, 0), (0, 4096)],
        "own": None,
        "own_index": 0,
        "wire": None,
        "out": (2, 0),
        "count": 5,
        "op": 0,
        "scale": 1.0,
        "index": 0,
        "round": 0,
        "rank": 0,
    }
    _host.Reduce(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype_code": 3}, "dtype_code is 3; allowed: 0 "),
        ({"srcs": [(3, 0)]}, "srcs names buffer 3, but the memory has 3"),
        ({"out": (7, 0)}, "out names buffer 7"),
        ({"srcs": []}, "nothing to reduce"),
        ({"out": None}, "nowhere to put the result"),
        ({"own": (1, 0), "own_index": 3}, "own_index is 3; allowed: 0 to 2"),
        ({"op": 3}, "op is 3; allowed: 0 .sum., 1"),
    ],
)
def test_impossible_operations_are_refused(changes: dict[str, Any], message: str) -> None:
    make()
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("name", "bucket", "options", "message"),
    [
        ("Maxmin", 8, [], "there is no codec Maxmin; allowed: Blocks, Cast, .*MinMax, .*Trellis"),
        ("MinMax", 12, [8], "bucket is 12; allowed: multiples of 8"),
        ("MinMax", 1 << 25, [8], "bucket is 33554432; allowed: multiples of 8 to 2.24, or 0"),
        ("MinMax", 8, [8] * 7, "7 options; allowed: up to 6"),
    ],
)
def test_impossible_kernels_are_refused(name: str, bucket: int, options: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _host.CompiledCodec(name, bucket, 0, options)


def test_a_buffer_without_address_is_an_error_not_a_crash() -> None:
    memory = _host.Memory(2)
    encode = _host.Encode(memory, codecs.NoCodec().host(), 0, (0, 0), (1, 0), 4, 0, 0, 0)
    with pytest.raises(RuntimeError, match="buffer 0 has no address"):
        encode()
    with pytest.raises(IndexError):
        memory[2] = 1


def test_storing_an_address_rebinds_and_the_memory_stays_alive() -> None:
    first, second, wire = (np.full(4, value, np.float32) for value in (1, 2, 0))
    memory = _host.Memory(2)
    memory[0], memory[1] = first.ctypes.data, wire.ctypes.data
    encode = _host.Encode(memory, codecs.NoCodec().host(), 0, (0, 0), (1, 0), 4, 0, 0, 0)
    encode()
    assert (wire == 1).all()
    memory[0] = second.ctypes.data
    del memory
    encode()
    assert (wire == 2).all()


def test_operations_release_the_gil() -> None:
    """This thread runs on while another is inside a long operation, though perhaps not beside the first one."""
    count = 1 << 23
    x, wire = np.ones(count, np.float32), np.empty(2 * count, np.uint8)
    memory = _host.Memory(2)
    memory[0], memory[1] = x.ctypes.data, wire.ctypes.data
    encode = _host.Encode(memory, codecs.MinMax(3, 8, "stochastic").host(), 0, (0, 0), (1, 0), count, 0, 0, 0)
    ticks: list[float] = []
    inside: list[float] = []

    def work() -> None:
        limit = patience.Limit(20)
        while not inside and limit.left():
            ticks.clear()
            start = time.monotonic()
            encode()
            stop = time.monotonic()
            margin = (stop - start) / 10
            inside.extend(tick for tick in tuple(ticks) if start + margin < tick < stop - margin)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        ticks.append(time.monotonic())
        time.sleep(0.0005)
    assert inside
