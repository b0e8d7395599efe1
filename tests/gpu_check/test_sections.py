"""Each section of gpu-check on a fake GPU: it passes, and finds what is planted."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import fake_cuda
import pytest
from clocks import Clock
from codec_table import TABLE

import qccl
from qccl.cuda import libraries
from qccl.schedule import Span

pytestmark = [pytest.mark.starts_first, pytest.mark.usefixtures("cupy")]


def test_kernels_on_a_fake_gpu(monkeypatch):
    """The comparison names the case and the kernel that wrote a wrong byte."""
    import codec_kernels

    assert len(codec_kernels.EVERY) > 500
    compared, differences = zip(*codec_kernels.check(codec_kernels.EVERY[::41]), strict=True)
    assert sum(compared) > 200 and not any(differences)
    run = codec_kernels.Device.run

    def spoil(device, launch, arrays, *arguments, **more):
        run(device, launch, arrays, *arguments, **more)
        if "reduce" in launch.kernels[0]:
            arrays.buffers[0][arrays.place(Span("array 0", 0, 1))[1]] ^= 1

    monkeypatch.setattr(codec_kernels.Device, "run", spoil)
    case = codec_kernels.EVERY[5]
    [(_, found)] = codec_kernels.check([case])
    assert found.startswith(f"{case}: reduce: 1 bytes of buffer 0 differ")


def test_streams_and_graphs_on_a_fake_gpu():
    import calls

    assert calls.stream_order(60.0)["asynchronous"]
    assert calls.graphs() == {"stochastic_replays_differ": True}


def test_costs_and_overlap_on_a_fake_gpu(monkeypatch):
    """They run; the fake GPU's times mean nothing."""
    import calls

    monkeypatch.setattr(calls, "_host_seconds", lambda *arguments: 14e-6)
    assert calls.dispatch(calls=2, burst=1)["replay_us one_shot"] == pytest.approx(14)
    monkeypatch.setattr(calls, "_host_seconds", lambda *arguments: 151e-6)
    with pytest.raises(AssertionError, match="a dispatch takes 151 us"):
        calls.dispatch(calls=2, burst=1)
    assert isinstance(
        calls._call_seconds(1 << 14, 0.0, 1 << 12, 1, {"codec": "minmax8", "algorithm": "one_shot"}), float
    )


def test_queues_on_a_fake_gpu(world, monkeypatch):
    """The fake's slow kernel ends after the timeout of the call behind it, by the clock of deadlines, and a while.

    tests/cuda/test_deadline.py has hanging kernels.
    """
    import queues

    clock, delay = Clock(), 0.1
    monkeypatch.setattr("qccl.deadline.time", clock)
    begun: dict[fake_cuda.Node, float] = {}

    def holds(node: fake_cuda.Node) -> bool:
        if node.what != "spin":
            return False
        if time.monotonic() < delay + begun.setdefault(node, time.monotonic()):
            return True
        if all(each.what != "qccl_end" for each in world.pending):  # the call has not been put on its streams yet
            return True
        clock.ahead = 1000.0
        return clock.asked < 3  # the host has looked whether the deadline has passed

    world.holds = holds
    assert queues.late_start(delay=delay, timeout=60.0)["seconds"] >= delay


def test_large_arrays_on_a_fake_gpu(world, monkeypatch):
    import large

    assert large.check(30_011, 8192)["elements"] == 30_011
    fill = large._fill
    monkeypatch.setattr(large, "_fill", lambda address, values, count: fill(address, values[::-1].copy(), count))
    with pytest.raises(AssertionError, match="of 30011 differs from the host's"):
        large.check(30_011, 8192)


def test_staging_on_a_fake_gpu(monkeypatch):
    """The section "staged", with shorter waits; it finds wrong bytes."""
    import staged

    from qccl.cuda.staging import Staging

    monkeypatch.setattr(staged, "CALLS", tuple((c, a, min(n, 5000), k and 1024) for c, a, n, k in staged.CALLS))
    assert set(staged.check(3)) == {"enqueue_ms", "done_ms"}
    assert set(staged.check_order(60.0))  # nothing waits so long == {"host_seconds rank 0", "host_seconds rank 1"}
    ended, times = threading.Event(), []

    def perf_counter():
        times.append(time.perf_counter())
        if len(times) == 2:
            ended.set()
        return times[-1]

    with monkeypatch.context() as patch:  # the other rank comes back when the call has ended
        patch.setattr(staged, "time", SimpleNamespace(sleep=ended.wait, perf_counter=perf_counter))
        assert 0.2 <= staged.check_away(0.2, 60.0)["seconds"] < 60.0
    monkeypatch.setattr(Staging, "_wait", lambda *arguments: None)
    with pytest.raises(AssertionError, match="differs from the host's bytes"):
        staged.check(2)


