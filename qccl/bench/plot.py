"""A chart of a run: time and bus bandwidth over size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from qccl.bench import table
from qccl.bench.measure import Row
from qccl.bench.params import Link, format_size
from qccl.bench.report import Report
from qccl.files import writing

__all__ = ["write_plot"]

#: series also differ by marker, for readers who cannot tell colours apart
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_MARKS = ("o", "s", "^", "D", "v", "P")


def write_plot(path: str, report: Report, link: Link | None) -> None:
    """Draw the out-of-place figures of a run; the ending of ``path`` selects the format (png, svg, pdf)."""
    ranks = len(report.devices)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    times, bandwidths = figure.subplots(1, 2)
    for number, (label, rows) in enumerate(_series(report)):
        plain = rows[0].codec == report.plain_rows[0].codec if report.plain_rows else False
        style: dict[str, Any] = {
            "label": label,
            "color": "black" if plain else _COLOURS[number % len(_COLOURS)],
            "marker": "x" if plain else _MARKS[number % len(_MARKS)],
            "linestyle": "--" if plain else "-",
        }
        _draw(times, rows, lambda r: r.out_of_place.seconds * 1e3, style)
        _draw(bandwidths, rows, lambda r: table.busbw(r, r.out_of_place, ranks), style)
        if link is not None:
            floor = style | {"linestyle": ":", "marker": "", "label": "_floor", "linewidth": 1}
            _draw(times, rows, lambda r: table.floor_seconds(r, link) * 1e3, floor)
    sizes = sorted({row.case.nbytes for row in (*report.rows, *report.plain_rows)})
    for axes, what in ((times, "time (ms)"), (bandwidths, "bus bandwidth of the values (GB/s)")):
        _axes(axes, sizes, what)
    if link is not None:
        bandwidths.axhline(
            link.rate / 1e9, color="grey", linestyle=":", linewidth=1, label=f"{link.name}, uncompressed"
        )
        times.plot([], [], color="grey", linestyle=":", linewidth=1, label="floor: bytes / link rate")
    times.legend(fontsize=8)
    bandwidths.legend(fontsize=8)
    where = f"{link.name} per rank" if link else "no link limit"
    figure.suptitle(f"all-reduce, {ranks} ranks, {where}; plain: {report.plain}", fontsize=10)
    with writing(path) as file:
        figure.savefig(file, format=path.rpartition(".")[2], dpi=150)


def _series(report: Report) -> list[tuple[str, list[Row]]]:
    """The rows of the plain all-reduce and of each codec, separated by type and operation if there are several."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for r in dict.fromkeys((*report.rows, *report.plain_rows)):
        found.setdefault((r.codec, r.case.dtype.name, r.case.op), []).append(r)
    several = len({key[1:] for key in found}) > 1
    return [(" ".join(key) if several else key[0], rows) for key, rows in found.items()]


def _draw(axes: Any, rows: Sequence[Row], value: Callable[[Row], float], style: dict[str, Any]) -> None:
    points = sorted((r.case.nbytes, value(r)) for r in rows if r.case.nbytes > 0)
    axes.plot([p[0] for p in points], [p[1] for p in points], markersize=5, **style)


def _axes(axes: Any, sizes: Sequence[int], what: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sizes if len(sizes) <= 12 else sizes[:: -(-len(sizes) // 12)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_size(round(x))))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("size (bytes)")
    axes.set_ylabel(what)
    axes.grid(True, which="major", alpha=0.3)
