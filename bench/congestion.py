"""Compares TCP's congestion controls by rate of loss: ``python bench/congestion.py`` (takes 20 minutes; needs root).

Two ranks in the lab make all-reduces of 4 MiB of float32 with ``minmax8`` behind links of 100 Mbit/s with a delay of
25 ms in each direction, for each loss, TCP congestion control and transport. For comparison, several plain TCP sockets
carry as many bytes, in two rounds like those of the all-reduce. With ``--in-flight 20`` each measured time is that of
20 concurrent calls. Each of the ``--rounds`` runs loses other packets; the table has the median of all calls, and the
medians of the fastest and the slowest run.

``--save`` writes docs/results/congestion-<date>.json after each row; ``--write docs/howto/starting.md`` replaces that
page's table.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from runs import document_table, machine, print_table, rewrite_table, run_ranks, store, todays

from qccl import codecs
from qccl.base.scalars import parse_seconds
from qccl.bench.lab.network import NetworkOptions
from qccl.bench.params import parse_link, parse_loss, parse_size

_SCRIPT = str(Path(__file__).parent / "congestion_rank.py")
#: a column beside the transports: as many plain sockets as --connections
SOCKETS = "sockets"


@click.command()
@click.option("--ranks", default=2, show_default=True, help="Other numbers need --connections 0.")
@click.option("--transports", default="ucx,wan", show_default=True)
@click.option("--tcp", "algorithms", default="cubic,bbr", show_default=True, help="Congestion controls.")
@click.option("--connections", default=8, show_default=True, help="Plain sockets; 0: none.")
@click.option("--losses", default="0%,0.1%,1%", show_default=True)
@click.option("--link", default="100mbit", show_default=True)
@click.option("--delay", default="25ms", show_default=True)
@click.option("--size", default="4M", show_default=True)
@click.option("--in-flight", default=1, show_default=True, help="Calls that are started together.")
@click.option("--codec", default="minmax8", show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Runs of each case; each loses other packets.")
@click.option("--calls", default=20, show_default=True, help="Calls in a run; fewer if they would take more than 15 s.")
@click.option("--save", is_flag=True, help="Write docs/results/congestion-<date>.json.")
@click.option("--write", type=click.Path(exists=True, dir_okay=False), help="Replace the table of this page.")
def main(**given: Any) -> None:
    """Print the table."""
    if given["connections"] and given["ranks"] != 2:
        raise click.UsageError("the plain sockets are between two ranks; add --connections 0")
    of, rows = machine() | {"tcp": ""}, []  # the lab sets the congestion control
    transports = [*given["transports"].split(","), *([SOCKETS] if given["connections"] else [])]
    columns = [(transport, tcp) for transport in transports for tcp in given["algorithms"].split(",")]
    for loss in given["losses"].split(","):
        rows += [_measure(given, loss, transport, tcp) for transport, tcp in columns]
        if given["save"]:
            store(todays("congestion"), {"machine": of, "rows": rows})
    head = ["packets lost", *(_name(transport, tcp, given["connections"]) for transport, tcp in columns)]
    body = list(_body(rows, len(columns)))
    print_table(head, body)
    print(
        f"\nThe bytes alone need {_floor(given) * 1e3:.0f} ms, two delays {2e3 * parse_seconds(given['delay']):g} ms."
    )
    if given["write"]:
        rewrite_table(given["write"], "python bench/congestion.py", document_table(head, body, of))


def _measure(given: dict[str, Any], loss: str, transport: str, tcp: str) -> dict[str, Any]:
    """Time the calls of all runs; each run loses other packets."""
    task = {key: given[key] for key in ("codec", "calls", "connections", "in_flight")}
    task |= {"transport": transport, "count": parse_size(given["size"]) // 4, "nbytes": _nbytes(given), "tcp": tcp}
    network = {"link": given["link"], "delay": parse_seconds(given["delay"]), "loss": parse_loss(loss), "tcp": tcp}
    runs, ranks = [], given["ranks"]
    for _ in range(given["rounds"]):
        lab = NetworkOptions(**network).lab(ranks)
        (row,) = run_ranks(_SCRIPT, ranks, task, "ucx" if transport == SOCKETS else transport, lab, plain=None)
        runs.append(row["seconds"])
    medians = [statistics.median(each) for each in runs]
    median = statistics.median([seconds for each in runs for seconds in each])
    print(
        f"{transport} {tcp} {loss}: {median * 1e3:.0f} ms", [f"{each * 1e3:.0f}" for each in medians], file=sys.stderr
    )
    return task | network | {"ranks": ranks, "seconds": runs, "median": median, "medians": medians}


def _nbytes(given: dict[str, Any]) -> int:
    """The bytes that a rank sends in one measured time: in each of two rounds, the codes of all shards but its own."""
    encoded = codecs.get(given["codec"]).encoded_nbytes(parse_size(given["size"]) // 4, "float32")
    return given["in_flight"] * 2 * encoded * (given["ranks"] - 1) // given["ranks"]


def _floor(given: dict[str, Any]) -> float:
    """The seconds that the bytes of one measured time take at the link's rate."""
    return _nbytes(given) / parse_link(given["link"]).rate


def _name(transport: str, tcp: str, connections: int) -> str:
    return f"{connections} plain sockets, `{tcp}`" if transport == SOCKETS else f"`{transport}`, `{tcp}`"


def _body(rows: Sequence[dict[str, Any]], columns: int) -> Iterator[list[str]]:
    for begin in range(0, len(rows), columns):
        line = rows[begin : begin + columns]
        yield [f"{line[0]['loss'] * 100:g}%" if line[0]["loss"] else "none", *map(_cell, line)]


def _cell(row: dict[str, Any]) -> str:
    """The median in milliseconds, and the medians of the fastest and the slowest run."""
    median, least, most = (f"{each * 1e3:.0f}" for each in (row["median"], min(row["medians"]), max(row["medians"])))
    return median if least == most else f"{median} ({least} to {most})"


if __name__ == "__main__":
    main()
