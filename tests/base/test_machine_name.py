"""The name of this machine as a text."""

from __future__ import annotations

import socket

from qccl.base.machine_name import machine_name


def test_bytes_that_are_not_utf_8_are_escaped(monkeypatch):
    assert machine_name() == socket.gethostname()
    monkeypatch.setattr(socket, "gethostname", lambda: b"node\xff\xc3\xa4".decode(errors="surrogateescape"))
    assert machine_name() == "node\\xffä"
