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
    left, stopped, worst = set(), set(), 0
    for rank in range(int(size)):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        command = [sys.executable, *sys.argv[2:]]
        left.add(os.posix_spawn(sys.executable, command, os.environ | place | ranks))
    while left - stopped:
        pid, status = os.waitpid(-1, os.WUNTRACED | os.WCONTINUED)
        if os.WIFSTOPPED(status):
            stopped.add(pid)
        elif os.WIFCONTINUED(status):
            stopped.discard(pid)
        else:
            left.discard(pid)
            worst = worst or abs(os.waitstatus_to_exitcode(status))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return worst or len(left)


if __name__ == "__main__":
    sys.exit(main())
