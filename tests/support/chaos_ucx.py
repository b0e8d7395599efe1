"""Chaos: ranks over UCX that are killed, stopped and joined at random, while strangers knock at their sockets.

``chaos_ucx.py --minutes 10 --seed 0`` keeps a group of 3 to 5 ranks on this machine busy with all-reduces. One event
follows the other: a rank is killed, or two shortly after each other, or a process joins (which may be killed on its
way), or a rank is stopped for a moment, or for longer than the others wait. Meanwhile strangers call the sockets by
which the ranks agree, with random bytes, half frames, mutated frames, and silence. It is checked that

- every sum is right, on every rank, exactly;
- after each event the ranks that are left are in one group within a minute, and no two groups have one number;
- nobody is left out but who was stopped, and no process ends otherwise.

The last line is JSON: how often what has happened, and what was wrong. The exit status is 1 where something was.

The ranks are forks of this process (forked_ranks.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import numpy as np
from forked_ranks import Forks
from plain_ranks import free_ports
from strangers import knock_for_ever

import qccl
import qccl.transports.ucx
from qccl.transports.join_address import JoinAddress

#: of the calls, and of shrink(); how long a rank that is stopped for good stays so at least
TIMEOUT = 6.0
SETTLE = 60.0
SMALLEST, LARGEST = 3, 5
LEFT_OUT, NOT_TAKEN = 7, 8
#: steps between two looks at who wants to join, and whether it is over
LOOKS = 10


# -- one rank --------------------------------------------------------------------------------------------------------


class Sums:
    """A rank's all-reduces, each checked."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder, self.count = number, folder, 0
        self.log = (folder / f"{number}.log").open("a")

    def say(self, **what: object) -> None:
        print(json.dumps(what), file=self.log, flush=True)

    def run(self, comm: qccl.Communicator) -> None:
        """Until all ranks have seen that it is over."""
        while True:
            try:
                comm = self.in_group(comm)
                if comm is None:
                    return
            except (qccl.PeerLost, qccl.CollectiveTimeout):
                comm = self.shrunk(comm)

    def shrunk(self, comm: qccl.Communicator) -> qccl.Communicator:
        """The next group. On a busy machine ranks may miss each other, and then try again."""
        deadline = time.monotonic() + SETTLE
        while True:
            try:
                return comm.shrink(TIMEOUT)
            except qccl.CollectiveTimeout as error:
                self.say(again=str(error))
                if time.monotonic() > deadline:
                    raise

    def in_group(self, comm: qccl.Communicator) -> qccl.Communicator | None:
        """The next group, if a process joins; None when it is over."""
        members = [int(note) for note in comm.allgather(str(self.number).encode())]
        assert members[comm.rank] == self.number
        self.say(epoch=comm.transport.membership.epoch, members=members, address=comm.address)
        while True:
            for _ in range(LOOKS):
                self.check_sum(comm, members)
                time.sleep(0.002)
            notes = comm.allgather(b"over" if (self.folder / "over").exists() else b"")
            if b"over" in notes:
                self.say(sums=self.count)
                comm.close()
                return None
            self.say(sums=self.count)
            grown = comm.grow()
            if grown is not comm:
                return grown

    def check_sum(self, comm: qccl.Communicator, members: list[int]) -> None:
        """Every rank gives its number plus that of the call, at every element."""
        chosen = random.Random(comm.calls)
        call, size = comm.calls % 1000, chosen.choice((1, 17, 1000, 20_000))
        x = np.full(size, self.number + call, np.float32)
        comm.quantized_allreduce(x, codec=chosen.choice(("none", "minmax8")))
        expected = sum(members) + call * len(members)
        if not (x == expected).all():
            self.say(wrong=f"call {comm.calls} of {members}: {x[x != expected][:3]} instead of {expected}")
            os._exit(1)
        self.count += 1


def be_a_rank(number: int, folder: Path, network: str, connect: Callable[[], qccl.Communicator]) -> None:
    """In a process of its own, whose exit status says whether the others have left it out or not taken it in."""
    os.environ |= {"OMP_NUM_THREADS": "1"} | ({"UCX_TLS": network} if network else {})
    sums = Sums(number, folder)
    try:
        comm = connect()
        comm.timeout = TIMEOUT  # a process that joins waits longer for the others
    except qccl.CollectiveTimeout as error:
        sums.say(error=str(error))
        sys.exit(NOT_TAKEN)
    try:
        sums.run(comm)
    except qccl.PeerLost as error:
        sums.say(error=str(error))
        sys.exit(LEFT_OUT if "without this one" in str(error) else 1)


