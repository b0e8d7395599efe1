"""Ranges of calls for profilers, with modules in the place of nvtx and ittapi."""

from __future__ import annotations

import contextlib
import sys
import threading
import types

import numpy as np
import pytest

import qccl
from qccl.base.errors import ArgumentError
from qccl.observe.ranges import VARIABLE


@pytest.mark.parametrize(("setting", "package", "function"), [("nvtx", "nvtx", "annotate"), ("itt", "ittapi", "task")])
def test_a_range_of_each_call(setting, package, function, monkeypatch):
    events: list[tuple[str, str, int]] = []

    @contextlib.contextmanager
    def range_(name, domain):
        assert domain == "qccl"
        events.append(("begin", name, threading.get_ident()))
        try:
            yield
        finally:
            events.append(("end", name, threading.get_ident()))

    monkeypatch.setitem(sys.modules, package, types.SimpleNamespace(**{function: range_}))
    monkeypatch.setenv(VARIABLE, setting)

    def run(comm):
        comm.quantized_allreduce(np.ones(100, np.float32), codec="minmax8")
        comm.plan("allreduce", 5, codec="none").bind(np.ones(5, np.float32)).run()
        comm.barrier()
        comm.quantized_allreduce(np.ones(7, np.float32), codec="onebit+ef", key="k", lr=0.5)
        with pytest.raises(qccl.MismatchError):
            comm.quantized_allreduce(np.ones(6 + comm.rank, np.float32), codec="none")
        return threading.get_ident()

    for rank, thread in enumerate(qccl.run_ranks(2, run)):
        found = [event[:2] for event in events if event[2] == thread and event[1] != "barrier()"]
        assert [kind for kind, _ in found] == ["begin", "end"] * 4
        assert found[6][1] == found[7][1] and f"count={6 + rank}," in found[6][1]
        names = [name.split(", dtype")[0] for _, name in found[::2]]
        assert names[:3] == ["allreduce(count=100", "allreduce(count=5", "allreduce(count=7"]
        assert "key='k'" in found[4][1] and "lr=" not in found[4][1]


@pytest.mark.parametrize("setting", ["NVTX", "1", "nvtx,itt"])
def test_a_wrong_setting(setting, monkeypatch):
    monkeypatch.setenv(VARIABLE, setting)
    with pytest.raises(ArgumentError, match=r'QCCL_RANGES is .*"nvtx" and "itt"'):
        qccl.run_ranks(1, lambda comm: None)


def test_a_package_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setenv(VARIABLE, "nvtx")
    with pytest.raises(ArgumentError, match="pip install nvtx"):
        qccl.run_ranks(1, lambda comm: None)
