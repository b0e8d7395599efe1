"""Ranks over UCX that are killed in the middle of their calls, and the survivors' next group.

``lost_ranks_ucx.py --runs 300`` kills one of 3 or 4 ranks in each run, at a random moment, in turn over shared memory
and TCP, and prints one line of JSON for every survivor. A survivor must raise PeerLost with the killed rank's number
within the keepalive and one second, shrink, end the next 20 collectives with the right sums, and at its end have as
many descriptors as at its begin. In every sixth run a new process joins the survivors. The exit status is 1 where a
process did something else.

The ranks are forks of this process, which has loaded no UCX. It waits for its children all the time: UCX takes a
process that has ended, but was not waited for, to be alive.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import patience
from lost_ranks import Rank, calls_for_ever, follow, say
from plain_ranks import free_ports

import qccl
from qccl.transports.ucx import UcxTransport

TIMEOUT = 20.0 * patience.factor()
#: the keepalive over shared memory, and one second
NOTICE = 2.0
PATIENCE = 90.0 * patience.factor()
NETWORKS = {"shared memory": None, "tcp": "tcp,self"}
#: in every so many runs a process joins
JOINS = 6


# -- one rank --------------------------------------------------------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def check_sums(comm: qccl.Communicator) -> None:
    """Twenty collectives of all sizes."""
    for call in range(20):
        x = np.full(1 + 7919 * call, comm.rank + 1, np.float32)
        comm.quantized_allreduce(x, codec=("none", "minmax8")[call % 2])
        assert (x == comm.size * (comm.size + 1) / 2).all(), (call, x)


def survive(rank: int, size: int, victim: int, address: str, seed: int, *, joins: bool) -> None:
    UcxTransport(lambda note: [note], TIMEOUT).close()  # from now on UCX is loaded, and has its own descriptors
    before = descriptors()
    comm = qccl.init("host", TIMEOUT, rank=rank, size=size, address=address)
    comm.barrier()
    say(ready=os.getpid())
    try:
        calls_for_ever(comm, seed)
    except qccl.QcclError as error:
        say(error=type(error).__name__, text=str(error), at=time.time())
    begin = time.time()
    comm = comm.shrink()
    say(shrunk=time.time() - begin)
    members = [int(note) for note in comm.allgather(str(rank).encode())]
    assert members == [r for r in range(size) if r != victim], members
    check_sums(comm)
    if joins:
        say(address=comm.address)
        comm = comm.grow(size)
        assert (comm.rank, comm.size) == (members.index(rank), size)
        check_sums(comm)
    calls = [int(note) for note in comm.allgather(str(comm.calls).encode())]
    assert min(calls) == max(calls), calls
    comm.close()
    say(done=True, descriptors=descriptors() - before)


def newcomer(address: str, size: int) -> None:
    comm = qccl.join(address, TIMEOUT)
    assert (comm.rank, comm.size) == (size - 1, size)
    check_sums(comm)
    comm.allgather(str(comm.calls).encode())
    comm.close()
    say(done=True)


# -- a run -----------------------------------------------------------------------------------------------------------


class Run:
    """A group of ranks, one of which is killed."""

    def __init__(self, number: int, seed: int) -> None:
        chosen = random.Random(seed)
        self.number, self.seed = number, seed
        self.network = list(NETWORKS)[number % 2]
        self.joins = number % JOINS == JOINS - 1 - number // JOINS % 2  # over both networks
        self.size = chosen.choice((3, 4))
        self.victim = chosen.randrange(self.size)
        self.delay = chosen.uniform(0, 1)
        self.folder = Path(tempfile.mkdtemp(prefix="lost_ranks."))
        self.begin = self.ready = self.killed = 0.0
        self.ranks: list[Rank] = []

    def start(self) -> None:
        self.begin = time.time()
        address = f"127.0.0.1:{free_ports(1)[0]}"
        for rank in range(self.size):
            self._fork(survive, rank, self.size, self.victim, address, self.seed)

    def _fork(self, work, *arguments) -> None:
        number = len(self.ranks)
        output, errors = self.folder / f"{number}.out", self.folder / f"{number}.err"
        pid = os.fork()
        if pid == 0:
            for descriptor, path in ((1, output), (2, errors)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
            os.environ["OMP_NUM_THREADS"] = "1"
            if NETWORKS[self.network]:
                os.environ["UCX_TLS"] = NETWORKS[self.network]
            if work is survive:
                work(*arguments, joins=self.joins)
            else:
                work(*arguments)
            sys.exit()
        self.ranks.append(Rank(pid, output, errors))

    def advance(self) -> bool:
        """Do what is due; whether the run is over."""
        now = time.time()
        ended = [rank.watch() for rank in self.ranks]
        if not self.killed:
            for rank in self.ranks:
                rank.listen()
            is_ready = all("ready" in rank.said for rank in self.ranks)
            self.ready = self.ready or (now if is_ready else 0.0)
            if self.ready and now > self.ready + self.delay:
                os.kill(self.ranks[self.victim].pid, signal.SIGKILL)
                self.killed = time.time()
            return (any(ended) or now > self.begin + PATIENCE) and self.stop()
        if self.joins and len(self.ranks) == self.size:
            survivor = self.ranks[0 if self.victim else 1]
            survivor.listen()
            if "address" in survivor.said:
                self._fork(newcomer, survivor.said["address"], self.size)
                return False
        return (all(ended) or now > self.killed + PATIENCE) and self.stop()

    def stop(self) -> bool:
        for rank in self.ranks:
            if not rank.watch():
                os.kill(rank.pid, signal.SIGKILL)
                os.waitpid(rank.pid, 0)
            rank.listen()
        return True

    def verdicts(self, notice: float) -> list[dict[str, object]]:
        """Of each survivor and of the newcomer; "wrong" says what it did wrong."""
        found = [self._verdict(n, rank, notice) for n, rank in enumerate(self.ranks) if n != self.victim]
        if self.joins and len(self.ranks) == self.size:
            found[0]["wrong"] = f"{found[0]['wrong']}, nobody could join".lstrip(", ")
        shutil.rmtree(self.folder)
        return found

    def _verdict(self, number: int, rank: Rank, notice: float) -> dict[str, object]:
        said, wrong = rank.said, []
        raised = float(said.get("at", 0)) - self.killed
        if not self.killed:
            wrong.append("the ranks did not start")
        if number < self.size:
            if said.get("error") != "PeerLost" or not re.search(
                rf"\brank {self.victim} was lost", str(said.get("text"))
            ):
                wrong.append("does not name the lost rank")
            if raised > notice:
                wrong.append("raised late")
            if said.get("descriptors"):
                wrong.append(f"has {said['descriptors']} more descriptors")
        if not said.get("done") or rank.status != 0:
            wrong.append(f"ended with {rank.status}" if rank.ended else "did not end")
        errors = rank.errors.read_text() if rank.errors.exists() else ""
        return {
            "run": self.number, "seed": self.seed, "network": self.network, "size": self.size, "killed": self.victim,
            "rank": number, "joins": self.joins, "text": said.get("text"), "raised": round(raised, 3),
            "shrunk": said.get("shrunk"), "descriptors": said.get("descriptors"), "wrong": ", ".join(wrong),
            "stderr": errors if wrong else "",
        }  # fmt: skip


def summary(found: list[dict[str, object]]) -> str:
    lines = []
    for network in NETWORKS:
        survivors = [each for each in found if each["rank"] < each["size"] and each["network"] == network]
        if survivors:
            raised = sorted(float(each["raised"]) for each in survivors)
            shrunk = sorted(float(each["shrunk"] or 0) for each in survivors)
            runs, wrong = len({each["run"] for each in survivors}), sum(bool(each["wrong"]) for each in survivors)
            lines.append(
                f"{network}: {runs} runs, {len(survivors)} survivors, raised after {raised[len(raised) // 2]:.3f} s "
                f"(median) to {raised[-1]:.3f} s, shrank in {shrunk[len(shrunk) // 2]:.3f} to {shrunk[-1]:.3f} s, "
                f"{wrong} wrong"
            )
    joined = [each for each in found if each["rank"] == each["size"]]
    lines.append(f"joined: {len(joined)}, {sum(bool(each['wrong']) for each in joined)} wrong")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--notice", type=float, default=NOTICE, help="seconds from the kill to PeerLost, at most")
    given = parser.parse_args()
    assert qccl.init and qccl.Communicator  # imported before the forks
    gc.freeze()  # the end of a process need not look through all of it
    found = follow((Run(n, given.seed + n) for n in range(given.runs)), given.jobs, given.notice)
    print(summary(found), flush=True)
    sys.exit(any(verdict["wrong"] for verdict in found))


if __name__ == "__main__":
    main()