def test_bandwidth_on_a_fake_gpu(monkeypatch):
    """Bytes by the fake's millisecond."""
    import bandwidth

    monkeypatch.setattr(bandwidth, "_SPECS", {"minmax8": ("encode", "decode", "reduce"), "minmax4": bandwidth._KINDS})
    figures = bandwidth.measure(mebibytes=1, jobs=2, repeats=1)
    moved = (1 << 20) + qccl.codecs.get("minmax8").encoded_nbytes(1 << 18, "float32")
    assert figures["encode minmax8 float32"]["gb_per_s"] == pytest.approx(2 * moved / 1e-3 / 1e9)
    assert figures["copy_gb_per_s"] == pytest.approx(4 * (1 << 20) / 1e-3 / 1e9)


def test_the_triage_on_a_fake_gpu(monkeypatch):
    """Its sections, except two ranks in processes; wrong bytes are found."""
    import bandwidth
    import codec_kernels
    import ranks
    import triage

    found = triage.driver()
    assert found["gpu"] == "Fake 100" and found["compute_capability"] == "9.0" and found["NVRTC"] == "12.9"
    monkeypatch.setattr(codec_kernels, "check_apart", lambda numbers: {"numbers": numbers})
    numbers = triage.codecs()["numbers"]
    assert {codec_kernels.EVERY[number].codec.name for number in numbers} == {"none", "minmax", *TABLE}
    monkeypatch.setattr(ranks, "check", lambda size: {"ranks": size})
    assert triage.nccl()["two ranks"] == {"ranks": 2}
    figures = bandwidth.first_figures(mebibytes=1, jobs=2, repeats=1)
    assert set(figures) == {"copy_gb_per_s", "encode minmax4 bfloat16", "reduce minmax8 bfloat16"}


def reports_of_threads(monkeypatch, work):
    """What ``work()`` reports on two ranks that are threads; the section takes it for its processes' reports."""
    import ranks

    unique_id, local = qccl.get_unique_id(), threading.local()
    make = lambda **arguments: qccl.Communicator(unique_id, local.rank, 2, device=local.rank, timeout=60.0)  # noqa: E731
    monkeypatch.setattr(qccl, "init", make)

    def run(rank):
        local.rank = rank
        with libraries.on_device(rank):
            return work()

    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(run, range(2)))
    monkeypatch.setattr(ranks, "_start", lambda size, what, **variables: (reports, [0, 0]))
    return reports


def test_ranks_on_a_fake_gpu(monkeypatch):
    """The work of the ranks' processes, on threads: the digests are the host's, and a wrong one is found."""
    import calls
    import ranks

    monkeypatch.setattr(ranks, "CALLS", tuple((a, d, min(n, 5000)) for a, d, n in ranks.CALLS))
    monkeypatch.setattr(ranks, "RATE_NBYTES", 20_000)
    one_at_a_time, captured = threading.Lock(), calls._captured
    begin, end = threading.Barrier(2), threading.Barrier(2)

    def alone(stream, comm, call):
        """The fake refuses in a capture of any thread what a capture forbids."""
        call()
        comm.check()
        comm.barrier()
        begin.wait(60)  # a rank may still poll for the barrier, which allocates
        with one_at_a_time:
            graph = captured(stream, SimpleNamespace(check=lambda: None), call)
        end.wait(60)
        comm.barrier()
        return graph

    monkeypatch.setattr(calls, "_captured", alone)
    reports = reports_of_threads(monkeypatch, ranks._calls)
    assert len(ranks.check(2)["gb_per_s"]) == 2
    reports[1]["digests"][3] = "0"
    with pytest.raises(AssertionError, match=r"rank 1 of 2: .*stochastic"):
        ranks.check(2)


def test_faults_on_a_fake_gpu(monkeypatch):
    import ranks

    monkeypatch.setattr(ranks, "TIMEOUT", 0.3)
    monkeypatch.setattr(ranks, "AWAY", 1.0)
    reports_of_threads(monkeypatch, ranks._faults)
    assert ranks.check_faults().items() >= {"synchronize": "CollectiveTimeout", "mismatch": "MismatchError"}.items()
