"""Measures what compression gains behind slow links: ``python bench/links.py`` (takes minutes; needs root).

One row per link, number of ranks, codec and transport: the time of a call, the time that its bytes need at the link's
rate, the time of MPI's own all-reduce in the same run, and the error. bench/host.py has plain transfers. The
transports of a link take turns, in ``--rounds`` runs each, of which the table has the median. "shared memory" has no
link; compression loses there. ``--write docs/results-collectives.md`` replaces that page's table of these links and
numbers of ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import click
from runs import allreduce, document_table, machine, print_table, rewrite_table

#: the most important columns come first, because a phone shows only the first ones
HEAD = (
    *("link", "ranks", "codec", "over", "speed-up (out of place, in place)", "ms (out of place, in place)"),
    *("MPI ms (out of place, in place)", "floor ms", "floor / time", "spread"),
    "relative L2 error",
)


@click.command()
@click.option("--links", default="100mbit,1gbit,10gbit,none", show_default=True, help='"none" is shared memory.')
@click.option("--ranks", default="2,4", show_default=True)
@click.option("--transports", default="ucx,mpi", show_default=True)
@click.option("--rounds", default=1, show_default=True, help="Runs of each transport.")
@click.option("--codec", default="minmax8,minmax4", show_default=True)
@click.option(
    "--write",
    type=click.Path(exists=True, dir_okay=False),
    help="Replace the table of these links and ranks in this page.",
)
def main(links: str, ranks: str, transports: str, rounds: int, codec: str, write: str | None) -> None:
    """Print the table."""
    before = machine()
    flags = ["-b", "16M", "-e", "16M", "--codec", codec, "--plain", "mpi"]
    rows = [
        row
        for link in links.split(",")
        for n in ranks.split(",")
        for row in _rows(link, n, transports.split(","), rounds, flags)
    ]
    print_table(HEAD, rows)
    if write is not None:
        command = f"python bench/links.py --links {links} --ranks {ranks}"
        rewrite_table(write, command, document_table(HEAD, rows, before))


def _rows(link: str, ranks: str, transports: list[str], rounds: int, flags: list[str]) -> Iterator[tuple[object, ...]]:
    limited = [] if link == "none" else ["--link", link]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}  # (codec, transport) -> results
    for _ in range(rounds):
        for transport in transports:
            for result in allreduce("--ranks", ranks, "--transport", transport, *limited, *flags)["results"]:
                found.setdefault((result["codec"], transport), []).append(result)
    order = [codec for codec, _ in found]
    for (codec, transport), results in sorted(found.items(), key=lambda item: order.index(item[0][0])):
        median = sorted(results, key=lambda result: result["out_of_place"]["time"])[len(results) // 2]
        yield ("shared memory" if link == "none" else link, ranks, codec, transport, *_cells(median))


def _cells(result: dict[str, Any]) -> Iterator[str]:
    side, in_place = result["out_of_place"], result["in_place"]
    share = side.get("line_share")
    rounds = [each[name] for each in (side, in_place) for name in ("time_rounds", "plain_time_rounds")]
    yield f"{side['speedup']:.2f}, {in_place['speedup']:.2f}"
    yield f"{side['time'] / 1e3:.1f}, {in_place['time'] / 1e3:.1f}"
    yield f"{side['plain_time'] / 1e3:.1f}, {in_place['plain_time'] / 1e3:.1f}"
    yield f"{result['floor'] / 1e3:.1f}" if "floor" in result else "no link"
    yield f"{share:.1%}" if share is not None else "not known" if "floor" in result else "no link"
    yield f"{max((max(each) - min(each)) / statistics.median(each) for each in rounds):.0%}"
    yield f"{side['relative_l2_error']:.1e}"


if __name__ == "__main__":
    main()
