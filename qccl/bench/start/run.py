"""``qccl-bench run``: the user's own program as several ranks, behind a slow network, with its traffic counted."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from qccl.bench.lab.lab import Lab, obstacle
from qccl.bench.lab.namespaces import congestion_control
from qccl.bench.lab.network import NetworkOptions, network_flags, network_of
from qccl.bench.params import AT_LEAST_1, option, output_file, write_json
from qccl.bench.start.mpiexec import find_mpiexec
from qccl.bench.start.processes import exit_status, run_processes
from qccl.bench.start.start import Way, commands, environment, share_of_processors
from qccl.meeting.launchers import detect, unset

__all__ = ["run"]

_LAUNCHER_HELP = "Start the ranks by mpiexec, or with torchrun's variables (torchrun itself is not used) [torchrun]."
_JSON_HELP = "Write the time, the exit status and the bytes that each rank sent."
#: time for a rank's last lines, which a process that left its session may hold back
_JOIN_SECONDS = 5.0


@click.command(
    short_help="Run your own program behind a slow network.", context_settings={"allow_interspersed_args": False}
)
@option("--ranks", AT_LEAST_1, "N", "Processes to start [2].", 2)
@network_flags
@option("--launcher", click.Choice(["torchrun", "mpiexec"]), None, _LAUNCHER_HELP, "torchrun")
@option("-J --json path", output_file, "FILE", _JSON_HELP)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    ranks: int,
    launcher: str,
    path: str | None,
    command: tuple[str, ...],
    **network: Any,
) -> None:
    """Run COMMAND as several ranks on this machine, for example:

    qccl-bench run --ranks 4 --link 100mbit -- python train.py --lr 0.1

    With --link each rank is in a network namespace of its own, behind a link of that rate, and the bytes that the ranks
    sent over their links are printed at the end; --delay and --loss make it a network between sites. The ranks' lines
    begin with the rank's number. The exit status is that of the first rank that failed; the others are then ended.
    """
    options = network_of(network)
    _check(ranks, options.flag, command)
    ctx.exit(exit_status(lambda: _run(ranks, options, launcher, path, command)))


def _check(ranks: int, lab: str, command: Sequence[str]) -> None:
    """Raise UsageError for a run that is impossible."""
    found = detect()
    if found is not None and found.processes > 1:
        raise click.UsageError(
            f"run starts its own ranks, but {found.name} has started {found.size}; start it without a launcher, or if "
            f"there was none, with {unset(found)}"
        )
    if lab and ranks == 1:
        raise click.UsageError(f"{lab} with one rank: nothing would cross the link; give --ranks 2 or more")
    if lab and (reason := obstacle()):
        raise click.UsageError(f"{lab}: {reason}")
    if shutil.which(command[0]) is None:
        raise click.UsageError(f"{command[0]!r} is neither a program in PATH nor a file that can be executed")


def _run(ranks: int, network: NetworkOptions, launcher: str, path: str | None, command: Sequence[str]) -> int:
    """Run the program, and report the traffic, also if the run is stopped. Returns the exit status."""
    way = Way(None, find_mpiexec() if launcher == "mpiexec" else None)
    lab = network.lab(ranks)
    with lab or contextlib.nullcontext():
        begin, status = time.monotonic(), 1
        try:
            status = _run_ranks(way, ranks, lab, command)
        finally:
            seconds, sent = time.monotonic() - begin, lab.shaped_nbytes() if lab else []
            for line in _report(ranks, network, seconds, sent):
                click.echo(line, err=True)
            if path is not None:
                found = {"ranks": ranks, "link": network.link, **network.to_json(), "seconds": seconds, "sent": sent}
                write_json(path, {**found, "status": status, "command": list(command)})
    return status


def _report(ranks: int, network: NetworkOptions, seconds: float, sent: Sequence[int]) -> Iterator[str]:
    """Yield the lines at the end: the bytes that passed each rank's link, with the headers of TCP and IP."""
    yield f"# qccl-bench run: {ranks} ranks, {seconds:.2f} s"
    if (link := network.rate) is None:
        return
    yield f"# link: {network.describe('rank')}, TCP {network.tcp or congestion_control()}"
    yield "# share of what it could carry in that time, in which the ranks also start and compute"
    yield f"# rank {'sent MB':>10} {'share':>7}"
    for rank, nbytes in enumerate(sent):
        yield f"# {rank:>4} {nbytes / 1e6:>10.3f} {nbytes / (link.rate * seconds):>7.1%}"


def _run_ranks(way: Way, ranks: int, lab: Lab | None, command: Sequence[str]) -> int:
    """Run the program's ranks, and print their lines. Returns the exit status."""
    variables = environment(way, ranks, lab, 0, {"OMP_NUM_THREADS": str(share_of_processors(ranks))})
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qccl-bench-")))
        for rank in range(ranks):
            for name in ("out", "err"):
                stack.enter_context(_shown(folder / f"{rank}.{name}", rank, is_error=name == "err"))
        variable = "RANK" if way.mpi is None else way.mpi.rank_variable
        # every rank opens its own pipes, because mpiexec would pass on lines in pieces
        script = f'exec "$@" >"$0/${variable}.out" 2>"$0/${variable}.err"'
        inside = ["/bin/sh", "-c", script, str(folder), *command]
        return run_processes([(words, variables | own) for words, own in commands(way, ranks, inside, lab)])


@contextlib.contextmanager
def _shown(path: Path, rank: int, *, is_error: bool) -> Iterator[None]:
    """Make a named pipe, and show its lines with the rank's number, by a thread, until all writers have ended."""
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without O_NONBLOCK this would wait for a writer
    writer = os.open(path, os.O_WRONLY)
    os.set_blocking(reader, True)

    def show() -> None:
        with open(reader, errors="replace", newline="\n") as lines:
            for line in lines:
                click.echo(f"[{rank}] {line.removesuffix(os.linesep)}", err=is_error)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(writer)
        thread.join(_JOIN_SECONDS)
