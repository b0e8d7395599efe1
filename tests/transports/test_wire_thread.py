"""A rank that computes holds nobody up: what it has sent arrives, and what comes is taken, without its calls."""

from __future__ import annotations

import ctypes
import socket
import time

import numpy as np
from start_ranks import needs_ucx
from wan_wires import ACK, HEAD, connected, poll_until, rank_0

from qccl.transports import ucx

#: more than the kernel takes of one connection, and less than the wire copies before it waits for the other rank
NBYTES = 12 << 20


def test_what_was_sent_arrives():
    """Wan copies messages; their sends are then over."""
    first, second = connected()
    data = np.random.default_rng(1).bytes(NBYTES)
    sent, got = first.send(1, data), second.receive(0, NBYTES)
    poll_until(lambda: sent in first.done, first)
    poll_until(lambda: got in second.done, second)
    assert second.data(got) == data
    first.close()
    second.close()


def test_callers_are_answered():
    """A rank whose connection broke is connected again, and knows it, while this rank makes no call."""
    with rank_0() as (_, (raw,)):
        raw.socket.settimeout(10)
        answer = raw.socket.recv(HEAD.size, socket.MSG_WAITALL)
        assert HEAD.unpack(answer)[1] == ACK


class _UcxWire:
    """One of two workers of this process that share memory."""

    def __init__(self) -> None:
        self.native = ucx.memory_wire(None)
        self.done: set[int] = set()

    def poll(self) -> None:
        self.done.update(self.native.poll(0))


@needs_ucx
def test_a_library_that_has_failed_does_not_keep_the_processor(monkeypatch):
    """Where UCX cannot say when to wake up, the thread looks again after a millisecond, not at once."""
    calls: list[float] = []

    @ctypes.CFUNCTYPE(ctypes.c_byte, ctypes.c_void_p)
    def fails(worker: int) -> int:
        calls.append(time.monotonic())
        return -3  # UCS_ERR_IO_ERROR

    address = ucx._address
    monkeypatch.setattr(
        ucx,
        "_address",
        lambda library, name: (
            ctypes.cast(fails, ctypes.c_void_p).value if name == "ucp_worker_arm" else address(library, name)
        ),
    )
    wire = _UcxWire()
    wire.native.connect(0, [wire.native.address()], lambda _: [])
    poll_until(lambda: len(calls) > 20)
    wire.native.close(0)
    assert calls[20] - calls[0] >= 20 * 0.001


@needs_ucx
def test_what_is_on_its_way_is_taken():
    """UCX's long messages need the receiving rank before their sends are over."""
    wires = [_UcxWire(), _UcxWire()]
    addresses = [wire.native.address() for wire in wires]
    for rank, wire in enumerate(wires):
        wire.native.connect(rank, addresses, lambda _: [])
    first, second = wires
    source, target = ctypes.create_string_buffer(b"a" * NBYTES, NBYTES), ctypes.create_string_buffer(NBYTES)
    second.native.receive(0, 1, ctypes.addressof(target), NBYTES, 1, 0)
    first.native.send(1, 1, ctypes.addressof(source), NBYTES, 2)
    poll_until(lambda: 2 in first.done, first)
    poll_until(lambda: 1 in second.done, second)
    assert target.raw == source.raw
    for wire in wires:
        wire.native.close(0)
