"""The tables, the headline and the figures of bench/train_slow_link.py, from its results files."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from runs import NOT_MEASURED, measured_on, save_figure, table

from qccl.base.scalars import parse_seconds
from qccl.bench.lab.network import NetworkOptions
from qccl.bench.params import parse_link, parse_loss

__all__ = [
    "BY_THREADS",
    "FIRST",
    "LONG",
    "OURS",
    "THEIRS",
    "TUNED",
    "computation",
    "draw",
    "headline",
    "network_of",
    "paragraphs",
]

Document = dict[str, Any]

#: by model: its name, its size and its optimiser, and the unit of its quality
MODELS = {
    "word_gpt": ("word-level GPT", "1.12 million parameters", "AdamW", "bits per word"),
    "byte_model": ("byte-level model", "2.05 million parameters", "SGD with momentum", "bits per byte"),
    "resnet": ("ResNet", "0.31 million parameters", "SGD with momentum", "bits per image"),
}
#: PyTorch's own reduction and hooks, and codecs: the order of the tables
THEIRS = ("fp32", "fp16", "powersgd:4", "powersgd:1")
OURS = (
    *("minmax8", "minmax4+ef", "minmax2:bucket=256+ef", "levels2+ef", "levels2:rounding=stochastic+ef"),
    *("levels4", "levels4/levels2", "trellis4+ef", "trellis2+ef"),
    "topk:k=96,block=4096,values=exp4/topk:k=192,block=4096,values=exp4+ef",
    "topk:k=64,block=4096,values=exp4/topk:k=256,block=4096,values=exp4+ef",
    *("topk:k=64,block=4096,values=exp4/topk:k=256,block=4096,values=exp4+ef+nesterov", "topk:k=0.01+ef"),
    *("onebit:reconstruct=mean+ef", "low_rank:4:minmax8+ef", "low_rank:32:minmax4+ef"),
    *(f"diloco:period={period},outer_lr=1,momentum=0:trellis2+ef" for period in (4, 8)),
)
#: the methods of trainings by threads, unless others are given
BY_THREADS = ("fp32", *(method for method in OURS if method.startswith(("minmax2", "levels"))), "trellis2+ef")
#: methods that an earlier version measured: SparseLoCo and DeMo are in docs/examples now
EARLIER = ("sparseloco:period=15", "demo:lr=0.002,values=exp4")
#: the methods of the section "rates", and of the section "long"
TUNED = (
    *("fp32", "powersgd:4", "minmax2:bucket=256+ef", "trellis2+ef"),
    *("topk:k=64,block=4096,values=exp4/topk:k=256,block=4096,values=exp4+ef", "onebit:reconstruct=mean+ef"),
    *("low_rank:4:minmax8+ef", "diloco:period=4,outer_lr=1,momentum=0:trellis2+ef"),
)
LONG = ("fp32", *(f"diloco:period={period}:trellis2+ef" for period in (15, 30, 100)))
#: the rows of README.md's table: the methods that most readers would compare first
FIRST = ("fp16", "powersgd:4", "minmax8", "minmax4+ef", "minmax2:bucket=256+ef")
#: the methods of one row of docs/training-all.png: fp32, PyTorch's hooks, and codecs with a fixed number of bits
BITS = (*("fp32", *FIRST), "trellis4+ef", "trellis2+ef", "onebit:reconstruct=mean+ef")
#: in place of steps or seconds to the target
_NOT_REACHED = "not reached"
#: the last row of the headline
BOUND = "upper bound, (c + n) / c"
ACCURACY = ("method", "{} at the end", "more than fp32", "steps to the target", "MB a step")
STEP = ("method", "link", "ms a step", "least ms", "least / time", "ms without a link")
TIMES = (*STEP, "s to the target", "speed-up over fp32")


def network_of(link: str) -> NetworkOptions:
    """The network of a link's name: "100mbit", or "100mbit 25ms 0.1% bbr" with delay, loss and congestion control."""
    rate, *more = link.split()
    if not more:
        return NetworkOptions(rate)
    delay, loss, tcp = more
    return NetworkOptions(rate, delay=parse_seconds(delay), loss=parse_loss(loss), tcp=tcp)


