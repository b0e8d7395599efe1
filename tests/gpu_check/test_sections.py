"""Sections of gpu-check on a fake GPU find what is planted. test_check.py runs all of them."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import fake_cuda
import pytest
from clocks import Clock
from codec_table import TABLE
from kernel_cases import FAR

import qccl
from qccl.collectives.schedule import Span

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
            arrays.buffers[0][arrays.place(Span("array 0", 0, 1))[1] - FAR] ^= 1

    monkeypatch.setattr(codec_kernels.Device, "run", spoil)
    case = codec_kernels.EVERY[5]
    [(_, found)] = codec_kernels.check([case])
    assert found.startswith(f"{case}: reduce: 1 bytes of buffer 0 differ")


def test_the_probe_on_a_fake_gpu(world, monkeypatch):
    """It puts the groups and edges on the streams that its figures name; a host that sees no flag is an error."""
    import probe
    from fake_gpu_check import Polling

    monkeypatch.setattr(probe, "NBYTES", (16,))
    monkeypatch.setattr(probe, "_REPEATS", 3)
    assert probe.groups().keys() == {"1 x 0 KiB", "3 x 0 KiB", "7 x 0 KiB"}
    assert [each[1] for each in world.calls if each[0] == "group"] == [2] * 4 + [6] * 4 + [14] * 4
    world.calls.clear()
    probe.edges(10)
    edges = [each[0] for each in world.calls]
    assert edges.count("wait") == 20 and edges.count("record") == 20 + 4  # once to warm up, and what is timed
    monkeypatch.setattr(probe, "time", Polling(world))
    assert probe.flag(5)["launch_to_host_us"] > 0
    world.frozen = True
    monkeypatch.setattr(probe.time, "perf_counter", itertools.count().__next__)
    with pytest.raises(AssertionError, match="does not see what a kernel has written"):
        probe.flag(5)
    monkeypatch.setattr(probe.nccl_library, "library", SimpleNamespace)
    assert probe.registered_groups() == "this NCCL has no ncclMemAlloc"


def test_queues_on_a_fake_gpu(world, monkeypatch):
    """The fake's slow kernel ends after the timeout of the call behind it, by the clock of deadlines, and a while.

    tests/engine/cuda/test_deadline.py has hanging kernels.
    """
    import queues

    clock, delay = Clock(), 0.1
    monkeypatch.setattr("qccl.base.deadline.time", clock)
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


def test_staging_on_a_fake_gpu(monkeypatch):
    """The section "staged", with shorter waits; it finds wrong bytes."""
    import staged

    from qccl.engine.cuda.staging import Staging

    monkeypatch.setattr(staged, "CALLS", tuple((c, a, min(n, 5000), k and 1024) for c, a, n, k in staged.CALLS))
    assert staged.check(3, 60.0).keys() == {"first_call_ms", "all_ms"}  # nothing waits so long
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
        staged.check(2, 60.0)


def test_bandwidth_on_a_fake_gpu(monkeypatch):
    """Bytes by the fake's millisecond."""
    import bandwidth

    monkeypatch.setattr(bandwidth, "_SPECS", {"minmax8": ("encode", "decode", "reduce"), "minmax4": bandwidth._KINDS})
    figures = bandwidth.measure(mebibytes=1, jobs=2, repeats=1)
    moved = (1 << 20) + qccl.codecs.get("minmax8").encoded_nbytes(1 << 18, "float32")
    assert figures["encode minmax8 float32"]["gb_per_s"] == pytest.approx(2 * moved / 1e-3 / 1e9)
    assert figures["copy_gb_per_s"] == pytest.approx(4 * (1 << 20) / 1e-3 / 1e9)


def test_codecs_has_a_case_of_each(monkeypatch):
    import codec_kernels
    import triage

    monkeypatch.setattr(codec_kernels, "check_apart", lambda numbers: {"numbers": numbers})
    numbers = triage.codecs()["numbers"]
    assert {codec_kernels.EVERY[number].codec.name for number in numbers} == {"none", "minmax", *TABLE}


def test_ranks_on_a_fake_gpu(monkeypatch):
    """The work of the ranks' processes, on threads: the digests are the host's, and a wrong one is found."""
    import fake_gpu_check
    import ranks

    monkeypatch.setattr(ranks, "CALLS", tuple((a, d, min(n, 5000)) for a, d, n in ranks.CALLS))
    monkeypatch.setattr(qccl, "init", qccl.init)
    reports, status = fake_gpu_check.on_threads(2, "calls")
    monkeypatch.setattr(ranks, "_start", lambda size, what: (reports, status))
    assert ranks.check(2).items() >= {"gpu": [0, 1], "link": ["PCIe", "PCIe"]}.items()
    reports[1]["digests"][3] = "0"
    with pytest.raises(AssertionError, match=r"rank 1 of 2: .*stochastic"):
        ranks.check(2)
