"""Which rank qccl-bench explain names, from records made by hand: one test for each rule, and for which of two wins."""

from __future__ import annotations

import dataclasses

import pytest

from qccl.bench.verdict import findings
from qccl.records import CallRecord, GroupRecord, TransferRecord

TEXT = "allreduce(count=1000, dtype=float32, codec=minmax8, op=sum)"
OTHER = "allreduce(count=1000, dtype=float32, codec=minmax4, op=sum)"
LATE = "rank 0 reached the deadline of allreduce(): rank 1 did not make this call"
WRITTEN = 100.0


def ended(sequence: int, text: str = TEXT) -> CallRecord:
    return CallRecord(sequence, sequence, text, "ended", 90.0 + sequence, 90.5 + sequence)


def under_way(sequence: int, text: str = TEXT, begun: float = 97.0, **found: object) -> CallRecord:
    return CallRecord(sequence, sequence, text, "under way", begun, **found)  # type: ignore[arg-type]


def record(rank: int, *calls: CallRecord, reason: str = "", size: int = 3) -> GroupRecord:
    return GroupRecord("group 0", rank, size, "host", 1, reason, WRITTEN, calls)


def verdict(*records: GroupRecord) -> tuple[list[int], str]:
    """The ranks that are named, and what is said."""
    found = findings({each.rank: each for each in records})
    return sorted({rank for each in found for rank in each.ranks}), "\n".join(each.text for each in found)


def receive(peer: int, since: float = 98.0) -> TransferRecord:
    return TransferRecord(False, peer, 500, since)


def send(peer: int) -> TransferRecord:
    return TransferRecord(True, peer, 500, 97.5)


def test_a_rank_that_made_another_call():
    ranks, text = verdict(record(0, under_way(4)), record(1, under_way(4, OTHER)), record(2, under_way(4)))
    assert ranks == [1] and text == f"rank 1 made {OTHER} as call 4, and ranks 0 and 2 made {TEXT}"


def test_another_call_while_a_third_rank_is_in_the_call_before():
    """Of two calls the one that was made before is the usual one."""
    before = record(0, ended(2), under_way(3))
    ranks, text = verdict(
        before, record(1, ended(3), under_way(4, OTHER)), record(2, ended(2), ended(3), under_way(4))
    )  # fmt: skip
    assert ranks == [1] and text.endswith(f"as call 4, and rank 2 made {TEXT}, as before")


def test_two_calls_of_which_nobody_knows_which_is_right():
    ranks, text = verdict(record(0, under_way(0)), record(1, under_way(0, OTHER)), record(2))
    assert ranks == [0, 1]
    assert text == f"the ranks made different calls number 0: rank 0 made {TEXT}; rank 1 made {OTHER}"


def test_what_pairs_of_ranks_agree_on_is_not_another_call():
    call = "all_to_all(dtype=float32); 0 sends 1 {} elements and gets 3 elements"
    first, second = (under_way(0, call.format(n), transfers=(receive(2),)) for n in (5, 6))
    assert verdict(record(0, first), record(1, second))[0] == [2]


@pytest.mark.parametrize("why", ["rank 2 gave up: ValueError: no", "rank 2 ended its process in the middle of a call"])
@pytest.mark.parametrize("calls", [(), (under_way(1, transfers=(receive(0),)),)], ids=["outside", "inside"])
def test_a_rank_that_gave_up(calls, why):
    waiting = [record(rank, under_way(1, transfers=(receive(1 - rank),)), reason=why) for rank in (0, 1)]
    ranks, text = verdict(*waiting, record(2, *calls, reason=why))
    assert ranks == [2] and text == f"the group ended in call 1, {TEXT} on rank 2: {why}"


def test_a_rank_that_gave_up_between_the_calls_of_all():
    why = "rank 1 gave up: KeyboardInterrupt: "
    ranks, text = verdict(*(record(rank, ended(0), reason=why) for rank in range(3)))
    assert ranks == [1] and text == f"the group ended on rank 1: {why}"


def test_a_rank_that_was_lost():
    """The others name it; one of them has heard of another reason."""
    lost = "rank 1 was lost: rank 0 has no connection to rank 1 any more"
    closed = "rank 0 gave up or cannot be reached: rank 2 has no connection to rank 0 any more"
    waiting = under_way(3, transfers=(receive(1),))
    assert verdict(record(0, waiting, reason=lost), record(2, waiting, reason=closed))[0] == [1]


def test_a_record_at_the_signal_does_not_excuse_a_rank_that_was_lost():
    lost = "rank 1 was lost: rank 0 has no connection to rank 1 any more"
    waiting = under_way(3, transfers=(receive(1),))
    asked = record(1, ended(2), reason="the signal SIGUSR1 came", size=2)
    assert verdict(record(0, waiting, reason=lost, size=2), asked)[0] == [1]


