"""``qccl-bench run``: the user's own program as several ranks, behind a slow network, with its traffic counted."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from qccl.bench.capacity import shared_processors
from qccl.bench.files import write_json
from qccl.bench.lab import Lab, obstacle
from qccl.bench.mpiexec import find_mpiexec
from qccl.bench.network_flags import lab_of, network_flags, network_of, show_network, show_remark
from qccl.bench.network_options import NetworkOptions
from qccl.bench.params import AT_LEAST_1, option, output_file
from qccl.bench.processes import LinePipe, Start, allow_descriptors, exit_status, run_processes
from qccl.bench.start import Way, commands, environment, share_of_processors
from qccl.bench.tcp import congestion_control
from qccl.launchers import detect

__all__ = ["run"]

_LAUNCHER_HELP = "mpiexec starts the ranks; or they get torchrun's variables (torchrun itself is not used) [torchrun]."
_JSON_HELP = "Write the time, the exit status and the bytes that each rank sent."
_DEFAULT_RANKS = 2
#: bytes of a rank with which its traffic begins: connecting takes fewer; and how often a thread looks at them
_FIRST_NBYTES, _LOOK_SECONDS = 16 << 10, 0.05
#: open files of this process for each rank (the two ends of two pipes, and one that tells its end), and besides
_DESCRIPTORS, _OWN_DESCRIPTORS = 5, 64


@dataclass(frozen=True)
class Traffic:
    """What a run sent.

    Attributes:
        ranks: their number.
        network: the lab's, as on the command line.
        seconds: from the start of the first rank to the end of the last.
        began: seconds from the start of the first rank to the first traffic; 0 if there was none.
        sent: bytes that passed each link (of a rank, or of a site), with the headers of TCP and IP; empty without one.
    """

    ranks: int
    network: NetworkOptions
    seconds: float
    began: float
    sent: list[int]

    def report(self) -> Iterator[str]:
        """The lines that the command prints at the end."""
        yield f"# qccl-bench run: {self.ranks} ranks, {self.seconds:.2f} s"
        if not self.network.flag:
            return
        what, seconds = "site" if self.network.sites else "rank", self.seconds - self.began
        yield f"# link: {self.network.describe('rank')}, TCP {self.network.tcp or congestion_control()}"
        yield f"# share of what it could carry in the {seconds:.2f} s since the first traffic"
        yield f"# {what:>4} {'sent MB':>10} {'share':>7}"
        for (name, rate), sent in zip(self.network.uplinks(self.ranks), self.sent, strict=True):
            yield f"# {name:>4} {sent / 1e6:>10.3f} {sent / (rate * seconds):>7.1%}"

    def to_json(self) -> dict[str, Any]:
        """For a results file."""
        o = self.network
        measured = {"seconds": self.seconds, "began": self.began, "sent": self.sent}
        return {"ranks": self.ranks, "link": o.link, **o.to_json(), **measured}


@click.command(
    short_help="Run your own program behind a slow network.", context_settings={"allow_interspersed_args": False}
)
@option("--ranks", AT_LEAST_1, "N", "Processes to start [2].")
@network_flags
@option("--launcher", click.Choice(["torchrun", "mpiexec"]), None, _LAUNCHER_HELP, "torchrun")
@option("-J --json path", output_file, "FILE", _JSON_HELP)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    ranks: int | None,
    launcher: str,
    path: str | None,
    command: tuple[str, ...],
    **network: Any,
) -> None:
    """Run COMMAND as several ranks on this machine, for example:

    qccl-bench run --ranks 4 --link 100mbit -- python train.py --lr 0.1

    With --link each rank is in a network namespace of its own, behind a link of that rate, and the bytes that the ranks
    sent over their links are printed at the end; --delay, --loss and so on add what networks between sites have. The
    ranks' lines begin with the rank's number. The exit status is that of the first rank that failed; the others are
    then ended.
    """
    options = network_of(network)
    count = ranks or options.ranks or _DEFAULT_RANKS
    _check(count, options.flag, command)
    if remark := shared_processors(count):
        click.echo(f"qccl-bench: {remark}", err=True)
    ctx.exit(exit_status(lambda: _run(count, options, launcher, path, command)))


def _check(ranks: int, lab: str, command: Sequence[str]) -> None:
    """Raise UsageError for what cannot run."""
    found = detect()
    if found is not None and found.size > 1:
        raise click.UsageError(
            f"run starts its own ranks, but {found.name} has started {found.size}; start it without a launcher"
        )
    if lab and ranks == 1:
        raise click.UsageError(f"{lab} with one rank: nothing would cross the link; give --ranks 2 or more")
    if lab and (reason := obstacle()):
        raise click.UsageError(f"{lab}: {reason}")
    if shutil.which(command[0]) is None:
        raise click.UsageError(f"{command[0]!r} is no program in PATH, and no file that can be executed")


def _run(ranks: int, options: NetworkOptions, launcher: str, path: str | None, command: Sequence[str]) -> int:
    """Run the program; returns the exit status. Reports the traffic, also of a run that is stopped."""
    way = Way(None, find_mpiexec() if launcher == "mpiexec" else None)
    with lab_of(options, ranks) as lab:
        show_network(lab)
        begin, status = time.monotonic(), 1
        traffic_begins: list[float] = []
        try:
            with _watched(lab, traffic_begins):
                status = _run_ranks(way, ranks, lab, command)
        finally:
            seconds, sent = time.monotonic() - begin, lab.shaped_nbytes() if lab else []
            began = traffic_begins[0] - begin if traffic_begins else 0.0
            traffic = Traffic(ranks, options, seconds, began, sent)
            for line in traffic.report():
                click.echo(line, err=True)
            show_remark(lab)
            if path is not None:
                write_json(path, {**traffic.to_json(), "status": status, "command": list(command)})
    return status


@contextlib.contextmanager
def _watched(lab: Lab | None, begins: list[float]) -> Iterator[None]:
    """Inside, a thread appends the time at which the first rank's traffic begins."""
    if lab is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_SECONDS):
            if max(lab.arrived_nbytes()) >= _FIRST_NBYTES:
                begins.append(time.monotonic())
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _run_ranks(way: Way, ranks: int, lab: Lab | None, command: Sequence[str]) -> int:
    """Run the program's ranks, and print their lines; returns the exit status."""
    variables = environment(way, ranks, lab, 0, {"OMP_NUM_THREADS": str(share_of_processors(ranks))})
    allow_descriptors(_DESCRIPTORS * ranks + _OWN_DESCRIPTORS)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qccl-bench-")))
        pipes = [
            stack.enter_context(LinePipe(partial(_show, rank, is_error=name == "err"), folder / f"{rank}.{name}"))
            for rank in range(ranks)
            for name in ("out", "err")
        ]
        variable = "RANK" if way.mpi is None else way.mpi.rank_variable
        # mpiexec would pass on a rank's output in pieces, so every rank opens pipes of its own
        script = f'exec "$@" >"$0/${variable}.out" 2>"$0/${variable}.err"'
        inside = ["/bin/sh", "-c", script, str(folder), *command]
        starts = [Start(words, variables | own) for words, own in commands(way, ranks, inside, lab)]
        return run_processes(starts, pipes, silence=None)


def _show(rank: int, line: str, *, is_error: bool) -> None:
    click.echo(f"[{rank}] {line}", err=is_error)
