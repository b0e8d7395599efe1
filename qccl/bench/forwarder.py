"""The process that is the lab's network: ``python -m qccl.bench.forwarder``, started by qccl.bench.switch.

The first line of its standard input, JSON, says what it is to do. It forwards packets between the interfaces of its
network namespace until its standard input ends, which happens when the lab's process closes it or ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from qccl._host import LabForwarder, LabNetwork
from qccl.bench.counters import Counters

__all__ = ["READY", "main"]

#: the line that says that it forwards
READY = "forwarding"


def main(task: dict[str, Any]) -> None:
    """Forward as ``task`` says (Network.to_json(), the interfaces, and the descriptor of the counters)."""
    counters = Counters(len(task["sites"]), task["counters"])
    lapses, paths = counters.addresses
    network = LabNetwork([tuple(site) for site in task["sites"]], task["seed"], paths)
    for path in task["paths"]:
        network.set_path(*path)
    _hurry()
    forwarder = LabForwarder(task["interfaces"], network, lapses, task["grain"])
    print(READY, flush=True)
    forwarder.run(sys.stdin.fileno())


def _hurry() -> None:
    """Run before all else: ranks that poll keep every processor busy, and it sleeps most of the time."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


if __name__ == "__main__":
    main(json.loads(sys.stdin.readline()))
