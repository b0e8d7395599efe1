"""Charts: time and bus bandwidth of a run over size, and errors of codecs over bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from qccl.bench import table
from qccl.bench.frontier import Point, shannon
from qccl.bench.measure import Row
from qccl.bench.report import Report
from qccl.bench.samples import SAMPLES
from qccl.bench.sizes import Link, format_size

__all__ = ["write_frontier", "write_plot"]

#: series also differ by marker, for readers who cannot tell colours apart
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_MARKS = ("o", "s", "^", "D", "v", "P")
#: colours of codecs, the best first
_LINES = ("#D55E00", "#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#E69F00")
#: markers of other systems
_OTHERS = ("x", "+", "s", "^", "D", "v", "P", "*", "<", ">")


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
    figure.savefig(path, dpi=150)


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


def write_frontier(path: str, points: Sequence[Point]) -> None:
    """Draw errors over bytes, in one panel for each sample."""
    figure = Figure(figsize=(13.5, 8.6), layout="constrained")
    for axes, sample in zip(figure.subplots(2, 3, sharex=True).reshape(-1), SAMPLES, strict=True):
        _draw_sample(axes, sample, points)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9)
    for axes in figure.axes[3:]:
        axes.set_xlabel("bytes per element")
    figure.supylabel("relative L2 error of one encode and decode", fontsize=10)
    figure.savefig(path, dpi=130)


def _draw_sample(axes: Any, sample: str, points: Sequence[Point]) -> None:
    """Draw qccl's codecs as lines, other systems as markers, and Shannon's bound for Gaussian values."""
    families: dict[tuple[bool, str], list[Point]] = {}
    for point in points:
        families.setdefault((point.ours, point.family), []).append(point)
    ours = sorted((family for family in families if family[0]), key=lambda f: _rank(families[f]))
    others = sorted(family for family in families if not family[0])
    for i, family in enumerate(ours):
        style = f"{_MARKS[i // len(_LINES) % len(_MARKS)]}-"
        _draw_family(axes, sample, families[family], _LINES[i % len(_LINES)], style, 4, family[1])
    for i, family in enumerate(others):
        _draw_family(axes, sample, families[family], "#555555", _OTHERS[i % len(_OTHERS)], 7, family[1])
    if sample.startswith("Gaussian"):
        densities = [i / 50 for i in range(3, 66)]
        axes.plot(densities, [shannon(d) for d in densities], "k--", linewidth=1, label="Shannon's bound, Gaussian")
    axes.set_title(sample, fontsize=10)
    axes.set_yscale("log")
    axes.set_xlim(0.06, 1.3)
    axes.set_ylim(top=min(axes.get_ylim()[1], 15))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.grid(True, which="major", alpha=0.3)


def _rank(points: Sequence[Point]) -> tuple[bool, float]:
    """Single points last, and lines that are nearer to Shannon's bound first."""
    return len(points) == 1, min(p.errors["Gaussian"] / shannon(p.density) for p in points)


def _draw_family(
    axes: Any, sample: str, points: Sequence[Point], colour: str, style: str, size: float, label: str
) -> None:
    x, y = [p.density for p in points], [p.errors[sample] for p in points]
    axes.plot(x, y, style, color=colour, markersize=size, linewidth=1.4, markerfacecolor="none", label=label)
