"""The flags of the lab's network: ``--link``, ``--delay``, ``--loss`` and so on; what the commands say of it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click

from qccl.bench.lab import Lab
from qccl.bench.network_options import NetworkOptions
from qccl.bench.params import option
from qccl.bench.sites import sites_file
from qccl.bench.sizes import parse_link, parse_loss
from qccl.errors import ArgumentError
from qccl.scalars import parse_seconds

__all__ = ["NETWORK_FLAGS", "lab_of", "network_flags", "network_of", "show_network", "show_remark"]

_LINK_HELP = "Put each rank behind a link of this rate, e.g. 100mbit or 1gbit; needs root."
_UP_HELP = "Rate at which each rank sends, where it is not that of --link."
_DOWN_HELP = "Rate at which each rank receives, where it is not that of --link."
_DELAY_HELP = "Each packet is under way this long, in each direction, e.g. 25ms."
_JITTER_HELP = "The delay becomes up to this much shorter or longer, e.g. 5ms; packets stay in order."
_LOSS_HELP = "Share of the packets that are lost at random, e.g. 0.1%."
_QUEUE_HELP = "Longest time a packet waits in front of a link; one that would wait longer is dropped [200ms]."
_TCP_HELP = "TCP's congestion control in the lab, e.g. cubic or bbr [the machine's]."
_SITES_HELP = "File (TOML) with sites, their ranks and links, and the delay and loss of each pair of them."


def _algorithm(text: str) -> str:
    """The name of a congestion control; which ones there are, the kernel says later."""
    if not re.fullmatch(r"[a-z0-9_-]{1,15}", text):
        raise ValueError(f"{text!r} is no congestion control's name; give one as the kernel spells it, such as bbr")
    return text


def _rate(text: str) -> str:
    return parse_link(text).name


#: in the order of the help
NETWORK_FLAGS: tuple[Callable[[Any], Any], ...] = (
    option("--link", _rate, "RATE", _LINK_HELP),
    option("--up", _rate, "RATE", _UP_HELP),
    option("--down", _rate, "RATE", _DOWN_HELP),
    option("--delay", parse_seconds, "TIME", _DELAY_HELP),
    option("--jitter", parse_seconds, "TIME", _JITTER_HELP),
    option("--loss", parse_loss, "PERCENT", _LOSS_HELP),
    option("--queue", parse_seconds, "TIME", _QUEUE_HELP),
    option("--sites", sites_file, "FILE", _SITES_HELP),
    option("--tcp", _algorithm, "NAME", _TCP_HELP),
)


def network_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let a click command accept the flags."""
    for decorate in reversed(NETWORK_FLAGS):
        command = decorate(command)
    return command


def network_of(given: dict[str, Any]) -> NetworkOptions:
    """Take the flags' values out of a command's parameters. Raises UsageError for networks that cannot be."""
    names = [field.name for field in fields(NetworkOptions) if field.name in given]
    try:
        return NetworkOptions(**{name: given.pop(name) for name in names})
    except ArgumentError as error:
        raise click.UsageError(str(error)) from error


def lab_of(
    options: NetworkOptions, ranks: int, nodes: int | None = None, *, link_per_rank: bool = False
) -> contextlib.AbstractContextManager[Lab | None]:
    """The lab that the flags ask for, or a context without one. Raises UsageError."""
    try:
        return options.lab(ranks, nodes, link_per_rank=link_per_rank) or contextlib.nullcontext()
    except ArgumentError as error:
        raise click.UsageError(str(error)) from error


def show_network(lab: Lab | None) -> None:
    """Print on standard error what the lab measured of its network."""
    if lab is not None and lab.checked is not None:
        click.echo(f"qccl-bench: the lab's network, measured: {lab.checked}", err=True)


def show_remark(lab: Lab | None) -> None:
    """Print on standard error what went wrong in the lab's network, if anything did."""
    if lab is not None and lab.remark:
        click.echo(f"qccl-bench: {lab.remark}", err=True)
