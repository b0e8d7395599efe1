"""Records of a rank's last calls: what they say, when they are written, and that files of others are checked."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import patience
import pytest

import qccl
import qccl.transports.loopback
from qccl.base.errors import ArgumentError, CollectiveTimeout
from qccl.observe.records import FOLDER, FORMAT, CallRecord, GroupRecord, TransferRecord, read_record

SECONDS = 60.0

CALL = CallRecord(
    *(7, 6, "allreduce(count=10)", "under way", 5.0),
    **{"send_nbytes": 20, "receive_nbytes": 30, "missing": (1,), "transfers": (TransferRecord(True, 1, 20, 6.0),)},
)
EARLIER = dataclasses.replace(CALL, sequence=6)
RECORD = GroupRecord("group 0", 0, 2, "host", 3, "why", 9.0, (CALL,))


def test_a_record_has_the_last_calls():
    def run(comm):
        x = np.ones(1000, np.float32)
        begun = time.time()
        comm.barrier()
        comm.quantized_allreduce(x, codec="minmax8")
        comm.quantized_allreduce(x, codec="onebit+ef", key="k")
        comm.barrier()
        return begun, comm.record("asked"), time.time()

    for rank, (begun, record, ended) in enumerate(qccl.run_ranks(2, run)):
        assert (record.rank, record.size, record.reason, record.pid) == (rank, 2, "asked", os.getpid())
        assert [call.text.split("(")[0] for call in record.calls] == ["barrier", "allreduce", "allreduce", "barrier"]
        assert [call.sequence for call in record.calls] == [0, 1, 2, 3]
        assert [call.call for call in record.calls[1:3]] == [0, 1]
        assert "count=1000" in record.calls[1].text and "key='k'" in record.calls[2].text
        assert {call.state for call in record.calls} == {"ended"}
        times = [time for call in record.calls for time in (call.begun, call.ended)]
        assert times == sorted(times) and begun - 0.1 <= times[0] and times[-1] <= ended + 0.1
        plain, coded = record.calls[1].send_nbytes, record.calls[2].send_nbytes
        assert 1000 <= plain <= 1100 and 125 <= coded <= 200  # two rounds of half the elements each, and scales


def test_the_next_group_has_a_name_that_newcomers_know():
    """After shrink(), grow() and join(); a newcomer knows the size and the call alone."""
    transport = qccl.transports.loopback.LoopbackGroup(1).transport(0)
    with qccl.Communicator._joined(transport, 7, 10.0) as comm:
        assert comm.record().group == "1 ranks from call 7 on"


def test_calls_under_way_and_queued():
    """Rank 1 makes no call: what rank 0 has begun waits for its header, and a second call waits for the first."""
    made = threading.Event()

    def run(comm):
        if comm.rank == 1:
            assert made.wait(SECONDS)
        x = np.ones(100_000, np.float32)
        works = [comm.quantized_allreduce(x, codec="minmax8", async_op=True) for _ in range(2)]
        record = comm.record()
        made.set()
        for work in works:
            work.wait()
        return record

    first, second = qccl.run_ranks(2, run)[0].calls
    assert (first.state, first.missing, first.ended) == ("under way", (1,), None)
    assert first.transfers and all(each.is_send and each.peer == 1 for each in first.transfers)
    assert first.received_nbytes == 0 and first.sent_nbytes <= first.send_nbytes
    assert (second.state, second.begun, second.sequence) == ("queued", None, first.sequence + 1)


def test_a_failure_writes_the_record(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path / "records"))
    timed_out = threading.Event()

    def run(comm):
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout):
                comm.quantized_allreduce(np.ones(10, np.float32), timeout=0.2)
            timed_out.set()
        assert timed_out.wait(SECONDS)
        return comm.record("later")

    later, _ = qccl.run_ranks(2, run)
    (path,) = (tmp_path / "records").glob("*-rank-0.json")
    record = read_record(path)
    assert "did not make this call" in record.reason
    assert record.calls[-1].missing == (1,) and record.calls[-1].state == "under way"
    assert later.calls == tuple(record.calls) or later.calls[-1].text == record.calls[-1].text


@pytest.mark.processes
def test_the_signal_writes_the_record(tmp_path):
    """Also while the program waits in a call."""
    program = """
import threading, os, numpy as np, qccl
def run(comm):
    if comm.rank == 0:
        print("ready", flush=True)
        comm.quantized_allreduce(np.ones(10, np.float32), timeout=20)
