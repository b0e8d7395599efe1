"""qccl-bench explain: whom it names, from records made by hand and from those of real ranks."""

from __future__ import annotations

import dataclasses
import json
import threading

import numpy as np
import pytest
from click.testing import CliRunner
from threads import hear

import qccl
from qccl.bench.cli import main
from qccl.bench.explain import explained
from qccl.errors import CollectiveTimeout
from qccl.records import CallRecord, GroupRecord, TransferRecord

TEXT = "allreduce(count=1000, dtype=float32, codec=minmax8, op=sum)"


def ended(sequence: int) -> CallRecord:
    return CallRecord(sequence, sequence, TEXT, "ended", 90.0 + sequence, 90.5 + sequence)


def under_way(sequence: int, **found: object) -> CallRecord:
    return CallRecord(sequence, sequence, TEXT, "under way", 97.0, **found)  # type: ignore[arg-type]


def records(*calls: list[CallRecord] | None, reason: str = "") -> dict[int, GroupRecord]:
    """Of the ranks that have left one, written 100 seconds after the start."""
    return {
        rank: GroupRecord("group 0", rank, len(calls), "host", 1, reason, 100.0, tuple(each))
        for rank, each in enumerate(calls)
        if each is not None
    }


def verdict(*calls: list[CallRecord] | None) -> str:
    return "\n".join(explained(records(*calls)))


def test_a_rank_that_has_not_made_the_call():
    found = verdict([ended(0), under_way(1, missing=(1,))], [ended(0)], [ended(0), under_way(1, missing=(1,))])
    assert found == (
        f"rank 1 has not made call 1, {TEXT}, in which ranks 0 and 2 waited for 3.0 s: it ended call 0, {TEXT}, "
        "9.5 s before, and did something else since"
    )


def test_a_rank_without_a_record():
    found = verdict([under_way(0, missing=(1,))], None)
    assert found.startswith("rank 1 has left no record, and rank 0 waited 3.0 s for it in call 0")
    found = verdict([under_way(0, transfers=(TransferRecord(False, 1, 500, 98.0),))], None)
    assert found.startswith("rank 1 has left no record") and "cannot be reached" in found


def test_a_rank_that_computes():
    receives = (TransferRecord(False, 1, 500, 98.0),)
    found = verdict([under_way(0, transfers=receives)], [under_way(0, computes=True)])
    assert found == f"rank 1 computes its part of call 0, {TEXT}, which ranks 0 and 1 began 3.0 s before"


def test_a_transfer_without_progress():
    """Rank 2 waits for rank 0, which waits itself: the transfer from 1 to 0 holds both."""
    found = verdict(
        [under_way(0, transfers=(TransferRecord(False, 1, 500, 98.0),))],
        [under_way(0, transfers=(TransferRecord(True, 0, 500, 97.5),))],
        [under_way(0, transfers=(TransferRecord(False, 0, 600, 97.0),))],
    )
    assert found == f"the transfer of 500 bytes from rank 1 to rank 0 of call 0, {TEXT} has made no progress for 2.0 s"


def test_no_call_is_under_way():
    assert verdict([ended(0)], [ended(0), ended(1)]) == (
        "no call is under way; the last ones were 0 on rank 0, 1 on rank 1"
    )
    assert verdict([], []) == "no call is under way"


def test_texts_of_files_do_not_control_the_terminal(tmp_path):
    text = f"\x1b[2Jallreduce(count={'9' * 5000})"
    record = next(iter(records([dataclasses.replace(under_way(0), text=text)]).values()))
    path = tmp_path / "record.json"
    path.write_text(json.dumps(dataclasses.replace(record, reason="\x07", group="\x1b]0;x").as_dict()))
    done = CliRunner().invoke(main, ["explain", str(path)])
    assert done.exit_code == 0 and "\x1b" not in done.output and "\x07" not in done.output
    path.write_text(json.dumps({**record.as_dict(), f"\x1b[2J{'9' * 5000}": 1}))
    done = CliRunner().invoke(main, ["explain", str(path)])
    assert done.exit_code == 1 and "unknown field" in done.output
    assert "\x1b" not in done.output and len(done.output) < 2000


def test_records_of_earlier_runs(tmp_path):
    """The folder was not emptied: a run of more ranks is shown apart, and an old record in place of none is noticed."""
    (new,) = records([under_way(0)]).values()
    others = {
        "old": dataclasses.replace(new, rank=1, size=2, written=new.written - 3600),
        "larger": dataclasses.replace(new, rank=3, size=4),
        "new": dataclasses.replace(new, size=2),
    }
    for name, record in others.items():
        (tmp_path / name).write_text(json.dumps(record.as_dict()))
    done = CliRunner().invoke(main, ["explain", *(str(tmp_path / name) for name in others)])
    assert done.exit_code == 0, done.output
    assert "group 0: records of ranks 0 and 1 of 2\n" in done.output and "records of rank 3 of 4\n" in done.output
    assert done.output.count("rank 1's record is 3,600 s older than the newest: is it of an earlier run?") == 1


def test_records_of_real_ranks(tmp_path, monkeypatch):
    """Rank 2 of 3 makes no second call: all files together name it."""
    monkeypatch.setenv("QCCL_RECORDS", str(tmp_path))
    failed = threading.Barrier(3)

    def run(comm):
        x = np.ones(1000, np.float32)
        comm.quantized_allreduce(x)
        if comm.rank == 0:
            with pytest.raises(qccl.PeerLost):
                comm.quantized_allreduce(x)
        elif comm.rank == 1:
            hear(comm._session.engine, 1)  # rank 0 has made the call, and is not missed
            with pytest.raises(CollectiveTimeout):
                comm.quantized_allreduce(x, timeout=0.3)
        failed.wait(60)
        comm.abort("as all others")

    qccl.run_ranks(3, run)
    files = sorted(str(path) for path in tmp_path.glob("*.json"))
    assert len(files) == 3
    done = CliRunner().invoke(main, ["explain", *files])
    assert done.exit_code == 0, done.output
    assert "rank 2 has not made call 1, allreduce(count=1000" in done.output


def test_a_file_that_is_no_record(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("{}")
    done = CliRunner().invoke(main, ["explain", str(path)])
    assert done.exit_code == 1 and f"Error: {path}" in done.output
