"""Timelines as files: how Perfetto draws them, and the ranks in one file."""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import qccl
from qccl.base import trace
from qccl.base.trace import TraceEvent, write_trace


def written(path: Path) -> list[dict]:
    return json.loads(path.read_text())["traceEvents"]


def tracks(records: list[dict]) -> dict[tuple[int, int], str]:
    """The names of all tracks, in the order in which they are to be drawn."""
    order = {
        (r["pid"], r["tid"] if r["name"].startswith("thread") else 0): r["args"]["sort_index"]
        for r in records
        if r["name"] in ("process_sort_index", "thread_sort_index")
    }
    names = {(r["pid"], r["tid"]): r["args"]["name"] for r in records if r["name"] == "thread_name"}
    return {key: names[key] for key in sorted(names, key=lambda key: (order[key[0], 0], order[key]))}


def check_drawing(records: list[dict]) -> list[dict]:
    """What every file must be: no overlap on a track, arrows from a slice to a slice, forwards; returns the slices."""
    slices, by_track = [r for r in records if r["ph"] == "X"], defaultdict(list)
    for r in slices:
        by_track[r["pid"], r["tid"]].append((r["ts"], r["ts"] + r["dur"]))
    assert set(by_track) == set(tracks(records))
    for found in by_track.values():
        assert all(start < stop for start, stop in found)
        assert all(a[1] <= b[0] + 1e-6 for a, b in zip(sorted(found), sorted(found)[1:], strict=False))
    arrows = defaultdict(dict)
    for r in records:
        if r["ph"] in ("s", "f"):
            arrows[r["id"]][r["ph"]] = r
            assert any(start <= r["ts"] < stop for start, stop in by_track[r["pid"], r["tid"]])
    assert all(set(ends) == {"s", "f"} and ends["s"]["ts"] <= ends["f"]["ts"] for ends in arrows.values())
    assert all(ends["f"]["bp"] == "e" and ends["s"]["pid"] != ends["f"]["pid"] for ends in arrows.values())
    return slices


