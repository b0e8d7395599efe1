"""The ranks of ``qccl-bench``: each makes the communicator of all ranks, under any launcher, and runs the sweep.

``python -m qccl.bench.sweep.worker OPTIONS-AS-JSON [N]`` is one rank; with N it is all N ranks, as threads.
"""

from __future__ import annotations

import os
import sys

from qccl.base.errors import ArgumentError, CodecError, PeerLost, QcclError
from qccl.bench.options import SweepOptions
from qccl.bench.start.launched import let_rank_0_speak
from qccl.bench.sweep.plain import load_mpi
from qccl.bench.sweep.sweep import Sweep
from qccl.communicator.launch import init
from qccl.communicator.ranks import run_ranks
from qccl.meeting.launchers import detect

__all__ = ["run_rank"]


def run_rank(options: SweepOptions) -> int:
    """Collective: measure as one rank. Returns the exit status.

    Each rank reports its own error, and rank 0 alone the loss of another rank, unless that rank has reported its error.
    """
    launcher = detect()
    rank = launcher.rank if launcher else 0
    if options.plain == "mpi":
        load_mpi()  # before UCX, so that MPI's own UCX is used: two cannot be loaded
    try:
        with init(options.backend, options.timeout, transport=options.transport or "auto") as comm:
            return 0 if Sweep(comm, options, _show).run() else 1
    except (ArgumentError, CodecError) as error:
        let_rank_0_speak(launcher)
        _report(rank, error)
    except QcclError as error:
        if not isinstance(error, PeerLost) or (rank == 0 and error.reason is None):
            _report(rank, error)
    return 1


def _run_threads(ranks: int, options: SweepOptions) -> int:
    """Measure as ``ranks`` threads of this process. Returns the exit status."""
    try:
        found = run_ranks(ranks, lambda comm: Sweep(comm, options, _show).run(), timeout=options.timeout)
        return 0 if found[0] else 1
    except QcclError as error:
        _report(0, error)
        return 1


def _show(line: str) -> None:
    """Print a line of the table; ends this process if nobody reads them."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        os._exit(1)


def _report(rank: int, error: Exception) -> None:
    print(f"qccl-bench: rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    given = SweepOptions.from_json(sys.argv[1])
    sys.exit(run_rank(given) if len(sys.argv) == 2 else _run_threads(int(sys.argv[2]), given))
