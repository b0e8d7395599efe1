"""The tables and the figure of bench/peers.py, from its results file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from runs import measured_on, table

from qccl.bench.params import format_size, parse_rate

__all__ = ["comparisons", "draw", "report"]

Document = dict[str, Any]
Row = dict[str, Any]

#: sizes from which, and bits per second below which, qccl should be the fastest at the same error
_FROM_NBYTES, _BELOW = 64 << 10, "10gbit"
#: an error is no larger than another one with so much above it: rounding of sums in another order
_SAME = 1.05
#: errors below this are rounding of float32
_ROUNDING = 1e-6
#: of the other systems in the figure; with ten colours in turn each looks different
_MARKERS = "sv^DPX*<>hdp8"
_ENDS = {
    "waits": "wait for more than a minute",
    "raised": "raise an error after {seconds:.1f} s",
    "returned": "return right results",
    "ended": "end without telling why (status {status})",
    "wrong": "**return wrong sums** without an error",
    "error": "fail before the call",
}


def report(document: Document) -> str:
    """All tables, with the machine and the versions."""
    parts = [verdict(document)]
    for network, ranks in _places(document):
        title = f"**{ranks} ranks, {network} each**; time of a call:"
        parts += [title, "\n".join(_times(document, network, ranks))]
    parts += ["What a call sends and loses:", "\n".join(_qualities(document))]
    parts += ["A rank of three is killed in a call of 16 MiB; the others:", "\n".join(_ends(document))]
    if document["failures"]:
        parts += ["Not measured:", "\n".join(table(("system", "ranks and link", "because"), _failures(document)))]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(document["versions"].items()))
    return "\n\n".join([*parts, f"Versions: {versions}.", measured_on(document["machine"])])


def _failures(document: Document) -> Iterator[tuple[str, str, str]]:
    """Each system's errors, with the places where it failed so."""
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
    """Of the largest size behind the first network, with most ranks."""
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
    yield f"({ranks} ranks, {format_size(4 * count)}, {network}; the first call. Bias: by how much the sum is longer.)"
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
    """Each row of another system with the fastest of qccl whose error is no larger, at the same place and size."""
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
    """How often qccl is the fastest at about the same error or a smaller one, and where it is not."""
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
    return f"{text} Not here:\n\n" + "\n".join(table(head, rows))


def _is_slow(row: Row) -> bool:
    """Whether a row is of those for which the claim is made."""
    return 4 * row["count"] >= _FROM_NBYTES and parse_rate(row["network"].split()[0]).rate < parse_rate(_BELOW).rate


def draw(document: Document, path: Path) -> None:
    """Time over error of the largest calls: one chart for each network, with most ranks."""
    count, ranks = (max(row[key] for row in document["rows"]) for key in ("count", "ranks"))
    networks = [network for network, number in _places(document) if number == ranks]
    networks.sort(key=lambda network: (parse_rate(network.split()[0]).rate, network))
    figure = Figure(figsize=(4.2 * len(networks), 4.4), layout="constrained")
    others = [*dict.fromkeys(row["system"] for row in document["rows"] if not row["system"].startswith("qccl"))]
    for axes, network in zip(figure.subplots(1, len(networks), squeeze=False)[0], networks, strict=True):
        place = (network, ranks, count)
        rows = [row for row in document["rows"] if (row["network"], row["ranks"], row["count"]) == place]
        own = sorted((row for row in rows if row["system"].startswith("qccl")), key=lambda row: row["error"])
        axes.plot(
            [row["error"] for row in own], [row["seconds"] * 1e3 for row in own], "o-", color="#D55E00", label="qccl"
        )
        for number, row in enumerate(own):  # labels on both sides in turn: some points are near each other
            place, align = ((5, 4), "left") if number % 2 == 0 else ((-5, -9), "right")
            axes.annotate(row["system"].removeprefix("qccl "), (row["error"], row["seconds"] * 1e3), place, ha=align,
                          textcoords="offset points", fontsize=6, color="#D55E00")  # fmt: skip
        for row in rows:
            if row["system"] in others:
                number = others.index(row["system"])
                style = {"marker": _MARKERS[number % len(_MARKERS)], "color": f"C{number}", "linestyle": ""}
                axes.plot([row["error"]], [row["seconds"] * 1e3], label=row["system"], **style)
        axes.set(xscale="log", yscale="log", xlabel="relative L2 error", ylabel="ms a call", title=network)
        for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            which(FuncFormatter(lambda ms, _: f"{ms:g}"))
        axes.tick_params(which="both", labelsize=7)
        axes.grid(visible=True, which="major", linewidth=0.3)
    found = {}  # a system may be missing behind a network
    for axes in figure.axes:
        found |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=5, fontsize=8)
    figure.suptitle(f"all-reduce of {format_size(4 * count)} on {ranks} ranks: down and left is better", fontsize=10)
    figure.savefig(path, dpi=130)
