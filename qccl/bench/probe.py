"""The network between the ranks of a launcher, measured: round trips, rates and loss, over TCP connections of its own.

Small messages are sent there and back between rank 0 and every other rank, and between neighbours in a ring. Then each
rank sends to its neighbour as fast as it can, in both directions of the ring one after the other; and at last at half
of the rate found, at which no queue overflows: packets that are lost then are the network's own losses.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qccl.bench.probe_traffic import Ranks, flood, ping
from qccl.bench.tcp_counters import Counters, limit_rate, set_congestion
from qccl.errors import EngineError
from qccl.transports.network import Network
from qccl.transports.sockets import connect, listen, place_text

__all__ = ["Pair", "Probe", "probe"]

#: seconds until a rank must be reached
_CONNECT_SECONDS = 10.0
#: seconds of a bulk transfer, or round trips if these take longer, because TCP starts slowly
_BULK_SECONDS, _BULK_TRIPS, _LONGEST_SECONDS = 1.2, 12, 5.0
#: connections of a bulk transfer: with bbr, and with others, which each loss slows down
_WITH_BBR, _WITHOUT = 2, 8
#: of the rate, that at which losses are counted
_UNHURRIED = 0.5
_COOKIE_NBYTES = 16


@dataclass(frozen=True)
class Pair:
    """What was measured from one rank to another.

    Attributes:
        ranks: the sender, and the receiver.
        round_trip: seconds, the median; None where no message went there and back.
        rate: bytes per second of a bulk transfer; None where there was none.
        packets, lost: of the transfer that counts losses; 0 where there was none, or where the system does not count.
    """

    ranks: Ranks
    round_trip: float | None = None
    rate: float | None = None
    packets: int = 0
    lost: int = 0


@dataclass(frozen=True)
class Probe:
    """The pairs that were measured, and what follows from all of them."""

    pairs: tuple[Pair, ...]

    @property
    def round_trip(self) -> float:
        """Seconds of the pair that takes longest, for which calls wait."""
        return max(pair.round_trip for pair in self.pairs if pair.round_trip is not None)

    @property
    def rate(self) -> float:
        """Bytes per second of the slowest rank's link: for each rank and direction the faster of its two transfers."""
        sides = [[(pair.ranks[side], pair.rate) for pair in self.pairs if pair.rate is not None] for side in (0, 1)]
        return min(max(rate for each, rate in side if each == rank) for side in sides for rank, _ in side)

    @property
    def loss(self) -> float | None:
        """The share of all packets that were lost; None: the systems do not count."""
        packets = sum(pair.packets for pair in self.pairs)
        return sum(pair.lost for pair in self.pairs) / packets if packets else None


def probe(comm: Any, congestion: str, show: Callable[[str], None]) -> Probe:
    """Collective: measure the network between the ranks of a communicator.

    It takes about six seconds, and five more for a transfer that is repeated because a rank received nothing.
    ``congestion`` is the congestion control of the bulk transfers; "" is the system's. ``show`` is called with the name
    of each phase. Raises EngineError on all ranks where one cannot be reached, or receives nothing.
    """
    meeting = _Meeting(comm, congestion)
    try:
        return _probe(meeting, show)
    finally:
        meeting.close()


def _probe(meeting: _Meeting, show: Callable[[str], None]) -> Probe:
    rank, size = meeting.comm.rank, meeting.comm.size
    following = [(each, (each + 1) % size) for each in range(size)]
    preceding = [(each, (each - 1) % size) for each in range(size)]

    show("round trips")
    outs, ins = meeting.connect({(min(pair), max(pair)) for pair in [*following, *((0, r) for r in range(1, size))]}, 1)
    trips = [Pair(pair, round_trip=seconds) for pair, seconds in meeting.run(lambda: ping(outs, ins))]
    longest = max((pair.round_trip or 0.0 for pair in meeting.gather(trips)), default=0.0)
    seconds = min(_LONGEST_SECONDS, max(_BULK_SECONDS, _BULK_TRIPS * longest))

    rates: list[Pair] = []
    for name, ring in (("to the next", following), ("to the previous", preceding)):
        show(f"rate of each rank's link, {name} rank")
        received = meeting.measure_rate(ring, seconds)
        rates += [Pair((next(a for a, b in ring if b == rank), rank), rate=received)]
    slowest = min(pair.rate or 0.0 for pair in meeting.gather(rates))

    show("packets that are lost")
    _, counted = meeting.transfer(following, 2 * seconds, _UNHURRIED * slowest)
    lost = [Pair(following[rank], packets=counted.sent, lost=counted.lost)]
    return Probe(tuple(_merged(meeting.gather([*trips, *rates, *lost]))))