def paragraphs(document: Document) -> Iterator[str]:
    """Paragraphs and tables in Markdown, of one model."""
    document = _in_order(document)
    if "compute" in document:
        yield _what(document)
    unit = MODELS[document["model"]][3]
    if "curves" in document:
        mean, deviation = _target(document)
        yield (
            f"The target is {mean + deviation:.3f} {unit}: fp32 has {mean:.3f} +- {deviation:.3f} after "
            f"{document['budget']} steps."
        )
        yield "\n".join(table([name.format(unit) for name in ACCURACY], _accuracy(document)))
    if "curves" in document and "steps" in document:
        yield "\n".join(table(TIMES, _times(document)))
    elif "steps" in document:
        sent = _sent(document)
        rows = ((*_timed(document, row), f"{sent[row['method']]:.2f}") for row in _behind_links(document))
        yield "\n".join(table((*STEP, "MB a step"), rows))
    if "rates" in document:
        yield f"{unit[0].upper()}{unit[1:]} at the end of one seed, by the learning rate as a multiple of the model's:"
        yield "\n".join(_rates(document))
    if "long" in document:
        yield f"{unit[0].upper()}{unit[1:]} in a longer training of one seed:"
        yield "\n".join(_long(document))
    for row in document.get("whole", []):
        others = [each["digest"] for each in document.get("curves", []) if _same(each, row)]
        equal = "equal" if others == [row["digest"]] else "do not equal"
        yield (
            f"With everything behind one link, {row['steps']} steps with {row['method']} took {row['seconds']:.0f} s"
            + (f"; the parameters {equal} those of the run without a link." if others else ".")
        )
    if "scaling" in document:
        alone = {row["method"]: row["seconds"] for row in document["scaling"] if row["ranks"] == 1}
        rows = (
            (row["ranks"], row["method"], f"{row['seconds'] * 1e3:.1f}", f"{alone['fp32'] / row['seconds']:.0%}")
            for row in document["scaling"]
        )
        yield "\n".join(table(("ranks", "method", "ms a step", "efficiency"), rows))
    yield measured_on(document["machine"])


def headline(documents: Sequence[Document], methods: Collection[str] = (), has_delay: bool = False) -> str:
    """The table of each method's speed-up over fp32 in time to the target, with a column for each model.

    The link is the first one that all documents have, or with ``has_delay`` the first with a delay; without such a link
    the result is "". Without ``methods`` the table has all measured methods.
    """
    documents = [_in_order(document) for document in documents]
    link = _headline_link(documents, has_delay)
    if link is None:
        return ""
    (number,) = {_behind_links(document)[0]["ranks"] for document in documents}
    head = ["gradients sent as"]
    text = f"Speed-up over fp32 in time to the same quality; {number} ranks, each behind {_described(link)}."
    columns: list[dict[str, str]] = []
    for document in documents:
        name, size, optimiser, _ = MODELS[document["model"]]
        head.append(name)  # short, so that the columns fit on a phone
        seconds = computation(document)
        text += f" The {name} has {size}, {optimiser}, and {seconds * 1e3:.0f} ms of computation a step."
        columns.append({**_speed_up(document, link), BOUND: f"{_ceiling(document, link):.1f}"})
    keys = sorted(dict.fromkeys(key for column in columns for key in column), key=_place)
    shown = [key for key in keys if not methods or key in (*methods, BOUND)]
    rows = [(_titled(key), *(column.get(key, NOT_MEASURED) for column in columns)) for key in shown]
    return text + "\n\n" + "\n".join(table(head, rows))


def _headline_link(documents: Sequence[Document], has_delay: bool) -> str | None:
    """The first link that all documents have, with or without a delay."""
    common = [link for link in _links(documents[0]) if all(link in _links(document) for document in documents)]
    return next((link for link in common if network_of(link).is_far == has_delay), None)


def _links(document: Document) -> list[str]:
    return list(dict.fromkeys(row["link"] for row in _behind_links(document)))


def _described(link: str) -> str:
    """The link in words."""
    rate, *more = link.split()
    if not more:
        return f"a link of {rate}"
    delay, loss, tcp = more
    return f"a link of {rate}, with a delay of {delay} in each direction and {loss} of the packets lost ({tcp})"


