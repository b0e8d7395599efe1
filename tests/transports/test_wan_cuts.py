"""Connections of wan that are cut at random while ranks call: every result has the right bits."""

from __future__ import annotations

import pytest
import wan_cuts

SECRET = bytes(range(32))


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
@pytest.mark.parametrize("size", [2, 3])
def test_connections_are_cut(size, secret, monkeypatch):
    monkeypatch.setenv("QCCL_WAN_CONNECTIONS", str(size))
    calls, cuts = wan_cuts.run(size, secret, 2.0, seed=size)
    assert calls and cuts  # as many as the machine has time for; every result was compared


@pytest.mark.every_size
@pytest.mark.parametrize("connections", [1, 4, 24])
@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_connections_are_cut_for_long(size, secret, connections, monkeypatch):
    monkeypatch.setenv("QCCL_WAN_CONNECTIONS", str(connections))
    for seed, pause in enumerate((0.3, 0.03, 0.003)):
        calls, _ = wan_cuts.run(size, secret, 10.0, seed, pause)
        assert calls
