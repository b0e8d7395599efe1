"""Ranks over gloo that are killed, stopped or interrupted in the middle of their calls, and what becomes of the others.

``lost_ranks.py --runs 300`` loses one rank in each run, at a random moment, and prints one line of JSON for every
survivor: what it raised, whether that names the lost rank, how many seconds after the loss its process ended, and how.
A survivor must raise an error of qccl's, and exit within the timeout of its calls and 5 seconds, and not by a signal;
an interrupted rank must exit, too. The exit status is 1 where one did not.

The ranks are forks of this process, which has imported PyTorch and nothing of qccl, because the import takes longer
than the run. Each ends as Python ends any program. Use an idle machine: a process that ends needs half a second of a
processor for Python and PyTorch alone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from plain_ranks import free_ports

#: how long the calls wait; how long the ranks may take to start, and when they are given up after the loss
TIMEOUT = 3.0
PATIENCE = 60.0
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "interrupted": signal.SIGINT}
#: what a survivor does with the error
STYLES = ("caught", "uncaught", "with")
SIZES = (1, 1000, 100_000, 3_000_000)


# -- one rank --------------------------------------------------------------------------------------------------------


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def calls_for_ever(comm: object, seed: int) -> None:
    """Calls of all kinds and sizes, the same on all ranks; some wait at once and some later."""
    chosen = random.Random(seed)
    arrays = {count: [np.ones(count, np.float32) for _ in range(3)] for count in SIZES}
    while True:
        codec = chosen.choice(("minmax8", "none"))
        some = arrays[chosen.choice(SIZES)][: chosen.choice((1, 1, 3))]
        if len(some) == 1:
            comm.quantized_allreduce(some[0], codec=codec)
        else:
            works = [comm.quantized_allreduce(x, codec=codec, async_op=True) for x in some]
            time.sleep(chosen.choice((0, 0.01)))
            for work in works:
                work.wait()
        for x in some:
            x.fill(1)


SETTINGS = {"OMP_NUM_THREADS": 1, "QCCL_TRANSPORT": "gloo"}


def be_a_rank(style: str, seed: int) -> None:
    import torch.distributed as dist

    import qccl

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would ranks
    dist.init_process_group("gloo")
    comm = qccl.Communicator.from_torch(timeout=PATIENCE)
    comm.barrier()
    comm.timeout = TIMEOUT
    say(ready=os.getpid(), rank=comm.rank)
    try:
        if style == "with":
            with comm:
                calls_for_ever(comm, seed)
        else:
            calls_for_ever(comm, seed)
    except BaseException as error:
        say(error=type(error).__name__, ours=isinstance(error, qccl.QcclError), text=str(error), at=time.time())
        if style != "caught":
            raise


# -- a run -----------------------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """A process, and what is known of it.

    Attributes:
        said: all it printed.
        ended: when (time.time()), and ``status`` how, as Popen.returncode; None while it runs or where nobody knows.
    """

    pid: int
    output: Path
    errors: Path
    ended: float = 0.0
    status: int | None = None
    said: dict[str, object] = field(default_factory=dict)

    def listen(self) -> None:
        for line in self.output.read_text().splitlines() if self.output.exists() else ():
            with contextlib.suppress(ValueError):
                self.said |= json.loads(line)

    def watch(self) -> bool:
        """Whether it has ended."""
        if not self.ended:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.ended, self.status = time.time(), os.waitstatus_to_exitcode(status)
        return bool(self.ended)


class Run:
    """A group of ranks, one of which is lost."""

    def __init__(self, number: int, loss: str, seed: int) -> None:
        chosen = random.Random(seed)
        self.number, self.loss, self.seed = number, loss, seed
        self.size = chosen.choice((2, 3, 4))
        self.victim = chosen.randrange(self.size)
        self.style = chosen.choice(STYLES)
        self.delay = chosen.uniform(0, 1)
        self.folder = Path(tempfile.mkdtemp(prefix="lost_ranks."))
        self.begin = self.ready = self.lost = 0.0
        self.ranks: list[Rank] = []

    def start(self) -> None:
        self.begin = time.time()
        port = free_ports(1)[0]
        for rank in range(self.size):
            output, errors = self.folder / f"{rank}.out", self.folder / f"{rank}.err"
            pid = os.fork()
            if pid == 0:
                for number, path in ((1, output), (2, errors)):
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
                where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
                which = {"RANK": rank, "WORLD_SIZE": self.size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": self.size}
                os.environ |= {key: str(value) for key, value in (where | which | SETTINGS).items()}
                be_a_rank(self.style, self.seed)
                sys.exit()
            self.ranks.append(Rank(pid, output, errors))

    def advance(self) -> bool:
        """Do what is due; whether the run is over."""
        now = time.time()
        ended = [rank.watch() for rank in self.ranks]
        if not self.ready:
            for rank in self.ranks:
                rank.listen()
            if all("ready" in rank.said for rank in self.ranks):
                self.ready = now
            elif any(ended) or now > self.begin + PATIENCE:
                return self.stop()
        elif not self.lost and now > self.ready + self.delay:
            os.kill(self.ranks[self.victim].pid, SIGNALS[self.loss])
            self.lost = time.time()
        elif self.lost:
            waited = [e for r, e in enumerate(ended) if self.loss != "stopped" or r != self.victim]
            if all(waited) or now > self.lost + PATIENCE:
                return self.stop()
        return False

    def stop(self) -> bool:
        for rank in self.ranks:
            if not rank.watch():
                os.kill(rank.pid, signal.SIGKILL)
                _, status = os.waitpid(rank.pid, 0)
                rank.status = os.waitstatus_to_exitcode(status)
            rank.listen()
        return True

    def verdicts(self, grace: float) -> list[dict[str, object]]:
        """Of each survivor, and of an interrupted rank; "wrong" says what it did wrong."""
        found = []
        for number, rank in enumerate(self.ranks):
            is_victim = number == self.victim
            if is_victim and self.loss != "interrupted":
                continue
            text = str(rank.said.get("text", ""))
            errors = rank.errors.read_text() if rank.errors.exists() else ""
            seconds = rank.ended - self.lost if rank.ended and self.lost else PATIENCE
            wrong = []
            if not self.lost:
                wrong.append("the ranks did not start")
            if not is_victim and not rank.said.get("ours"):
                wrong.append(f"raised {rank.said.get('error')}")
            if seconds > TIMEOUT + grace:
                wrong.append("exited late" if rank.ended else "did not exit")
            if rank.status not in ((0, 1) if not is_victim else (0, 1, -signal.SIGINT)):
                wrong.append(f"ended with {rank.status}")
            if "terminate called" in errors or "Fatal Python error" in errors:
                wrong.append("aborted")
            found.append(
                {
                    "run": self.number, "seed": self.seed, "loss": self.loss, "size": self.size, "lost": self.victim,
                    "style": self.style, "rank": number, "error": rank.said.get("error"), "text": text,
                    "names": bool(re.search(rf"\branks? (\d+, )*{self.victim}\b|\[(\d+, )*{self.victim}\b", text)),
                    "raised": round(float(rank.said.get("at", 0)) - self.lost, 2) if "at" in rank.said else None,
                    "exited": round(seconds, 2), "status": rank.status, "wrong": ", ".join(wrong),
                    "stderr": errors if wrong else "",
                }
            )  # fmt: skip
        shutil.rmtree(self.folder)
        return found


def summary(loss: str, verdicts: list[dict[str, object]]) -> str:
    """What became of the survivors of one kind of loss."""
    errors = Counter(str(verdict["error"]) for verdict in verdicts)
    names = sum(bool(verdict["names"]) for verdict in verdicts)
    wrong = sum(bool(verdict["wrong"]) for verdict in verdicts)
    latest = max(float(str(verdict["exited"])) for verdict in verdicts)
    runs = len({verdict["run"] for verdict in verdicts})
    return (
        f"{loss}: {runs} runs, {len(verdicts)} survivors: {dict(errors)}; {names} name the lost rank; "
        f"exited after at most {latest} s; {wrong} wrong"
    )


def follow(runs: Iterator[Any], jobs: int, limit: float) -> list[dict[str, object]]:
    """Make the runs, ``jobs`` at a time; print and return their verdicts, for which ``limit`` is the time allowed."""
    under_way: list[Any] = []
    found: list[dict[str, object]] = []
    while True:
        for run in itertools.islice(runs, jobs - len(under_way)):
            run.start()
            under_way.append(run)
        if not under_way:
            return found
        for run in list(under_way):
            if run.advance():
                under_way.remove(run)
                for verdict in run.verdicts(limit):
                    found.append(verdict)
                    print(json.dumps(verdict), flush=True)
        time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", default=",".join(SIGNALS), help="kinds of loss, in turn")
    parser.add_argument("--grace", type=float, default=5.0, help="seconds from the timeout to the exit")
    given = parser.parse_args()
    import torch.distributed  # noqa: F401

    gc.freeze()  # the end of a process need not look through all of it
    losses = given.losses.split(",")
    found = follow(
        (Run(n, losses[n % len(losses)], given.seed + n) for n in range(given.runs)), given.jobs, given.grace
    )
    for loss in losses:
        if survivors := [v for v in found if v["loss"] == loss and v["rank"] != v["lost"]]:
            print(summary(loss, survivors))
    sys.exit(any(verdict["wrong"] for verdict in found))


if __name__ == "__main__":
    main()
