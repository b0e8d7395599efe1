"""A rank of test_far_ranks.py, started by ``qccl-bench run`` with a delay between the ranks.

far_ranks.py shrink    Each rank calls shrink() as soon as its own call has ended.
"""

from __future__ import annotations

import sys

import numpy as np
import patience

import qccl


def shrink(comm: qccl.Communicator) -> qccl.Communicator:
    """The ranks do not end a call at the same moment; it must end on all of them, with the right sum."""
    size = comm.size
    for count in (10, 1000, 300_000):
        found = comm.quantized_allreduce(np.full(count, comm.rank + 1, np.float32), codec="none")
        comm = comm.shrink()
        assert comm.size == size
        assert (found == size * (size + 1) / 2).all()
    return comm


if __name__ == "__main__":
    with globals()[sys.argv[1]](qccl.init("host", 60.0 * patience.factor())) as last:
        print(f"rank {last.rank} of {last.size} over {last.transport.name} is done", flush=True)
