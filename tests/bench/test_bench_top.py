"""qccl-bench top: its table from made-up endpoints, from endpoints that are none, and from real ranks."""

from __future__ import annotations

import contextlib
import itertools
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import patience
import pytest
from click.testing import CliRunner

import qccl
from qccl import metrics
from qccl.bench import scrape, top
from qccl.bench.cli import main
from qccl.bench.scrape import Sample
from qccl.bench.top import lines

SECONDS = 20.0
OK = b"HTTP/1.1 200 OK\r\n\r\n"


def text(calls: int, *, rank: int = 0, group: str = "group 0", timed: bool = True) -> str:
    """What an endpoint would say after so many calls, of which each takes 10 ms: 3 of them computing, 5 waiting."""
    found = [f'qccl_group_size{{group="{group}",rank="{rank}"}} 2', "# TYPE a comment"]
    for codec, factor in (("minmax4", 1), ("none", 0.25)):
        labels = f'{{group="{group}",rank="{rank}",collective="allreduce",codec="{codec}"}}'
        values = {"calls": calls, "raw_bytes": 4000 * calls, "sent_bytes": (500 if factor == 1 else 4000) * calls}
        if timed:
            values |= {
                "call_seconds": 0.01 * calls,
                "computing_seconds": 0.003 * calls,
                "waiting_seconds": 0.005 * calls,
            }
        found += [f"qccl_{name}_total{labels} {value * factor!r}" for name, value in values.items()]
    return "\n".join(found) + "\n"


def sample(now: float, calls: int, **options) -> Sample:
    return scrape.parsed(text(calls, **options), now)


def table(before: list[Sample], now: list[Sample]) -> list[list[str]]:
    places = [("127.0.0.1", 9400 + i) for i in range(len(now))]
    return [[cell.strip() for cell in line.split("  ") if cell] for line in lines(places, before, now)]


