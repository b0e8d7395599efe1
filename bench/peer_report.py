"""The tables and the figure of bench/peers.py, from its results file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator
from matplotlib.transforms import Bbox
from runs import measured_on, save_figure, table

from qccl.bench.params import format_size, parse_rate

__all__ = ["comparisons", "draw", "report"]

Document = dict[str, Any]
Row = dict[str, Any]

#: from this size on, and behind links slower than this, qccl should be the fastest at the same error
_FROM_NBYTES, _BELOW = 64 << 10, "10gbit"
#: errors count as the same up to this factor: sums in another order round differently
_SAME = 1.05
#: errors below this are rounding of float32
_ROUNDING = 1e-6
#: the other systems' markers in the figure; with ten colours in turn each system looks different
_MARKERS = "sv^DPX*<>hdp8"
#: the colour of qccl in the figure
_OWN = "#D55E00"
#: offsets of a label from its marker in points, the best one first
_AROUND = ((9, 0), (0, 11), (0, -11), (7, 9), (7, -9), (-9, 0), (-7, -9), (-7, 9))
_ENDS = {
    "waits": "wait for more than a minute",
    "raised": "raise an error after {seconds:.1f} s",
    "returned": "return correct results",
    "ended": "end without an error message (status {status})",
    "wrong": "**return wrong sums** without an error",
    "error": "fail before the call",
}


def report(document: Document) -> str:
    """All tables, with the machine and the versions."""
    parts = [verdict(document)]
    for network, ranks in _places(document):
        title = f"**{ranks} ranks, {network} each**; time of a call:"
        parts += [title, "\n".join(_times(document, network, ranks))]
    parts += ["The bytes and the errors of a call:", "\n".join(_qualities(document))]
    parts += ["One of three ranks is killed in a call of 16 MiB:", "\n".join(_ends(document))]
    if document["failures"]:
        parts += ["Not measured:", "\n".join(table(("system", "ranks and link", "because"), _failures(document)))]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(document["versions"].items()))
    return "\n\n".join([*parts, f"Versions: {versions}.", measured_on(document["machine"])])


def _failures(document: Document) -> Iterator[tuple[str, str, str]]:
    """Each system's error messages, with the networks and numbers of ranks behind which they came."""
    places: dict[tuple[str, str], list[str]] = {}
    for each in document["failures"]:
        place = f"{each['ranks']} x {each['network']}" if each["ranks"] else "not installed"
        places.setdefault((each["system"], each["error"].replace("|", "/")), []).append(place)
    for (system, error), where in places.items():
        yield system, ", ".join(where), error


def _places(document: Document) -> list[tuple[str, int]]:
    return list(dict.fromkeys((row["network"], row["ranks"]) for row in document["rows"]))


def _times(document: Document, network: str, ranks: int) -> Iterator[str]:
    rows = [row for row in document["rows"] if (row["network"], row["ranks"]) == (network, ranks)]
    counts = sorted({row["count"] for row in rows})
    cells = {(row["system"], row["count"]): f"{row['seconds'] * 1e3:.3g} ms" for row in rows}
    systems = dict.fromkeys(row["system"] for row in rows)
    body = ((system, *(cells.get((system, count), "-") for count in counts)) for system in systems)
    return table(("system", *(format_size(4 * count) for count in counts)), body)


def _qualities(document: Document) -> Iterator[str]:
    """Make the table of bytes and errors for the largest size behind the first network, with most ranks."""
    count = max(row["count"] for row in document["rows"])
    ranks = max(row["ranks"] for row in document["rows"])
    network = document["rows"][0]["network"]
    rows = [row for row in document["rows"] if (row["network"], row["ranks"], row["count"]) == (network, ranks, count)]
    cells = (
        (
            row["system"],
            f"{row['nbytes'] / (2 * (ranks - 1) / ranks * count):.2f}",
            f"{row['error']:.1e}",
            f"{row['bias']:+.0e}",
            "yes" if all(each["equal"] for each in document["rows"] if each["system"] == row["system"]) else "**no**",
        )
        for row in rows
    )
    head = "system", "bytes sent for each element and direction", "relative L2 error", "bias", "equal bits on all ranks"
    yield f"({ranks} ranks, {format_size(4 * count)}, {network}; the first call. Bias: how much too long the sum is.)"
    yield ""
    yield from table(head, cells)


def _ends(document: Document) -> Iterator[str]:
    rows = []
    for end in document["ends"]:
        what = _ENDS.get(end["outcome"], end["outcome"]).format(**end)
        said = next((text for text in end.get("says", ()) if text), "none")
        rows.append((end["system"], what, said[:160].replace("|", "/")))
    return table(("system", "what the others do", "error"), rows)


# -- qccl beside each system -------------------------------------------------------------------------------------------


def comparisons(document: Document) -> Iterator[tuple[Row, Row]]:
    """Pair each row of another system with qccl's fastest row of no larger error, for the same network and size."""
    rows = document["rows"]
    for row in rows:
        if row["system"].startswith("qccl"):
            continue
        most = max(row["error"] * _SAME, _ROUNDING)
        same = [
            each
            for each in rows
            if each["system"].startswith("qccl")
            and all(each[key] == row[key] for key in ("network", "ranks", "count"))
            and each["error"] <= most
        ]
        if same:
            yield row, min(same, key=lambda each: each["seconds"])