def _in_order(document: Document) -> Document:
    """The document with its curves, and the steps of each link, in the order of the methods; unknown methods last."""
    found = {
        section: sorted(document[section], key=lambda row: _place(row["method"]))
        for section in ("curves", "steps")
        if section in document
    }
    links = list(dict.fromkeys(row["link"] for row in document.get("steps", [])))
    found.get("steps", []).sort(key=lambda row: links.index(row["link"]))
    return document | found


def _place(method: str) -> tuple[int, str]:
    """A key to sort methods by; unknown methods come last."""
    order, name = (*THEIRS, *OURS, *EARLIER), method.partition("@")[0]
    return (len(order) + 1 if method == BOUND else order.index(name) if name in order else len(order), method)


def computation(document: Document) -> float:
    """The seconds that forward and backward pass and optimiser take one rank alone."""
    compute = document["compute"]
    return float(compute["forward"] + compute["ready"][-1][1] + compute["optimiser"])


def _what(document: Document) -> str:
    """The model, its optimiser and its computation, and the most that any method can gain."""
    name, size, optimiser, _ = MODELS[document["model"]]
    text = (
        f"A {name} with {size}; {optimiser}. The computation of one rank alone takes c = "
        f"{computation(document) * 1e3:.1f} ms: {document['compute']['summary']}."
    )
    for link in _links(document):
        network = _network(document, link)
        if network:
            text += (
                f" At {link} the bytes of fp32 need n = {network * 1e3:.0f} ms, so that (c + n) / c = "
                f"{_ceiling(document, link):.1f}."
            )
    return text


def _network(document: Document, link: str) -> float | None:
    """The seconds in which the link carries the bytes of a step in fp32."""
    rate = parse_link(link.split()[0]).rate
    found = (row for row in _behind_links(document) if row["method"] == "fp32" and row["link"] == link)
    return next((row["nbytes"] / rate for row in found), None)


def _ceiling(document: Document, link: str) -> float:
    """The upper bound of the speed-up of a step by compression alone: nothing is left of it but the computation."""
    network = _network(document, link)
    return math.nan if network is None else (computation(document) + network) / computation(document)


def _speed_up(document: Document, link: str) -> dict[str, str]:
    """The speed-up over fp32 in time to the target behind a link, by method."""
    rows = {row["method"]: row for row in _behind_links(document) if row["link"] == link}
    found = {method: _seconds_to_target(document, row) for method, row in rows.items() if _steps(document, method)}
    first = found["fp32"]
    return {method: f"{first / own:.1f}" if first and own else _NOT_REACHED for method, own in found.items()}


def _titled(method: str) -> str:
    """A method as a user of qccl would write it."""
    kind, _, rest = method.partition(":")
    options, _, codec = rest.partition(":")
    match kind:
        case "low_rank":
            return f"`{codec}`, `low_rank={options}`"
        case "diloco":
            return f"`{codec}`, `DiLoCo({options.replace(',', ', ')})`"
        case "sparseloco":
            return f"SparseLoCo, `{options}`"
        case "demo":
            return f"DeMo, `{options.replace(',', ', ')}`"
    if method == BOUND:
        return method
    return f"{method} (PyTorch)" if method in THEIRS else f"`{method}`"


# -- the quality -------------------------------------------------------------------------------------------------------


def _target(document: Document) -> tuple[float, float]:
    """Mean and standard deviation of fp32's quality after the budget's steps."""
    found = [dict(row["curve"])[document["budget"]] for row in document["curves"] if row["method"] == "fp32"]
    return statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else 0.0


def _steps(document: Document, method: str) -> list[int | None]:
    """For each seed, the first step whose quality reaches the target; None if no step does."""
    target = sum(_target(document))
    curves = [row["curve"] for row in document["curves"] if row["method"] == method]
    return [next((step for step, bits in curve if bits <= target), None) for curve in curves]


def _accuracy(document: Document) -> Iterator[tuple[str, ...]]:
    """The rows of ACCURACY: quality at the end, its difference from fp32's of the same seed, steps to the target."""
    ends: dict[str, dict[int, float]] = {}
    for row in document["curves"]:
        ends.setdefault(row["method"], {})[row["seed"]] = row["curve"][-1][1]
    sent = _sent(document)
    for method, bits in ends.items():
        more = [end - ends["fp32"][seed] for seed, end in bits.items() if seed in ends["fp32"]]
        steps = _steps(document, method)
        known = [step for step in steps if step is not None]
        yield (
            method,
            _spread(bits.values(), ""),
            _spread(more, "+") if more else NOT_MEASURED,
            f"{statistics.median(known):.0f} ({len(known)} of {len(steps)} seeds)" if known else _NOT_REACHED,
            f"{sent[method]:.2f}" if method in sent else NOT_MEASURED,
        )


