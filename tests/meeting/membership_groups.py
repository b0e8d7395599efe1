"""Groups of ranks that only agree on their next group: threads with a MembershipSocket each, and no UCX."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import patience
import pytest

from qccl.base.errors import CollectiveTimeout, PeerLost
from qccl.meeting.membership import Agreement
from qccl.meeting.messages import Decision
from qccl.meeting.regroup import MembershipSocket


def give_secret(monkeypatch: pytest.MonkeyPatch, secret: bytes | None = bytes(range(32))) -> None:
    """Sockets are made with this secret, where a test gives none."""
    monkeypatch.setattr(MembershipSocket.__init__, "__defaults__", ((), secret))


@contextmanager
def silent(*ranks: int) -> Iterator[None]:
    """Meanwhile the other ranks of a group give up after half a second to wait for these alone.

    All others they await as long as their timeout says. So a test can give them a long one, and a thread that is held
    up is not taken for a rank that is silent.
    """
    passed, since = Agreement.passed, dict[Agreement, float]()

    def hurried(self: Agreement, now: float) -> None:
        awaited = {self._leader} if self._leader < self._rank else set() if self._phase else set(self._missing())
        if not awaited or self._rank in ranks or not awaited.issubset(ranks):
            since.pop(self, None)
        elif now > since.setdefault(self, now) + 0.5:
            now = max(now, self._until + 0.001)
        passed(self, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agreement, "passed", hurried)
        yield


class Group:
    """Ranks of one process, each with its socket."""

    def __init__(self, size: int) -> None:
        self.ranks = [MembershipSocket("127.0.0.1") for _ in range(size)]
        for rank in self.ranks:
            rank.begin([each.member(b"first") for each in self.ranks])

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exception: object) -> None:
        for rank in self.ranks:
            rank.close()

    def run(self, *works: Callable[[], Decision]) -> list[Decision | Exception]:
        """The results of all, which run at once."""

        def caught(work: Callable[[], Decision]) -> Decision | Exception:
            try:
                return work()
            except (PeerLost, CollectiveTimeout) as error:
                return error

        with ThreadPoolExecutor(len(works)) as pool:
            return [each.result(120) for each in [pool.submit(caught, work) for work in works]]

    def agree(self, *ranks: int, timeout: float = 60.0) -> list[Decision | Exception]:
        return self.run(*(self.work(rank, timeout) for rank in ranks))

    def agree_and_meet(self, *ranks: int) -> list[Decision | Exception]:
        """As agree(); then each waits for all others, as it does while the group is connected.

        A rank that has missed the decision hears it then.
        """
        decided = list[int]()

        def work(rank: int) -> Decision:
            decision = self.work(rank)()
            decided.append(rank)
            patience.wait_until(lambda: len(decided) == len(ranks), self.ranks[rank].check_whole)
            return decision

        return self.run(*(functools.partial(work, rank) for rank in ranks))

    def work(self, rank: int, timeout: float = 60.0, *, after: float = 0.0) -> Callable[[], Decision]:
        def work() -> Decision:
            time.sleep(after)
            return self.ranks[rank].agree(b"worker %d" % rank, 100 + rank, timeout)

        return work

    def grow(self, rank: int) -> Callable[[], Decision]:
        """As work(), with a process that joins at this rank."""

        def work() -> Decision:
            patience.wait_until(self.ranks[rank].waiting)
            return self.ranks[rank].agree(b"worker", rank, 60.0, grows=True)

        return work

    def numbers(self, decision: Decision | Exception) -> list[int]:
        """The old ranks in a group."""
        assert isinstance(decision, Decision), decision
        ids = [rank.member(b"").id for rank in self.ranks]
        return [ids.index(member.id) for member in decision.members]


def one_group(found: list[Decision | Exception]) -> Decision:
    """The only group that ranks have ended in."""
    groups = {each for each in found if isinstance(each, Decision)}
    assert len(groups) == 1, found
    return groups.pop()
