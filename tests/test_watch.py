"""Which processes have ended, by their listening sockets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from qccl.transports.watch import Watch

LISTENER = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(60)
"""


def ended_soon(watch, ranks):
    """ended(), once it finds any, or after ten seconds."""
    deadline = time.monotonic() + 10
    while not (found := watch.ended(ranks)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_a_process_that_is_killed_and_not_reaped():
    with subprocess.Popen([sys.executable, "-c", LISTENER], stdout=subprocess.PIPE, text=True) as process:
        with socket.create_server(("127.0.0.1", 0)) as living:
            watch = Watch([living.getsockname(), ("127.0.0.1", int(process.stdout.readline()))])
            assert watch.ended([0, 1]) == []
            process.send_signal(signal.SIGKILL)
            assert ended_soon(watch, [0, 1]) == [1]
            assert watch.ended([0, 1]) == [1] and watch.ended([0]) == []
            os.kill(process.pid, 0)  # by its number it is still there
            watch.close()
            assert watch.ended([0, 1]) == []
        process.wait(10)


def test_a_process_that_ends_a_connection_lives():
    """It accepts those of ranks that look, and may end them; then another one is made."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        watch = Watch([server.getsockname()])
        for _ in range(3):
            assert watch.ended([0]) == []
            server.accept()[0].close()
            time.sleep(0.05)
        assert len(watch._connections) == 1
        watch.close()


def test_a_machine_that_does_not_answer_is_asked_once(monkeypatch):
    asked = []

    def create_connection(place, timeout):
        asked.append((place, timeout))
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", create_connection)
    watch = Watch([("192.0.2.1", 9)])
    assert watch.ended([0]) == watch.ended([0]) == []
    assert len(asked) == 1


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_a_connection_to_itself_is_none():
    """TCP makes one where the port is free and the caller happens to get it."""
    itself = socket.socket()
    itself.bind(("127.0.0.1", 0))
    itself.connect(itself.getsockname())
    watch = Watch([itself.getsockname()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", lambda *_: itself)
        assert watch.ended([0]) == [0]