def _merged(found: Sequence[Pair]) -> Iterator[Pair]:
    """One Pair for each pair of ranks."""
    for ranks in sorted({pair.ranks for pair in found}):
        its = [pair for pair in found if pair.ranks == ranks]
        trips = [pair.round_trip for pair in its if pair.round_trip is not None]
        rates = [pair.rate for pair in its if pair.rate is not None]
        packets, lost = sum(pair.packets for pair in its), sum(pair.lost for pair in its)
        yield Pair(ranks, max(trips, default=None), max(rates, default=None), packets, lost)


def _unmeasured(rank: int, reason: str) -> EngineError:
    return EngineError(
        f"the network could not be measured: rank {rank}: {reason}; allow TCP between the machines of the ranks, or "
        f"give --link, --delay and --loss instead of --measure"
    )


class _Meeting:
    """How the ranks connect to each other, and exchange what they found."""

    def __init__(self, comm: Any, congestion: str) -> None:
        self.comm = comm
        self._congestion = congestion
        self._count = _WITH_BBR if congestion == "bbr" else _WITHOUT
        network = Network.towards(os.environ.get("MASTER_ADDR"), is_local=len(set(comm.nodes)) == 1)
        host = network.own_host()
        self._listener = listen(host, is_local=network.is_local)
        self._listener.settimeout(_CONNECT_SECONDS)
        self._cookie = os.urandom(_COOKIE_NBYTES)
        note = f"{host} {self._listener.getsockname()[1]} {self._cookie.hex()}"
        self._notes = [each.decode().split() for each in comm.allgather(note.encode())]

    def close(self) -> None:
        self._listener.close()

    def run(self, work: Callable[[], Any]) -> Any:
        """Collective: the result of ``work``. Raises EngineError on all ranks if it fails with OSError on one."""
        result, text = None, ""
        try:
            result = work()
        except OSError as error:
            text = str(error)
        for rank, each in enumerate(self.comm.allgather(text.encode())):
            if each:
                raise _unmeasured(rank, each.decode(errors="replace"))
        return result

    def gather(self, own: Sequence[Pair]) -> list[Pair]:
        """Collective: the pairs of all ranks."""
        found = self.comm.allgather(json.dumps([asdict(pair) for pair in own]).encode())
        pairs = [given for each in found for given in json.loads(each)]
        return [Pair(**given | {"ranks": tuple(given["ranks"])}) for given in pairs]

    def connect(
        self, pairs: Collection[Ranks], count: int
    ) -> tuple[list[tuple[Ranks, socket.socket]], list[socket.socket]]:
        """Collective: ``count`` connections for each pair: those of which this rank is the first, and the second."""
        rank = self.comm.rank
        outs: list[tuple[Ranks, socket.socket]] = []
        ins: list[socket.socket] = []

        def work() -> None:
            for pair in sorted(pairs):
                for _ in range(count if pair[0] == rank else 0):
                    outs.append((pair, self._call(pair[1])))
            for _ in range(count * sum(pair[1] == rank for pair in pairs)):
                ins.append(self._accept())

        self.run(work)
        return outs, ins

    def _call(self, rank: int) -> socket.socket:
        host, port, cookie = self._notes[rank]
        try:
            connection = connect((host, int(port)), _CONNECT_SECONDS)
        except OSError as error:
            raise OSError(f"rank {rank} cannot be reached at {place_text((host, int(port)))} ({error})") from error
        set_congestion(connection, self._congestion)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(bytes.fromhex(cookie))
        return connection

    def _accept(self) -> socket.socket:
        """The next connection of a rank; others are closed."""
        deadline = time.monotonic() + _CONNECT_SECONDS
        while time.monotonic() < deadline:
            connection, _ = self._listener.accept()
            connection.settimeout(_CONNECT_SECONDS)
            if connection.recv(_COOKIE_NBYTES, socket.MSG_WAITALL) == self._cookie:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection
            connection.close()
        raise TimeoutError("not every rank has connected in time")

    def measure_rate(self, ring: Sequence[Ranks], seconds: float) -> float:
        """Collective: the rate at which this rank received along the ring. Raises EngineError if one had none twice."""
        missing: list[int] = []
        for each in (seconds, _LONGEST_SECONDS):  # a process of a busy machine may not have run in the first time
            rate, _ = self.transfer(ring, each, None)
            found = self.comm.allgather(b"received" if rate else b"")
            missing = [rank for rank, text in enumerate(found) if not text]
            if not missing:
                return rate
        raise _unmeasured(missing[0], "hardly any bytes came from the neighbour in the ring")

    def transfer(self, ring: Sequence[Ranks], seconds: float, pace: float | None) -> tuple[float, Counters]:
        """Collective: send along the ring; the rate at which this rank received, and what it sent and lost."""
        outs, ins = self.connect(ring, self._count)
        if pace is not None:
            for _, connection in outs:
                limit_rate(connection, pace / len(outs))
        return self.run(lambda: flood([each for _, each in outs], ins, seconds))  # type: ignore[no-any-return]
