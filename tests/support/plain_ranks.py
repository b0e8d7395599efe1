"""Free ports, torchrun's variables, and ranks that run a program with these, as those of mpiexec do."""

from __future__ import annotations

import json
import os
import random
import runpy
import socket
import sys
from collections import deque
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: the command of be_a_rank(): the arguments of Python, whether this process runs them itself, and a port
COMMAND = "QCCL_TEST_COMMAND"
_PORTS = range(20_000, 32_000, 32)
#: sockets whose names say to the other processes of tests which ports this one has found: the last of them
_claims: deque[socket.socket] = deque()
_MOST_CLAIMS = 16


def free_ports(count: int) -> list[int]:
    """Ports that are free and stay so, and so are the 31 above each: qccl and torchrun add something to MASTER_PORT.

    The system gives none below 32768 to the connections of other programs. Other processes of tests on this machine
    pass over those that this one has found.
    """
    found: set[int] = set()
    while len(found) < count:
        port, claim = random.choice(_PORTS), socket.socket(socket.AF_UNIX)
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


def be_a_rank(rank: int, size: int, address: str) -> None:
    """The body of start_plain(): run Python with the arguments of the command in this process, or anew."""
    arguments, is_fork, port = json.loads(os.environ.pop(COMMAND))
    os.environ |= torch_variables(rank, size, int(address.rpartition(":")[2])) | {"QCCL_PORT": str(port)}
    os.chdir(ROOT)
    os.dup2(1, 2)  # one text, in the order in which it was written
    if not is_fork:
        os.execv(sys.executable, [sys.executable, *arguments])
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")
