"""The ranks of gpu-check's sections: what they do, on threads with fake GPUs, and how their processes are started."""

from __future__ import annotations

import importlib
import threading
import time

import fake_cuda
import pytest

import qccl
from qccl import measuring
from qccl.cuda import libraries
from qccl.cuda.libraries import cuda_libraries

pytestmark = pytest.mark.starts_first


def reports_of_threads(monkeypatch, work):
    """What ``work()`` reported on two ranks that are threads; the section takes it for that of its processes."""
    import ranks

    unique_id, local, reports = qccl.get_unique_id(), threading.local(), dict[int, dict]()
    monkeypatch.setattr(
        qccl, "init",
        lambda **arguments: qccl.Communicator(unique_id, local.rank, 2, device=local.rank, timeout=10.0),
    )  # fmt: skip

    def run(rank):
        local.rank = rank
        with libraries.on_device(rank):
            reports[rank] = work()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    monkeypatch.setattr(ranks, "_start", lambda size, what, **variables: ([reports[0], reports[1]], [0, 0]))
    return reports


def test_what_an_nccl_rank_does_on_a_fake_gpu(world, monkeypatch):
    """The work of the ranks' processes, on threads: the digests are the host's."""
    import ranks

    monkeypatch.setattr(ranks, "CALLS", tuple((a, d, min(n, 5000)) for a, d, n in ranks.CALLS))
    monkeypatch.setattr(ranks, "RATE_NBYTES", 20_000)
    one_at_a_time = threading.Lock()
    import calls

    captured = calls._captured

    def alone(stream, comm, call):
        call()
        comm.check()
        comm.barrier()
        with one_at_a_time:
            graph = captured(stream, _Quiet(), call)
        comm.barrier()
        return graph

    class _Quiet:
        def check(self):
            pass

    monkeypatch.setattr(calls, "_captured", lambda stream, comm, call: alone(stream, comm, call))
    reports = reports_of_threads(monkeypatch, ranks._calls)
    found = ranks.check(2)
    assert set(found) == {"gpu", "registered", "gb_per_s", "dispatch_us", "replay_us"}
    assert found["registered"] == [True, True] and min(found["gb_per_s"]) > 0 and found["gpu"] == [0, 1]
    reports[1]["digests"][3] = "0"
    with pytest.raises(AssertionError, match=r"rank 1 of 2: .*stochastic"):
        ranks.check(2)


def test_the_section_auto(world, monkeypatch):
    """Its ranks on threads: fast and slow choices, and ranks that choose differently."""
    import choices

    world.elapses = None
    rig = importlib.import_module("qccl.cuda.rig")
    monkeypatch.setattr(rig, "_NBYTES", (1 << 20,))
    monkeypatch.setattr(measuring, "_LIMIT", 0.05)
    monkeypatch.setattr(measuring, "_OF_TIMEOUT", 1e6)  # fake GPUs on a busy machine are slow
    monkeypatch.setattr(choices, "SIZES", (400, 4000))
    monkeypatch.setattr(choices, "_ROUNDS", 1)
    monkeypatch.setattr(choices, "MOST", 1e9)
    reports = reports_of_threads(monkeypatch, choices.one_rank)
    found = choices.check()
    assert found["hardware"] == "2 x Fake 100, NCCL 2.28.0" and found["measured_s"] > 0
    for size in ("400", "4000"):
        row = found[size]
        assert row["beside_best"] >= 1 and row["chosen"] in row["ms"] and "of the group's profile" in row["why"]
    monkeypatch.setattr(choices, "MOST", 0.5)
    with pytest.raises(AssertionError, match="a fixed choice is much faster than auto's at"):
        choices.check()
    monkeypatch.setattr(libraries, "device_count", lambda: 1)
    assert choices.check() == found, "ranks that take turns on one GPU have no rates"
    reports[1]["sizes"]["400"]["chosen"] = "none chain"
    with pytest.raises(AssertionError, match="the ranks choose differently"):
        choices.check()


def test_ranks_with_and_without_registered_memory(world, monkeypatch):
    """The section "ranks" starts its ranks four times, the last time with NCCL's registration switched off."""
    import check
    import ranks

    asked = []
    monkeypatch.setattr(ranks, "check", lambda size, **variables: asked.append((size, variables)) or {"ranks": size})
    assert set(check.SECTIONS["ranks"][0]()) == {"2 ranks", "3 ranks", "4 ranks", "2 ranks, unregistered"}
    assert asked == [(2, {}), (3, {}), (4, {}), (2, {"NCCL_LOCAL_REGISTER": "0"})]
    assert len(asked) * ranks._SECONDS <= check.SECTIONS["ranks"][1]


def test_ranks_share_a_gpu_only_where_there_are_too_few(world, monkeypatch):
    import ranks

    started = []

    class Process:
        returncode = 0

        def __init__(self, command, *, env, **options):
            started.append(env)

        def communicate(self, timeout):
            return "{}", ""

    monkeypatch.setattr(ranks.subprocess, "Popen", Process)
    runtime = cuda_libraries().runtime
    for count, shared in ((fake_cuda.DEVICES, False), (1, True)):
        monkeypatch.setattr(runtime, "getDeviceCount", lambda count=count: count)
        ranks._start(2, "calls", NCCL_LOCAL_REGISTER="0")
        assert all(("NCCL_SHM_DISABLE" in env) == ("NCCL_HOSTID" in env) == shared for env in started[-2:])
        assert started[-1]["NCCL_LOCAL_REGISTER"] == "0"
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, started[-1][name])
        with libraries.on_device(5):
            ranks._use_device()
            assert runtime.getDevice() == (0 if shared else 1)


def test_what_ranks_do_when_one_stays_away(world, monkeypatch):
    """The section "faults", on threads and with shorter waits."""
    import ranks

    monkeypatch.setattr(ranks, "TIMEOUT", 0.3)
    monkeypatch.setattr(ranks, "AWAY", 1.0)
    reports = reports_of_threads(monkeypatch, ranks._faults)
    assert ranks.check_faults().items() >= {"synchronize": "CollectiveTimeout", "mismatch": "MismatchError"}.items()
    monkeypatch.setattr(ranks, "_start", lambda size, what: ([reports[0], {"stderr": "a bug"}], [0, 1]))
    with pytest.raises(AssertionError, match="a bug"):
        ranks.check_faults()


#: stands for Python in a rank's process: sends a report, dies, or hangs, by the rank's number
_RANK = """#!/bin/sh
echo "some library greets"
case $RANK in
0) echo '{"what": "'$2'", "host": "'$NCCL_HOSTID'", "port": "'$QCCL_PORT'", "size": "'$WORLD_SIZE'"}' ;;
1) head -c 300000 /dev/zero | tr '\\0' x >&2; echo "it broke" >&2; exit 3 ;;
2) exec sleep 60 ;;
esac
"""


def test_the_processes_of_ranks(monkeypatch, tmp_path):
    import ranks

    program = tmp_path / "python"
    program.write_text(_RANK)
    program.chmod(0o755)
    monkeypatch.setattr(ranks.sys, "executable", str(program))
    monkeypatch.setattr(ranks, "_SECONDS", 1.5)
    monkeypatch.setattr(libraries, "device_count", lambda: 1)
    begin = time.monotonic()
    reports, status = ranks._start(3, "calls")
    assert time.monotonic() - begin < 20
    assert status == [0, 3, -9]
    assert reports[0].items() >= {"what": "calls", "host": "rank0", "size": "3"}.items() and reports[0]["port"]
    assert reports[1]["stderr"].endswith("it broke\n") and reports[2] == {"stderr": ""}
