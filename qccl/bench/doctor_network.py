"""The network of ``qccl-bench doctor``: given by --link, --delay and --loss, or measured between the ranks."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click
import numpy as np

import qccl
from qccl.bench.advice import BBR, Advice, Conditions, advise
from qccl.bench.costs import FP32
from qccl.bench.network import Path
from qccl.bench.probe import Probe, probe
from qccl.bench.sizes import parse_link, parse_loss
from qccl.bench.tcp import congestion_control
from qccl.costs.profile import Profile
from qccl.costs.step import LATENCY, Step, sent_nbytes
from qccl.costs.tcp_model import MAX_LOSS, Tcp
from qccl.dtypes import FLOAT32
from qccl.errors import ArgumentError, QcclError
from qccl.scalars import parse_seconds
from qccl.transports import wan

if TYPE_CHECKING:
    from qccl.communicator import Communicator

__all__ = ["TrainingNetwork", "given_network", "measured_network", "parse_delay", "parse_small_loss"]

#: bytes of the call that measures the link, and the number of calls
_CALL_NBYTES, _CALLS = 16 << 20, 6
#: pairs of ranks that are printed
_SHOWN_PAIRS = 8


@dataclass(frozen=True)
class TrainingNetwork:
    """The network of a training.

    Attributes:
        conditions: rate, delay, loss, and what the machines permit.
        ranks, rank: their number, and this one.
        source: where the rate comes from.
        knows_delay: delay and loss are known, so a transport can be recommended.
        probe: the pairs of ranks, where they were measured.
    """

    conditions: Conditions
    ranks: int
    rank: int
    source: str
    knows_delay: bool
    probe: Probe | None = None

    @property
    def advice(self) -> Advice | None:
        """What fits this network; None where too little is known."""
        return advise(self.conditions, self.ranks) if self.knows_delay else None

    def step(self, profile: Profile, processors: float) -> Step:
        """The training step on it, over the transport that fits."""
        conditions, advice, own = self.conditions, self.advice, Tcp(self.conditions.congestion)
        if conditions.is_one_machine:  # shared memory, whose delay is in the rate
            return Step(profile, self.ranks, conditions.rate, processors)
        delay, loss, tcp = conditions.delay, conditions.loss or 0.0, advice.tcp if advice else own
        return Step(profile, self.ranks, conditions.rate, processors, delay, loss, tcp, own)

    def head(self, step: Step) -> Iterator[str]:
        """The network in words, for the head of the table."""
        yield f"link: {step.rate * 8 / 1e6:.0f} Mbit/s in each direction of a rank ({self.source})"
        if self.probe is not None:
            yield from (f"measured: {line}" for line in _pair_lines(self.probe))
        if step.delay or step.loss:
            yield f"delay: {step.delay * 1e3:.1f} ms from one rank to another; loss: {step.loss:.2%} of the packets"
            yield f"TCP: qccl: {_tcp(step.tcp, step.own_rate)}; gloo: {_tcp(step.gloo, step.gloo_rate)}"

    def to_json(self) -> dict[str, Any]:
        """For the results file: the network, and the advice."""
        pairs = [asdict(pair) for pair in self.probe.pairs] if self.probe else []
        return {"network": asdict(self.conditions) | {"pairs": pairs}, "advice": self.advice and asdict(self.advice)}


def _tcp(tcp: Tcp, rate: float) -> str:
    """Connections, and the rate that they get."""
    many = f"{tcp.connections} connection{'s' if tcp.connections > 1 else ''}"
    return f"{many} for each pair of ranks, with {tcp.congestion}, {rate * 8e-6:.4g} Mbit/s"


def parse_delay(text: str) -> float:
    """Seconds from one rank to another. Raises ValueError."""
    return Path(delay=parse_seconds(text)).delay


def parse_small_loss(text: str) -> float:
    """The share of the packets that "0.1%" are, as far as there are figures for TCP. Raises ValueError."""
    loss = parse_loss(text)
    if loss > MAX_LOSS:
        raise ValueError(
            f"{text!r} is more than is known of TCP; give a loss from 0% to {MAX_LOSS:.0%}, and repair a network that "
            f"loses more"
        )
    return loss


def given_network(
    link: str, delay: float | None, loss: float | None, tcp: str | None, ranks: int, rank: int
) -> TrainingNetwork:
    """The network of the options; ``tcp`` is the machines' congestion control, None: this machine's.

    Raises UsageError for a QCCL_WAN_CONGESTION that this machine does not permit.
    """
    try:
        permits_bbr = (tcp or wan.congestion_control()) == BBR
    except ArgumentError as error:
        raise click.UsageError(str(error)) from error
    default = tcp or congestion_control()
    rate, has_token = parse_link(link).rate, _has_token()
    conditions = Conditions(rate, delay or 0.0, loss or 0.0, default, permits_bbr, has_token=has_token)
    return TrainingNetwork(conditions, ranks, rank, "--link", delay is not None or loss is not None)


def _has_token() -> bool:
    return any(os.environ.get(name) for name in ("QCCL_TOKEN", "QCCL_TOKEN_FILE"))


def measured_network(elements: int) -> TrainingNetwork:
    """Collective: measure the network between the ranks of the launcher, for gradients of so many elements."""
    try:
        with qccl.init("host") as comm:
            machines = _machines(comm)
            found = probe(comm, BBR if machines.permits_bbr else "", lambda what: _show(comm, what))
            delay = max(0.0, found.round_trip / 2 - LATENCY)
            loss = 0.0 if machines.is_one_machine else found.loss  # shared memory loses nothing
            conditions = replace(machines, rate=found.rate, delay=delay, loss=loss)
            rate, source = _rate(comm, conditions, elements)
            return TrainingNetwork(replace(conditions, rate=rate), comm.size, comm.rank, source, True, found)
    except QcclError as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error


def _machines(comm: Communicator) -> Conditions:
    """Collective: what follows from the machines of the ranks, without a rate."""
    own = [congestion_control(), wan.congestion_control() == BBR, _has_token()]
    defaults, permits, tokens = zip(*map(json.loads, comm.allgather(json.dumps(own).encode())), strict=True)
    default = next((each for each in defaults if each != BBR), BBR)
    is_one_machine = len(set(comm.nodes)) == 1
    return Conditions(0.0, 0.0, None, default, all(permits), is_one_machine, has_token=any(tokens))


def _show(comm: Communicator, what: str) -> None:
    if comm.rank == 0:
        click.echo(f"qccl-bench: measuring {what}", err=True)


def _rate(comm: Communicator, conditions: Conditions, elements: int) -> tuple[float, str]:
    """Collective: bytes per second of a rank's link, and how they were measured.

    A plain all-reduce uses what the transport has, such as shared memory or RDMA. Between sites it would measure the
    delay and the losses, too.
    """
    bulk = "measured: transfers over TCP along a ring of these ranks"
    if conditions.is_far:
        is_limited = conditions.loss and not conditions.permits_bbr
        return conditions.rate, f"{bulk}{', which losses slow down' if is_limited else ''}"
    _show(comm, "a plain all-reduce")
    rate, source = _allreduce_rate(comm, elements), "measured: a plain all-reduce among these ranks"
    return (rate, source) if conditions.is_one_machine or rate >= conditions.rate else (conditions.rate, bulk)


def _allreduce_rate(comm: Communicator, elements: int) -> float:
    """Collective: bytes per second that a rank sends in an all-reduce without a codec."""
    x = np.zeros(min(elements, _CALL_NBYTES // FLOAT32.itemsize), np.float32)
    times = []
    for _ in range(_CALLS):
        comm.barrier()
        begin = time.perf_counter()
        comm.quantized_allreduce(x, codec=FP32, algorithm="two_round")
        times.append(time.perf_counter() - begin)
    mine = statistics.median(times[1:])
    slowest = max(float(each) for each in comm.allgather(repr(mine).encode()))
    return sent_nbytes(x.nbytes, comm.size) / slowest


def _pair_lines(found: Probe) -> Iterator[str]:
    """The pairs of ranks in words, those with the longest round trips first."""
    pairs = sorted(found.pairs, key=lambda pair: pair.round_trip or 0.0, reverse=True)
    for pair in pairs[:_SHOWN_PAIRS]:
        parts = [] if pair.round_trip is None else [f"{pair.round_trip * 1e3:.3g} ms there and back"]
        parts += [] if pair.rate is None else [f"{pair.rate * 8e-6:.0f} Mbit/s"]
        parts += [f"{pair.lost} of {pair.packets} packets lost"] if pair.packets else []
        yield f"rank {pair.ranks[0]} to {pair.ranks[1]}: {', '.join(parts)}"
    if len(pairs) > _SHOWN_PAIRS:
        yield f"and {len(pairs) - _SHOWN_PAIRS} more pairs"
