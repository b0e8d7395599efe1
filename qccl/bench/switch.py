"""The lab's network as a process of its own: the forwarder, in a network namespace with the other ends of all links.

It is the same on every kernel: the kernel's netem is not needed, and not used where it exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence

from qccl._host import lab_port_address
from qccl.bench.counters import Counters
from qccl.bench.forwarder import READY
from qccl.bench.network import Network
from qccl.bench.tools import LabError

__all__ = ["MTU", "Switch", "port_address"]

#: of the links: what the internet carries
MTU = "1500"
_START_SECONDS, _END_SECONDS = 60.0, 5.0


def port_address(port: int) -> str:
    """The Ethernet address that the interface of port ``port`` must have: "02:71:63:63:00:01"."""
    return lab_port_address(port).hex(":")


class Switch:
    """Forwards packets between ``interfaces`` of a network namespace, as ``network`` delays, loses and limits them.

    The first interfaces lead to the network's sites; the others to machines outside of it, for which nothing is delayed
    or lost. Raises LabError if the process does not start.

    Attributes:
        process: the forwarder's.
        counters: of the packets between the sites, as they are at each moment.
    """

    def __init__(self, namespace: str, interfaces: Sequence[str], network: Network) -> None:
        memory = os.memfd_create("qccl-lab")
        try:
            self.counters = Counters(len(network.sites), memory)
            task = json.dumps({**network.to_json(), "interfaces": list(interfaces), "counters": memory})
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", namespace, sys.executable, "-P", "-m", "qccl.bench.forwarder"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[memory],
                start_new_session=True,  # Ctrl-C is for the lab's process, which then closes the pipe
            )
        finally:
            os.close(memory)
        try:
            self._give(task)
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _give(self, task: str) -> None:
        """Write the task to the process's standard input, which stays open as long as this process lives."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and says why
            self.process.stdin.write(task.encode() + b"\n")
            self.process.stdin.flush()

    def _wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], _START_SECONDS)
        line = self.process.stdout.readline().decode(errors="replace").strip() if ready else ""
        if line != READY:
            self.process.kill()
            rest = self.process.stdout.read().decode(errors="replace") if ready else "it printed nothing"
            raise LabError(f"the lab's forwarder did not start: {line} {rest}".rstrip())

    def check_alive(self) -> None:
        """Raise LabError if the process has ended: then no packet arrives any more."""
        if (status := self.process.poll()) is not None:
            assert self.process.stdout is not None
            said = self.process.stdout.read().decode(errors="replace").strip()
            raise LabError(f"the lab's forwarder has ended with status {status}: {said or 'it printed nothing'}")

    def close(self) -> None:
        """End the process. Idempotent."""
        process = self.process
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
