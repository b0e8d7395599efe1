"""Processes that may open no further file: every refusal of the system is an error of qccl's that says what to do."""

from __future__ import annotations

import os
import resource

import pytest
from start_ranks import needs_ucx

import qccl
from qccl.meeting import descriptors
from qccl.meeting.network import Network
from qccl.transports.connect import connected_transport

#: more than split() opens in a group of one
MOST = 30


def split_with(name: str, spare: int) -> str:
    """What split() raises in a group of one whose process may open so many further files; nothing if it returns."""
    transport = connected_transport(name).meet(lambda note: [note], 60.0, Network(is_local=True))
    comm = qccl.Communicator.from_transport(transport, 60.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = os.dup(0)  # the lowest free number
    os.close(first)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + spare, hard))
    try:
        sub = comm.split(0)
    except qccl.QcclError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        comm.close()
        comm.transport.close()
    assert sub is not None
    sub.close()
    return ""


@needs_ucx
@pytest.mark.parametrize("name", ["ucx", "wan"])
def test_too_many_open_files(name, monkeypatch):
    monkeypatch.setattr(descriptors, "allow", lambda ranks: None)  # it would raise the limit
    monkeypatch.setenv("QCCL_INSECURE", "1")
    if name == "wan":
        monkeypatch.setenv("UCX_TLS", "tcp")  # no shared memory
    found = [split_with(name, spare) for spare in range(MOST)]
    assert found[0] and not found[-1]
    for text in filter(None, found):
        assert "EMFILE (too many open files)" in text and "ulimit -n" in text, text
