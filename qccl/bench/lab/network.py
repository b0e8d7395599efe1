"""The network that ``--link``, ``--delay``, ``--loss`` and ``--tcp`` ask for: the same link for every rank or node."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import click

from qccl.base.errors import ArgumentError
from qccl.base.scalars import parse_seconds
from qccl.bench.lab.lab import Lab
from qccl.bench.params import Link, option, parse_link, parse_loss

__all__ = ["NETWORK_FLAGS", "NetworkOptions", "network_flags", "network_of", "parse_delay"]

_MAX_SECONDS = 10.0


@dataclass(frozen=True)
class NetworkOptions:
    """The network that a lab imitates. Raises ArgumentError for a delay, a loss or a ``tcp`` without a link.

    Attributes:
        link: rate at which each rank sends, such as "100mbit"; None: no lab.
        delay: each packet's delay in seconds.
        loss: the share of the packets that are lost, at random.
        tcp: TCP's congestion control; None: the machine's.
    """

    link: str | None = None
    delay: float | None = None
    loss: float | None = None
    tcp: str | None = None

    def __post_init__(self) -> None:
        given = [f"--{name}" for name, value in asdict(self).items() if value is not None]
        if self.link is None and given:
            raise ArgumentError(f"{given[0]} is for the lab's links, which need a rate, too; give --link")

    @property
    def flag(self) -> str:
        """The flag that asks for the lab, with its value; an empty text without a lab."""
        return f"--link {self.link}" if self.link else ""

    @property
    def is_far(self) -> bool:
        """Whether packets are delayed or lost."""
        return bool(self.delay or self.loss)

    @property
    def rate(self) -> Link | None:
        """The link's rate; None without a lab."""
        return parse_link(self.link) if self.link else None

    def lab(self, ranks: int, nodes: int | None = None, *, link_per_rank: bool = False) -> Lab | None:
        """Make the lab for ``ranks`` ranks on ``nodes`` nodes, not yet entered; None without a network."""
        if self.rate is None:
            return None
        far = {"delay": self.delay or 0.0, "loss": self.loss or 0.0}
        return Lab(ranks, self.rate, nodes, link_per_rank=link_per_rank, tcp=self.tcp, **far)

    def describe(self, each: str) -> str:
        """Describe the network: "100mbit per rank, delay 25 ms, loss 0.1%" if ``each`` is "rank"."""
        parts = [f"{self.link} per {each}"]
        parts += [f"delay {self.delay * 1e3:g} ms"] if self.delay else []
        parts += [f"loss {self.loss * 100:g}%"] if self.loss else []
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The entries of a results file beside the rate; empty without delay and loss."""
        return {"delay": self.delay or 0.0, "loss": self.loss or 0.0} if self.is_far else {}


def parse_delay(text: str) -> float:
    """Parse a delay such as "25ms" to seconds. Raises ValueError."""
    delay = parse_seconds(text)
    if delay > _MAX_SECONDS:
        raise ValueError(f"a delay of {delay:g} s is not possible; give 0 to {_MAX_SECONDS:g} s")
    return delay


def _parse_tcp(text: str) -> str:
    """Check the form of a congestion control's name; the kernel checks later that it exists. Raises ValueError."""
    if not re.fullmatch(r"[a-z0-9_-]{1,15}", text):
        raise ValueError(f"{text!r} is not a congestion control's name; give the kernel's spelling, such as bbr")
    return text


_LINK_HELP = "Put each rank behind a link of this rate, e.g. 100mbit or 1gbit; needs root."
_DELAY_HELP = "Each packet's delay, in each direction, e.g. 25ms."
_LOSS_HELP = "Share of the packets that are lost at random, e.g. 0.1%."
_TCP_HELP = "TCP's congestion control in the lab, e.g. cubic or bbr [the machine's]."

#: the flags in the order of the help
NETWORK_FLAGS: tuple[Callable[[Any], Any], ...] = (
    option("--link", lambda text: parse_link(text).name, "RATE", _LINK_HELP),
    option("--delay", parse_delay, "TIME", _DELAY_HELP),
    option("--loss", parse_loss, "PERCENT", _LOSS_HELP),
    option("--tcp", _parse_tcp, "NAME", _TCP_HELP),
)


def network_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let a click command accept the flags."""
    for decorate in reversed(NETWORK_FLAGS):
        command = decorate(command)
    return command


def network_of(given: dict[str, Any]) -> NetworkOptions:
    """Take the flags' values out of a command's parameters. Raises UsageError for impossible networks."""
    try:
        return NetworkOptions(**{field.name: given.pop(field.name) for field in fields(NetworkOptions)})
    except ArgumentError as error:
        raise click.UsageError(str(error)) from error
