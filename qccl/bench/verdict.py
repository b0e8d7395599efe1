"""Finds the rank that the others wait for, or why the group has ended, from the records of its ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from qccl.base.errors import CollectiveTimeout, MismatchError
from qccl.meeting.strangers import printable
from qccl.observe.records import CallRecord, GroupRecord, TransferRecord

__all__ = ["Finding", "findings", "names"]

#: errors of ranks that have waited for others, or differ from them
_WAITED = {CollectiveTimeout.__name__, MismatchError.__name__}
#: a rank stood still if it did not advance the call for this part of the others' waiting time
_STILL = 0.5


@dataclass(frozen=True)
class Finding:
    """One sentence of the verdict.

    Attributes:
        ranks: the ranks that the others wait for, or on which the group has ended; empty if no rank is behind.
        text: the sentence.
    """

    ranks: tuple[int, ...]
    text: str


def findings(records: Mapping[int, GroupRecord]) -> list[Finding]:
    """Find who is behind, in which call, and why, from a group's records by rank, of which some may be missing."""
    number = _oldest_call(records)
    if number is None:
        return list(_gave_up(records, "")) or [_idle(records)]
    stuck = Stuck(records, number)
    return next(found for rule in _RULES if (found := list(rule(stuck))))


class Stuck:
    """The oldest call that a rank has begun and not ended.

    Attributes:
        records: the group's records, by rank.
        number: the number of the call.
        calls: the records of this call, by rank; ranks that have not made it are left out.
        waiting: the ranks that have begun the call and not ended it.
        text: the call's number and arguments.
        since, shortest: the longest and the shortest time for which these ranks have waited, in seconds.
        absent: ranks without a record.
        missing: ranks that have not made the call according to others.
    """

    def __init__(self, records: Mapping[int, GroupRecord], number: int) -> None:
        self.records, self.number = records, number
        self.calls = {rank: call for rank, record in sorted(records.items()) if (call := _find(record, number))}
        self.waiting = [rank for rank, call in self.calls.items() if call.state != "ended"]
        self.text = f"call {number}, {printable(self.calls[self.waiting[0]].text)}"
        waited = [self.waited(rank) for rank in self.waiting]
        self.since, self.shortest = max(waited), min(waited)
        self.absent = set(range(_size(records))) - records.keys()
        self.missing = {rank for each in self.waiting for rank in self.calls[each].missing}

    def waited(self, rank: int) -> float:
        """The seconds from the begin of the call on this rank to the rank's record."""
        begun = self.calls[rank].begun
        return 0.0 if begun is None else max(0.0, self.records[rank].written - begun)

    def names(self) -> str:
        """The ranks that wait."""
        return names(self.waiting)


# -- the rules: the first one that finds something gives the verdict ---------------------------------------------------


def _differ(stuck: Stuck) -> Iterator[Finding]:
    """Find ranks that have made another call than the others, with this number or a later one.

    The odd call is the call that fewer ranks have made, or that no rank has made before: programs repeat their calls.
    """
    by_text: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, record in sorted(stuck.records.items()):
        for call in record.calls:
            if call.state != "queued":
                by_text[call.sequence][_shared(call.text)].append(rank)
    number = next((number for number, calls in sorted(by_text.items()) if len(calls) > 1), None)
    if number is None:
        return
    calls = by_text[number]
    earlier = {text for before, texts in by_text.items() if before < number for text in texts}
    weights = {text: (len(ranks), text in earlier) for text, ranks in calls.items()}
    usual = max(calls, key=lambda text: weights[text])
    if list(weights.values()).count(weights[usual]) > 1:
        made = "; ".join(f"{names(ranks)} made {printable(text)}" for text, ranks in calls.items())
        several = tuple(rank for ranks in calls.values() for rank in ranks)
        yield Finding(several, f"the ranks made different calls number {number}: {made}")
        return
    before = ", as before" if usual in earlier else ""
    for text in calls.keys() - {usual}:
        made = f"made {printable(text)} as call {number}, and {names(calls[usual])} made {printable(usual)}{before}"
        yield from (Finding((rank,), f"rank {rank} {made}") for rank in calls[text])