def be_strangers(folder: Path, seed: int) -> None:
    """Call the sockets of all ranks, until the parent ends this process."""

    def places() -> list[tuple[str, int]]:
        with suppress(OSError, ValueError):
            return [JoinAddress.of(each).place for each in json.loads((folder / "places").read_text())]
        return []

    def stay_silent() -> None:
        while True:
            with ExitStack() as stack:
                for place in places() * 15:
                    with suppress(OSError):
                        stack.enter_context(socket.create_connection(place, timeout=1))
                time.sleep(1)

    def count() -> None:
        calls = 0
        while True:
            calls += knock_for_ever(places, seed + calls, Soon())
            (folder / f"calls.{seed}").write_text(str(calls))

    threading.Thread(target=stay_silent, daemon=True).start()
    count()


class Soon:
    """An event that is set after a second."""

    def __init__(self) -> None:
        self.end = time.monotonic() + 1

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return time.monotonic() > self.end


# -- all of them -----------------------------------------------------------------------------------------------------


class Chaos:
    """The processes, and what happens to them."""

    def __init__(self, seed: int, network: str) -> None:
        self.chosen = random.Random(seed)
        self.folder = Path(tempfile.mkdtemp(prefix="chaos_ucx."))
        self.network = network
        self.ranks, self.strangers = Forks(self.folder), Forks(self.folder)
        self.stopped: set[int] = set()  # they were, at least for a moment
        self.killed: set[int] = set()
        self.expected_ends: dict[int, set[int]] = {}
        self.read: dict[int, int] = {}
        self.groups: dict[int, list[int]] = {}
        self.last: dict[int, tuple[int, list[int]]] = {}
        self.addresses: dict[int, str] = {}
        self.sums: Counter[int] = Counter()
        self.events: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.next = 0

    def start_rank(self, connect: Callable[[], qccl.Communicator]) -> int:
        number, self.next = self.next, self.next + 1
        self.ranks.start(number, partial(be_a_rank, number, self.folder, self.network, connect))
        return number

    def start(self, size: int) -> None:
        address = f"127.0.0.1:{free_ports(1)[0]}"
        for rank in range(size):
            self.start_rank(lambda rank=rank: qccl.init("host", TIMEOUT, rank=rank, size=size, address=address))
        for seed in range(2):
            self.strangers.start(-1 - seed, partial(be_strangers, self.folder, seed))

    # -- what the ranks do

    def watch(self) -> None:
        """Wait for processes that have ended, and read what ranks have said."""
        for number in self.ranks.watch():
            self.listen(number)
            code = self.ranks.statuses[number]
            allowed = self.expected_ends.get(number, set()) | ({LEFT_OUT} if number in self.stopped else set())
            if code not in allowed:
                self.wrong.append(f"rank {number} ended with {code}")
            if code == LEFT_OUT:
                self.events["left out"] += 1
        for number in self.ranks.running:
            self.listen(number)
        self.wrong += [f"strangers ended: {self.strangers.errors(number)}" for number in self.strangers.watch()]
        places = json.dumps([self.addresses[number] for number in self.ranks.running if number in self.addresses])
        (self.folder / "places.new").write_text(places)
        (self.folder / "places.new").replace(self.folder / "places")

    def listen(self, number: int) -> None:
        path = self.folder / f"{number}.log"
        if not path.exists():
            return
        with path.open() as file:
            file.seek(self.read.get(number, 0))
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self.read[number] = self.read.get(number, 0) + len(whole)
        for line in map(json.loads, whole.splitlines()):
            if "members" in line:
                epoch, members = line["epoch"], line["members"]
                if self.groups.setdefault(epoch, members) != members:
                    self.wrong.append(f"two groups have the number {epoch}: {members} and {self.groups[epoch]}")
                self.last[number] = epoch, members
                self.addresses[number] = line["address"]
            self.sums[number] = line.get("sums", self.sums[number])
            self.events["tried again"] += "again" in line
            if "wrong" in line:
                self.wrong.append(f"rank {number}: {line['wrong']}")

    def settle(self, ranks: Callable[[], set[int]], what: str) -> bool:
        """Wait until these ranks are one group, and calculate."""
        deadline = time.monotonic() + SETTLE
        while time.monotonic() < deadline and not self.wrong:
            self.watch()
            wanted = ranks()
            groups = [self.last.get(number, (-1, []))[1] for number in wanted]
            if wanted and all(set(group) == wanted for group in groups) and not self.killed & self.ranks.running.keys():
                return True
            time.sleep(0.005)
        if not self.wrong:
            self.wrong.append(f"{what}: {sorted(ranks())} are in the groups {self.last}")
        return False

    def pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.watch()
            time.sleep(0.005)

    def running(self) -> set[int]:
        return set(self.ranks.running)

    # -- what happens to them

    def kill_rank(self, number: int) -> None:
        self.killed.add(number)
        self.expected_ends[number] = {-signal.SIGKILL}
        self.ranks.signal(number, signal.SIGKILL)

    def kill(self) -> None:
        victims = self.chosen.sample(
            sorted(self.ranks.running), self.chosen.choice((1, 1, 2)) if len(self.ranks.running) > 3 else 1
        )
        for victim in victims:
            self.kill_rank(victim)
            self.events["killed"] += 1
            if len(victims) > 1:
                self.pause(self.chosen.choice((0, 0.05, 0.5, 1.5)))
        self.settle(lambda: self.running() - set(victims), "killed")

    def join(self) -> None:
        address = self.addresses[self.chosen.choice(sorted(self.addresses.keys() & self.ranks.running.keys()))]
        new = self.start_rank(lambda: qccl.join(address, SETTLE))
        if self.chosen.random() < 0.2:
            self.pause(self.chosen.uniform(0, 0.8))
            self.kill_rank(new)
            self.events["killed on its way"] += 1
            self.settle(lambda: self.running() - {new}, "killed on its way")
        else:
            self.events["joined"] += 1
            self.settle(self.running, "joined")

    def stop_for_a_moment(self) -> None:
        victim = self.chosen.choice(sorted(self.ranks.running))
        self.stopped.add(victim)
        self.ranks.signal(victim, signal.SIGSTOP)
        self.pause(self.chosen.uniform(0.01, 1.0))
        self.ranks.signal(victim, signal.SIGCONT)
        self.events["stopped for a moment"] += 1
        self.settle(self.running, "stopped for a moment")

    def stop_for_good(self) -> None:
        victim = self.chosen.choice(sorted(self.ranks.running))
        self.expected_ends[victim] = {LEFT_OUT}
        self.ranks.signal(victim, signal.SIGSTOP)
        self.settle(lambda: self.running() - {victim}, "stopped")
        self.ranks.signal(victim, signal.SIGCONT)
        self.events["stopped for good"] += 1
        end = time.monotonic() + SETTLE
        while victim in self.ranks.running and time.monotonic() < end:
            self.pause(0.01)
        if victim in self.ranks.running:
            self.wrong.append(f"rank {victim} was stopped, and did not end")

    def happen(self) -> None:
        size = len(self.ranks.running)
        kinds = [self.stop_for_a_moment]
        if size > SMALLEST:
            kinds += [self.kill, self.kill, self.stop_for_good]
        if size < LARGEST:
            kinds += [self.join] * (3 if size == SMALLEST else 2)
        self.chosen.choice(kinds)()
        self.pause(self.chosen.uniform(0, 0.5))

    def run(self, seconds: float) -> dict[str, object]:
        try:
            return self.events_for(seconds)
        finally:
            self.ranks.end()
            self.strangers.end()

    def events_for(self, seconds: float) -> dict[str, object]:
        begin = time.monotonic()
        self.start(4)
        self.settle(self.running, "started")
        while not self.wrong and time.monotonic() < begin + seconds:
            self.happen()
        while not self.wrong and len(self.ranks.running) < SMALLEST:
            self.join()
        lasted = time.monotonic() - begin
        self.end()
        calls = sum(int(each.read_text() or 0) for each in self.folder.glob("calls.*"))
        if not self.wrong and not calls:
            self.wrong.append("no stranger was heard")
        counts = {"groups": len(self.groups), "sums": sum(self.sums.values()), "calls of strangers": calls}
        return {
            "seconds": round(lasted),
            "network": self.network or "all",
            **counts,
            **self.events,
            "wrong": self.wrong,
        }

    def end(self) -> None:
        """All ranks end in order."""
        for number in self.ranks.running:
            self.expected_ends[number] = {0}
        (self.folder / "over").touch()
        deadline = time.monotonic() + SETTLE
        while self.ranks.running and time.monotonic() < deadline and not self.wrong:
            self.pause(0.01)
        if self.ranks.running and not self.wrong:
            self.wrong.append(f"ranks {sorted(self.ranks.running)} did not end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--network", default="", help='UCX_TLS of the ranks, such as "tcp,self"; all by default')
    given = parser.parse_args()
    assert qccl.init and qccl.Communicator and qccl.join  # imported before the forks

    gc.freeze()  # the end of a process need not look through all of it
    chaos = Chaos(given.seed, given.network)
    found = chaos.run(60 * given.minutes)
    if found["wrong"]:
        for number in range(chaos.next):
            print(f"rank {number}: {chaos.ranks.errors(number)[-5000:]}", file=sys.stderr)
    if not found["wrong"]:
        shutil.rmtree(chaos.folder)
    print(json.dumps(found), flush=True)
    sys.exit(bool(found["wrong"]))


if __name__ == "__main__":
    main()
