"""What delay and loss cost a transfer over TCP: the rate that loss permits, and the wait for lost packets.

**The rate.** A congestion control that takes a lost packet for congestion, such as cubic, gets less than the link's
rate. The window that it reaches on average is the larger one of two published response functions: that of Reno
(Mathis, Semke, Mahdavi and Ott, "The Macroscopic Behavior of the TCP Congestion Avoidance Algorithm", 1997), sqrt(3/2)
/ sqrt(p) segments, and that of CUBIC (RFC 9438, section 5.1), 1.054 (RTT / p) ** (3/4) segments with the RTT in
seconds. A window is sent in a round trip. Where windows are short, losses also lead to timeouts, whose share is that of
Padhye, Firoiu, Towsley and Kurose, "Modeling TCP Throughput: A Simple Model and its Empirical Validation", 1998,
equation 30. bbr measures the link's rate instead, and keeps it up to a loss of 15% (Cardwell, Cheng, Gunn, Yeganeh and
Jacobson, "BBR: Congestion-Based Congestion Control", 2016): the link carries the packets that are lost, too.

**The wait.** A lost packet arrives one round trip later than it would have, and so do those behind it that would have
been there earlier. A round of a call ends when the last rank has all its bytes, so it is the loss nearest to its end
that counts, on any link.

All this describes a transfer in its steady state: neither slow start, nor a window that is large because few packets
were sent until now, nor losses in bursts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["MAX_LOSS", "SEGMENT", "Tcp", "needed_connections", "rate_with_loss", "wait_for_losses"]

#: bytes of a packet's payload, with Ethernet's usual packets of 1,500 bytes
SEGMENT = 1448
#: the largest loss for which the sources give figures
MAX_LOSS = 0.15
#: RFC 9438's factor for its C of 0.4 and beta of 0.7
_CUBIC = math.sqrt(math.sqrt(0.4 * 3.7 / 1.2))
#: seconds of Linux's shortest timeout, beyond the round trip
_TIMEOUT = 0.2


@dataclass(frozen=True, slots=True)
class Tcp:
    """The connections from one rank to another.

    Attributes:
        congestion: TCP's congestion control: "bbr", or another one, which is taken for cubic.
        connections: their number, for long messages.
    """

    congestion: str = "cubic"
    connections: int = 1


def rate_with_loss(rate: float, round_trip: float, loss: float, tcp: Tcp, peers: int) -> float:
    """Bytes per second that a rank gets of its link's ``rate``, sending to ``peers`` others at once.

    ``round_trip`` is in seconds; ``loss`` is the share of the packets that are lost, at most MAX_LOSS. Without loss it
    is ``rate`` itself.
    """
    if loss == 0:
        return rate
    if tcp.congestion == "bbr":
        return rate * (1 - loss)
    return min(rate * (1 - loss), peers * tcp.connections * _cubic_rate(round_trip, loss))


def _cubic_rate(round_trip: float, loss: float) -> float:
    """Bytes per second of one connection with cubic."""
    window = max(math.sqrt(1.5 / loss), _CUBIC * math.pow(round_trip / loss, 0.75))
    timeouts = min(1.0, 3 * math.sqrt(3 * loss / 8)) * loss * (1 + 32 * loss**2)
    return SEGMENT / (round_trip / window + (round_trip + _TIMEOUT) * timeouts)


def wait_for_losses(rate: float, round_trip: float, loss: float, nbytes: float, ranks: int) -> float:
    """Seconds by which losses delay the end of a round in which each of ``ranks`` ranks sends ``nbytes``: the mean.

    ``rate`` is the link's, in bytes per second. A loss ``t`` seconds before the end delays it by ``round_trip - t``.
    Losses are independent, ``density`` of them a second on all links, so the last one was ``t`` seconds before the end
    with the probability density ``density * exp(-density * t)``. ``t`` is at most the time in which the bytes were
    sent.
    """
    density, longest = ranks * loss * rate / SEGMENT, min(round_trip, nbytes / rate)
    if density * longest < 1e-9:  # nothing, but for what subtraction would leave
        return 0.0
    none_lost = math.exp(-density * longest)
    return round_trip * (1 - none_lost) - (1 - none_lost) / density + longest * none_lost


def needed_connections(rate: float, round_trip: float, loss: float, peers: int) -> int:
    """How many connections with cubic, to each of ``peers`` ranks, have the link's rate together; 1 without loss."""
    return 1 if loss == 0 else math.ceil(rate * (1 - loss) / (peers * _cubic_rate(round_trip, loss)))
