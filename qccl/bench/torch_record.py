"""Records of ranks in the form of PyTorch's flight recorder, whose torchfrtrace compares the ranks' calls.

Fields and values: torch/csrc/distributed/c10d/FlightRecorder.hpp, and what torch/distributed/flight_recorder reads.
"""

from __future__ import annotations

import re
from typing import Any

from qccl.records import CallRecord, GroupRecord

__all__ = ["as_torch"]

#: of the form
_VERSION = "2.10"
#: our collectives by PyTorch's names; the others are all_to_all, whose sizes may differ between ranks
_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "hierarchical_allreduce": "all_reduce",
    "hierarchical_allreduce_coalesced": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "barrier": "barrier",
}
_STATES = {"ended": "completed", "under way": "started", "queued": "scheduled"}


def as_torch(record: GroupRecord) -> dict[str, Any]:
    """One rank's record; PyTorch keeps such a dict in a file by pickle."""
    ranks = str(list(range(record.size)))
    config = {record.group: {"name": record.group, "desc": record.group, "ranks": ranks}}
    return {"version": _VERSION, "pg_config": config, "entries": [_entry(call, record) for call in record.calls]}


def _entry(call: CallRecord, record: GroupRecord) -> dict[str, Any]:
    name = _NAMES.get(re.split(r"\W", call.text, maxsplit=1)[0], "all_to_all")
    inputs, outputs = _sizes(name, call.text, record.size)
    dtype = re.search(r"dtype=(\w+)", call.text)
    dtypes = [dtype[1] if dtype else ""]
    return {
        "record_id": call.sequence,
        "pg_id": 0,
        "process_group": (record.group, record.group),
        "collective_seq_id": call.sequence,
        "p2p_seq_id": 0,
        "op_id": call.sequence,
        "profiling_name": f"gloo:{name}",  # its readers know no other libraries
        "time_created_ns": _nanoseconds(call.begun) or _nanoseconds(record.written),
        "time_discovered_started_ns": _nanoseconds(call.begun),
        "time_discovered_completed_ns": _nanoseconds(call.ended),
        "input_sizes": [inputs],
        "output_sizes": [outputs],
        "input_dtypes": dtypes,
        "output_dtypes": dtypes,
        "state": _STATES[call.state],
        "retired": call.state == "ended",
        "is_p2p": False,
        "frames": [{"name": call.text, "filename": f"rank {record.rank}", "line": call.sequence}],
    }


def _sizes(name: str, text: str, size: int) -> tuple[list[int], list[int]]:
    """Of the arrays that the rank gives and gets. Shards are padded to equal sizes, which the reader expects."""
    given = re.search(r"count=([0-9]{1,19})\b", text)
    if given is None:
        return [], []
    count = int(given[1])
    shard = -(-count // size)
    if name == "all_gather":
        return [shard], [shard * size]
    if name == "reduce_scatter":
        return [shard * size], [shard]
    return [count], [count]


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1e9)
