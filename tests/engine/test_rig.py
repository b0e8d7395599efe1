"""The memory of measured calls on the host, and its clock."""

from __future__ import annotations

from qccl.engine.host.rig import HostRig


def test_memory_is_filled_with_repeated_values():
    rig = HostRig()
    assert rig.address % 64 == 0
    rig.fill(b"abc", 10, 20)
    rig.fill(b"z", rig.nbytes - 2, rig.nbytes)
    assert rig.read(10, 10) == b"abcabcabca" and rig.read(rig.nbytes - 2, 2) == b"zz"


def test_seconds_are_those_of_one_call(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("qccl.engine.host.rig.time.perf_counter", lambda: now[0])
    calls = []

    def call():
        calls.append(now[0])
        now[0] += 2.0

    assert HostRig().seconds(call, 3) == 2.0 and len(calls) == 3
