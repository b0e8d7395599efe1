"""Which rank qccl-bench explain names, from records made by hand: one row for each rule, and for which of two wins."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest

from qccl.base.errors import CollectiveTimeout, PeerLost, QcclError
from qccl.base.errors import gave_up as error_of_rank
from qccl.bench.verdict import findings
from qccl.observe.records import CallRecord, GroupRecord, TransferRecord

TEXT = "allreduce(count=1000, dtype=float32, codec=minmax8, op=sum)"
OTHER = "allreduce(count=1000, dtype=float32, codec=minmax4, op=sum)"
PAIRS = "all_to_all(dtype=float32); 0 sends 1 {} elements and gets 3 elements"
LATE = CollectiveTimeout("rank 0 reached the deadline of allreduce(): rank 1 did not make this call")
LOST = PeerLost("rank 1 was lost: rank 0 has no connection to rank 1 any more", 1)
CLOSED = PeerLost("rank 0 gave up or cannot be reached: rank 2 has no connection to rank 0 any more", 0)
WRITTEN = 100.0


def ended(sequence: int, text: str = TEXT) -> CallRecord:
    return CallRecord(sequence, sequence, text, "ended", 90.0 + sequence, 90.5 + sequence)


def under_way(sequence: int, text: str = TEXT, begun: float = 97.0, **found: object) -> CallRecord:
    return CallRecord(sequence, sequence, text, "under way", begun, **found)  # type: ignore[arg-type]


def queued(sequence: int, text: str = TEXT) -> CallRecord:
    return dataclasses.replace(under_way(sequence, text), state="queued", begun=None)


def record(rank: int, *calls: CallRecord, reason: str | QcclError = "", size: int = 3) -> GroupRecord:
    return dataclasses.replace(GroupRecord.of("group 0", rank, size, [], reason), written=WRITTEN, calls=calls)


def receive(peer: int, since: float = 98.0, nbytes: int = 500) -> TransferRecord:
    return TransferRecord(False, peer, nbytes, since)


def send(peer: int) -> TransferRecord:
    return TransferRecord(True, peer, 500, 97.5)


def waits(sequence: int, *peers: int, still: float = 0.0) -> CallRecord:
    """A call that waits for data of these ranks."""
    return under_way(sequence, transfers=tuple(map(receive, peers)), still=still)


def gave_up(rank: int, error: str = "KeyboardInterrupt: ") -> PeerLost:
    return error_of_rank(rank, error)


class Rule(NamedTuple):
    """Records, the ranks that are named, and what is said: all of it, or parts; ``never`` is not said."""

    records: list[GroupRecord]
    ranks: list[int]
    said: str | tuple[str, ...] = ()
    never: str = "no such text"


RULES = {
    "a rank made another call": Rule(
        [record(0, under_way(4)), record(1, under_way(4, OTHER)), record(2, under_way(4))],
        *([1], f"rank 1 made {OTHER} as call 4, and ranks 0 and 2 made {TEXT}"),
    ),
    # of two calls the one that was made before is the usual one
    "another call while a third rank is in the call before": Rule(
        [
            record(0, ended(2), under_way(3)),
            record(1, ended(3), under_way(4, OTHER)),
            record(2, ended(2), ended(3), under_way(4)),
        ],
        *([1], f"rank 1 made {OTHER} as call 4, and rank 2 made {TEXT}, as before"),
    ),
    "two calls of which nobody knows which is right": Rule(
        [record(0, under_way(0)), record(1, under_way(0, OTHER)), record(2)],
        *([0, 1], f"the ranks made different calls number 0: rank 0 made {TEXT}; rank 1 made {OTHER}"),
    ),
    "pairs of ranks agree on something else": Rule(
        [record(n, under_way(0, PAIRS.format(5 + n), transfers=(receive(2),))) for n in range(2)], [2]
    ),
    "a rank gave up between the calls of all": Rule(
        [record(rank, ended(0), reason=gave_up(1)) for rank in range(3)],
        *([1], f"the group ended on rank 1: {gave_up(1)}"),
    ),
    # the others name it; one of them has heard of another reason
    "a rank was lost": Rule([record(0, waits(3, 1), reason=LOST), record(2, waits(3, 1), reason=CLOSED)], [1]),
    "a record at the signal does not excuse a rank that was lost": Rule(
        [
            record(0, waits(3, 1), reason=LOST, size=2),
            record(1, ended(2), reason="the signal SIGUSR1 came", size=2),
        ],
        [1],
    ),
    # neither is the reason; the one that stood still is
    "two ranks name each other": Rule(
        [
            record(0, waits(3, 1), reason=PeerLost("rank 1 was lost: no connection", 1), size=2),
            record(1, under_way(3, still=2.9), reason=PeerLost("rank 0 was lost: no connection", 0), size=2),
        ],
        *([1], ("rank 1 did not advance call 3", "for 2.9 s")),
    ),
    # they have waited for a rank that has not made the call
    "Ctrl-C on all ranks is not the reason": Rule(
        [
            *(record(rank, under_way(5, missing=(2,)), reason=gave_up(rank)) for rank in (0, 1)),
            record(2, ended(4), reason=gave_up(2)),
        ],
        *([2], ("rank 2 has not made call 5",)),
    ),
    "a deadline comes before who gave up after it": Rule(
        [
            record(0, under_way(5, missing=(1,)), reason=LATE, size=2),
            record(1, ended(4), reason=gave_up(1, "RuntimeError: too late"), size=2),
        ],
        *([1], ("rank 1 has not made call 5",)),
    ),
    # its record has its last calls only, and the oldest one that others have not ended is no longer among them
    "a rank far ahead has made the call": Rule(
        [record(0, ended(4), waits(5, 1), size=2), record(1, ended(7), waits(8, 0), size=2)],
        *([0, 1], ("from rank 1 to rank 0",), "has not made call"),
    ),
    "an unknown rank was lost": Rule([record(0, waits(0, 1), reason=PeerLost("a rank was lost"))], [1]),
    # others stood still for a moment, because the machine was busy
    "a rank stood still": Rule(
        [
            record(rank, waits(2, 2 if rank == 1 else 1, still=2.8 if rank == 1 else 0.3), reason=LATE)
            for rank in range(3)
        ],
        [1],
        f"rank 1 did not advance call 2, {TEXT} for 2.8 s, and ranks 0, 1 and 2 waited up to 3.0 s: its process was "
        "stopped, or an operation, a signal handler or the program's own work during the call took so long",
    ),
    "a rank made the call when the others had given up": Rule(
        [
            *(record(rank, under_way(2, missing=(1,), still=0.1), reason=LATE) for rank in (0, 2)),
            record(1, ended(1), under_way(2, begun=99.9, still=0.09), reason=LATE),
        ],
        *([1], ("rank 1 made call 2", "it ended call 1 8.4 s before that, and did something else since")),
    ),
    "a late rank comes before one that a busy machine held up": Rule(
        [
            record(0, ended(1), under_way(2, begun=99.9), reason=LATE),
            record(2, under_way(2, missing=(0,), still=2.0), reason=LATE),
        ],
        [0],
    ),
    "a rank that stood still comes before one without a record": Rule(
        [record(0, waits(2, 1, 2), reason=LATE), record(1, under_way(2, still=2.8), reason=LATE)], [1]
    ),
    # its stream waits for other work
    "a GPU has not begun the call": Rule(
        [record(0, under_way(3)), record(1, queued(3))],
        *([1], (f"rank 1 has queued call 3, {TEXT}, which rank 0 began 3.0 s before",)),
    ),
    "nothing but a missing record is known": Rule([record(0, under_way(3)), record(1, under_way(3))], [2]),
    # both ranks have made the call at once: the connection is the reason, if there is no transfer to look at
    "a header does not arrive": Rule(
        [record(0, under_way(2, missing=(1,)), size=2), record(1, under_way(2), size=2)],
        *([1], f"rank 1 has made call 2, {TEXT}, but its header has not reached ranks 0 and 1"),
    ),
    "transfers are of two ranks": Rule(
        [record(0, waits(0, 1), size=2), record(1, under_way(0, transfers=(send(0),)), size=2)],
        *([0, 1], ("from rank 1 to rank 0",)),
    ),
    "queued calls are not compared": Rule(
        [record(0, waits(5, 2), under_way(6)), record(1, waits(5, 2), queued(6, OTHER))], [2]
    ),
    "a rank has not made the call": Rule(
        [record(1, ended(0)), *(record(rank, ended(0), under_way(1, missing=(1,))) for rank in (0, 2))],
        [1],
        f"rank 1 has not made call 1, {TEXT}, in which ranks 0 and 2 waited for 3.0 s: it ended call 0, {TEXT}, "
        "9.5 s before, and did something else since",
    ),
    "a header of a rank without a record": Rule(
        [record(0, under_way(0, missing=(1,)), size=2)],
        *([1], ("rank 1 has left no record, and rank 0 waited 3.0 s for it in call 0",)),
    ),
    "data of a rank without a record": Rule(
        [record(0, waits(0, 1), size=2)], [1], ("rank 1 has left no record", "cannot be reached")
    ),
    "a rank computes": Rule(
        [record(0, waits(0, 1), size=2), record(1, under_way(0, computes=True), size=2)],
        *([1], f"rank 1 computes its part of call 0, {TEXT}, which ranks 0 and 1 began 3.0 s before"),
    ),
    # rank 2 waits for rank 0, which waits itself: the transfer from 1 to 0 holds both
    "a transfer makes no progress": Rule(
        [
            record(0, waits(0, 1)),
            record(1, under_way(0, transfers=(send(0),))),
            record(2, under_way(0, transfers=(receive(0, 97.0, 600),))),
        ],
        [0, 1],
        f"the transfer of 500 bytes from rank 1 to rank 0 of call 0, {TEXT} has made no progress for 2.0 s",
    ),
    "no call is under way": Rule(
        [record(0, ended(0), size=2), record(1, ended(0), ended(1), size=2)],
        *([], "no call is under way; the last ones were 0 on rank 0, 1 on rank 1"),
    ),
    "no call was made": Rule([record(0, size=2), record(1, size=2)], [], "no call is under way"),
}
for _why in (gave_up(2, "ValueError: no"), PeerLost("rank 2 ended its process in the middle of a call", 2)):
    for _calls in ((), (waits(1, 0),)):
        RULES[f"{_why}, {'inside' if _calls else 'outside'}"] = Rule(
            [*(record(rank, waits(1, 1 - rank), reason=_why) for rank in (0, 1)), record(2, *_calls, reason=_why)],
            *([2], f"the group ended in call 1, {TEXT} on rank 2: {_why}"),
        )


@pytest.mark.parametrize("name", RULES)
def test_who_is_named(name: str) -> None:
    records, ranks, said, never = RULES[name]
    found = findings({each.rank: each for each in records})
    text = "\n".join(each.text for each in found)
    assert sorted({rank for each in found for rank in each.ranks}) == ranks, text
    assert text == said if isinstance(said, str) else all(part in text for part in said), text
    assert never not in text
