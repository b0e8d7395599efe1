"""Groups of chaos.py that last: their ranks go on calling, and are struck again and again until the time is over.

Over UCX ranks are killed, stopped and joined while strangers call the sockets by which the ranks agree, with random
bytes, half frames, mutated frames, and silence. In other groups a signal's handler, or another thread by
PyThreadState_SetAsyncExc(), raises an exception in a call of one rank, of qccl's types or of others; calls are then
also split(), shrink(), and a rank that leaves and joins again.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from chaos_calls import SMALL, Known
from chaos_cases import connect, set_up
from forked_ranks import Forks
from interruptions import AfterTime, AtSignal, Interrupter
from plain_ranks import free_ports
from strangers import be_strangers

import qccl
from qccl.transports.ucx import UcxTransport

EVENTS = ("kill", "join", "stop for a moment", "stop for good", "exceptions")
#: of a group with exceptions, which has SIZE ranks, and of one whose ranks are lost and join
SIZE, SMALLEST, LARGEST = 3, 3, 5
#: of the calls in each of them, in seconds; an exception is told long before
PATIENT, TIMEOUT, LATE = 30.0, 6.0, 15.0
#: how long ranks may take to be a group again; of a group with exceptions; after so much silence a rank hangs
SETTLE, EPISODE, SILENCE = 120.0, 60.0, 150.0
#: calls between two looks at who wants to join, and whether it is over
LOOKS = 10
LEFT_OUT, NOT_TAKEN = 7, 8
CALLS = ("call", "sum", "async", "plan", "barrier", "allgather", "split", "shrink", "join")


class Stop(BaseException):
    """An exception that no library knows."""


KINDS = (
    *(qccl.CollectiveTimeout, qccl.PeerLost, qccl.MismatchError, qccl.QcclError, qccl.ArgumentError),
    *(KeyboardInterrupt, TimeoutError, ConnectionResetError, RuntimeError, ValueError, Stop),
)


class Plan(NamedTuple):
    """What all ranks of a group know. Without ``interrupts`` they are lost and join instead."""

    seed: str
    transport: str
    calls: list[str]
    interrupts: bool
    known: Known


class Failed(Exception):
    """The group has failed."""


# -- one rank --------------------------------------------------------------------------------------------------------


class Rank:
    """A process that makes one call after the other. All ranks choose alike, by the round and the call's number."""

    def __init__(self, plan: Plan, number: int, folder: Path) -> None:
        self.plan, self.number, self.folder = plan, number, folder
        self.log = (folder / f"{number}.log").open("a")
        self.timeout = PATIENT if plan.interrupts else TIMEOUT
        self.round, self.name = 0, "barrier"
        self.lasts: dict[str, float] = {}
        self.members: list[int] = []
        self.sub: Any = None
        self.over = self.joining = False

    def say(self, **what: object) -> None:
        print(json.dumps(what), file=self.log, flush=True)

    def leave_out(self, why: str) -> None:
        self.say(left_out=why)
        os._exit(LEFT_OUT)

    def run(self, comm: qccl.Communicator) -> None:
        self.comm = comm
        while self.settle():
            if self.over:
                return self.comm.close()
            with suppress(Failed):
                for step in range(1 if self.plan.interrupts else LOOKS):
                    self.make_call(random.Random(f"{self.plan.seed} {self.round} {step}"))

    def settle(self) -> bool:
        """Go on when all ranks are one group; False over gloo, where a group that has failed has no next one."""
        deadline = time.monotonic() + 2 * SETTLE
        while True:
            if time.monotonic() > deadline:
                self.leave_out("the other ranks have ended")
            try:
                if self.joining:
                    self.let_join()
                while self.vote():
                    pass  # processes have joined, which vote, too
                self.joining = False
                return True
            except Failed:
                if self.plan.transport == "gloo":
                    self.comm.transport.close()
                    return False
                self.go_on()

    def make_call(self, chosen: random.Random) -> None:
        self.name, self.kind, self.interrupter = chosen.choice(self.plan.calls), chosen.choice(KINDS), Interrupter()
        how = chosen.choice((AtSignal, AfterTime))
        if chosen.randrange(SIZE) == self.comm.rank and self.plan.interrupts:
            self.interrupter = how(self.lasts.get(self.name, 0.01) * random.random() * 1.2, kind=self.kind)
        if self.name == "shrink":
            self.go_on(self.interrupter)
        elif self.name == "join":
            self.leave()
        else:
            self.disturbed(partial(self.call, self.name), chosen)

    def call(self, name: str, chosen: random.Random) -> str:
        """Make a call; what is wrong with its result."""
        comm, call = self.comm, chosen.choice(SMALL)
        array = self.plan.known.arrays[comm.rank]
        if name == "barrier":
            comm.barrier()
        elif name == "allgather":
            items = [bytes([rank]) * 10 ** chosen.randrange(6) for rank in range(comm.size)]
            return "" if comm.allgather(items[comm.rank]) == items else "allgather() gave wrong values"
        elif name == "sum":  # of other values in each call, so the result of no other call is right
            unit = chosen.randrange(1000)
            x = np.full(chosen.choice((1, 17, 1000, 20_000)), unit + comm.rank, np.float32)
            comm.quantized_allreduce(x, codec=chosen.choice(("none", "minmax8")))
            wanted = comm.size * unit + sum(range(comm.size))
            return "" if (x == wanted).all() else f"a sum has {x[x != wanted][:3]} in place of {wanted}"
        elif name == "split":
            self.sub = None
            self.sub = comm.split(0)
        else:
            if name == "plan":
                call = SMALL[2]
            out = call.out(comm.size, array)
            if name == "plan":
                plan = comm.plan("allreduce", call.count, codec=call.codec, algorithm="two_round").bind(out)
                plan.start()
                plan.wait()
            else:
                work = call.begin(comm, array, out, async_op=name == "async")
                if name == "async":
                    work.wait()
            return self.plan.known.fault(call, comm.size, comm.rank, out)
        return ""

    def disturbed(self, call: Callable[[random.Random], str], chosen: random.Random) -> None:
        """Make a call under the interrupter; again if it was not made."""
        session = self.comm._session
        state, sequence = chosen.getstate(), session.numbers.sequence
        found = self.attempt(lambda: call(chosen))
        if found is None and not session.end.is_over:
            if session.numbers.sequence == sequence:
                chosen.setstate(state)
                self.interrupter = Interrupter()
                found = self.attempt(lambda: call(chosen))
            else:
                self.attempt(lambda: session.engine.wait_until_idle(self.timeout))
        if session.end.is_over:
            raise Failed
        if found:
            self.say(wrong=found)
            os._exit(1)

    def attempt(self, act: Callable[[], Any]) -> Any:
        """What it returns, or None: an exception has ended it."""
        begin, is_heard = time.monotonic(), qccl.QcclError if self.plan.interrupts else LOSSES
        try:
            with self.interrupter.armed():
                found = act()
            self.lasts[self.name] = time.monotonic() - begin
            return found
        except BaseException as error:
            lasted = time.monotonic() - begin
            if self.interrupter.place and isinstance(error, self.kind):
                self.say(raised=self.name, kind=self.kind.__name__, at=self.interrupter.place)
            elif isinstance(error, is_heard):
                self.say(heard=self.name, error=f"{type(error).__name__}: {error}", after=round(lasted, 2))
            else:
                self.say(wrong=f"{self.name} raised {type(error).__name__}: {error}")
                raise
            if self.plan.interrupts and lasted > LATE:
                self.say(wrong=f"{self.name} ended late, after {lasted:.1f} s: {type(error).__name__}: {error}")
            if "without this one" in str(error):
                self.leave_out(str(error))
            return None

    def vote(self) -> bool:
        """All ranks say that they go on, and whether they have a group of split(). Returns whether processes joined."""
        self.interrupter, sub, self.sub = Interrupter(), self.sub, None
        note = [self.round, sub is not None, (self.folder / "over").exists(), self.number]
        votes = self.attempt(lambda: self.comm.allgather(json.dumps(note).encode()))
        if votes is None:
            raise Failed
        rounds, have, overs, members = map(list, zip(*map(json.loads, votes), strict=True))
        self.over, self.round = any(overs), max(rounds) + 1
        self.say(round=self.round)
        if members != self.members and (membership := getattr(self.comm.transport, "membership", None)):
            assert members[self.comm.rank] == self.number
            self.members = members
            self.say(epoch=membership.epoch, members=members, address=self.comm.address)
        if all(have):
            call, size = SMALL[1], sub.size
            out = call.out(size, self.plan.known.arrays[sub.rank])
            if self.attempt(lambda: call.make(sub, self.plan.known.arrays[sub.rank], [out]) or True) is None:
                self.say(wrong="a group of split() has failed")
            elif fault := self.plan.known.fault(call, size, sub.rank, out):
                self.say(wrong=f"a group of split(): {fault}")
            sub.close()
        elif sub is not None:
            sub.abort("another rank has no such group")
        if not self.plan.interrupts and not self.over:
            size, grown = self.comm.size, self.attempt(self.comm.grow)
            if grown is None:
                raise Failed
            self.comm = grown
            return grown.size > size
        return False

    def go_on(self, interrupter: Interrupter | None = None) -> None:
        """shrink() until the ranks are a group again; on a busy machine they may miss each other."""
        self.interrupter, self.name = interrupter or Interrupter(), "shrink"
        deadline = time.monotonic() + SETTLE
        while (new := self.attempt(partial(self.comm.shrink, self.timeout))) is None:
            self.interrupter = Interrupter()
            if time.monotonic() > deadline:
                self.say(wrong="the ranks are no group again")
                os._exit(1)
        self.comm = new
        if self.plan.interrupts and new.size < SIZE and not self.joining:
            self.leave_out(f"the group has {new.size} ranks")

    def leave(self) -> None:
        """The last rank leaves, and joins again."""
        interrupter, self.interrupter, self.joining = self.interrupter, Interrupter(), True
        found = self.attempt(lambda: self.comm.allgather(self.comm.address.encode()))
        if found is None:
            raise Failed
        if self.comm.rank < self.comm.size - 1:
            self.attempt(self.comm.barrier)
            self.go_on()
            self.interrupter = interrupter
            return
        self.comm.abort("it leaves")
        self.comm.transport.close()
        self.name, self.interrupter, deadline = "join", interrupter, time.monotonic() + SETTLE
        while (new := self.attempt(lambda: qccl.join(found[0].decode(), self.timeout))) is None:
            self.interrupter = Interrupter()
            if time.monotonic() > deadline:
                self.leave_out("the rank cannot join")
        self.comm = new

    def let_join(self) -> None:
        """Grow until the group has all ranks."""
        self.name, deadline = "join", time.monotonic() + SETTLE
        while self.comm.size < SIZE:
            new = self.attempt(lambda: self.comm.grow(SIZE, self.timeout))
            if new is not None:
                self.comm = new
            elif time.monotonic() > deadline:
                self.leave_out("nobody joined")
            else:
                raise Failed


