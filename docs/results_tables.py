"""The tables of docs/results/host-*.json, in Markdown, for the page of results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from qccl.bench.params import format_size

Rows = Sequence[dict[str, Any]]


def markdown(folder: Path) -> str:
    """All tables of all files in ``folder``, the newest file first."""
    return "\n".join(line for path in sorted(folder.glob("host-*.json"), reverse=True) for line in _file(path))


def _file(path: Path) -> Iterator[str]:
    found = json.loads(path.read_text(encoding="utf-8"))
    machine = found["machine"]
    yield f"\n## {machine['cpu']}, {machine['date']}\n"
    yield f"{machine['cores']} cores, {machine['instruction set']}, {machine['mpi']}, float32, `python bench/host.py`;"
    yield f"[the file](results/{path.name}). Times are in milliseconds, and medians.\n"
    yield from tables(found)


def tables(document: dict[str, Any]) -> Iterator[str]:
    """The tables of a run of bench/host.py."""
    for section, lines in (("lab", _lab), ("shared", _shared), ("overlap", _overlap)):
        if document[section]:
            yield from lines(document[section])


def _lab(rows: Rows) -> Iterator[str]:
    yield "### Behind slow links\n"
    yield "16 MiB in each call. The floor is the time that the encoded bytes alone need on the link; a plain transfer"
    yield "moves as many bytes by the same library in the same run. Of two figures the second is in place.\n"
    yield from _table(
        ("link", "ranks", "codec", "over", "qccl", "floor", "plain transfer", "MPI", "MPI / qccl"),
        (
            (
                *(r["link"], r["ranks"], r["codec"], r["transport"], _both(r, "qccl")),
                *(*map(_ms, (r["floor"], r["bulk"])), *_beside(r)),
            )
            for r in rows
        ),
    )


def _shared(rows: Rows) -> Iterator[str]:
    yield "### In shared memory\n"
    yield "More ranks than cores share the processors.\n"
    yield from _table(
        ("size", "ranks", "codec", "over", "qccl", "a bound plan", "MPI", "MPI / qccl"),
        (
            (
                *(format_size(4 * r["count"]), r["ranks"], r["codec"], r["transport"]),
                *(_both(r, "qccl"), _plan(r), *_beside(r)),
            )
            for r in rows
        ),
    )


def _overlap(rows: Rows) -> Iterator[str]:
    yield "### Overlap with the caller's work\n"
    yield "A call of 16 MiB with `async_op=True`, and the caller's own work meanwhile: each alone, and both together.\n"
    yield from _table(
        ("link", "ranks", "codec", "over", "beside", "the call alone", "the caller alone", "both"),
        (
            (
                *(r["link"], r["ranks"], r["codec"], r["transport"], what),
                *map(_ms, (r["qccl"], side["alone"], side["both"])),
            )
            for r in rows
            for what, side in r["beside"].items()
        ),
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    rows = list(rows)
    rule = ["--:" if any(str(row[i])[:1].isdigit() for row in rows) else "---" for i in range(len(head))]
    for row in (head, rule, *rows):
        yield "| " + " | ".join(map(str, row)) + " |"
    yield ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _both(row: dict[str, Any], side: str) -> str:
    """Out of place and in place; earlier files have no times in place."""
    return ", ".join(_ms(row[name]) for name in (side, f"{side} in place") if name in row)


def _plan(row: dict[str, Any]) -> str:
    return _ms(row["plan"]) if "plan" in row else "not measured"


def _beside(row: dict[str, Any]) -> tuple[str, str]:
    """MPI's times, and their ratios to qccl's."""
    modes = [mode for mode in ("", " in place") if f"mpi{mode}" in row]
    return _both(row, "mpi"), ", ".join(f"{row[f'mpi{mode}'] / row[f'qccl{mode}']:.2f}" for mode in modes)
