"""Compares calls computed by ``qccl-bench simulate`` with measured ones: ``bench/simulate_accuracy.py`` (needs root).

It times all-reduces on 2, 3, 4 and 8 ranks over UCX, each rank behind a link of its own, some with a delay. The ranks
encode and decode on the processors of this machine, which several ranks may share. The simulator's constants are fitted
to the calls on 2 ranks alone, and then it computes all others. In some calls the 2 ranks share one processor: this
separates the processor's time from the time that ranks wait. With ``--resume`` it measures only what today's file
lacks.

``--save`` writes docs/results/simulate-<date>.json after each group of ranks, with the constants. ``--write
docs/results-collectives.md`` replaces that page's table.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import click
from runs import allreduce, begun, measured_on, rewrite_table, store, table, todays

from qccl.base import dtypes
from qccl.base.scalars import parse_seconds
from qccl.bench.doctor.simulated import Constants, Machines, Processor, simulated
from qccl.bench.doctor.speed import measure_speed
from qccl.bench.params import codec_of, format_size, parse_link
from qccl.bench.sweep.calls import Case

#: links with their delays
NETWORKS = "100mbit,1gbit,100mbit 25ms,1gbit 5ms"
CODECS = "minmax8,minmax4,none"
#: the number of ranks whose calls the constants are fitted to
FITTED_RANKS = 2
#: flags for the sizes and the number of calls: several in a round, because ranks begin it at different times
_CALLS = ("-b", "2K", "-e", "1M", "-f", "8", "-n", "40", "-w", "2", "-c", "0")
#: elements of an encoding that is timed
_TIMED = 256 << 10
#: factors by which the fit changes a constant, the coarse ones first
_FACTORS = (2.0, 1.4, 1.2, 1.1, 1.05)
#: the largest factor between a fitted constant and its default
_FARTHEST = 10.0
_FITTED = ("latency", "message", "byte", "operation")
COLUMNS = ("ranks", "processors", "link", "delay", "calls", "median error", "largest error", "of", "ms", "computed")


@click.command()
@click.option("--ranks", default="2,3,4,8", show_default=True)
@click.option("--networks", default=NETWORKS, show_default=True)
@click.option("--codecs", default=CODECS, show_default=True)
@click.option("--resume", is_flag=True, help="Keep the results of today's file.")
@click.option("--save", is_flag=True, help="Write the results file.")
@click.option("--write", help="A page whose table is to be replaced: docs/results-collectives.md.")
def main(**given: Any) -> None:
    """Measure, compute, and print both."""
    path = todays("simulate")
    document = begun(path, resume=given["resume"])
    for _ in _measured(document, given):
        if given["save"]:
            store(path, document)
    rows = computed(document)
    for line in table(("ranks", "network", "size", "codec", "ms", "computed", "error"), map(_shown, rows)):
        print(line)
    text = "\n".join(table(COLUMNS, summary(rows))) + f"\n\n{verdict(rows)}\n\n" + measured_on(document["machine"])
    print(f"\n{text}")
    if given["save"]:
        store(path, document)
    if given["write"]:
        rewrite_table(given["write"], "python bench/simulate_accuracy.py", text)


def _measured(document: dict[str, Any], given: dict[str, Any]) -> Iterator[None]:
    """Add to the document what it lacks: speeds of codecs, and times of calls."""
    codecs = given["codecs"].split(",")
    speeds = document.setdefault("speeds", {})
    for codec in codecs:
        if codec not in speeds and codec != "none":
            found = measure_speed(codec_of(codec), _TIMED)
            speeds[codec] = [found.encode, found.decode]
    all_of_them = len(os.sched_getaffinity(0))
    for ranks, network in itertools.product(map(int, given["ranks"].split(",")), given["networks"].split(",")):
        shares = ranks == FITTED_RANKS and " " not in network and all_of_them > 1  # the lab's delays need a processor
        for cores in (all_of_them, 1) if shares else (all_of_them,):
            if not any(_place(row) == (ranks, network, cores) for row in document["rows"]):
                document["rows"] += _timed(ranks, network, codecs, cores)
                yield


def _place(row: dict[str, Any]) -> tuple[int, str, int]:
    return row["ranks"], row["network"], row["cores"]


def _timed(ranks: int, network: str, codecs: list[str], cores: int) -> list[dict[str, Any]]:
    """The times of all sizes and codecs by ``qccl-bench allreduce``: the median of all rounds, in and out of place."""
    link, _, delay = network.partition(" ")
    flags = ["--ranks", str(ranks), "--transport", "ucx", "--link", link]
    flags += ["--delay", delay] if delay else []
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(own)[:cores])
    try:
        document = allreduce(*flags, *_CALLS, "--codec", ",".join(codecs), "--plain", "none")
    finally:
        os.sched_setaffinity(0, own)
    return [
        {"ranks": ranks, "network": network, "cores": cores, "codec": each["codec"], "size": each["size"]}
        | {"seconds": statistics.median(each["out_of_place"]["time_rounds"] + each["in_place"]["time_rounds"]) / 1e6}
        for each in document["results"]
    ]


# -- what the simulator computes ---------------------------------------------------------------------------------------


def computed(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with what the simulator computes, and its relative error; the document gets the constants."""
    speeds = document["speeds"]
    fitted = [row for row in document["rows"] if row["ranks"] == FITTED_RANKS]

    def seconds(row: dict[str, Any], constants: Constants) -> float:
        processor = Processor(constants, {codec: (encode, decode) for codec, (encode, decode) in speeds.items()})
        return call_seconds(row, processor)

    def error(constants: Constants) -> float:
        return statistics.mean(abs(math.log(seconds(row, constants) / row["seconds"])) for row in fitted)

    constants = fit(Constants(), error)
    document["constants"] = asdict(constants)
    found = [row | {"computed": seconds(row, constants)} for row in document["rows"]]
    return [row | {"error": row["computed"] / row["seconds"] - 1} for row in found]


