"""NCCL ranks, one process each: right bytes on every rank, graphs and faults.

Each rank has a GPU of its own where there are enough. Otherwise they share one, over sockets. They then take turns on
it, so their times mean nothing, and none is measured (``qccl-bench --backend cuda`` measures ranks).

``python ranks.py`` is one rank (of those that a launcher's variables announce); it writes what it found as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from device import DeviceArray
from kernel_calls import hard_values
from plain_ranks import free_ports, torch_variables
from reports import each_of, stacks_before

import qccl
from qccl.engine.cuda import libraries

#: NCCL then treats processes as machines; otherwise it refuses two ranks on one GPU
ALONE = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
_SECONDS = 29.0
#: the deadline of a call whose peer stays away, and how long it does, in seconds
TIMEOUT, AWAY = 3.0, 8.0

#: the arguments of the calls, with the count last
CALLS: tuple[tuple[dict[str, Any], str, int], ...] = (
    ({"codec": "minmax8", "algorithm": "two_round"}, "float32", 100_003),
    ({"codec": "minmax8", "algorithm": "two_round", "chunk": 4096}, "float32", 100_003),
    ({"codec": "minmax4", "algorithm": "two_round", "op": "avg"}, "bfloat16", 50_001),
    ({"codec": "minmax4:rounding=stochastic,seed=3", "algorithm": "two_round", "chunk": 8192}, "float32", 70_000),
    ({"codec": "minmax3:bucket=shard", "algorithm": "one_shot", "op": "max"}, "float16", 9_999),
    ({"codec": "none", "algorithm": "two_round", "op": "min"}, "float32", 20_000),
    ({"codec": "minmax8", "algorithm": "one_shot"}, "float32", 1),
    ({"codec": "minmax8", "algorithm": "two_round"}, "float32", 2_000_000),
)


def _input(number: int, rank: int) -> np.ndarray:
    _, dtype, count = CALLS[number]
    kind = ("normal", "outliers", "special", "negative")[number % 4]
    return hard_values(kind, count, dtype, np.random.default_rng([number, rank]))


def _digests_on_host(size: int) -> list[str]:
    """The expected result of each call, on all ranks."""

    def run(comm: qccl.Communicator) -> list[str]:
        found = []
        for number, (arguments, dtype, _) in enumerate(CALLS):
            x = _input(number, comm.rank)
            comm.quantized_allreduce(x, dtype=dtype if dtype == "bfloat16" else None, **arguments)
            found.append(_digest(x))
        return found

    return qccl.run_ranks(size, run)[0]


def _digest(x: np.ndarray) -> str:
    import hashlib

    return hashlib.sha256(x.tobytes()).hexdigest()


def check_all() -> dict[str, Any]:
    """2 to 4 ranks."""
    return each_of({f"{size} ranks": partial(check, size) for size in (2, 3, 4)})


def check(size: int) -> dict[str, Any]:
    """Start ``size`` ranks, and compare their reports."""
    reports, status = _start(size, "calls")
    assert not any(status), f"exit statuses {status}: {reports}"
    expected = _digests_on_host(size)
    for rank, report in enumerate(reports):
        for number, (mine, wanted) in enumerate(zip(report["digests"], expected, strict=True)):
            assert mine == wanted, f"rank {rank} of {size}: {CALLS[number]} differs from the host's bytes"
        assert report["graph"] == expected[0], f"rank {rank} of {size}: the replay of a graph differs"
        assert report["split"] == [size - 1 - rank, size], f"rank {rank} of {size}: split gave {report['split']}"
    return {key: [report[key] for report in reports] for key in ("gpu", "link", "seconds")}


def check_faults() -> dict[str, Any]:
    """A rank stays away: the others' watchdogs end the call in time, with the documented errors, and they exit."""
    begin = time.monotonic()
    reports, status = _start(2, "faults")
    seconds = time.monotonic() - begin
    assert not any(status), f"exit statuses {status}: {reports}"
    assert reports[0]["synchronize"] == "CollectiveTimeout", reports[0]
    assert reports[0]["next"] in ("CollectiveTimeout", "PeerLost", "EngineError"), reports[0]
    assert reports[0]["poisoned"], "the results of the call that failed are no NaN"
    assert reports[1]["mismatch"] == reports[0]["mismatch"] == "MismatchError", reports
    return {"seconds": seconds, **reports[0]}


