"""Where ranks of the transport wan listen, and at which addresses they say that the others reach them."""

from __future__ import annotations

import pytest
from wan_groups import group

from qccl import ArgumentError
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
        WanTransport(lambda note: [note], 10.0, is_local=True)
