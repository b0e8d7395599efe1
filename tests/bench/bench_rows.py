"""Rows of qccl-bench, each measured by one call of the ranks of a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import qccl
from qccl import codecs
from qccl.bench.sweep.calls import Case, PlainCall, QuantizedCall
from qccl.bench.sweep.measure import Counts, Row, measure

SHARED = {"layout": "sharded", "node_ids": [0, 0, 1, 1]}
_ONCE = Counts(iters=1, warmups=0, checks=1)


def measured(
    comm: qccl.Communicator,
    codec: str | codecs.Codec,
    case: Case,
    algorithm: str = "auto",
    counts: Counts = _ONCE,
    parameters: Mapping[str, object] = MappingProxyType({}),
    *,
    as_plan: bool = False,
) -> Row:
    call = QuantizedCall(comm, case, codecs.get(codec), algorithm, None, parameters, as_plan=as_plan)
    return measure_one(comm, call, counts)


def measure_one(
    comm: qccl.Communicator,
    call: QuantizedCall | PlainCall,
    counts: Counts = _ONCE,
    meter: Callable[[], int] | None = None,
) -> Row:
    (row,) = measure(comm, [call], counts, meter=meter)
    return row
