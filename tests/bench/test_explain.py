"""qccl-bench explain: files of records, and those of real ranks. test_verdict.py has the rules."""

from __future__ import annotations

import dataclasses
import json
import threading

import numpy as np
import pytest
from click.testing import CliRunner
from threads import hear

import qccl
from qccl.base.errors import CollectiveTimeout
from qccl.bench.cli import main
from qccl.observe.records import CallRecord, GroupRecord

TEXT = "allreduce(count=1000, dtype=float32, codec=minmax8, op=sum)"


def a_record() -> GroupRecord:
    """Of a rank alone, in a call."""
    call = CallRecord(0, 0, TEXT, "under way", 97.0)
    return GroupRecord("group 0", 0, 1, "host", 1, "", 100.0, (call,))


def test_texts_of_files_do_not_control_the_terminal(tmp_path):
    text = f"\x1b[2Jallreduce(count={'9' * 5000})"
    (call,) = a_record().calls
    record = dataclasses.replace(a_record(), calls=(dataclasses.replace(call, text=text),))
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
    new = a_record()
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
