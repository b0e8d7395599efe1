"""What the records and the statistics of calls cost: ``python bench/recording.py``.

Two calls of the same loop differ by less than two measurements of one call in Python, so this measures what a call
costs more in native code (``recording.cpp``, compiled here with g++ or the compiler that CXX names): with its totals
counted, and with its record made a second time, in blocks that take turns in one process. A process has the medians of
its blocks' differences, and the table has the median, the lowest and the highest of the processes, whose memory lies
differently. Beside them stands the share of the highest one in a call in Python, of one rank and of two over MPI, whose
time is the median of rounds. ``--write docs/howto/hangs.md`` replaces that page's table.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import click
import small_calls
from runs import document_table, machine, print_table, report, rewrite_table, run_ranks, start_script

import qccl

_ROOT = Path(__file__).parent.parent
_SOURCES = ("engine/loop.cpp", "engine/run.cpp", "engine/steps.cpp", "host/operations.cpp", "host/threads.cpp")
#: as the extension's Release build (CMakeLists.txt)
_FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "-fstack-protector-strong", "-D_FORTIFY_SOURCE=2", "-pthread")
#: of small_calls.calls()
_KINDS = ("all-reduce", "plan.run()")
_COLUMNS = (f"call of {small_calls.COUNT} elements", "takes", "its record", "at most", "its statistics", "at most")


@click.command()
@click.option("--processes", default=15, show_default=True, help="Of native code.")
@click.option("--blocks", default=500, show_default=True, help="Blocks of calls in each process, of each kind.")
@click.option("--write", help="A page whose table is to be replaced.")
def main(processes: int, blocks: int, write: str | None) -> None:
    """Measure, and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        found = costs(compiled(Path(folder)), processes, blocks)
    rows = [row for ranks in (1, 2) for row in run_ranks(__file__, ranks, {"ranks": ranks}, "mpi", None)]
    table = [cells(row, found) for row in rows]
    print_table(_COLUMNS, table)
    if write:
        rewrite_table(write, "python bench/recording.py", document_table(_COLUMNS, table, machine()))


def compiled(folder: Path) -> Path:
    """The native program, compiled to this folder."""
    program = folder / "recording"
    sources = [Path(__file__).with_suffix(".cpp"), *(_ROOT / "kernels" / name for name in _SOURCES)]
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, *_FLAGS, "-o", str(program), *map(str, sources)], check=True, timeout=600)
    return program


def costs(program: Path, processes: int, blocks: int) -> dict[str, list[float]]:
    """Nanoseconds of "call", "records" and "statistics" in each of so many processes, in ascending order."""
    found: dict[str, list[float]] = {}
    for _ in range(processes):
        done = subprocess.run([program, str(blocks)], check=True, timeout=600, capture_output=True, text=True)
        for name, value in map(str.split, done.stdout.splitlines()):
            found.setdefault(name, []).append(float(value))
    return {name: sorted(values) for name, values in found.items()}


def cells(row: dict[str, Any], found: dict[str, list[float]]) -> list[str]:
    """A row of the table: a call's time, and what costs() has found beside it. The shares are of the highest costs."""
    written = [f"{row['kind']}, {row['ranks']} rank{'s' if row['ranks'] > 1 else ''}", f"{row['us']:.2f} us"]
    for each in (found["records"], found["statistics"]):
        written += [f"{statistics.median(each):.1f} ns ({each[0]:.1f} to {each[-1]:.1f})"]
        written += [f"{each[-1] / row['us'] / 1e3:.2%}"]
    return written


def _as_rank(task: dict[str, Any]) -> None:
    with qccl.init("host") as comm:
        times = small_calls.measure(comm, (each for each in small_calls.calls(comm) if each[0] in _KINDS))
        rows = [{"kind": each["kind"], "us": statistics.median(each["us"])} for each in times]
        if comm.rank == 0:
            report(rows)


if __name__ == "__main__":
    start_script(main, _as_rank)
