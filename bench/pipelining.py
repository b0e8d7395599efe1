"""Measures the gain of pipelining: a call in chunks against one chunk. ``python bench/pipelining.py`` (as root)."""

from __future__ import annotations

import click
from runs import allreduce, print_table


@click.command()
@click.option("--link", default="1gbit", show_default=True)
@click.option("--ranks", default=4, show_default=True)
@click.option("--size", default="16M", show_default=True)
@click.option("--codec", default="minmax8", show_default=True)
@click.option("--iters", default=20, show_default=True)
def main(link: str, ranks: int, size: str, codec: str, iters: int) -> None:
    """Print the two times and their ratio."""
    flags = ["--link", link, "--ranks", str(ranks), "-b", size, "-e", size, "-n", str(iters), "--codec", codec]
    times = [
        allreduce(*flags, *chunk)["results"][0]["out_of_place"]["time"] / 1e3
        for chunk in ([], ["--chunk", str(1 << 30)])
    ]
    print_table(
        ("chunks", "ms", "ratio"),
        [("default", f"{times[0]:.1f}", "1"), ("one", f"{times[1]:.1f}", f"{times[1] / times[0]:.2f}")],
    )


if __name__ == "__main__":
    main()
