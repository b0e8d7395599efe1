"""What mpiexec starts: one rank of ``qccl-bench``. ``python -m qccl.bench.worker OPTIONS-AS-JSON``."""

from __future__ import annotations

import sys

import qccl
from qccl.bench.options import Options
from qccl.bench.progress import encode_progress
from qccl.bench.sweep import Sweep

__all__ = ["main"]


def main(argument: str) -> int:
    """Measure as one rank; the exit status. Rank 0's lines go to standard output, its progress among them, marked."""
    options = Options.from_json(argument)
    try:
        with qccl.init(backend=options.backend, timeout=options.timeout) as comm:
            sweep = Sweep(comm, options, emit=_print, progress=lambda *step: _print(encode_progress(*step)))
            return 0 if sweep.run() else 1
    except qccl.PeerLost:
        return 1  # the rank that failed says why
    except qccl.QcclError as error:
        print(f"qccl-bench: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _print(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
