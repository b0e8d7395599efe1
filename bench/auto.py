"""Compares ``codec="auto"`` with the best fixed choice: ``python bench/auto.py`` (takes 20 minutes; needs root).

It times all-reduces of 1 KiB to 64 MiB on 2 and 4 ranks over UCX in the lab. The ways to call are each fixed codec and
algorithm, "auto" and "auto:minmax4"; they take turns in one run. The group's profile is measured first. Two of the
links were not used while the choice was developed. A way is timed up to the first size at which a call takes more than
half a second, and beyond 4 MiB only while it takes at most 2.5 times as long as the fastest.

``--save`` writes docs/results/auto-<date>.json after each group of ranks; ``--resume`` keeps what today's file has.
``--write docs/results-collectives.md`` replaces that page's table and draws docs/auto.png from all rows.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from matplotlib.figure import Figure
from runs import begun, measured_on, rewrite_table, run_ranks, save_figure, store, table, todays

from qccl.base.scalars import parse_seconds
from qccl.bench.lab.network import NetworkOptions
from qccl.bench.params import format_size

_ROOT = Path(__file__).parent.parent
_SCRIPT = str(Path(__file__).parent / "auto_rank.py")
#: links with their delays: used while the choice was developed, and not used
DEVELOPED, NEW = ("100mbit", "1gbit", "100mbit 25ms"), ("300mbit", "700mbit 2ms")
#: the codecs that each spelling of "auto" chooses from
AUTOS = {"auto": ("none", "minmax8"), "auto:minmax4": ("none", "minmax4")}
_CODECS = ("none", "minmax8", "minmax4")
COLUMNS = (
    "ranks",
    "link",
    "delay",
    "codec",
    "sizes",
    "beside the best: median",
    "largest",
    "at",
    "its choice",
    "beside plain",
)
#: "auto" counts as close to the best fixed choice if its time is longer by at most this share
CLOSE = 0.05


@click.command()
@click.option("--ranks", default="2,4", show_default=True)
@click.option("--networks", default=",".join(DEVELOPED + NEW), show_default=True)
@click.option("--resume", is_flag=True, help="Keep the rows of today's file.")
@click.option("--save", is_flag=True, help="Write the results file.")
@click.option("--write", help="A page whose table is to be replaced: docs/results-collectives.md.")
def main(**given: Any) -> None:
    """Measure, and print the table."""
    path = todays("auto")
    document = begun(path, resume=given["resume"])
    for ranks, network in itertools.product(map(int, given["ranks"].split(",")), given["networks"].split(",")):
        if not any((row["ranks"], row["network"]) == (ranks, network) for row in document["rows"]):
            document["rows"] += _timed(ranks, network)
            if given["save"]:
                store(path, document)
    text = report(document)
    print(text)
    if given["write"]:
        rewrite_table(given["write"], "python bench/auto.py", text)
        draw(document["rows"], _ROOT / "docs" / "auto.png")


def _timed(ranks: int, network: str) -> list[dict[str, Any]]:
    """Measure all sizes on a network, such as "100mbit 25ms", and return the rows."""
    link, _, delay = network.partition(" ")
    lab = NetworkOptions(link=link, delay=parse_seconds(delay) if delay else None).lab(ranks)
    task = {"sizes": [1 << power for power in range(10, 27, 2)], "codecs": _CODECS, "autos": list(AUTOS)}
    rows = run_ranks(_SCRIPT, ranks, task, "ucx", lab, plain=None)
    keys = ("size", "profiled", "rounds", "seconds", "chosen")
    return [{"ranks": ranks, "network": network} | {key: row[key] for key in keys} for row in rows]


# -- the report --------------------------------------------------------------------------------------------------------


def beside(row: dict[str, Any], auto: str) -> tuple[float, float, float | None]:
    """Three ratios of times: ``auto`` / best fixed choice, its own choice / best fixed choice, ``auto`` / best plain.

    "Its own choice" is the fixed codec and algorithm that ``auto`` took. The last ratio is None if no plain call was
    timed, because plain calls were much slower at a smaller size.
    """
    seconds = row["seconds"]
    fixed = {way: each for way, each in seconds.items() if way.split()[0] in AUTOS[auto] and " auto" not in way}
    best, own = min(fixed.values()), seconds[f"{auto} auto"]
    plain = [each for way, each in fixed.items() if way.startswith("none ")]
    return own / best, fixed.get(row["chosen"][auto], own) / best, own / min(plain) if plain else None


def report(document: dict[str, Any]) -> str:
    """The table of all networks, a verdict, and the machine."""
    rows = document["rows"]
    each = [beside(row, auto) for row in rows for auto in AUTOS]
    close = [sum(values[i] <= 1 + CLOSE for values in each) for i in range(2)]
    plain = [values[2] for values in each if values[2] is not None]
    verdict = (
        f"{close[0]} of {len(each)} cases took at most {CLOSE:.0%} longer than the best fixed choice. Two runs of the "
        f"same call differ, too: in {close[1]} cases the fixed choice that auto took was within {CLOSE:.0%} of the "
        f"best. {sum(value <= 1.03 for value in plain)} of the {len(plain)} cases with plain times took at most 3% "
        f"longer than the faster plain algorithm. Making a profile took {min(row['profiled'] for row in rows):.2f} to "
        f"{max(row['profiled'] for row in rows):.2f} s."
    )
    return "\n".join(table(COLUMNS, _lines(rows))) + f"\n\n{verdict}\n\n" + measured_on(document["machine"])


def _lines(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for (ranks, network), group in itertools.groupby(rows, lambda row: (row["ranks"], row["network"])):
        members, (link, _, delay) = list(group), network.partition(" ")
        for auto in AUTOS:
            found = [(beside(row, auto), row["size"]) for row in members]
            worst, size = max(found, key=lambda item: item[0][0])
            plain = [values[2] for values, _ in found if values[2] is not None]
            yield (
                *(str(ranks), f"{link}{'' if network in DEVELOPED else ' (new)'}", delay or "none", f"`{auto}`"),
                *(str(len(found)), _percent(statistics.median(values[0] for values, _ in found))),
                *(_percent(worst[0]), format_size(size), _percent(max(values[1] for values, _ in found))),
                _percent(max(plain)),
            )


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the times of "auto", plain calls and minmax8 over the best fixed choice, in a panel for each network."""
    groups = {key: list(group) for key, group in itertools.groupby(rows, lambda row: (row["network"], row["ranks"]))}
    networks, ranks = (list(dict.fromkeys(key[i] for key in groups)) for i in range(2))
    figure = Figure(figsize=(3.6 * len(ranks), 0.4 + 1.9 * len(networks)), layout="constrained")
    panels = figure.subplots(len(networks), len(ranks), sharex=True, sharey=True, squeeze=False)
    for (network, count), group in groups.items():
        axes = panels[networks.index(network)][ranks.index(count)]
        for label, colour, mark in (("auto", "#0072B2", "o"), ("plain", "black", "x"), ("minmax8", "#E69F00", "^")):
            points = [(row["size"], relative) for row in group if (relative := _relative(row, label)) is not None]
            axes.plot(*zip(*points, strict=True), color=colour, marker=mark, markersize=4, linewidth=1.2, label=label)
        axes.axhspan(1 / (1 + CLOSE), 1 + CLOSE, color="#0072B2", alpha=0.12)
        axes.set_title(f"{count} ranks, {network}{'' if network in DEVELOPED else ' (new)'}", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        sizes = [1 << power for power in range(10, 27, 4)]
        axes.set_xticks(sizes, [format_size(size) for size in sizes])
        axes.set_yticks([1, 2, 4], ["1", "2", "4"])
        axes.minorticks_off()
        axes.grid(True, alpha=0.3)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    for axes in panels[-1]:
        axes.set_xlabel("size of the array")
    figure.supylabel("time / time of the best fixed choice", fontsize=10)
    save_figure(figure, path)


def _relative(row: dict[str, Any], label: str) -> float | None:
    """The time of the faster algorithm with this label over the time of the best fixed choice of "auto"."""
    prefix = {"auto": "auto auto", "plain": "none "}.get(label, f"{label} ")
    own = [each for way, each in row["seconds"].items() if way.startswith(prefix)]
    return min(own) / (row["seconds"]["auto auto"] / beside(row, "auto")[0]) if own else None


if __name__ == "__main__":
    main()
