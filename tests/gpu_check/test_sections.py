"""Parts of sections that gpu-check on a fake GPU (test_check.py) leaves out, and what their figures mean."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import fake_cuda
import pytest
from clocks import Clock

import qccl

pytestmark = [pytest.mark.starts_first, pytest.mark.usefixtures("cupy")]


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
    """The section "staged", with shorter waits."""
    import staged

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


def test_bandwidth_on_a_fake_gpu(monkeypatch):
    """Bytes by the fake's millisecond."""
    import bandwidth

    monkeypatch.setattr(bandwidth, "_SPECS", {"minmax8": ("encode", "decode", "reduce"), "minmax4": bandwidth._KINDS})
    figures = bandwidth.measure(mebibytes=1, jobs=2, repeats=1)
    moved = (1 << 20) + qccl.codecs.get("minmax8").encoded_nbytes(1 << 18, "float32")
    assert figures["encode minmax8 float32"]["gb_per_s"] == pytest.approx(2 * moved / 1e-3 / 1e9)
    assert figures["copy_gb_per_s"] == pytest.approx(4 * (1 << 20) / 1e-3 / 1e9)