@pytest.mark.parametrize(
    ("codec", "algorithm"), [("minmax8", "two_round"), ("onebit+ef", "one_shot"), ("none", "two_round")]
)
def test_a_call_is_drawn_in_a_few_tracks_with_arguments_and_arrows(tmp_path: Path, codec: str, algorithm: str) -> None:
    path, size, count, chunk = tmp_path / "call.json", 4, 1 << 16, 4096

    def run(comm: qccl.Communicator) -> None:
        events: list[TraceEvent] = []
        x = np.random.default_rng(comm.rank).standard_normal(count).astype(np.float32)
        key = "x" if "ef" in codec else None
        comm.quantized_allreduce(x, codec=codec, algorithm=algorithm, chunk=chunk, key=key, trace=events)
        write_trace(path, events, comm)

    qccl.run_ranks(size, run)
    records = written(path)
    slices = check_drawing(records)
    for rank in range(size):
        peers = [peer for peer in range(size) if peer != rank]
        expected = ["compute", *(f"{way} rank {peer}" for peer in peers for way in ("to", "from"))]
        assert [name for (pid, _), name in tracks(records).items() if pid == rank] == expected
    transfers = [r for r in slices if r["cat"] in ("send", "recv")]
    assert sum(r["ph"] == "s" for r in records) == len(transfers) / 2
    for r in transfers:
        args = r["args"]
        assert {"peer", "bytes", "message", "call", "chunk", "round", "codec", "elements", "queued_us"} <= set(args)
        assert r["name"] == f"{'send' if r['cat'] == 'send' else 'receive'} chunk {args['chunk']}"
        assert args["codec"] == codec.removesuffix("+ef")
        encoded = qccl.codecs.get(args["codec"]).encoded_nbytes(args["elements"], qccl.base.dtypes.FLOAT32)
        assert args["bytes"] == encoded and args["elements"] <= chunk
    computed = [r for r in slices if r["cat"] == "compute" and not r["name"].startswith("commit")]
    assert all({"elements", "codec", "round", "chunk"} <= set(r["args"]) for r in computed)
    shares = count // (size if algorithm == "two_round" else 1)
    assert {r["args"]["chunk"] for r in transfers} == set(range(shares // chunk))
    for number in range(shares // chunk):
        of_chunk = [r for r in transfers if (r["pid"], r["cat"], r["args"]["chunk"]) == (0, "send", number)]
        assert len(of_chunk) == 3 * (2 if algorithm == "two_round" else 1)


def test_what_overlaps_is_drawn_one_after_the_other_and_nothing_is_lost(tmp_path: Path) -> None:
    """A message is drawn from when it is the next one; a receive from when there is something to receive."""

    def transfer(rank: int, queue: str, start: float, stop: float, message: int) -> TraceEvent:
        return TraceEvent(rank, queue, f"m{message}", start, stop, {"peer": 1 - rank, "message": message, "call": 7})

    events = [
        TraceEvent(0, "compute", "encode", 10.0, 10.25),
        transfer(0, "send", 10.25, 10.75, 0),
        transfer(0, "send", 10.25, 11.5, 1),  # noticed late
        transfer(1, "recv", 10.0, 10.75, 0),  # posted early
        transfer(1, "recv", 10.0, 11.0, 1),
        transfer(1, "recv", 10.0, 11.25, 2),  # whose send is not in the file
        TraceEvent(1, "comm", "exchange", 10.0, 10.0),
    ]
    path = tmp_path / "trace.json"
    write_trace(path, events)
    records = written(path)
    found = {
        (f"rank {r['pid']}", tracks(records)[r["pid"], r["tid"]], r["name"]): (
            r["ts"],
            r["dur"],
            r["args"].get("queued_us"),
        )
        for r in check_drawing(records)
    }
    assert found == {
        ("rank 0", "compute", "encode"): (0.0, 250_000.0, None),
        ("rank 0", "to rank 1", "m0"): (250_000.0, 500_000.0, 0.0),
        ("rank 0", "to rank 1", "m1"): (750_000.0, 250_000.0, 500_000.0),
        ("rank 1", "comm", "exchange"): (0.0, 0.001, None),
        ("rank 1", "from rank 0", "m0"): (250_000.0, 500_000.0, 0.0),
        ("rank 1", "from rank 0", "m1"): (750_000.0, 250_000.0, 500_000.0),
        ("rank 1", "from rank 0", "m2"): (1_000_000.0, 250_000.0, 1_000_000.0),
    }
    assert [r["ts"] for r in records if r["ph"] in "sf"] == [250_000.0, 749_999.999, 750_000.0, 999_999.999]
    write_trace(path, [])
    assert written(path) == []


def test_clocks_of_other_machines_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose clock is 1000 s ahead: its events lie where they lay, and the file says how exactly."""
    path, true = tmp_path / "call.json", trace.time.perf_counter
    begin, ranks = true(), {}

    def run(comm: qccl.Communicator) -> None:
        events = [TraceEvent(comm.rank, "compute", "work", begin + 1000 * comm.rank, begin + 1000 * comm.rank + 1)]
        ranks[threading.current_thread()] = comm.rank
        write_trace(path, events, comm)

    monkeypatch.setattr(trace.time, "perf_counter", lambda: true() + 1000 * ranks.get(threading.current_thread(), 0))
    monkeypatch.setattr(trace, "_machine", lambda: str(ranks[threading.current_thread()]))
    qccl.run_ranks(2, run)
    starts = {r["pid"]: r["ts"] for r in check_drawing(written(path))}
    remark = json.loads(path.read_text())["otherData"]["clocks"]
    error = float(re.fullmatch(r"the clocks of ranks \[1\] were .* to (\d+) us", remark)[1])
    assert set(starts) == {0, 1} and abs(starts[0] - starts[1]) <= error + 1
