"""Labels of a trace: chunks and messages are numbered, and a message has the codec and round of its code."""

from __future__ import annotations

from schedule_cases import one_rank
from threads import CODEC

from qccl.collectives.allreduce import two_round
from qccl.dtypes import FLOAT32
from qccl.engine.labels import labels, launch_label
from qccl.schedule import Encode, tasks

SCHEDULE = one_rank(two_round, 0, 2, 256, FLOAT32, CODEC, chunk_elements=64)
PROGRAM = tuple(tasks(SCHEDULE, per_transfer=True))
NBYTES = CODEC.encoded_nbytes(64, FLOAT32)


def test_chunks_and_messages():
    found = labels(PROGRAM, SCHEDULE.buffers)
    for queue, kind in (("send", "send"), ("recv", "receive")):
        of_kind = [label for label in found if label.queue == queue]
        assert [label.name for label in of_kind] == [f"{kind} chunk {i}" for i in (0, 1, 0, 1)]
        assert [(label.args["round"], label.args["message"]) for label in of_kind] == [(0, 0), (0, 1), (1, 2), (1, 3)]
        assert all(label.args["peer"] == 1 and label.args["bytes"] == NBYTES for label in of_kind)
        assert all(label.args["codec"] == str(CODEC.spec()) and label.args["elements"] == 64 for label in of_kind)
    computed = [label for label in found if label.queue == "compute"]
    assert [label.name for label in computed] == [
        f"{k} chunk {i}" for k in ("encode", "reduce", "decode") for i in (0, 1)
    ]
    assert [label.args["bytes"] for label in computed] == [NBYTES] * 2 + [2 * NBYTES] * 2 + [NBYTES] * 2


def test_operations_of_one_launch():
    encodes = [task for task in PROGRAM if isinstance(task.op, Encode)]
    label = launch_label(encodes, SCHEDULE.buffers)
    assert (label.queue, label.name) == ("compute", "encode 0")
    assert (label.args["operations"], label.args["elements"], label.args["bytes"]) == (2, 128, 2 * NBYTES)