def call_seconds(row: dict[str, Any], processor: Processor) -> float:
    """The time of a row's call as the simulator computes it, on ranks that share the row's processors.

    The lab's limiter lets a burst pass an idle link at once. But the measured calls follow each other, so each takes at
    least the time of its bytes at the link's rate.
    """
    link, _, delay = row["network"].partition(" ")
    rate = parse_link(link)
    share, seconds = min(1.0, row["cores"] / row["ranks"]), parse_seconds(delay) if delay else 0.0
    machines = Machines(row["ranks"], rate, intra=5e9, delay=seconds, processors=share)
    case = Case(row["size"] // 4, dtypes.FLOAT32, "sum")
    call = simulated(case, codec_of(row["codec"]), "auto", None, machines, processor)
    return max(call.timeline.total, call.wire_nbytes * processor.constants.headers / rate.rate)


def fit(constants: Constants, error: Callable[[Constants], float]) -> Constants:
    """Change one constant at a time by the factors, until no change makes the error smaller."""
    least, first = error(constants), constants
    for factor in _FACTORS:
        is_better = True
        while is_better:
            is_better = False
            for name, each in itertools.product(_FITTED, (factor, 1 / factor)):
                value = getattr(constants, name) * each
                usual = getattr(first, name)
                if not usual / _FARTHEST <= value <= usual * _FARTHEST:
                    continue
                tried = replace(constants, **{name: value})
                if (found := error(tried)) < least * (1 - 1e-3):
                    constants, least, is_better = tried, found, True
    return constants


def summary(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """The errors of each number of ranks and network, and the call with the largest one."""
    for (ranks, network, cores), each in itertools.groupby(rows, _place):
        group = list(each)
        worst = max(group, key=lambda row: abs(row["error"]))
        link, _, delay = network.partition(" ")
        of = f"{worst['codec']}, {format_size(worst['size'])}"
        times = f"{worst['seconds'] * 1e3:.2f}", f"{worst['computed'] * 1e3:.2f}"
        median = statistics.median(abs(row["error"]) for row in group)
        yield (
            str(ranks),
            str(cores),
            link,
            delay or "none",
            str(len(group)),
            f"{median:.0%}",
            f"{worst['error']:+.0%}",
            of,
            *times,
        )


def verdict(rows: list[dict[str, Any]]) -> str:
    """The median errors of the calls that no constant was fitted to, in words."""
    others = [row for row in rows if row["ranks"] != FITTED_RANKS]
    parts = []
    for name, is_far in (("without a delay", False), ("with one", True)):
        errors = [abs(row["error"]) for row in others if (" " in row["network"]) == is_far]
        parts += [f"{statistics.median(errors):.0%} {name} ({len(errors)} calls)"] if errors else []
    return f"Median error on other numbers of ranks than {FITTED_RANKS}: {', '.join(parts) or 'none were measured'}."


def _shown(row: dict[str, Any]) -> tuple[str, ...]:
    times = f"{row['seconds'] * 1e3:.2f}", f"{row['computed'] * 1e3:.2f}"
    size = format_size(row["size"])
    return str(row["ranks"]), row["network"], size, row["codec"], *times, f"{row['error']:+.0%}"


if __name__ == "__main__":
    main()
