"""Which transport, how many connections and which congestion control fit a network, and why."""

from __future__ import annotations

from dataclasses import dataclass

from qccl.costs.tcp_model import Tcp, needed_connections

__all__ = ["BBR", "Advice", "Choice", "Conditions", "advise"]

BBR = "bbr"
#: seconds of delay from which on ranks are taken for ones of different sites, and the loss that matters
_FAR, _LOSSY = 1e-3, 1e-5
#: connections of wan with bbr, without it where losses are unknown, the most, and so many times those that the model
#: needs, because messages are not spread evenly
_WITH_BBR, _WITHOUT, _MOST, _SPARE = 2, 24, 64, 2
_PERMIT = 'modprobe tcp_bbr && sysctl -w net.ipv4.tcp_allowed_congestion_control="reno cubic bbr"'


@dataclass(frozen=True)
class Conditions:
    """A network between ranks, and what their machines permit.

    Attributes:
        rate: bytes per second of each rank's link, in each direction.
        delay: seconds that a packet is under way, beyond those in one room.
        loss: the share of the packets that are lost; None: unknown.
        congestion: the machines' congestion control, as gloo and UCX use it.
        permits_bbr: all machines let wan choose bbr.
        is_one_machine: all ranks are on it.
        has_token: the job has a token, so its connections must be encrypted.
    """

    rate: float
    delay: float = 0.0
    loss: float | None = 0.0
    congestion: str = "cubic"
    permits_bbr: bool = False
    is_one_machine: bool = False
    has_token: bool = False

    @property
    def is_far(self) -> bool:
        """Whether the ranks are at different sites, or on a network that loses packets."""
        return not self.is_one_machine and (self.delay > _FAR or (self.loss or 0.0) > _LOSSY)


@dataclass(frozen=True)
class Choice:
    """A value, and the reason in one sentence."""

    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.value}, because {self.reason}"


@dataclass(frozen=True)
class Advice:
    """What fits; ``tcp`` are qccl's connections by it, with the congestion control that is permitted today."""

    transport: Choice
    connections: Choice
    congestion: Choice
    tcp: Tcp


def advise(conditions: Conditions, ranks: int) -> Advice:
    """The advice for so many ranks on a network."""
    transport = _transport(conditions)
    if transport.value == "ucx":
        one = Choice("1", "UCX has one connection for each pair of ranks")
        return Advice(transport, one, _congestion_of_ucx(conditions), Tcp(conditions.congestion, 1))
    count, connections = _connections(conditions, ranks)
    tcp = Tcp(BBR if conditions.permits_bbr else conditions.congestion, count)
    return Advice(transport, connections, _congestion_of_wan(conditions), tcp)


def _transport(conditions: Conditions) -> Choice:
    if conditions.is_one_machine:
        return Choice("ucx", "all ranks are on one machine, where UCX uses shared memory")
    if conditions.is_far:
        return Choice(
            "wan",
            f"a delay of {conditions.delay * 1e3:.3g} ms and {_percent(conditions.loss)} loss are not those of one "
            f"cluster: wan encrypts, sends what is late a second time, and connects again after an interruption "
            f"(QCCL_TRANSPORT=wan, and a token: qccl-bench token FILE)",
        )
    if conditions.has_token:
        return Choice("wan", "a token is set, and only wan encrypts what crosses the network")
    return Choice(
        "ucx",
        "the delay is short, nothing is lost, and UCX costs the processor least; if others than your ranks reach this "
        "network, take wan and a token (qccl-bench token FILE)",
    )


def _percent(loss: float | None) -> str:
    return "unknown" if loss is None else f"{loss * 100:.2g}%"


def _connections(conditions: Conditions, ranks: int) -> tuple[int, Choice]:
    """The number, and the advice, which says how to set it."""
    if conditions.permits_bbr:
        reason = "with bbr one has the link's rate, and what is late on it is sent over the other; it is wan's default"
        return _WITH_BBR, Choice(str(_WITH_BBR), reason)
    if conditions.loss is None:
        reason = "each loss halves the rate of one connection only, and losses are unknown; it is wan's default"
        return _WITHOUT, Choice(str(_WITHOUT), reason)
    if conditions.loss == 0:
        reason = "nothing is lost, so one has the link's rate, and what is late on it is sent over the other"
        reason += f" (QCCL_WAN_CONNECTIONS={_WITH_BBR})"
        return _WITH_BBR, Choice(str(_WITH_BBR), reason)
    round_trip = 2 * max(conditions.delay, _FAR / 10)
    needed = needed_connections(conditions.rate, round_trip, conditions.loss, ranks - 1)
    count = min(_MOST, max(_WITH_BBR, _SPARE * needed))
    with_loss = f"with {conditions.congestion} and {_percent(conditions.loss)} loss"
    reason = f"{with_loss} it takes {needed} for each pair of ranks to fill a link"
    reason += ", and twice as many level out their differences" if count == _SPARE * needed else ""
    reason += f", and more than {_MOST} are not possible" if count < needed else ""
    return count, Choice(str(count), f"{reason} (QCCL_WAN_CONNECTIONS={count})")


def _congestion_of_wan(conditions: Conditions) -> Choice:
    if not conditions.permits_bbr:
        return Choice(
            BBR,
            f"it keeps its rate when packets are lost; not all machines permit it yet, so the administrator of each "
            f"one runs, outside of containers: {_PERMIT}; the figures are those of {conditions.congestion}",
        )
    reason = "it keeps its rate when packets are lost, and wan chooses it by itself, because all machines permit it"
    if conditions.congestion != BBR:
        reason += (
            f"; for gloo, the administrator of each machine replaces {conditions.congestion} by sysctl -w "
            f"net.ipv4.tcp_congestion_control=bbr"
        )
    return Choice(BBR, reason)


def _congestion_of_ucx(conditions: Conditions) -> Choice:
    if conditions.is_one_machine:
        return Choice(conditions.congestion, "shared memory needs none, so leave it as it is")
    if conditions.congestion == BBR:
        return Choice(
            "cubic",
            "bbr leaves gaps where delays are short; the administrator of each machine runs sysctl -w "
            "net.ipv4.tcp_congestion_control=cubic",
        )
    return Choice(conditions.congestion, "nothing is lost, so it has the link's rate; leave it as it is")
