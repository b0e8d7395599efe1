"""The lab's check of itself: whether packets are delayed, lost and limited as was asked for.

Small packets measure the delay of every path, as ping does. Then each site sends a train of packets back to back, as
iperf does, which arrives at the rate of the slowest link on its way. The forwarder's counters must have each of them.
The kernel notes when a packet arrives, so that a busy machine does not disturb the times.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from qccl.bench.counters import Counters
from qccl.bench.namespaces import inside
from qccl.bench.network import Network
from qccl.bench.tools import LabError

__all__ = ["Checked", "check_network"]

#: the first sites of a large network are checked, in so many attempts until one finds nothing wrong
_SITES, _ATTEMPTS = 8, 10
_PINGS, _PING_SECONDS = 10, 2e-3
#: of a train: seconds at the rate asked for, share of the queue that it fills, fewest packets if they can be short
_TRAIN_SECONDS, _FILL, _MIN_TRAIN = 0.1, 0.9, 20
#: bytes of its longest datagrams, and of the headers of Ethernet, IP and UDP
_DATAGRAM, _HEADERS = 1472, 42
#: what may be wrong: seconds of a delay, share of a rate, standard deviations of the number of losses
_DELAY, _RATE, _LOSSES = 2e-3, 0.05, 5.0
#: SO_TIMESTAMPNS, which Python lacks: the kernel notes the time of arrival
_TIMESTAMPS = 35
_PORT, _PACKET, _TIME, _PATIENCE = 9, struct.Struct("<HHIQ"), struct.Struct("@qq"), 1.0


@dataclass(frozen=True, slots=True)
class Checked:
    """What the lab measured of its network.

    Attributes:
        delays: for each path between the sites that were checked, the seconds of its fastest packet.
        rates: for each of these sites, the bytes per second at which a train of packets arrived.
        sent, lost: numbers of packets.
    """

    delays: list[float]
    rates: list[float]
    sent: int
    lost: int

    def __str__(self) -> str:
        return (
            f"one way {min(self.delays) * 1e3:.1f} to {max(self.delays) * 1e3:.1f} ms, {min(self.rates) * 8e-6:.1f} to "
            f"{max(self.rates) * 8e-6:.1f} Mbit/s, {self.lost} of {self.sent} packets lost"
        )


def check_network(network: Network, namespaces: Sequence[str], addresses: Sequence[str], counters: Counters) -> Checked:
    """Measure a network that carries nothing else, and reset its counters.

    Raises LabError with what was asked for and what was measured.
    """
    reason = late = ""
    for _ in range(_ATTEMPTS):
        counters.reset()
        with _Probe(namespaces[:_SITES], addresses, counters) as probe:
            try:
                return _measure(network, probe, counters)
            except LabError as error:
                reason, late = str(error), f"{counters.lapses().worst * 1e3:.1f} ms"
            finally:
                counters.reset()
    raise LabError(
        f"the lab's network is not what was asked for: {reason}. Its forwarder was late by up to {late}; perhaps the "
        f"machine is too busy, or too slow for these links"
    )


@dataclass(frozen=True, slots=True)
class _Arrival:
    source: int
    to: int
    index: int
    sent: float
    at: float


class _Probe:
    """A UDP socket at each site, and what arrived at them."""

    def __init__(self, namespaces: Sequence[str], addresses: Sequence[str], counters: Counters) -> None:
        self._addresses, self._counters = addresses, counters
        self._sockets = [
            inside(name, partial(_socket, address)) for name, address in zip(namespaces, addresses, strict=False)
        ]
        self.sites, self.sent = len(self._sockets), 0
        self.arrivals: list[_Arrival] = []

    def __enter__(self) -> _Probe:
        return self

    def __exit__(self, *error: object) -> None:
        for each in self._sockets:
            each.close()

    def send(self, source: int, to: int, index: int, nbytes: int = 0) -> None:
        packet = _PACKET.pack(source, to, index, time.time_ns()).ljust(nbytes, b"\0")
        self._sockets[source].sendto(packet, (self._addresses[to], _PORT))
        self.sent += 1

    def collect(self, seconds: float) -> None:
        """Receive until nothing is under way, at most for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            is_empty = self._is_empty()
            ready, _, _ = select.select(self._sockets, [], [], 0 if is_empty else 1e-3)
            for each in ready:
                self._receive(each)
            if is_empty and not ready:
                return

    def _is_empty(self) -> bool:
        total = self._counters.total()
        gone = total.lost + total.cut + total.dropped_down + total.delivered_packets
        return total.packets + total.dropped_up >= self.sent and gone >= total.packets

    def _receive(self, each: socket.socket) -> None:
        while True:
            try:
                data, notes, _, _ = each.recvmsg(_DATAGRAM, socket.CMSG_SPACE(_TIME.size), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            source, to, index, sent = _PACKET.unpack_from(data)
            seconds, nanoseconds = _TIME.unpack(notes[0][2])
            self.arrivals.append(_Arrival(source, to, index, sent * 1e-9, seconds + nanoseconds * 1e-9))


def _socket(address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, _TIMESTAMPS, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        made.setsockopt(socket.SOL_SOCKET, option + 25, 64 << 20)  # SO_SNDBUFFORCE 32, SO_RCVBUFFORCE 33
    made.bind((address, _PORT))
    return made


def _measure(network: Network, probe: _Probe, counters: Counters) -> Checked:
    longest = max((path.delay + path.jitter for path in network.paths.values()), default=0.0) + _PATIENCE
    pairs = [(i, j) for i in range(probe.sites) for j in range(probe.sites) if i != j]
    for index in range(_PINGS):
        for pair in pairs:
            probe.send(*pair, index)
        time.sleep(max(_PING_SECONDS, 2 * probe.sites * (_PACKET.size + _HEADERS) / network.slowest.rate))
    probe.collect(longest)
    delays = [each for pair in pairs for each in _delay(network, probe, *pair)]
    rates = [_rate(network, probe, site, (site + 1) % probe.sites, longest) for site in range(probe.sites)]
    _check_counters(network, probe, counters)
    return Checked(delays, rates, probe.sent, probe.sent - len(probe.arrivals))


def _delay(network: Network, probe: _Probe, source: int, to: int) -> Iterator[float]:
    """The time of the fastest packet; nothing where all were lost."""
    path, names = network.path(source, to), f"from {network.sites[source].name} to {network.sites[to].name}"
    arrived = [each for each in probe.arrivals if (each.source, each.to) == (source, to)]
    if [each.index for each in arrived] != sorted(each.index for each in arrived):
        raise LabError(f"packets {names} overtook each other")
    if not arrived:
        return
    fastest = min(each.at - each.sent for each in arrived)
    nbytes = _HEADERS + _PACKET.size
    least = path.delay - path.jitter
    most = (
        path.delay + path.jitter + _PINGS * probe.sites * nbytes * sum(1 / rate for rate in _rates(network, source, to))
    )
    if not least - _DELAY <= fastest <= most + _DELAY + 0.05 * path.delay:
        raise LabError(
            f"packets {names} took {fastest * 1e3:.2f} ms or more, not {least * 1e3:g} to {most * 1e3:.2f} ms"
        )
    yield fastest


def _rates(network: Network, source: int, to: int) -> tuple[float, float]:
    return network.sites[source].up.rate, network.sites[to].down.rate


def _rate(network: Network, probe: _Probe, source: int, to: int, longest: float) -> float:
    """The bytes per second at which a train of packets arrived, of which some may have been lost."""
    names, asked = f"from {network.sites[source].name} to {network.sites[to].name}", min(_rates(network, source, to))
    length = min(_TRAIN_SECONDS, _FILL * network.queue)
    nbytes = min(max(_PACKET.size + _HEADERS, round(length * asked / _MIN_TRAIN)), _DATAGRAM + _HEADERS)
    count = max(2, round(length * asked / nbytes))
    begin, before = time.monotonic(), len(probe.arrivals)
    for index in range(count):
        probe.send(source, to, index, nbytes - _HEADERS)
    offered = count * nbytes / (time.monotonic() - begin)
    probe.collect(longest + length)
    arrived = probe.arrivals[before:]
    if len(arrived) < 2:
        raise LabError(f"of {count} packets {names} {len(arrived)} arrived")
    first, last = arrived[0], arrived[-1]
    rate = (last.index - first.index) * nbytes / max(last.at - first.at, 1e-9)
    jitter = min(2 * network.path(source, to).jitter, length / 2)
    allowed = _RATE + (network.grain + jitter) / (length - jitter)
    if not (1 - allowed) * min(asked, offered) <= rate <= (1 + allowed) * asked:  # it cannot be more than was offered
        raise LabError(
            f"{count} packets {names} arrived at {rate * 8e-6:.2f} Mbit/s, not at {asked * 8e-6:.2f} (they were sent "
            f"at {offered * 8e-6:.2f})"
        )
    return rate


def _check_counters(network: Network, probe: _Probe, counters: Counters) -> None:
    total, lapses = counters.total(), counters.lapses()
    found = (total.packets + total.dropped_up, total.delivered_packets, total.dropped_up + total.dropped_down)
    if found != (probe.sent, len(probe.arrivals), 0) or lapses.overrun or lapses.refused:
        raise LabError(
            f"{probe.sent} packets were sent and {len(probe.arrivals)} arrived, but its counters say {total} {lapses}"
        )
    paths = {pair: counters.path(*pair) for pair in network.paths}
    expected = sum(network.paths[pair].loss * count.packets for pair, count in paths.items())
    variance = sum(path.loss * (1 - path.loss) * paths[pair].packets for pair, path in network.paths.items())
    if abs(total.lost - expected) > _LOSSES * math.sqrt(variance) + 1:
        raise LabError(f"{total.lost} of {total.packets} packets were lost, not about {expected:.0f}")