def verdict(document: Document) -> str:
    """Say how often qccl is the fastest at about the same error or a smaller one, and list the other cases."""
    slow = [(row, own) for row, own in comparisons(document) if _is_slow(row)]
    alone = sum(_is_slow(row) and not row["system"].startswith("qccl") for row in document["rows"]) - len(slow)
    lost = [(row, own) for row, own in slow if own["seconds"] > row["seconds"]]
    text = (
        f"Behind links slower than {_BELOW}, from 64 KiB on, another system's call was compared {len(slow)} times with "
        f"the fastest codec of qccl whose error is at most {_SAME - 1:.0%} larger. qccl was faster "
        f"{len(slow) - len(lost)} times."
    )
    if alone:
        text += f" {alone} further calls had a smaller error than every codec of qccl that was measured beside them."
    if not lost:
        return text
    rows = (
        (
            row["system"],
            f"{row['ranks']} x {row['network']}",
            format_size(4 * row["count"]),
            f"{row['seconds'] * 1e3:.3g} ms",
            f"{own['seconds'] * 1e3:.3g} ms",
            own["system"],
        )
        for row, own in lost
    )
    head = ("system", "ranks and link", "size", "time", "qccl's", "by")
    return f"{text} The other cases:\n\n" + "\n".join(table(head, rows))


def _is_slow(row: Row) -> bool:
    """Whether the verdict covers a row: it is large enough, and behind a slow link."""
    return 4 * row["count"] >= _FROM_NBYTES and parse_rate(row["network"].split()[0]).rate < parse_rate(_BELOW).rate


def draw(document: Document, path: Path) -> None:
    """Draw time over error of the largest calls on the most ranks, in a panel for each network."""
    count, ranks = (max(row[key] for row in document["rows"]) for key in ("count", "ranks"))
    networks = [network for network, number in _places(document) if number == ranks]
    networks.sort(key=lambda network: (parse_rate(network.split()[0]).rate, network))
    figure = Figure(figsize=(7.2, 0.9 + 2.8 * ((len(networks) + 1) // 2)), layout="constrained")
    others = [*dict.fromkeys(row["system"] for row in document["rows"] if not row["system"].startswith("qccl"))]
    panels = figure.subplots((len(networks) + 1) // 2, 2, squeeze=False).flat
    handles: dict[str, Any] = {}  # a system may be missing behind a network
    labelled = []
    for axes, network in zip(panels, networks, strict=False):
        rows = [
            row for row in document["rows"] if (row["network"], row["ranks"], row["count"]) == (network, ranks, count)
        ]
        own = sorted((row for row in rows if row["system"].startswith("qccl")), key=lambda row: row["error"])
        points = [(row["error"], row["seconds"] * 1e3) for row in own]
        (handles["qccl"],) = axes.plot(*zip(*points, strict=True), "o-", color=_OWN, markersize=5)
        labelled.append((axes, points, [row["system"].removeprefix("qccl ") for row in own]))
        for row in rows:
            if row["system"] in others:
                number = others.index(row["system"])
                style = {"marker": _MARKERS[number % len(_MARKERS)], "color": f"C{number}", "linestyle": ""}
                (handles[row["system"]],) = axes.plot([row["error"]], [row["seconds"] * 1e3], **style)
        axes.set(xscale="log", yscale="log", xlabel="relative L2 error", ylabel="ms a call")
        axes.set_title(network, fontsize=10)
        axes.margins(x=0.08, y=0.15)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.tick_params(which="both", labelsize=8.5)
        axes.grid(visible=True, which="major", linewidth=0.3)
    for axes in [*panels]:  # the panel left over by an odd number of networks
        axes.set_axis_off()
    names = sorted(handles, key=["qccl", *others].index)
    figure.legend([handles[name] for name in names], names, loc="outside lower center", ncols=3, fontsize=8.5)
    figure.suptitle(f"all-reduce of {format_size(4 * count)} on {ranks} ranks: down and left is better", fontsize=11)
    figure.draw_without_rendering()
    for axes, points, texts in labelled:
        _label(axes, points, texts)
    save_figure(figure, path)


def _label(axes: Any, points: list[tuple[float, float]], texts: list[str]) -> None:
    """Write a text beside each point, where it covers no marker, no line between the points and no other text."""
    line = axes.transData.transform(points)
    ends = pairwise(line)
    taken = [Bbox.from_bounds(*(a + (b - a) * part - 3), 6, 6) for a, b in ends for part in np.linspace(0, 1, 40)]
    marks = [axes.transData.transform(each.get_xydata()) for each in axes.lines]
    taken += [Bbox.from_bounds(x - 6, y - 6, 12, 12) for mark in marks for x, y in mark]
    offsets = [(x * far, y * far) for far in (1, 1.5, 2, 3, 4) for x, y in _AROUND]
    for point, text in zip(points, texts, strict=True):
        for x, y in offsets:
            side = "left" if x > 0 else "right" if x < 0 else "center"
            given = {"xytext": (x, y), "textcoords": "offset points", "ha": side, "va": "center"}
            note = axes.annotate(text, point, fontsize=8, color=_OWN, **given)
            box = note.get_window_extent()
            if all(axes.bbox.contains(*corner) for corner in box.corners()) and not box.count_overlaps(taken):
                axes.annotate("", point, arrowprops={"arrowstyle": "-", "linewidth": 0.5}, **given)
                taken.append(box)
                break
            note.remove()
