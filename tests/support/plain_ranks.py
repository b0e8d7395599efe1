"""Starts Python processes with torchrun's variables, as mpiexec starts ranks: ``plain_ranks.py N ARGUMENT...``.

With ``--import MODULE,...`` before the arguments the ranks are forks of this process, which has imported these modules:
the import of PyTorch takes longer than many a run. Such ranks have the same seed for the hashes of texts, so a program
whose ranks must not depend on the order of a set needs ranks that are no forks.

The status is the first one that is not 0. Processes that have stopped are killed when all others have ended.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import runpy
import signal
import socket
import sys
from collections import deque
from functools import partial
from pathlib import Path

from forked_ranks import Forks

_PORTS = range(20_000, 32_000, 32)
_WORKERS = 8
#: sockets whose names say to the other processes of tests which ports this one has found: the last of them
_claims: deque[socket.socket] = deque()
_MOST_CLAIMS = 16


def free_ports(count: int) -> list[int]:
    """Ports that are free and stay so, and so are the 31 above each: qccl and torchrun add something to MASTER_PORT.

    The system gives none below 32768 to the connections of other programs. Each worker of pytest-xdist has its own, and
    other runs of the tests on this machine pass over them.
    """
    ports = _PORTS
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        ports = ports[int(worker.removeprefix("gw")) % _WORKERS :: _WORKERS]
    found: set[int] = set()
    while len(found) < count:
        port, claim = random.choice(ports), socket.socket(socket.AF_UNIX)
        try:
            with socket.create_server(("127.0.0.1", port)):
                claim.bind(f"\0qccl tests' port {port}")  # the system frees this name with its socket
        except OSError:  # somebody has this one
            claim.close()
            continue
        found.add(port)
        _claims.append(claim)
    while len(_claims) > max(count, _MOST_CLAIMS):
        _claims.popleft().close()
    return list(found)


def torch_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """torchrun's variables for a rank of one machine."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {key: str(value) for key, value in (ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).items()}


def be_a_rank(arguments: list[str], variables: dict[str, str], *, fork: bool) -> None:
    """Run Python with ``arguments`` in this process, which is a fork, or anew."""
    os.environ |= variables
    if not fork:
        os.execv(sys.executable, [sys.executable, *arguments])
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def main() -> int:
    size, arguments = int(sys.argv[1]), sys.argv[2:]
    if fork := arguments[0] == "--import":
        for name in arguments[1].split(","):
            importlib.import_module(name)
        arguments = arguments[2:]
        gc.freeze()  # so that the ranks' last collection of garbage need not visit these objects
    master_port, port = free_ports(2)
    ranks = Forks()
    for rank in range(size):
        variables = torch_variables(rank, size, master_port) | {"QCCL_PORT": str(port)}
        ranks.start(rank, partial(be_a_rank, arguments, variables, fork=fork))
    for rank in ranks.as_they_end():
        if code := ranks.statuses[rank]:  # a process that a signal ends says nothing itself
            print(f"plain_ranks.py: rank {rank} ended with status {code}", file=sys.stderr, flush=True)
    for rank in ranks.running:
        print(f"plain_ranks.py: rank {rank} has stopped and is killed", file=sys.stderr, flush=True)
        ranks.signal(rank, signal.SIGKILL)
    return next((abs(code) for code in ranks.statuses.values() if code), len(ranks.running))


if __name__ == "__main__":
    sys.exit(main())