def _rates(document: Document) -> list[str]:
    """The table of the section "rates"; its multiple 1 is the first seed of the section "curves"."""
    rows = [row | {"factor": 1.0} for row in document.get("curves", []) if row["seed"] == 0] + document["rates"]
    ends: dict[str, dict[float, float]] = {}
    for row in rows:
        ends.setdefault(row["method"], {})[row["factor"]] = row["curve"][-1][1]
    tuned = {method: ends[method] for method in sorted({row["method"] for row in document["rates"]}, key=_place)}
    factors = sorted({factor for found in tuned.values() for factor in found})
    best = min(tuned["fp32"].values())
    head = ["method", *(f"{factor:g}" for factor in factors), "best, more than fp32's best"]
    return table(
        head,
        (
            (
                method,
                *(f"{found[factor]:.3f}" if factor in found else NOT_MEASURED for factor in factors),
                f"{min(found.values()) - best:+.3f}",
            )
            for method, found in tuned.items()
        ),
    )


def _long(document: Document) -> list[str]:
    """The table of the section "long": the quality after thirds of the steps."""
    rows = sorted(document["long"], key=lambda row: _place(row["method"]))
    (steps,) = {row["steps"] for row in rows}
    (end,) = (row["curve"][-1][1] for row in rows if row["method"] == "fp32")
    after = [steps // 3, steps * 2 // 3, steps]
    head = ["method", *(f"after {step} steps" for step in after), "more than fp32"]
    found = ((row["method"], dict(map(tuple, row["curve"]))) for row in rows)
    return table(
        head,
        (
            (
                method,
                *(f"{curve[step]:.3f}" for step in after),
                f"{curve[steps] - end:+.3f}",
            )
            for method, curve in found
        ),
    )


def _spread(values: Collection[float], sign: str) -> str:
    """Mean and standard deviation."""
    deviation = f" +- {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.3f}{deviation}"


def _same(a: Document, b: Document) -> bool:
    return all(a[key] == b[key] for key in ("method", "seed", "steps", "ranks"))


# -- the time ----------------------------------------------------------------------------------------------------------


def _behind_links(document: Document) -> list[dict[str, Any]]:
    """The rows of steps behind a link."""
    return [row for row in document.get("steps", []) if row["link"]]


def _sent(document: Document) -> dict[str, float]:
    """The megabytes that a rank sends in a step behind the first link, by method."""
    return {row["method"]: row["nbytes"] / 1e6 for row in reversed(_behind_links(document))}


def _times(document: Document) -> Iterator[tuple[str, ...]]:
    """The rows of TIMES: the time of a step behind each link, its limit, and the time to the target."""
    fp32 = {row["link"]: row for row in _behind_links(document) if row["method"] == "fp32"}
    for row in _behind_links(document):
        seconds, first = (_seconds_to_target(document, each) for each in (row, fp32[row["link"]]))
        without = _NOT_REACHED if _steps(document, row["method"]) else NOT_MEASURED
        yield (
            *_timed(document, row),
            f"{seconds:.0f}" if seconds else without,
            f"{first / seconds:.1f}" if seconds and first else without,
        )


def _timed(document: Document, row: dict[str, Any]) -> tuple[str, ...]:
    """The columns STEP of a row of the section "steps"."""
    alone = {each["method"]: each["seconds"] for each in document["steps"] if each["link"] is None}
    return (
        row["method"],
        row["link"],
        f"{row['seconds'] * 1e3:.1f}",
        f"{row['limit'] * 1e3:.1f}",
        f"{row['limit'] / row['seconds']:.0%}",
        f"{alone[row['method']] * 1e3:.1f}" if row["method"] in alone else NOT_MEASURED,
    )


def _seconds_to_target(document: Document, row: dict[str, Any]) -> float | None:
    """The median time to the target over the seeds; None unless most seeds reach it."""
    steps = _steps(document, row["method"])
    known = [step for step in steps if step is not None]
    return statistics.median(known) * row["seconds"] if len(known) * 2 > len(steps) else None


# -- the figures -------------------------------------------------------------------------------------------------------


def draw(documents: Sequence[Document], folder: Path) -> None:
    """Draw quality by time, with a column for each model.

    ``training.png`` has fp32 and the methods of README.md's table behind the first link of the headlines.
    ``training-all.png`` has the methods that reach the target in some training, behind each link of the headlines: a
    row for codecs with a fixed number of bits, and one for all others.
    """
    documents = [_in_order(document) for document in documents]
    curves = [(document, row["method"]) for document in documents for row in document["curves"]]
    reached = dict.fromkeys(method for document, method in curves if any(_steps(document, method)))
    others = [method for method in reached if method not in BITS]
    links = [link for has_delay in (False, True) if (link := _headline_link(documents, has_delay))]
    _draw(documents, links[:1], [("fp32", *FIRST)], folder / "training.png")
    _draw(documents, links, [BITS, ("fp32", *others)], folder / "training-all.png")


def _draw(documents: Sequence[Document], links: Sequence[str], sets: Sequence[Sequence[str]], path: Path) -> None:
    """For each set of methods: a row of panels for each link, and a legend."""
    heights = [0.4 + 2.8 * len(links) + 0.11 * sum(2 + _label(method).count("\n") for method in each) for each in sets]
    figure = Figure(figsize=(7.2, sum(heights)), layout="constrained")
    figure.suptitle("Quality by time of training: lower and further left is better", fontsize=11)
    for part, methods in zip(
        figure.subfigures(len(sets), 1, height_ratios=heights, squeeze=False).flat, sets, strict=True
    ):
        panels = part.subplots(len(links), len(documents), squeeze=False).flat
        lines: dict[str, Any] = {}
        for axes, (link, document) in zip(panels, itertools.product(links, documents), strict=True):
            lines |= _panel(axes, document, link, methods)
        lines[f"the target: fp32 after {documents[0]['budget']} steps"] = lines.pop("")
        part.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=2, fontsize=8.5, frameon=False)
    save_figure(figure, path)


