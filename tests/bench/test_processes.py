"""Processes of qccl-bench, whose ends leave none behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import patience
import pytest
from bench_runs import LAUNCHERS, workers

from qccl.bench.start import processes
from qccl.bench.start.processes import run_processes

STARTER = """
import os
from qccl.bench.start.processes import run_processes, stoppable

with stoppable():
    run_processes([(["sleep", "60"], os.environ)] * 40)
"""


@pytest.mark.processes
def test_ranks_that_ignore_the_request_to_end_are_killed_even_when_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with hundreds of ranks, of which the first ones took all the time that there was."""
    monkeypatch.setattr(processes, "_GRACE_SECONDS", 0.0)
    stubborn = ["sh", "-c", "trap '' TERM; echo up; touch \"$0/$$\"; sleep 60 & sleep 60", str(tmp_path)]
    ends = ["sh", "-c", 'until [ $(ls "$0" | wc -l) = 3 ]; do sleep 0.05; done; exit 3', str(tmp_path)]
    with open(tmp_path.parent / "up", "w+") as file:
        assert run_processes([(stubborn, os.environ)] * 3 + [(ends, os.environ)], file) == 3
        file.seek(0)
        assert file.read() == "up\n" * 3
    patience.wait_until(lambda: not workers(os.getpid()), seconds=30)


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_while_ranks_start_leaves_none(number: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHERS}
    process = subprocess.Popen([sys.executable, "-c", STARTER], env=environment, stdin=subprocess.DEVNULL)
    try:
        patience.wait_until(lambda: workers(process.pid))
        process.send_signal(number)
        assert process.wait(40) == (-9 if number == signal.SIGKILL else 128 + number)
    finally:
        process.kill()
        process.wait(10)
    patience.wait_until(lambda: not workers(process.pid), seconds=30)


def test_signals_unwind_once() -> None:
    for number, expected in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)):
        before = signal.getsignal(number)
        with pytest.raises(expected) as caught, processes.stoppable():
            try:
                signal.raise_signal(number)
            finally:
                signal.raise_signal(signal.SIGINT)  # while cleaning up: ignored
        assert signal.getsignal(number) is before
        if expected is SystemExit:
            assert caught.value.code == 128 + number
