"""Computing and communicating overlap, in a real run of 4 ranks behind a rate-limited network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qccl.bench import lab

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(lab.obstacle() is not None, reason=f"no lab here: {lab.obstacle()}"),
]
ROOT = Path(__file__).parents[2]


def bench(folder: Path, *flags: str) -> tuple[dict, list[dict]]:
    """The report and the trace of ``qccl-bench allreduce`` on 4 ranks at 1 Gbit/s."""
    report, trace = folder / "report.json", folder / "trace.json"
    command = [sys.executable, "-m", "qccl.bench", "allreduce", "--ranks=4", "--link=1gbit", "-c0", *flags]
    command += ["--algorithm=two_round", f"--json={report}", f"--trace={trace}"]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(report.read_text()), json.loads(trace.read_text())["traceEvents"]


def spans(events: list[dict], rank: int, kind: str) -> list[tuple[int, float, float]]:
    """(operation number, start, stop) of the events of one kind on one rank, by operation.

    A send stops when its message has arrived: a transport may report it as completed when it has copied the message.
    """
    arrivals = {}
    for event in of_kind(events, "receive"):
        args = event["args"]
        arrivals[args["peer"], event["pid"], args["call"], args["message"]] = event["ts"] + event["dur"]
    found = []
    for event in of_kind(events, kind):
        args = event["args"]
        if event["pid"] == rank:
            posted, stop = event["ts"] - args.get("queued_us", 0), event["ts"] + event["dur"]
            if kind == "send":
                stop = arrivals[rank, args["peer"], args["call"], args["message"]]
            found.append((args["operation"], posted, stop))
    return sorted(found)


def of_kind(events: list[dict], kind: str) -> list[dict]:
    return [event for event in events if event["ph"] == "X" and event["name"].startswith(kind)]


def covered_shares(events: list[dict]) -> list[float]:
    """By rank: of the encodes of the second chunk and later, the share that runs within a send of an earlier one."""
    shares = []
    for rank in range(4):
        encodes, sends = spans(events, rank, "encode"), spans(events, rank, "send")
        assert len(sends) > 6 and len(encodes) > 6
        later = [e for e in encodes if any(op < e[0] for op, _, _ in sends)]
        covered = [e for e in later if any(op < e[0] and a <= e[1] and e[2] <= b for op, a, b in sends)]
        assert len(later) >= 3
        shares.append(len(covered) / len(later))
    return shares


def test_the_next_chunk_is_encoded_while_one_is_sent(tmp_path):
    """It is the schedule that allows it, and a free processor that shows it: one of some runs must."""
    found = []
    for _ in range(4):
        _, events = bench(tmp_path, "-b4M", "-e4M", "-n2", "-w1", "--codec=minmax8")
        found.append(covered_shares(events))
        if min(found[-1]) >= 0.5:
            return
    raise AssertionError(f"shares of each rank, in four runs: {found}")
