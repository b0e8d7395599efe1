"""What compression gains behind slow links, and where it loses: ``python bench/links.py`` (as root; minutes).

One line per link, number of ranks and codec: the time of a call, the least time its bytes take on the link, MPI's own
all-reduce of the same values in the same run, and the error. "shared memory" has no link: there compression loses.
"""

from __future__ import annotations

from collections.abc import Iterator

import click
from runs import allreduce, print_table

HEAD = ("link", "ranks", "codec", "ms", "floor ms", "of the line", "MPI ms", "speed-up", "relative L2 error")


@click.command()
@click.option("--links", default="100mbit,1gbit,10gbit,none", show_default=True, help='"none" is shared memory.')
@click.option("--ranks", default="2,4", show_default=True)
@click.option("--size", default="16M", show_default=True)
@click.option("--codec", default="minmax8,minmax4", show_default=True)
@click.option("--iters", default=20, show_default=True)
def main(links: str, ranks: str, size: str, codec: str, iters: int) -> None:
    """Print the table."""
    rows = (
        row
        for link in links.split(",")
        for n in ranks.split(",")
        for row in _rows(link, n, ["-b", size, "-e", size, "-n", str(iters), "--codec", codec])
    )
    print_table(HEAD, rows)


def _rows(link: str, ranks: str, flags: list[str]) -> Iterator[tuple[object, ...]]:
    limited = [] if link == "none" else ["--link", link]
    for result in allreduce("--ranks", ranks, *limited, *flags)["results"]:
        side = result["out_of_place"]
        share = side.get("line_share")
        yield (
            "shared memory" if link == "none" else link,
            ranks,
            result["codec"],
            f"{side['time'] / 1e3:.1f}",
            f"{result['floor'] / 1e3:.1f}" if "floor" in result else "",
            "" if share is None else f"{share:.1%}",
            f"{side['plain_time'] / 1e3:.1f}",
            f"{side['speedup']:.2f}",
            f"{side['relative_l2_error']:.1e}",
        )


if __name__ == "__main__":
    main()
