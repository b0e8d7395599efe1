"""Totals of a group's calls on one rank, by collective and codec, which Communicator.stats() reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

from qccl import _host
from qccl.base.intervals import IntervalMap
from qccl.collectives.schedule import Decode, Encode, Exchange, Reduce, Role, Schedule, Span

__all__ = ["CallStats", "Counted", "Tallies", "Traffic", "traffic"]


@dataclass(frozen=True)
class CallStats:
    """The calls of one collective with one codec. Only calls that have ended count, and no barriers.

    Attributes:
        collective: name of the collective, as in Communicator.plan(); "" for all together.
        codec: the codec with its parameters; "" for all together.
        calls: number of ended calls; on CUDA number of calls put on their streams, without those in graphs.
        elements: sum of the elements of the calls' vectors.
        raw_nbytes: bytes of the values that this rank's messages carried, without a codec.
        sent_nbytes: bytes of encoded data that this rank has sent to other ranks, without the headers of calls.
        seconds: sum of the times from each call's beginning to its end; overlapping calls each count. None on CUDA,
            like the next three.
        computing_seconds: the part of ``seconds`` in operations: encoding, decoding, reducing. Only one in 16 of the
            calls that send and receive less than 256 KiB is timed, and represents those after it.
        waiting_seconds: the part in which the program waited for other ranks or the network, and the call did not
            compute. While several calls are under way, each second counts once, for the call that ends next.
        hidden_seconds: the part in which the program waited for no call and did its own work.
    """

    collective: str
    codec: str
    calls: int = 0
    elements: int = 0
    raw_nbytes: int = 0
    sent_nbytes: int = 0
    seconds: float | None = None
    computing_seconds: float | None = None
    waiting_seconds: float | None = None
    hidden_seconds: float | None = None

    @property
    def ratio(self) -> float | None:
        """Raw bytes divided by sent bytes; None if nothing was sent."""
        return self.raw_nbytes / self.sent_nbytes if self.sent_nbytes else None

    def values(self) -> tuple[float | None, ...]:
        """All numbers, from ``calls`` on."""
        return tuple(getattr(self, field.name) for field in fields(self)[2:])


class Counted(NamedTuple):
    """The entry that counts a program's calls, and the number of elements of each call."""

    tally: _host.Tally
    elements: int


class Tallies:
    """The totals of an engine; any thread may read them."""

    def __init__(self, *, are_timed: bool) -> None:
        """``are_timed``: whether the engine adds the times of its calls, too."""
        self._are_timed = are_timed
        self._by_label: dict[tuple[str, str], _host.Tally] = {}

    def counted(self, collective: str, codec: str, elements: int) -> Counted:
        """Make an entry for a program whose calls have ``elements`` each."""
        return Counted(self._by_label.setdefault((collective, codec), _host.Tally()), elements)

    def __iter__(self) -> Iterator[CallStats]:
        """The entries in the order in which the programs were made, without those that have no calls."""
        for label, tally in tuple(self._by_label.items()):
            found = tally.totals()
            if found[0]:
                yield CallStats(*label, *(found if self._are_timed else found[:4]))


class Traffic(NamedTuple):
    """The amounts that a rank sends to others in one run.

    Attributes:
        raw_nbytes: bytes of the values that its messages carry, in the caller's element type.
        sent_nbytes: bytes of the messages.
    """

    raw_nbytes: int
    sent_nbytes: int


@dataclass(slots=True)
class _Code:
    """The place of encoded values in a wire buffer."""

    start: int
    stop: int
    elements: int

    def split(self, at: int) -> _Code:
        """Split a code inside which a message ends; the elements are shared in proportion."""
        rest = _Code(at, self.stop, round(self.elements * (self.stop - at) / (self.stop - self.start)))
        self.stop, self.elements = at, self.elements - rest.elements
        return rest


def traffic(schedule: Schedule) -> Traffic:
    """The traffic of the schedule's rank. A message may have several codes, also codes made by other ranks."""
    codes: dict[str, IntervalMap[_Code]] = {name: IntervalMap() for name in schedule.buffers}

    def put(span: Span, values: Span | None) -> None:
        if span.start < span.stop:
            elements = 0 if values is None else values.stop - values.start
            codes[span.buffer].put(_Code(span.start, span.stop, elements))

    for op in reversed(
        schedule.ops
    ):  # codes that arrive, by what reads them; backwards, so that the first reader counts
        if isinstance(op, Decode):
            put(op.wire, op.dst)
        elif isinstance(op, Reduce):
            for src in op.srcs:
                put(src, op.out if op.own is None else op.own)
    elements = 0
    for op in schedule.ops:
        if isinstance(op, Encode):
            put(op.wire, op.src)
        elif isinstance(op, Reduce) and op.wire is not None:
            put(op.wire, op.out if op.own is None else op.own)
        elif isinstance(op, Exchange):
            for span in [transfer.span for transfer in op.sends if transfer.peer != schedule.rank]:
                elements += sum([code.elements for code in codes[span.buffer].covered(span.start, span.stop)])
    kinds = (each.dtype for each in schedule.buffers.values() if each.role in (Role.INPUT, Role.OUTPUT))
    itemsize = next((dtype.itemsize for dtype in kinds if dtype is not None), 0)
    return Traffic(elements * itemsize, schedule.sent_nbytes())
