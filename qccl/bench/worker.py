"""A rank of ``qccl-bench``: ``python -m qccl.bench.worker OPTIONS-AS-JSON [N]``; with N, all N ranks, as threads."""

from __future__ import annotations

import sys

from qccl.bench.options import Options
from qccl.bench.progress import encode_progress
from qccl.bench.rank import run_rank, run_threads

__all__ = ["main"]


def main(argument: str, threads: str | None = None) -> int:
    """Measure as one rank, or as all; returns the exit status. Rank 0 prints lines and marked lines of progress."""
    given = Options.from_json(argument), _print, lambda *step: _print(encode_progress(*step))
    return run_rank(*given) if threads is None else run_threads(int(threads), *given)


def _print(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
