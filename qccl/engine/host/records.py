"""The records of the host engine's last calls, from what its loop has kept (kernels/engine/recorder.h)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from qccl import _host
from qccl.engine.control import text_of
from qccl.engine.host.execution import HostExecution
from qccl.observe.call_records import CallRecord, TransferRecord

__all__ = ["records"]


def records(loop: _host.Loop, queued: Iterable[HostExecution]) -> Iterator[CallRecord]:
    """Yield records from the oldest call on; ``queued`` calls have not begun. Only the thread that drives may ask."""
    under_way = {each[0]: each[1:] for each in loop.under_way()}
    for sequence, call, header, send_nbytes, receive_nbytes, begun, ended, still in loop.records():
        text, sizes = text_of(header), (send_nbytes, receive_nbytes)
        if sequence not in under_way:
            yield CallRecord(sequence, call, text, "ended", begun, ended or None, *sizes, *sizes, still)
            continue
        sent, received, computes, missing, transfers = under_way[sequence]
        yield CallRecord(
            sequence, call, text, "under way", begun, None, *sizes, sent, received, still, tuple(missing), computes,
            tuple(TransferRecord(*each) for each in transfers),
        )  # fmt: skip
    for execution in queued:
        yield CallRecord(execution.sequence, execution.call, execution.bound.text, "queued", None)