@contextlib.contextmanager
def answering(answer: Callable[[], bytes], pause: float = 0.0) -> Iterator[str]:
    """The place of a server that answers each connection with bytes, one by one if there is a ``pause``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.recv(65536)
                        found = answer()
                        for part in [found] if not pause else (found[i : i + 1] for i in range(len(found))):
                            connection.sendall(part)
                            time.sleep(pause)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(SECONDS)


def test_rates_between_two_samples():
    """100 calls with minmax4 and 25 with none in 2 seconds."""
    _, row = table([sample(10.0, 100)], [sample(12.0, 200)])
    raw, sent = (400_000 + 100_000) / 2, (50_000 + 100_000) / 2
    assert row == [
        *("127.0.0.1:9400", "group 0", "0 of 2", "minmax4 +1", "62.5", f"{raw / 1000:.1f} k", f"{sent / 1000:.1f} k"),
        *(f"{raw / sent:.2f}", f"{100 * 125 * 0.003 / 2:.0f}%", f"{100 * 125 * 0.005 / 2:.0f}%"),
    ]


def test_a_rank_without_calls_in_the_interval():
    _, row = table([sample(10.0, 100)], [sample(12.0, 100)])
    assert row[3:] == ["minmax4", "0.0", "0", "0", "-", "0%", "0%"]


def test_a_group_that_is_new_and_one_whose_job_was_started_again():
    """Neither shows the calls of its life as those of one interval, nor negative rates."""
    for before in (Sample(10.0, error="refused"), sample(10.0, 1000)):
        _, row = table([before], [sample(12.0, 100)])
        assert row[4:7] == ["0.0", "0", "0"]


def test_a_rank_on_cuda_has_no_times():
    _, row = table([sample(10.0, 100, timed=False)], [sample(12.0, 200, timed=False)])
    assert row[4] == "62.5" and row[-2:] == ["-", "-"]


def test_ranks_that_do_not_answer_are_shown():
    found = table([sample(1.0, 1), Sample(1.0)], [sample(2.0, 2), Sample(2.0, error="Connection \x1b[2J refused")])
    assert len(found) == 3
    assert found[2][0].startswith("127.0.0.1:9401 does not answer: Connection ") and "\x1b" not in found[2][0]


def test_texts_of_endpoints_do_not_control_the_terminal():
    now = sample(2.0, 2, group="\x1b[2J\u202e")
    assert not {"\x1b", "\u202e"} & set("".join(lines([("h", 1)], [now], [now])))


def test_the_command_on_made_up_endpoints(monkeypatch):
    monkeypatch.setattr(scrape, "_SECONDS", SECONDS)
    calls = itertools.count(100, 50)
    with answering(lambda: OK + text(next(calls), rank=1).encode()) as place, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and it does not listen
        closed = silent.getsockname()[1]
        found = CliRunner().invoke(main, ["top", place, f"127.0.0.1:{closed}", "--interval", "0.2"])
    assert found.exit_code == 0 and "\x1b" not in found.output
    header, row, error = found.output.splitlines()
    assert header.split()[0] == "endpoint" and row.split()[:6] == [place, "group", "0", "1", "of", "2"]
    assert "minmax4 +1" in row
    assert error.startswith(f"127.0.0.1:{closed} does not answer: ") and "refused" in error


@pytest.mark.parametrize(
    ("answer", "pause", "reason"),
    [
        (b"", 0, "no endpoint of qccl"),
        (b"HTTP/1.1 404 Not Found\r\n\r\nno", 0, "no endpoint of qccl"),
        (b"SSH-2.0-OpenSSH_9\r\n", 0, "no endpoint of qccl"),
        (OK + b"\xff\xfe", 0, "decode"),
        (OK + b"<html>\n", 0, "no endpoint of qccl"),
        (OK + b'node_cpu_seconds_total{cpu="0"} 3\n', 0, "no endpoint of qccl"),
        (
            OK + b'qccl_group_size{group="g",rank="0"} 1e999\n',
            0,
            "it says 1e999, which is too large for qccl_group_size",
        ),
        (
            OK + b'qccl_calls_total{group="g",rank="0"} 2e19\n',
            0,
            "it says 2e19, which is too large for qccl_calls_total",
        ),
        (OK + b'qccl_calls_total{group="g",rank="0"} 1.2.3\n', 0, "could not convert"),
        (OK + b'qccl_group_size{group="g",rank="0"} 1e1e1\n', 0, "float"),
        (OK + b"#" * (5 << 20), 0, "more than 4 MiB"),
        (OK + b"#" * 1000, 0.05, "no answer within"),
    ],
)
def test_answers_of_other_programs(answer, pause, reason, monkeypatch):
    monkeypatch.setattr(scrape, "_SECONDS", 0.5 if pause else SECONDS)
    with answering(lambda: answer, pause) as place:
        host, port = place.split(":")
        (found,) = scrape.scrape([(host, int(port))])
    assert reason in found.error and not found.sizes


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["--ranks", "2"], ["--port", "9400"], ["h:1", "--ranks", "2", "--port", "1"], ["host"], ["host:0"]),
        *(["host:x"], ["--ranks", "2", "--port", "65535"], ["--ranks", "0", "--port", "1"], ["h:1", "--interval", "0"]),
    ],
)
def test_wrong_arguments(arguments):
    found = CliRunner().invoke(main, ["top", *arguments])
    assert found.exit_code == 2 and "Error" in found.output


def test_real_ranks(port, monkeypatch):
    monkeypatch.setenv(metrics.VARIABLE, str(port))
    monkeypatch.setattr(scrape, "_SECONDS", SECONDS)
    stop, comms, sleep = threading.Event(), [], time.sleep

    def pause(seconds):
        """Until each rank has ended calls."""
        limit, before = patience.Limit(SECONDS), [comm.calls for comm in comms]
        while limit.left() and any(comm.calls < calls + 2 for comm, calls in zip(comms, before, strict=True)):
            sleep(seconds)

    monkeypatch.setattr(top, "time", SimpleNamespace(sleep=pause))

    def run(comm):
        comms.append(comm)
        comm.barrier()
        if comm.rank == 0:
            thread = threading.Thread(target=look, daemon=True)
            thread.start()
        data = np.zeros(10_000, np.float32)
        while not comm.quantized_allreduce(data, codec="minmax4").any():
            data[:] = stop.is_set()
            time.sleep(0.01)
        if comm.rank == 0:
            thread.join(SECONDS)

    def look():
        try:
            arguments = ["top", "--ranks", "2", "--port", str(port), "--interval", "0.5"]
            found.append(CliRunner().invoke(main, arguments))
        finally:
            stop.set()

    found: list = []
    qccl.run_ranks(2, run)
    rows = [line.split() for line in found[0].output.splitlines()]
    assert [row[0] for row in rows] == ["endpoint", f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
    for row in rows[1:]:
        assert row[6] == "minmax4" and float(row[7]) > 0


def test_in_a_terminal_it_is_drawn_again_until_ctrl_c():
    calls = itertools.count(100, 50)
    with answering(lambda: OK + text(next(calls)).encode()) as place:
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "qccl.bench", "top", place, "--interval", "0.1"]
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        try:
            shown, deadline = b"", time.monotonic() + SECONDS
            while shown.count(b"\x1b[H") < 4 and time.monotonic() < deadline:
                if select.select([ours], [], [], 0.1)[0]:
                    shown += os.read(ours, 65536)
            process.send_signal(signal.SIGINT)
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()
            process.wait(SECONDS)
            os.close(ours)
    last = shown.rpartition(b"\x1b[H")[0].rpartition(b"\x1b[H")[2]
    assert b"minmax4 +1" in last and last.count(b"\n") == 2
    assert b"Traceback" not in shown
