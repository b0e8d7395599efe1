"""Starts the ranks of test_torch.py: ``torch_fork.py FOLDER SIZE NAME...`` runs functions of torch_ranks.py, or
of another module: ``module.function``.

The ranks are forks of one process, which has imported PyTorch, because the import takes longer than a run; qccl is
imported by the ranks. Each rank ends as Python ends any program. Rank r writes to FOLDER/r.out and FOLDER/r.err; this
process prints a line when a rank has ended or stopped: rank, exit status, time.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist
from plain_ranks import free_ports, torch_variables


def be_a_rank(rank: int, size: int, port: int, folder: Path) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT), number)
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
    ranks = {}
    for rank in range(size):
        if (pid := os.fork()) == 0:
            return be_a_rank(rank, size, port, folder)
        ranks[pid] = rank
    while ranks:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        ended = "stopped" if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
        print(ranks.pop(pid), ended, time.time(), flush=True)
    return None


if __name__ == "__main__":
    main()
