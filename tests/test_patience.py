"""Limits of the tests: they grow with the machine's load, also while something waits, and they end."""

from __future__ import annotations

import subprocess
import sys
import time

import patience
import pytest


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What patience.factor() gives, one after the other; the last one stays."""
    values = [1.0]
    monkeypatch.setattr(patience, "factor", lambda: values.pop(0) if len(values) > 1 else values[0])
    return values


def test_a_busy_machine_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("os.getloadavg", lambda: (24.0, 3.0, 0.0))
    assert patience.factor() >= 12
    monkeypatch.setattr("os.getloadavg", lambda: (1e6, 0.0, 0.0))
    assert patience.factor() == 20
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    assert 1 <= patience.factor() <= 20
    monkeypatch.setenv("QCCL_TEST_PATIENCE", "3.5")
    assert patience.factor() == 3.5


def test_a_limit_follows_the_load_that_comes_later(load: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    load[:] = [1.0, 4.0, 2.0]
    limit = patience.Limit(10)
    now[0] = 109.0
    assert limit.left() == 1
    now[0] = 111.0
    assert limit.left() == 29  # four times as long, from the beginning
    now[0] = 141.0
    assert limit.left() == 0  # the load has gone


def test_processes_have_limits_that_grow_and_that_end(load: list[float]) -> None:
    """conftest.py makes them so; input is sent once, and output is complete."""
    program = "import sys, time; time.sleep(0.7); print(sys.stdin.read() * 2)"
    load[:] = [1.0, 1000.0]
    done = subprocess.run([sys.executable, "-c", program], input="abc", capture_output=True, text=True, timeout=0.5)
    assert (done.returncode, done.stdout) == (0, "abcabc\n")
    load[:] = [1.0]
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        process.kill()