group = qccl.transports.loopback.LoopbackGroup(2)
comms = [qccl.Communicator.from_transport(group.transport(rank)) for rank in range(2)]
run(comms[0])
"""
    environment = {**os.environ, FOLDER: str(tmp_path)}
    command = [sys.executable, "-c", "import qccl.transports.loopback\n" + program]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"

            def found() -> list[GroupRecord]:
                return [read_record(path) for path in sorted(tmp_path.glob("*.json"))]

            def signal_it() -> None:
                process.send_signal(signal.SIGUSR1)
                time.sleep(0.1)

            patience.wait_until(lambda: len(records := found()) == 2 and records[0].calls, signal_it)
            records = found()
        finally:
            process.kill()
    assert [record.rank for record in records] == [0, 1]
    assert all("SIGUSR1" in record.reason for record in records)
    assert records[0].calls[-1].state == "under way" and not records[1].calls


def test_a_handler_of_the_program_stays(monkeypatch):
    monkeypatch.setenv(FOLDER, "/nowhere")
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        qccl.Communicator.from_transport(qccl.transports.loopback.LoopbackGroup(1).transport(0)).close()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, caplog):
    """Is logged, and the call's own error stays."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(FOLDER, str(tmp_path / "file"))

    def run(comm):
        with pytest.raises(qccl.PeerLost, match="asked for"):
            comm.abort("asked for")
            comm.barrier()

    qccl.run_ranks(1, run)
    assert "could not write its record" in caplog.text


def test_files_are_read_back(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(RECORD.as_dict()))
    assert read_record(path) == RECORD


def changed(**fields):
    return {**RECORD.as_dict(), **fields}


def changed_call(**fields):
    return changed(calls=[{**dataclasses.asdict(CALL), **fields}])


HOSTILE = [
    *(None, 3, [], {}, "text", [RECORD.as_dict()]),
    *(changed(format=FORMAT + 1), changed(rank=2), changed(rank=-1), changed(rank=0.5), changed(size=10**9)),
    *(changed(size=True), changed(calls=[{}]), changed(lost=2), changed(lost=-1), changed(error=None)),
    *(changed(group=3), changed(calls=None), changed(calls=[3]), changed(calls={}), changed(other=1)),
    *(changed_call(sequence="1"), changed_call(begun="now"), changed_call(missing=3), changed_call(missing=["1"])),
    *(changed_call(transfers=[[]]), changed_call(transfers=[{"peer": 1}]), changed_call(computes=1), changed_call(x=1)),
    *(changed_call(state="asleep"), changed(written=None)),
    *(
        changed(written=10**400),
        changed(written=math.nan),
        changed_call(begun=-(10**400)),
        changed_call(ended=math.inf),
    ),
    *(changed_call(begun=float("inf")), changed_call(still=float("nan")), changed_call(sequence=10**30)),
    *(
        changed(calls=2 * [dataclasses.asdict(CALL)]),
        changed(calls=[dataclasses.asdict(each) for each in (CALL, EARLIER)]),
    ),
    *(changed_call(missing=[True]), changed_call(missing=[-1]), changed_call(missing=[10**400])),
]


DAMAGED = [b"", b"{", b"\xff\xfe", b"[" * 200_000, b'{"rank": NaN}']


@pytest.mark.parametrize(
    "content", [json.dumps(given).encode() for given in HOSTILE] + DAMAGED, ids=lambda content: repr(content[-40:])
)
def test_other_files_are_refused(content, tmp_path):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"record\.json"):
        read_record(path)


def test_the_record_says_on_whom_the_group_has_ended(tmp_path, monkeypatch):
    """Also if an error of this rank's own ends the block of ``with`` before it has seen the engine's failure."""
    monkeypatch.setenv(FOLDER, str(tmp_path))

    def run(comm):
        if comm.rank == 0:
            comm.abort("asked for")
            return
        with pytest.raises(RuntimeError), comm:
            comm.quantized_allreduce(np.ones(10, np.float32), async_op=True)
            patience.wait_until(lambda: comm._session.end.failure)
            raise RuntimeError("mine")

    qccl.run_ranks(3, run)
    records = [read_record(path) for path in tmp_path.glob("*.json")]
    assert {(each.reason, each.error, each.lost) for each in records} == {("rank 0 gave up: asked for", "PeerLost", 0)}