def _words(stuck: Stuck) -> Iterator[Finding]:
    yield from _gave_up(stuck.records, f" in {stuck.text}")


def _stood_still(stuck: Stuck) -> Iterator[Finding]:
    """Find ranks that were stopped, or did something else, in the middle of the call."""
    for rank, call in stuck.calls.items():
        if call.still and call.still >= _STILL * stuck.since:
            yield Finding(
                (rank,),
                f"rank {rank} did not advance {stuck.text} for {call.still:.1f} s, and {stuck.names()} waited up "
                f"to {stuck.since:.1f} s: its process was stopped, or an operation, a "
                "signal handler or the program's own work during the call took so long",
            )


def _late(stuck: Stuck) -> Iterator[Finding]:
    """Find ranks that have not made the call, or only after the others had waited for long."""
    waited_for = f"{stuck.names()} waited for {stuck.since:.1f} s"
    for rank, record in sorted(stuck.records.items()):
        if rank not in stuck.calls:
            if record.calls and record.calls[-1].sequence > stuck.number:
                continue  # it has ended the call, which its record no longer has after many others
            yield Finding((rank,), f"rank {rank} has not made {stuck.text}, in which {waited_for}: {_doing(record)}")
        elif rank in stuck.missing and stuck.waited(rank) < _STILL * stuck.since:
            yield Finding(
                (rank,),
                f"rank {rank} made {stuck.text} only {stuck.waited(rank):.1f} s before its record, and {waited_for}: "
                f"{_before(record, stuck.calls[rank])}",
            )
    yield from _gone(stuck, stuck.absent & stuck.missing, "had not made the call")


def _lost(stuck: Stuck) -> Iterator[Finding]:
    """Find ranks without a record that have transfers under way; without recorded transfers (on GPUs), all of them."""
    peers = {each.peer for rank in stuck.waiting for each in stuck.calls[rank].transfers}
    yield from _gone(stuck, stuck.absent & (peers or stuck.absent), "cannot be reached")


def _gone(stuck: Stuck, ranks: set[int], why: str) -> Iterator[Finding]:
    for rank in sorted(ranks):
        yield Finding(
            (rank,),
            f"rank {rank} has left no record, and {stuck.names()} waited {stuck.since:.1f} s for it in {stuck.text}: "
            f"it has ended, was stopped, or {why}",
        )


def _not_begun(stuck: Stuck) -> Iterator[Finding]:
    """Find ranks whose GPU has not begun the call that others have begun."""
    queued = [rank for rank in stuck.waiting if stuck.calls[rank].state == "queued"]
    begun = [rank for rank in stuck.calls if rank not in queued]
    for rank in queued if begun else ():
        yield Finding(
            (rank,),
            f"rank {rank} has queued {stuck.text}, which {names(begun)} began {stuck.since:.1f} s before: its GPU "
            "is busy with earlier work on the stream",
        )


def _compute(stuck: Stuck) -> Iterator[Finding]:
    for rank in stuck.waiting:
        if stuck.calls[rank].computes:
            began = f"which {stuck.names()} began {stuck.since:.1f} s before"
            yield Finding((rank,), f"rank {rank} computes its part of {stuck.text}, {began}")


def _transfers(stuck: Stuck) -> Iterator[Finding]:
    """Find the transfers for which both sides wait, if all ranks have made the call."""
    calls = {rank: stuck.calls[rank] for rank in stuck.waiting}
    receives = [(rank, each) for rank, call in calls.items() for each in call.transfers if not each.is_send]
    sends = {(rank, each.peer): each for rank, call in calls.items() for each in call.transfers if each.is_send}
    found = [
        (each.peer, rank, rank, each)
        for rank, each in receives
        if (each.peer, rank) in sends or each.peer not in calls  # otherwise that rank itself waits
    ] or [(rank, peer, rank, each) for (rank, peer), each in sends.items()]
    for source, target, rank, each in sorted(found, key=lambda transfer: transfer[3].since):
        yield Finding((source, target), _slow(stuck, source, target, each, stuck.records[rank]))


