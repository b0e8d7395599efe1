"""The ranks of ``qccl-bench``: each makes the communicator of all ranks, under any launcher, and runs the sweep.

``python -m qccl.bench.worker OPTIONS-AS-JSON [N]`` is one rank; with N it is all N ranks, as threads.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import qccl
from qccl.bench.options import Options
from qccl.bench.plain import load_mpi
from qccl.bench.progress import Progress, encode_progress
from qccl.bench.sweep import Sweep
from qccl.launchers import detect

__all__ = ["main", "run_rank"]


def run_rank(options: Options, emit: Callable[[str], None], progress: Progress) -> int:
    """Collective: measure as one rank; returns the exit status. ``emit`` and ``progress``: see Sweep.

    All ranks have the same wrong arguments. Only rank 0 reports them and fails, because launchers end all ranks
    when one fails, before another could print the reason. Rank 0 alone reports the loss of another rank, unless that
    rank has reported its own error.
    """
    launcher = detect()
    rank = launcher.rank if launcher else 0
    if options.plain == "mpi":
        load_mpi()  # before UCX, which is then MPI's own: a second one cannot be loaded beside it
    try:
        with qccl.init(options.backend, options.timeout, transport=options.transport or "auto") as comm:
            return 0 if Sweep(comm, options, emit, progress).run() else 1
    except (qccl.ArgumentError, qccl.CodecError) as error:
        if rank == 0:
            _report(rank, error)
        return int(rank == 0)
    except qccl.QcclError as error:
        if not isinstance(error, qccl.PeerLost) or (rank == 0 and " gave up: " not in str(error)):
            _report(rank, error)
    return 1


def _run_threads(ranks: int, options: Options, emit: Callable[[str], None], progress: Progress) -> int:
    """Measure as ``ranks`` threads of this process; returns the exit status."""

    def run(comm: qccl.Communicator) -> bool:
        return Sweep(comm, options, emit, progress).run()

    try:
        return 0 if qccl.run_ranks(ranks, run, timeout=options.timeout)[0] else 1
    except qccl.QcclError as error:
        _report(0, error)
        return 1


def _report(rank: int, error: Exception) -> None:
    print(f"qccl-bench: rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)


def main(argument: str, threads: str | None = None) -> int:
    """Measure as one rank, or as all; returns the exit status. Rank 0 prints lines and marked lines of progress."""
    given = Options.from_json(argument), _print, lambda *step: _print(encode_progress(*step))
    return run_rank(*given) if threads is None else _run_threads(int(threads), *given)


def _print(line: str) -> None:
    try:
        print(line, flush=True)
    except BrokenPipeError:  # the command was killed, and its end is about to end this process by the same signal
        signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
