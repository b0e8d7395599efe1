"""Shared by the scripts in this folder: running qccl-bench or own ranks, printing tables, writing results files."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

import qccl
from qccl import _host
from qccl.bench.lab import Lab
from qccl.bench.sizes import parse_link
from qccl.bench.start import find_mpiexec, run_ranks_by_mpiexec

__all__ = [
    *("MARK", "allreduce", "document_table", "machine", "print_table", "rewrite_table", "run_ranks"),
    *("run_undisturbed", "save"),
]

#: begins the line in which rank 0 prints the results
MARK = "result "
#: CPU share that other programs may have in an undisturbed run
_QUIET = 0.05
_RESULTS = Path(__file__).parent.parent / "docs" / "results"
#: the keys that identify a row of results
_KIND = ("ranks", "nodes", "link", "link_per_rank", "codec", "count", "algorithm", "chunk")


def allreduce(*flags: str) -> dict[str, Any]:
    """The JSON document of ``qccl-bench allreduce`` with ``flags``; its table goes to standard error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        command = [sys.executable, "-m", "qccl.bench", "allreduce", *flags, "--json", str(path)]
        subprocess.run(command, stdout=sys.stderr, check=True, timeout=3600)
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return document


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table."""
    for line in _table(head, rows):
        print(line, flush=True)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(map(str, row)) + " |"


def document_table(head: Sequence[str], rows: Iterable[Sequence[object]], of: dict[str, Any]) -> str:
    """The table, with the machine that it was measured on: a result of machine()."""
    what = f"{of['cpu']}, {of['cores']} cores, {of['mpi']}, qccl {of['qccl']} ({of['commit']}), {of['date']}"
    return "\n".join(_table(head, rows)) + f"\n\n(Measured on {what}.)"


def rewrite_table(page: str, command: str, text: str) -> None:
    """Put ``text`` between the two comments of a page that name the command which measures it."""
    path = Path(page)
    begin, end = f"<!-- measured by {command} -->\n", f"<!-- end of {command} -->"
    head, found, rest = path.read_text(encoding="utf-8").partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{page} has no lines {begin.strip()!r} and {end!r}; put them around the table's place")
    path.write_text(f"{head}{begin}\n{text}\n\n{end}{tail}", encoding="utf-8")
    print(f"wrote the table of {page}")


def run_ranks(script: str, ranks: int, task: dict[str, Any], lab: Lab | None) -> dict[str, Any]:
    """Start ``script TASK`` on ``ranks`` ranks (in ``lab``); returns the task and rank 0's results."""
    found: list[dict[str, Any]] = []

    def on_line(line: str) -> None:
        if line.startswith(MARK):
            found.append(json.loads(line.removeprefix(MARK)))
        else:
            print(line, file=sys.stderr)

    command = [sys.executable, script, json.dumps(task)]
    with lab or contextlib.nullcontext():
        status = run_ranks_by_mpiexec(ranks, command, lab=lab, smallest=4 * task["count"], silence=600, on_line=on_line)
    if status or not found:
        raise SystemExit(f"the ranks failed with status {status}")
    return task | found[0]


def run_undisturbed(run: Callable[[], dict[str, Any]], until: float) -> dict[str, Any]:
    """Repeat ``run`` until one is undisturbed, or until ``until``; returns the least disturbed one."""
    tried: list[dict[str, Any]] = []
    while True:
        while time.monotonic() < until and _others(lambda: time.sleep(1)) > _QUIET:
            pass
        found: list[dict[str, Any]] = []
        others = _others(lambda into=found: into.append(run()))
        tried.append(found[0] | {"others": round(others, 3), "commit": commit()})
        if others < _QUIET or time.monotonic() > until:
            return min(tried, key=lambda each: each["others"])


def _others(run: Callable[[], object]) -> float:
    """The CPU share of other programs while ``run`` ran.

    It sums over processes, because the machine's total has another clock, with which the share became negative.
    """
    begin, before = time.monotonic(), _seconds_of_others()
    run()
    return (_seconds_of_others() - before) / (time.monotonic() - begin) / (os.cpu_count() or 1)


def _seconds_of_others() -> float:
    """CPU seconds of all other processes, including their ended children."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended
                fields = (entry / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, Any]:
    """The machine and the software that are measured."""
    model = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    mpi = find_mpiexec()
    return {
        "cpu": model[0] if model else "",
        "cores": len(os.sched_getaffinity(0)),
        "instruction set": _host.isa,
        "mpi": f"{mpi.name} {mpi.version}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "qccl": qccl.__version__,
        "commit": commit(),
        "date": date.today().isoformat(),
        "load before": os.getloadavg(),
    }


def commit() -> str:
    """The commit of the sources, with "+" if files other than results differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", ":/", ":(top,exclude)docs/results")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def save(document: dict[str, Any]) -> None:
    """Write today's file; in an existing file replace the rows with the same keys and keep the others."""
    _RESULTS.mkdir(parents=True, exist_ok=True)
    path = _RESULTS / f"host-{date.today().isoformat()}.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        for section, rows in before.items():
            if section != "machine":
                document[section] = _renewed(rows, document.get(section, []))
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def _renewed(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def kind(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(key) for key in _KIND)

    renewed = [kind(row) for row in rows]
    rows = rows + [row for row in before if kind(row) not in renewed]
    return sorted(rows, key=lambda row: (parse_link(row["link"]).rate if row["link"] else 0, row["count"]))