def _slow(stuck: Stuck, source: int, target: int, transfer: TransferRecord, record: GroupRecord) -> str:
    since = max(0.0, record.written - transfer.since)
    return (
        f"the transfer of {transfer.nbytes:,} bytes from rank {source} to rank {target} of {stuck.text} has made no "
        f"progress for {since:.1f} s"
    )


def _unreached(stuck: Stuck) -> Iterator[Finding]:
    """Find ranks whose header of the call has not reached the others; otherwise name the ranks that wait."""
    for rank in sorted(stuck.missing & stuck.calls.keys()):
        yield Finding((rank,), f"rank {rank} has made {stuck.text}, but its header has not reached {stuck.names()}")
    for rank in stuck.waiting if not stuck.missing & stuck.calls.keys() else ():
        yield Finding(
            (), f"rank {rank} has made {stuck.text}, and has not ended it, and its record has no transfer under way"
        )


_RULES: Sequence[Callable[[Stuck], Iterator[Finding]]] = (
    *(_differ, _words, _late, _not_begun, _stood_still, _lost, _compute, _transfers, _unreached),
)


# -- helpers of the rules ----------------------------------------------------------------------------------------------


def _gave_up(records: Mapping[int, GroupRecord], where: str) -> Iterator[Finding]:
    """Find the ranks on which the group has ended, by the errors of the ranks that have records.

    A rank that another rank names may itself have failed because of a third one. If a rank has reached its deadline, or
    most have given up, for example after Ctrl-C, the errors are consequences, and none is taken.
    """
    if any(record.error in _WAITED for record in records.values()):
        return
    named = {rank: record.lost for rank, record in records.items() if record.lost is not None}
    origins: dict[int, str] = {}
    for first in sorted(named):
        seen, rank = {first}, first
        while (rank := named[rank]) not in seen and rank in named:
            seen.add(rank)
        if named.get(rank, rank) == rank:
            origins.setdefault(rank, records[rank if rank in named else first].reason)
    for rank, reason in sorted(origins.items() if 2 * len(origins) <= _size(records) else ()):
        yield Finding((rank,), f"the group ended{where} on rank {rank}: {printable(reason)}")


def _idle(records: Mapping[int, GroupRecord]) -> Finding:
    """Say that no call is under way."""
    last = {rank: record.calls[-1].sequence for rank, record in sorted(records.items()) if record.calls}
    ends = "; the last ones were " + ", ".join(f"{n} on rank {rank}" for rank, n in last.items()) if last else ""
    absent = sorted(set(range(_size(records))) - records.keys())
    text = f"{names(absent)} left no record, and no call is under way" if absent else "no call is under way"
    return Finding(tuple(absent), text + ends)


def _doing(record: GroupRecord) -> str:
    """Say what a rank did that has not made the call."""
    if not record.calls:
        return "it has made no call so far"
    last = record.calls[-1]
    if last.state != "ended" or last.ended is None:
        return f"it was in call {last.sequence}, {printable(last.text)}"
    return (
        f"it ended call {last.sequence}, {printable(last.text)}, {record.written - last.ended:.1f} s before, and did "
        "something else since"
    )


def _before(record: GroupRecord, call: CallRecord) -> str:
    """Say what a rank did before it made the call too late."""
    earlier = _find(record, call.sequence - 1)
    if earlier is None or earlier.ended is None or call.begun is None:
        return "it did something else before"
    idle = call.begun - earlier.ended
    return f"it ended call {earlier.sequence} {idle:.1f} s before that, and did something else since"


def _size(records: Mapping[int, GroupRecord]) -> int:
    return next(iter(records.values())).size


def _oldest_call(records: Mapping[int, GroupRecord]) -> int | None:
    """The number of the oldest call that a rank has begun and not ended."""
    numbers = [call.sequence for record in records.values() for call in record.calls if call.state != "ended"]
    return min(numbers, default=None)


def _find(record: GroupRecord, sequence: int) -> CallRecord | None:
    return next((call for call in record.calls if call.sequence == sequence), None)


def _shared(text: str) -> str:
    """The part of a call's text that is the same on all ranks (CollectiveSpec.pairs)."""
    return text.partition("; ")[0]


def names(ranks: Sequence[int]) -> str:
    """Name ranks in a sentence."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if ranks else "no rank"
