"""Starts Python processes with torchrun's variables, as mpiexec starts ranks: ``plain_ranks.py N ARGUMENT...``.

Its status is the first one that is not 0. Processes that have stopped are killed when all others have ended.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
from contextlib import suppress


def free_ports(count: int) -> list[int]:
    """Ports that are free and stay so: the system gives none below 32768 to the connections of other programs."""
    found: set[int] = set()
    while len(found) < count:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.add(port)
    return list(found)


def main() -> int:
    size = sys.argv[1]
    master_port, port = free_ports(2)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(master_port), "QCCL_PORT": str(port)}
    left: dict[int, int] = {}
    stopped, worst = set(), 0
    for rank in range(int(size)):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        command = [sys.executable, *sys.argv[2:]]
        left[os.posix_spawn(sys.executable, command, os.environ | place | ranks)] = rank
    while left.keys() - stopped:
        pid, status = os.waitpid(-1, os.WUNTRACED | os.WCONTINUED)
        if os.WIFSTOPPED(status):
            stopped.add(pid)
        elif os.WIFCONTINUED(status):
            stopped.discard(pid)
        else:
            rank, code = left.pop(pid), os.waitstatus_to_exitcode(status)
            if code:  # a process that a signal ends says nothing itself
                print(f"plain_ranks.py: rank {rank} ended with status {code}", file=sys.stderr, flush=True)
            worst = worst or abs(code)
    for pid, rank in left.items():
        print(f"plain_ranks.py: rank {rank} has stopped and is killed", file=sys.stderr, flush=True)
        os.kill(pid, signal.SIGKILL)
    return worst or len(left)


if __name__ == "__main__":
    sys.exit(main())
