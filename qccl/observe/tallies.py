"""Totals of a group's calls on one rank, by collective and codec, which Communicator.stats() reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import repeat
from typing import NamedTuple

from qccl import _host
from qccl.collectives.schedule import Decode, Encode, Exchange, Reduce, Role, Schedule, Span, pieces

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


def traffic(schedule: Schedule) -> Traffic:
    """The traffic of the schedule's rank. A message may have several codes, also codes made by other ranks."""
    found: list[tuple[Span, Span | None]] = []  # codes with their values, and messages
    # first the codes that arrive, by their readers; backwards, so that the first reader counts
    for op in reversed(schedule.ops):
        if isinstance(op, Decode):
            found.append((op.wire, op.dst))
        elif isinstance(op, Reduce):
            found += zip(op.srcs, repeat(op.out if op.own is None else op.own))
    for op in schedule.ops:
        if isinstance(op, Encode):
            found.append((op.wire, op.src))
        elif isinstance(op, Reduce) and op.wire is not None:
            found.append((op.wire, op.out if op.own is None else op.own))
        elif isinstance(op, Exchange):
            for transfer in op.sends:
                if transfer.peer != schedule.rank:
                    found.append((transfer.span, None))
    pieces_of, starts = pieces([span for span, _ in found])
    elements, share = 0.0, [0.0] * len(starts)  # the share of a piece: its code's elements, in proportion to the bytes
    for span, values in found:
        if values is None:
            elements += sum(map(share.__getitem__, pieces_of[span]))
            continue
        count, nbytes = values.stop - values.start, span.stop - span.start
        for piece in pieces_of[span]:
            share[piece] = count * (starts[piece + 1] - starts[piece]) / nbytes
    arrays = [each for each in schedule.buffers.values() if each.role in (Role.INPUT, Role.OUTPUT)]
    itemsize = arrays[0].itemsize if arrays else 0
    return Traffic(round(elements) * itemsize, schedule.sent_nbytes())
