"""``qccl-bench top``: what the ranks of a running job do, from their endpoints (metrics.py)."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import click

from qccl.bench.scrape import Rank, Sample, scrape
from qccl.statistics import table, with_unit
from qccl.transports.sockets import Place, host_and_port, place_text
from qccl.transports.strangers import printable

__all__ = ["top"]

_HOST = "127.0.0.1"
_MOST_PORTS = 4096
_HEADER = ("endpoint", "group", "rank", "codec", "calls/s", "raw B/s", "sent B/s", "ratio", "computing", "waiting")
_LEFT = 4
#: to the first line, and to the end of a line and of the screen what was there is deleted
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


@click.command(short_help="Show what the ranks of a running job do.")
@click.argument("places", nargs=-1, metavar="[HOST:PORT]...")
@click.option("--ranks", type=click.IntRange(1, _MOST_PORTS), help="Show this machine's ranks: so many ports.")
@click.option("--port", type=click.IntRange(1, 65535), help="The first of these ports, as in QCCL_METRICS.")
@click.option("--interval", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True, help="Seconds of a look.")
def top(places: Sequence[str], ranks: int | None, port: int | None, interval: float) -> None:
    """Show what the ranks of a running job do: calls and bytes per second, and how long they wait.

    Each rank of the job must have an endpoint: set QCCL_METRICS to a port before it starts. The rank's number on its
    machine is added to the port. Give the endpoints as HOST:PORT, or with --ranks and --port those of this machine.

    In a terminal the table is renewed until Ctrl-C; otherwise there is one, of one interval.
    """
    found = _places(places, ranks, port)
    before = scrape(found)
    if not sys.stdout.isatty():
        time.sleep(interval)
        click.echo("\n".join(lines(found, before, scrape(found))))
        return
    click.clear()
    with _interrupted_waits() as was_interrupted:
        while not was_interrupted(interval):
            now = scrape(found)
            _draw(lines(found, before, now))
            before = now


@contextlib.contextmanager
def _interrupted_waits() -> Iterator[Callable[[float], bool]]:
    """A function that waits for so many seconds, or until Ctrl-C, and says whether it was that.

    Ctrl-C ends a wait, and nothing else: an exception between any two statements may be lost in a destructor.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def tell(*_: object) -> None:
        with contextlib.suppress(BlockingIOError):
            theirs.send(b"\0")

    before = signal.signal(signal.SIGINT, tell)
    try:
        yield lambda seconds: bool(select.select([ours], [], [], seconds)[0])
    finally:
        signal.signal(signal.SIGINT, before)
        ours.close()
        theirs.close()


def lines(places: Sequence[Place], before: Sequence[Sample], now: Sequence[Sample]) -> Iterator[str]:
    """The table of what happened between two samples of each endpoint, and those that do not answer."""
    rows: list[tuple[str, ...]] = [_HEADER]
    silent = []
    for place, first, last in zip(places, before, now, strict=True):
        if last.error:
            silent.append(f"{place_text(place)} does not answer: {printable(last.error)}")
        rows += [_row(place, rank, first, last) for rank in last.sizes]
    yield from table(rows, left=_LEFT)
    yield from silent


def _row(place: Place, rank: Rank, first: Sample, last: Sample) -> tuple[str, ...]:
    increases = _increases(rank, first, last)
    seconds = last.time - first.time

    def rate(name: str) -> float:
        return sum(of_codec[name] for of_codec in increases.values()) / seconds if seconds > 0 else 0.0

    raw, sent = rate("qccl_raw_bytes_total"), rate("qccl_sent_bytes_total")
    is_timed = any("qccl_call_seconds_total" in of_codec for of_codec in increases.values())
    shares = rate("qccl_computing_seconds_total"), rate("qccl_waiting_seconds_total")
    group, number = rank
    return (
        place_text(place),
        printable(group),
        f"{printable(number)} of {last.sizes[rank]}",
        printable(_codecs(increases)),
        f"{rate('qccl_calls_total'):.1f}",
        with_unit(raw),
        with_unit(sent),
        f"{raw / sent:.2f}" if sent else "-",
        *(f"{100 * share:.0f}%" if is_timed else "-" for share in shares),
    )


def _increases(rank: Rank, first: Sample, last: Sample) -> dict[str, Counter[str]]:
    """By codec and counter, what was added since ``first``.

    Nothing where the endpoint did not answer then, because the job may have run for long before, and where another job
    has taken its place.
    """
    old, new = first.counters.get(rank, {}), last.counters.get(rank, {})

    def increase(codec: str, name: str) -> float:
        before = old.get(codec, {}).get(name, 0.0)
        return max(new[codec][name] - before, 0.0) if rank in first.sizes else 0.0

    return {codec: Counter({name: increase(codec, name) for name in names}) for codec, names in new.items()}


def _codecs(increases: dict[str, Counter[str]]) -> str:
    """The codec of most raw bytes, and how many others were used."""
    used = [codec for codec, of_codec in increases.items() if of_codec["qccl_calls_total"]] or [*increases][:1]
    if not used:
        return "-"
    most = max(used, key=lambda codec: increases[codec]["qccl_raw_bytes_total"])
    return most + (f" +{len(used) - 1}" if len(used) > 1 else "")


def _draw(drawn: Iterator[str]) -> None:
    click.echo(_HOME + "".join(f"{line}{_END_OF_LINE}\n" for line in drawn) + _END_OF_SCREEN, nl=False)


def _places(texts: Sequence[str], ranks: int | None, port: int | None) -> list[Place]:
    if bool(texts) == (ranks is not None) or (ranks is None) != (port is None):
        raise click.UsageError("give the endpoints as HOST:PORT, or both --ranks and --port")
    found = []
    for text in texts:
        if (place := host_and_port(text)) is None:
            raise click.UsageError(f"{text!r} is no endpoint; give a host and its port, such as 127.0.0.1:9400")
        found.append(place)
    if ranks is not None and port is not None:
        if port + ranks - 1 > 65535:
            raise click.UsageError(f"{ranks} ranks from port {port} on would need ports above 65535")
        found = [(_HOST, port + rank) for rank in range(ranks)]
    return found
