"""Records of calls on CUDA, on fake GPUs: queued, under way, ended and failed, and that explain reads them."""

from __future__ import annotations

import threading
import time

import patience
import pytest
from cuda_ranks import called, captured, on_gpus, pair, ranks, summed

import qccl
from qccl.bench.verdict import findings
from qccl.observe.records import FOLDER, read_record

SECONDS = 60.0


def states(comm: qccl.Communicator) -> list[str]:
    return [call.state for call in comm.record().calls]


def wait_for_states(comm: qccl.Communicator, wanted: list[str]) -> None:
    """The watchdog looks at the flags every 10 ms."""
    patience.wait_until(lambda: states(comm) == wanted, what=str(wanted))


@on_gpus(1)
def test_calls_are_queued_under_way_and_ended(comm, world, cupy):
    called(comm)
    before = time.time()
    world.frozen = True
    work = comm.quantized_allreduce(*pair(), codec="minmax8", async_op=True)
    assert states(comm) == ["ended", "queued"] and comm.record().calls[-1].begun is None
    world.ends, world.frozen = False, False
    wait_for_states(comm, ["ended", "under way"])
    world.ends = True
    work.synchronize()
    wait_for_states(comm, ["ended", "ended"])
    comm.barrier()
    record, after = comm.record("asked"), time.time()
    assert record.reason == "asked" and [call.sequence for call in record.calls] == [0, 1, 2]
    assert [call.call for call in record.calls] == [0, 1, 2]
    assert record.calls[1].text.startswith("allreduce(count=100") and record.calls[2].text == "barrier()"
    begun, ended = record.calls[1].begun, record.calls[1].ended
    assert before - 0.1 <= begun <= ended <= after + 0.1
    assert not record.calls[1].transfers and not record.calls[1].missing


@on_gpus(1)
def test_a_record_has_no_call_of_a_graph(comm, cupy):
    x, out = called(comm)
    captured(cupy, comm, lambda stream: comm.quantized_allreduce(x, out, stream=stream))
    assert len(comm.record().calls) == 1


def test_explain_names_the_rank_that_stays_away(world, cupy, tmp_path, monkeypatch):
    """The GPU of rank 0 waits inside NCCL until the deadline; both ranks write what they know."""
    monkeypatch.setenv(FOLDER, str(tmp_path))

    def run(comm):
        x = summed(comm)
        if comm.rank == 1:
            assert missed.wait(SECONDS)
            comm._session.write_record("asked")
            return None
        with pytest.raises(qccl.CollectiveTimeout):
            comm.quantized_allreduce(x, async_op=True, timeout=0.3).synchronize()
        with pytest.raises(qccl.CollectiveTimeout, match="earlier"):
            comm.check()
        missed.set()
        return None

    missed = threading.Event()
    assert ranks(2, run) == [None, None]
    records = {record.rank: record for record in map(read_record, tmp_path.glob("*.json"))}
    assert "reached the deadline" in records[0].reason and records[0].calls[-1].state == "under way"
    [found] = findings(records)
    assert found.ranks == (1,) and "rank 1 has not made call 2, allreduce(count=100" in found.text
    del records[1]  # its process was killed
    [found] = findings(records)
    assert found.ranks == (1,) and "rank 1 has left no record" in found.text
