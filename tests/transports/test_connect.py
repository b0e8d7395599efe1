"""The transport that is wanted, and why others cannot be used."""

from __future__ import annotations

import importlib.util

import pytest

from qccl import ArgumentError
from qccl.meeting.launchers import Launcher
from qccl.meeting.meetings import Meeting
from qccl.transports import choice
from qccl.transports.connect import gather_offers


def test_the_transport_that_is_wanted(monkeypatch):
    monkeypatch.delenv("QCCL_TRANSPORT", raising=False)
    assert choice.wanted_transport() is None and choice.wanted_transport("ucx") == "ucx"
    for text, wanted in (("wan", "wan"), ("auto", None), ("", None)):
        monkeypatch.setenv("QCCL_TRANSPORT", text)
        assert choice.wanted_transport() == wanted and choice.wanted_transport("ucx") == "ucx"
    with pytest.raises(ArgumentError, match="transport='tcp' does not exist; there are auto, ucx, mpi, gloo"):
        choice.wanted_transport("tcp")


def test_wan_is_a_transport_beside_mpi(monkeypatch):
    """On one machine, and between machines if the user allows it without a token."""
    monkeypatch.delenv("QCCL_TOKEN", raising=False)
    monkeypatch.setattr(choice, "obstacle", lambda name: "" if name == "wan" else "it is not here")
    assert choice.has_other_than_mpi(Launcher("MPICH", 0, 2, 0, 2))
    assert not choice.has_other_than_mpi(several := Launcher("srun", 0, 2, 0, 0))
    monkeypatch.setenv("QCCL_INSECURE", "1")
    assert choice.has_other_than_mpi(several)


def test_obstacles(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choice.obstacle("gloo") == "PyTorch is not installed"
    assert choice.obstacle("ucx") == choice.obstacle("wan") == "msgspec is not installed (pip install msgspec)"
    meeting = Meeting("a launcher", 0, 2, lambda note, timeout: [note, note])
    assert gather_offers(meeting, 1.0)[1].gloo == "a launcher has no port for gloo"
    monkeypatch.delenv("QCCL_TOKEN", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert choice.obstacle("wan") == ""