def test_two_ranks_that_name_each_other():
    """Neither is the reason; the one that stood still is."""
    first = record(0, under_way(3, transfers=(receive(1),)), reason="rank 1 was lost: no connection", size=2)
    second = record(1, under_way(3, still=2.9), reason="rank 0 was lost: no connection", size=2)
    ranks, text = verdict(first, second)
    assert ranks == [1] and "rank 1 did not advance call 3" in text and "for 2.9 s" in text


def test_ctrl_c_on_all_ranks_is_not_the_reason():
    """They have waited for a rank that has not made the call."""
    waiting = [record(r, under_way(5, missing=(2,)), reason=f"rank {r} gave up: KeyboardInterrupt: ") for r in (0, 1)]
    ranks, text = verdict(*waiting, record(2, ended(4), reason="rank 2 gave up: KeyboardInterrupt: "))
    assert ranks == [2] and "rank 2 has not made call 5" in text


def test_a_deadline_comes_before_who_gave_up_after_it():
    waiting = record(0, under_way(5, missing=(1,)), reason=LATE, size=2)
    ranks, text = verdict(waiting, record(1, ended(4), reason="rank 1 gave up: RuntimeError: too late", size=2))
    assert ranks == [1] and "rank 1 has not made call 5" in text


def test_a_rank_far_ahead_has_made_the_call():
    """Its record has its last calls only, and the oldest one that others have not ended is no longer among them."""
    behind = record(0, ended(4), under_way(5, transfers=(receive(1),)), size=2)
    ranks, text = verdict(behind, record(1, ended(7), under_way(8, transfers=(receive(0),)), size=2))
    assert "has not made call" not in text and "from rank 1 to rank 0" in text and ranks == [0, 1]


def test_a_reason_with_a_number_that_is_no_rank():
    found = verdict(record(0, under_way(0, transfers=(receive(1),)), reason=f"rank {'9' * 5000} gave up: no"))
    assert found[0] == [1]


def test_a_rank_that_stood_still():
    """Others stood still for a moment, because the machine was busy."""
    waiting = [under_way(2, transfers=(receive(1),), still=0.3), under_way(2, transfers=(receive(2),), still=2.8)]
    ranks, text = verdict(
        record(0, waiting[0], reason=LATE), record(1, waiting[1], reason=LATE), record(2, waiting[0], reason=LATE)
    )
    assert ranks == [1]
    assert text == (
        f"rank 1 did not advance call 2, {TEXT} for 2.8 s, and ranks 0, 1 and 2 waited up to 3.0 s: its process was "
        "stopped, or an operation, a signal handler or what the program did while the call was under way took so long"
    )


def test_a_rank_that_made_the_call_when_the_others_had_given_up():
    waiting = under_way(2, missing=(1,), still=0.1)
    late = under_way(2, begun=99.9, still=0.09)
    ranks, text = verdict(
        record(0, waiting, reason=LATE), record(1, ended(1), late, reason=LATE), record(2, waiting, reason=LATE)
    )
    assert ranks == [1]
    assert "rank 1 made call 2" in text and text.endswith(
        "it ended call 1 8.4 s before that, and did something else since"
    )


def test_a_late_rank_comes_before_one_that_a_busy_machine_held_up():
    waiting = under_way(2, missing=(0,), still=2.0)
    found = verdict(record(0, ended(1), under_way(2, begun=99.9), reason=LATE), record(2, waiting, reason=LATE))
    assert found[0] == [0]


def test_a_rank_that_stood_still_comes_before_one_without_a_record():
    waiting = under_way(2, transfers=(receive(1), receive(2)))
    found = verdict(record(0, waiting, reason=LATE), record(1, under_way(2, still=2.8), reason=LATE))
    assert found[0] == [1]


def test_a_gpu_that_has_not_begun_the_call():
    """Its stream waits for other work; a rank without a record is named only where nothing else is known."""
    queued = dataclasses.replace(under_way(3), state="queued", begun=None)
    ranks, text = verdict(record(0, under_way(3)), record(1, queued))
    assert ranks == [1] and text.startswith(f"rank 1 has queued call 3, {TEXT}, which rank 0 began 3.0 s before")
    assert verdict(record(0, under_way(3)), record(1, under_way(3)))[0] == [2]


def test_a_header_that_does_not_arrive():
    """Both ranks have made the call at once: the connection is the reason, if there is no transfer to look at."""
    ranks, text = verdict(record(0, under_way(2, missing=(1,)), size=2), record(1, under_way(2), size=2))
    assert ranks == [1] and text == f"rank 1 has made call 2, {TEXT}, but its header has not reached ranks 0 and 1"


def test_transfers_are_of_two_ranks():
    calls = [under_way(0, transfers=(receive(1),)), under_way(0, transfers=(send(0),))]
    ranks, text = verdict(record(0, calls[0], size=2), record(1, calls[1], size=2))
    assert ranks == [0, 1] and "from rank 1 to rank 0" in text


def test_queued_calls_are_not_compared():
    queued = dataclasses.replace(under_way(6, OTHER), state="queued", begun=None)
    calls = [under_way(5, transfers=(receive(2),)), under_way(6)]
    ranks, _ = verdict(record(0, *calls), record(1, calls[0], queued))
    assert ranks == [2]
