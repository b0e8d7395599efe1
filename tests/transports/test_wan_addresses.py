"""Where ranks of the transport wan listen, and at which addresses they say that the others reach them."""

from __future__ import annotations

import pytest
from wan_groups import group
from wan_wires import Wire

from qccl import ArgumentError, _host
from qccl.meeting.network import Network
from qccl.transports.wan import WanTransport


def test_ranks_listen_at_the_ports_that_are_forwarded(monkeypatch):
    monkeypatch.setenv("QCCL_WAN_ADVERTISE", "localhost:23400-23419")
    with group() as running:
        running.wait_for_calls(list(running.calls))
        assert set(running.ports) <= set(range(23400, 23420))


@pytest.mark.parametrize("text", ["host", "host:1", "host:1-1", "host:2-1", "host:0-9", "h:1-65536", ":1-2", "h:1-x"])
def test_a_setting_without_a_host_and_ports(text, monkeypatch):
    monkeypatch.setenv("QCCL_WAN_ADVERTISE", text)
    with pytest.raises(ArgumentError, match=f"QCCL_WAN_ADVERTISE='{text}' is not \"host:first-last\""):
        WanTransport.meet(lambda note: [note], 10.0, Network(is_local=True))


@pytest.mark.parametrize("text", ["", "a" * 31 + " 1", "{nonce}", "{nonce} 0", "{nonce} 0\n127.0.0.1 1"])
def test_what_is_no_address_is_refused(text):
    """Also one without connections, whose rank would look lost."""
    wire = Wire()
    with pytest.raises(_host.WireError, match=r"^rank 1 \(not the address of a rank\)$"):
        wire.connect(0, [wire.native.address(), text.format(nonce="a" * 32).encode()])
    wire.close()
