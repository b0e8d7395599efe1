"""Shared by the scripts in this folder: they run qccl-bench or their own ranks, print tables, write results files."""

from __future__ import annotations

import contextlib
import io
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
from qccl.bench.lab.lab import Lab
from qccl.bench.lab.namespaces import congestion_control
from qccl.bench.params import parse_link
from qccl.bench.start import start
from qccl.bench.start.mpiexec import find_mpiexec
from qccl.codecs.operations import instruction_set

__all__ = [
    *(
        "allreduce",
        "begun",
        "commit",
        "cpu",
        "document_table",
        "machine",
        "measured_on",
        "print_table",
        "read",
        "report",
        "rewrite_table",
        "run_ranks",
    ),
    *("run_undisturbed", "save", "save_figure", "start_script", "store", "table", "todays"),
]

#: the environment variable with the file for rank 0's results
_ROWS = "BENCH_ROWS"
#: CPU share that other programs may have in an undisturbed run
_QUIET = 0.05
_RESULTS = Path(__file__).parent.parent / "docs" / "results"
#: the keys that identify a row of results
_KIND = ("transport", "ranks", "link", "codec", "count")


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
    for line in table(head, rows):
        print(line, flush=True)


#: a table's cell without a figure; an empty cell could mean several things
NOT_MEASURED = "not measured"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    for row in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(map(str, row)) + " |"


def document_table(head: Sequence[str], rows: Iterable[Sequence[object]], of: dict[str, Any]) -> str:
    """The table, with the machine that it was measured on: a result of machine()."""
    return "\n".join(table(head, rows)) + "\n\n" + measured_on(of)


def measured_on(of: dict[str, Any]) -> str:
    """A line about the machine and the software of a measurement: a result of machine()."""
    libraries = ", ".join(of[name] for name in ("mpi", "ucx") if of.get(name))
    libraries += f", TCP {of['tcp']}" if of.get("tcp") else ""
    what = f"{of['cpu']}, {of['cores']} cores, {libraries}, qccl {of['qccl']} ({of['commit']}), {of['date']}"
    return f"(Measured on {what}.)"


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


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure of matplotlib as a PNG of 256 colours, which needs half the bytes of full colour."""
    from PIL import Image  # comes with matplotlib, which most of these scripts do without

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150)
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, "PNG", optimize=True)
    print(f"wrote {path}")


def run_ranks(
    script: str, ranks: int, task: dict[str, Any], transport: str, lab: Lab | None, plain: str | None = "mpi"
) -> list[dict[str, Any]]:
    """Start ``script TASK`` on ``ranks`` ranks (in ``lab``); returns the rows that rank 0 reports, each with the task.

    mpiexec starts them over every ``transport``, so that they can also measure MPI's all-reduce; with ``plain`` None
    it starts only ranks over MPI.
    """
    command, way = [sys.executable, script, json.dumps(task)], start.choose_way(transport, plain=plain)
    with tempfile.TemporaryDirectory() as folder, lab or contextlib.nullcontext():
        path = Path(folder) / "rows.json"
        os.environ[_ROWS] = str(path)
        status = start.run_ranks(ranks, command, way=way, lab=lab, smallest=4 * task.get("count", 0), stdout=sys.stderr)
        if status or not path.exists():
            raise SystemExit(f"the ranks failed with status {status}")
        return [task | row for row in json.loads(path.read_text(encoding="utf-8"))]


def start_script(main: Callable[[], object], rank: Callable[[dict[str, Any]], object]) -> None:
    """Run ``rank`` with its task in a process that run_ranks() has started, and otherwise the command ``main``."""
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        rank(json.loads(sys.argv[1]))
    else:
        main()


def report(rows: Sequence[dict[str, Any]]) -> None:
    """On rank 0: hand over rows of results, which run_ranks() returns."""
    Path(os.environ[_ROWS]).write_text(json.dumps(rows), encoding="utf-8")


def run_undisturbed(run: Callable[[], list[dict[str, Any]]], until: float) -> list[dict[str, Any]]:
    """Repeat ``run`` until one is undisturbed, or until ``until``; returns the rows of the least disturbed one."""
    tried: list[tuple[float, list[dict[str, Any]]]] = []
    while True:
        while time.monotonic() < until and _others(lambda: time.sleep(1)) > _QUIET:
            pass
        found: list[dict[str, Any]] = []
        others = _others(lambda into=found: into.extend(run()))
        tried.append((others, [row | {"others": round(others, 3), "commit": commit()} for row in found]))
        if others < _QUIET or time.monotonic() > until:
            return min(tried, key=lambda each: each[0])[1]


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
    return {
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction set": instruction_set(),
        "mpi": _mpi(),
        "ucx": _ucx(),
        "tcp": congestion_control(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "qccl": qccl.__version__,
        "commit": commit(),
        "date": date.today().isoformat(),
        "load before": os.getloadavg(),
    }


def cpu() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")


def _mpi() -> str:
    """The name and version of MPI, from its mpiexec; "" without MPI."""
    if start.obstacle("mpi"):
        return ""
    found = find_mpiexec()
    return f"{found.name} {found.version}"


def _ucx() -> str:
    """The version of UCX in ranks that mpiexec starts: MPI's own UCX, if MPI has one."""
    program = (
        "from qccl.bench.sweep.plain import load_mpi; load_mpi(); from qccl.transports import ucx; print(ucx.version())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    return "" if done.returncode else f"UCX {done.stdout.strip()}"


def commit() -> str:
    """The commit of the sources, with "+" if files other than results and figures differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", ":/", ":(top,exclude)docs/results", ":(top,exclude)docs/*.png")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def todays(kind: str) -> Path:
    """Today's results file of this kind."""
    return _RESULTS / f"{kind}-{date.today().isoformat()}.json"


def read(path: Path) -> dict[str, Any]:
    """The document of a results file. Raises SystemExit, with the reason, for any other file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise SystemExit(
            f"{path} is not a results file ({error}); give one that these scripts wrote, or remove it"
        ) from error
    if not isinstance(found, dict):
        raise SystemExit(f"{path} is not a results file: its JSON is of type {type(found).__name__}; remove it")
    return found


def begun(path: Path, *, resume: bool) -> dict[str, Any]:
    """The document to add results to: with ``resume`` the file's, if there is a file; otherwise a new one."""
    found = read(path) if resume and path.exists() else {}
    return found if "machine" in found else {"machine": machine(), "rows": []} | found


def store(path: Path, document: dict[str, Any]) -> None:
    """Write a results file, which names the commits of all runs that have stored something in it."""
    commits = [*document["machine"]["commit"].split(", "), commit()]
    document["machine"]["commit"] = ", ".join(dict.fromkeys(commits))
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def save(document: dict[str, Any]) -> None:
    """Write today's file; in an existing file replace the rows with the same keys and keep the others."""
    _RESULTS.mkdir(parents=True, exist_ok=True)
    path = todays("host")
    if path.exists():
        before = read(path)
        for section, rows in before.items():
            if section != "machine":
                document[section] = _renewed(rows, document.get(section, []))
    store(path, document)
    print(f"wrote {path}")


def _renewed(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def kind(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(key) for key in _KIND)

    renewed = [kind(row) for row in rows]
    rows = rows + [row for row in before if kind(row) not in renewed]
    return sorted(rows, key=lambda row: (parse_link(row["link"]).rate if row["link"] else 0, row["count"]))
