"""One rank of ``qccl-bench``, started by mpiexec: ``python -m qccl.bench.worker OPTIONS-AS-JSON``."""

from __future__ import annotations

import sys

from qccl.bench.options import Options
from qccl.bench.progress import encode_progress
from qccl.bench.rank import run_rank

__all__ = ["main"]


def main(argument: str) -> int:
    """Measure as one rank; returns the exit status. Rank 0 prints lines and marked lines of progress."""
    return run_rank(Options.from_json(argument), _print, lambda *step: _print(encode_progress(*step)))


def _print(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