def _start(size: int, what: str) -> tuple[list[dict[str, Any]], list[int]]:
    """All ranks' reports and exit statuses."""
    port, is_shared = free_ports(1)[0], libraries.device_count() < size

    def run(rank: int) -> tuple[dict[str, Any], int]:
        place = torch_variables(rank, size, port) | {"QCCL_PORT": str(port)}
        if is_shared:
            place |= ALONE | {"NCCL_HOSTID": f"rank{rank}"}
        command, pipe = [sys.executable, str(Path(__file__)), what], subprocess.PIPE
        with subprocess.Popen(command, env=os.environ | place, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                out, err = process.communicate(timeout=_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate(timeout=30)
        sys.stderr.write(err)  # the section's process keeps all of it
        lines = [line for line in out.splitlines() if line.startswith("{")]
        return json.loads(lines[-1]) if lines else {"stderr": err[-1000:]}, process.returncode

    with ThreadPoolExecutor(size) as pool:
        reports, statuses = zip(*pool.map(run, range(size)), strict=True)
    return list(reports), list(statuses)


# -- one rank --------------------------------------------------------------------------------------------------------


def _use_device() -> None:
    """Make this rank's GPU the current one."""
    rank, size = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    libraries.cuda_libraries().runtime.setDevice(rank if libraries.device_count() >= size else 0)


def _calls() -> dict[str, Any]:
    from calls import _captured

    gpu = libraries.cuda_libraries()
    stream, device, begin = gpu.cupy.cuda.Stream(non_blocking=True), gpu.runtime.getDevice(), time.monotonic()
    with qccl.init(backend="cuda", device=device, timeout=60.0) as comm:
        digests = []
        for number, (arguments, dtype, _) in enumerate(CALLS):
            x = DeviceArray(_input(number, comm.rank))
            bfloat16 = {"dtype": dtype} if dtype == "bfloat16" else {}
            comm.quantized_allreduce(x, stream=stream, **bfloat16, **arguments)
            comm.check()
            digests.append(_digest(x.get()))
        arguments, _, _ = CALLS[0]
        x = DeviceArray(_input(0, comm.rank))
        graph = _captured(stream, comm, lambda: comm.quantized_allreduce(x, stream=stream, **arguments))
        x.put(_input(0, comm.rank))
        graph.launch(stream)
        comm.check(stream.ptr)
        replayed = _digest(x.get())
        del graph  # before the communicator, for NCCL waits for graphs that use it
        sub = comm.split(0, key=-comm.rank)
        assert sub is not None
        y = DeviceArray(np.full(1000, 1.0, np.float32))
        sub.quantized_allreduce(y, stream=stream)
        sub.check()
        assert (y.get() == comm.size).all()
        split = [sub.rank, sub.size]
        sub.close()
    figures = {"gpu": device, "link": comm.transport.link, "seconds": time.monotonic() - begin}
    return {"digests": digests, "graph": replayed, "split": split, **figures}


def _faults() -> dict[str, Any]:
    found = {}
    device = libraries.cuda_libraries().runtime.getDevice()
    comm = qccl.init(backend="cuda", device=device, timeout=60.0)
    x = DeviceArray(np.ones(1000, np.float32))
    try:
        comm.split(0).quantized_allreduce(x, codec="minmax8" if comm.rank else "minmax4")
    except qccl.QcclError as error:
        found["mismatch"] = type(error).__name__
    comm.quantized_allreduce(x)  # makes the plan, before a rank stays away
    comm.check()
    comm.barrier()
    if comm.rank == 1:
        time.sleep(AWAY)
        comm.abort("its part is over")
        return found
    work = comm.quantized_allreduce(x, async_op=True, timeout=TIMEOUT)
    for name, call in (("synchronize", work.synchronize), ("next", lambda: comm.quantized_allreduce(x))):
        try:
            call()
        except qccl.QcclError as error:
            found[name] = type(error).__name__
    found["poisoned"] = bool(np.isnan(x.get()).all())
    return found


if __name__ == "__main__":
    stacks_before(_SECONDS)
    _use_device()
    print(json.dumps({"calls": _calls, "faults": _faults}[sys.argv[1]]()), flush=True)