LOSSES = (qccl.PeerLost, qccl.CollectiveTimeout)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def be_a_rank(plan: Plan, number: int, folder: Path, address: str, size: int) -> None:
    """In a process of its own, whose exit status says whether the others have left it out or not taken it in.

    With a ``size`` it is one of the first ranks; otherwise it joins.
    """
    set_up(plan.transport, number, size or SIZE, address if size else ":0")
    rank = Rank(plan, number, folder)
    if plan.transport.startswith("ucx"):  # once it is loaded, UCX has some descriptors of its own
        UcxTransport.meet(lambda note: [note], SETTLE).close()
    before = descriptors()
    try:
        comm = connect(plan.transport, number, size, address, SETTLE) if size else qccl.join(address, SETTLE)
        comm.timeout = rank.timeout
    except qccl.CollectiveTimeout as error:
        rank.say(error=str(error))
        sys.exit(NOT_TAKEN)
    rank.run(comm)
    if not plan.interrupts:
        del comm, rank.comm
        gc.collect()
        if (left := descriptors()) > before:
            rank.say(wrong=f"{left - before} descriptors stay open")


# -- the program that starts, strikes and watches them ---------------------------------------------------------------


class LastingGroup:
    """The processes of one group, what happens to them, and what is wrong: ``advance()`` until it says True."""

    def __init__(self, plan: Plan, events: list[str], until: float) -> None:
        self.plan, self.kinds, self.until = plan, events, until
        self.chosen = random.Random(plan.seed)
        self.folder = Path(tempfile.mkdtemp(prefix="chaos_groups."))
        self.ranks, self.strangers = Forks(self.folder), Forks(self.folder)
        self.stopped, self.killed = set[int](), set[int]()  # they were, at least for a moment
        self.expected: dict[int, set[int]] = {}  # the statuses
        self.read, self.groups = Counter[int](), dict[int, list[int]]()
        self.last: dict[int, list[int]] = {}
        self.addresses: dict[int, str] = {}
        self.counts, self.wrong, self.heard_at = Counter[str](groups=1), list[str](), time.monotonic()
        self.events, self.next = self.happenings(), 0
        address = f"127.0.0.1:{free_ports(1)[0]}"
        for _ in range(size := SIZE if plan.interrupts else 4):
            self.start_rank(address, size)
        for seed in range(0 if plan.interrupts else 2):
            self.strangers.start(-1 - seed, partial(be_strangers, self.folder, seed))

    def start_rank(self, address: str, size: int = 0) -> int:
        number, self.next = self.next, self.next + 1
        self.ranks.start(number, partial(be_a_rank, self.plan, number, self.folder, address, size))
        return number

    def advance(self) -> bool:
        """Do what is due; whether all processes have ended."""
        self.watch()
        if not self.wrong and next(self.events, "over") != "over":
            return False
        self.end()
        calls = sum(int(each.read_text() or 0) for each in self.folder.glob("calls.*"))
        self.counts += Counter({"calls of strangers": calls, "numbers of groups": len(self.groups)})
        if not (self.wrong or calls or self.plan.interrupts):
            self.wrong.append("no stranger was heard")
        if self.wrong:
            self.wrong = [f"{self.plan.transport}, {self.plan.seed}, {self.folder}: {each}" for each in self.wrong]
            self.wrong += [f"rank {number}: {self.ranks.errors(number)[-5000:]}" for number in range(self.next)]
        else:
            shutil.rmtree(self.folder)
        return True

    def end(self) -> None:
        self.ranks.end()
        self.strangers.end()

    # -- what the ranks do

    def running(self) -> set[int]:
        return set(self.ranks.running)

    def watch(self) -> None:
        """Read what ranks have said, and which have ended."""
        for number in self.ranks.watch():
            self.listen(number)
            code = self.ranks.statuses[number]
            allowed = self.expected.get(number, set()) | ({LEFT_OUT} if number in self.stopped else set())
            if code not in allowed:
                self.wrong.append(f"rank {number} ended with {code}")
            self.counts["left out"] += code == LEFT_OUT
        for number in self.ranks.running:
            self.listen(number)
        if self.ranks.running and time.monotonic() > self.heard_at + SILENCE:
            self.counts["hangs"] += 1
            self.wrong.append(f"ranks {sorted(self.ranks.running)} hang")
        self.wrong += [f"strangers ended: {self.strangers.errors(number)}" for number in self.strangers.watch()]
        places = json.dumps([self.addresses[number] for number in self.ranks.running if number in self.addresses])
        (self.folder / "places.new").write_text(places)
        (self.folder / "places.new").replace(self.folder / "places")

    def listen(self, number: int) -> None:
        path = self.folder / f"{number}.log"
        if not path.exists():
            return
        with path.open() as file:
            file.seek(self.read[number])
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self.read[number] += len(whole)
        for line in map(json.loads, whole.splitlines()):
            self.heard_at = time.monotonic()
            if "members" in line:
                members = line["members"]
                if self.groups.setdefault(line["epoch"], members) != members:
                    self.wrong.append(f"two groups have the number {line['epoch']}: {members} and others")
                self.last[number], self.addresses[number] = members, line["address"]
            self.counts["rounds"] += "round" in line and number == min(self.ranks.running, default=number)
            self.counts["exceptions"] += "raised" in line
            self.counts[f"in {line.get('raised')}"] += "raised" in line
            if "wrong" in line or ("left_out" in line and self.plan.interrupts):
                self.wrong.append(f"rank {number}: {line.get('wrong', line.get('left_out'))}")

    # -- what happens to them: generators that go on at each look at the processes

    def happenings(self) -> Iterator[None]:
        yield from self.settle(self.running, "started")
        if self.plan.interrupts:
            end = min(self.until, time.monotonic() + EPISODE)
            while time.monotonic() < end and self.ranks.running:
                for number in self.ranks.running:
                    self.expected[number] = {0}  # over gloo the first exception ends the group
                yield
        else:
            while time.monotonic() < self.until:
                yield from self.happen()
            while len(self.ranks.running) < SMALLEST:
                yield from self.join()
        for number in self.ranks.running:
            self.expected[number] = {0}
        (self.folder / "over").touch()
        deadline = time.monotonic() + SETTLE
        while self.ranks.running:
            if time.monotonic() > deadline:
                self.wrong.append(f"ranks {sorted(self.ranks.running)} did not end")
            yield

    def happen(self) -> Iterator[None]:
        size = len(self.ranks.running)
        events = {"stop for a moment": self.stop_for_a_moment}
        if size > SMALLEST:
            events |= {"kill": self.kill, "stop for good": self.stop_for_good}
        if size < LARGEST:
            events["join"] = self.join
        weights = {"kill": 2, "join": 3 if size == SMALLEST else 2}
        names = [name for name in events if name in self.kinds] or ["join"]
        (name,) = self.chosen.choices(names, [weights.get(name, 1) for name in names])
        self.counts[name] += 1
        yield from events.get(name, self.join)()
        yield from self.pause(self.chosen.uniform(0, 0.5))

    def settle(self, ranks: Callable[[], set[int]], what: str) -> Iterator[None]:
        """Until these ranks are one group, and calculate."""
        deadline = time.monotonic() + SETTLE
        while True:
            wanted = ranks()
            are_one = all({*self.last.get(number, ())} == wanted for number in wanted)
            if self.plan.transport == "gloo" or (wanted and are_one and not self.killed & self.ranks.running.keys()):
                return
            if time.monotonic() > deadline:
                self.wrong.append(f"{what}: {sorted(ranks())} are in the groups {self.last}")
            yield

    def pause(self, seconds: float) -> Iterator[None]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            yield

    def kill_rank(self, number: int) -> None:
        self.killed.add(number)
        self.expected[number] = {-signal.SIGKILL}
        self.ranks.signal(number, signal.SIGKILL)

    def kill(self) -> Iterator[None]:
        """One rank, or two shortly after each other."""
        count = self.chosen.choice((1, 1, 2)) if len(self.ranks.running) > 3 else 1
        victims = self.chosen.sample(sorted(self.ranks.running), count)
        for victim in victims:
            self.kill_rank(victim)
            yield from self.pause(self.chosen.choice((0, 0.05, 0.5, 1.5)) if count > 1 else 0)
        yield from self.settle(lambda: self.running() - set(victims), "killed")

    def join(self) -> Iterator[None]:
        """A process joins, or is killed on its way."""
        new = self.start_rank(self.addresses[self.chosen.choice(sorted(self.addresses.keys() & self.ranks.running))])
        if self.chosen.random() < 0.2:
            yield from self.pause(self.chosen.uniform(0, 0.8))
            self.kill_rank(new)
            self.counts["killed on its way"] += 1
        yield from self.settle(lambda: self.running() - self.killed, "joined")

    def stop_for_a_moment(self) -> Iterator[None]:
        victim = self.chosen.choice(sorted(self.ranks.running))
        self.stopped.add(victim)
        self.ranks.signal(victim, signal.SIGSTOP)
        yield from self.pause(self.chosen.uniform(0.01, 1.0))
        self.ranks.signal(victim, signal.SIGCONT)
        yield from self.settle(self.running, "stopped for a moment")

    def stop_for_good(self) -> Iterator[None]:
        """The others go on without it. When it continues, it is left out."""
        victim = self.chosen.choice(sorted(self.ranks.running))
        self.expected[victim] = {LEFT_OUT}
        self.ranks.signal(victim, signal.SIGSTOP)
        yield from self.settle(lambda: self.running() - {victim}, "stopped")
        self.ranks.signal(victim, signal.SIGCONT)
        end = time.monotonic() + SETTLE
        while victim in self.ranks.running:
            if time.monotonic() > end:
                self.wrong.append(f"rank {victim} was stopped, and did not end")
            yield
