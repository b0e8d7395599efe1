"""The label of a launch in a trace. (test_trace.py has those of chunks and messages.)"""

from __future__ import annotations

from schedule_cases import one_rank
from threads import CODEC

from qccl.base.dtypes import FLOAT32
from qccl.collectives.allreduce import two_round
from qccl.collectives.schedule import Encode, tasks
from qccl.engine.labels import launch_label

SCHEDULE = one_rank(two_round, 0, 2, 256, FLOAT32, CODEC, chunk_elements=64)
PROGRAM = tuple(tasks(SCHEDULE, per_transfer=True))
NBYTES = CODEC.encoded_nbytes(64, FLOAT32)


def test_operations_of_one_launch():
    encodes = [task for task in PROGRAM if isinstance(task.op, Encode)]
    label = launch_label(encodes, SCHEDULE.buffers)
    assert (label.queue, label.name) == ("compute", "encode 0")
    assert (label.args["operations"], label.args["elements"], label.args["bytes"]) == (2, 128, 2 * NBYTES)