def _label(method: str) -> str:
    """A method in a legend, where long ones need two lines."""
    return _titled(method).replace("`", "").replace("/", "/\n").replace(", DiLoCo", ",\nDiLoCo")


def _panel(axes: Any, document: Document, link: str, methods: Sequence[str]) -> dict[str, Any]:
    """One model behind one link: the mean over the seeds, and the band of their extremes.

    Returns the lines by their labels; the label of the target's line is "".
    """
    rows = [row for row in _behind_links(document) if row["link"] == link]
    seconds, ranks = {row["method"]: row["seconds"] for row in rows}, rows[0]["ranks"]
    mean, deviation = _target(document)
    highest = mean + 1.5  # the first steps, before the learning rate has risen, are of no interest
    lines, means, begin = {}, [], math.inf
    for number, method in enumerate(methods):
        curves = [row["curve"] for row in document["curves"] if row["method"] == method]
        if not curves or method not in seconds:
            continue
        at = [step * seconds[method] for step, _ in curves[0]]
        bits = list(zip(*[[b for _, b in curve] for curve in curves], strict=True))
        own = [statistics.fmean(each) for each in bits]
        colour = "black" if method == "fp32" else f"C{number - 1}"
        style = "--" if method in THEIRS else "-"
        (lines[_label(method)],) = axes.plot(at, own, color=colour, linestyle=style, linewidth=1.6)
        axes.fill_between(at, list(map(min, bits)), list(map(max, bits)), color=colour, alpha=0.12, linewidth=0)
        means += own
        begin = min([begin, *(x for x, y in zip(at, own, strict=True) if y < highest)])
    lines[""] = axes.axhline(mean + deviation, color="grey", linestyle=":")
    name, _, optimiser, unit = MODELS[document["model"]]
    axes.set_xlabel(f"seconds of training, {ranks} ranks,\neach behind {link}", fontsize=9.5)
    axes.set(xscale="log", ylabel=f"{unit} (validation)")
    axes.set(xlim=(begin / 1.1, None), ylim=(min(means) - 0.1, highest))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.3)
    axes.set_title(f"{name}, {optimiser},\n{computation(document) * 1e3:.0f} ms of computation a step", fontsize=9.5)
    return lines
