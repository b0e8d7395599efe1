"""Starts the ranks of test_torch.py: ``torch_fork.py FOLDER SIZE NAME...`` runs functions of torch_ranks.py, or
of another module: ``module.function``.

The ranks are forks of this process, which has imported PyTorch, because the import takes longer than a run; qccl is
imported by the ranks. Rank r writes to FOLDER/r.out and FOLDER/r.err; this process prints a line for each rank when it
has ended, or at the end if it has stopped: rank, exit status, time.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch.distributed as dist
from forked_ranks import Forks
from plain_ranks import free_ports, torch_variables


def be_a_rank(rank: int, size: int, port: int, folder: Path) -> None:
    os.dup2(os.open(folder / f"{rank}.out", os.O_WRONLY | os.O_CREAT), 1)
    settings = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "QCCL_TRANSPORT": "gloo"}
    os.environ |= torch_variables(rank, size, port) | settings
    dist.init_process_group("gloo")
    for name in sys.argv[3:]:
        module, _, function = name.rpartition(".")
        getattr(importlib.import_module(module or "torch_ranks"), function)()
        print("done", name, flush=True)


def main() -> None:
    folder, size = Path(sys.argv[1]), int(sys.argv[2])
    port = free_ports(1)[0]
    gc.freeze()  # so that the ranks' last collection of garbage need not visit these objects
    ranks = Forks(folder)
    for rank in range(size):
        ranks.start(rank, partial(be_a_rank, rank, size, port, folder))
    for rank in ranks.as_they_end():
        print(rank, ranks.statuses[rank], ranks.ends[rank], flush=True)
    for rank in ranks.running:
        print(rank, "stopped", time.time(), flush=True)


if __name__ == "__main__":
    main()
