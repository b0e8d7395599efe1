"""One rank of chaos.py: it makes the calls of its case, checks every result, and brings its fault about."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Collection
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import patience
from chaos_calls import LARGE, SMALL, Array, Call, Results, other_call
from plain_ranks import torch_variables
from wan_cuts import cut
from wan_groups import ports_of

import qccl
from qccl.records import FOLDER, write_record
from qccl.transports.ucx import UcxTransport

__all__ = [
    *("FAULTS", "HARMLESS", "REGROUPS", "STYLES", "UNCAUGHT", "Case"),
    *("be_a_newcomer", "be_a_rank", "faults_over", "styles_of"),
]

#: what happens to the victim; the last two cost no call its result
FAULTS = ("killed", "stopped", "stopped for good", "raised", "interrupted", "late", "other call", "SIGUSR1", "cut")
HARMLESS = ("SIGUSR1", "cut")
#: what a rank does with its error: it ends, or the survivors of a rank that was killed make a next group
UNCAUGHT, REGROUPS = ("uncaught", "with"), ("shrinks", "grows")
STYLES = ("closed", "caught", *UNCAUGHT, *REGROUPS)
_SIGNALS = {
    **{"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "stopped for good": signal.SIGSTOP},
    **{"interrupted": signal.SIGINT, "SIGUSR1": signal.SIGUSR1},
}
#: the part of the faults that happen in the middle of a large call, if they can
_INSIDE = 0.85
#: how long ranks that start wait for each other, and those that make a next group, in seconds
_START, _REGROUP = 60.0, 20.0
#: large calls under way at once, which are struck inside; as many before them tell how long they last
_BURST = 4
_SETTINGS = {
    **{"OMP_NUM_THREADS": "1", "QCCL_WAN_SHARED_MEMORY": "0", "QCCL_INSECURE": "1"},
    **{"QCCL_WAN_CONNECTIONS": "2"},
}


def faults_over(transport: str, faults: Collection[str] = FAULTS) -> list[str]:
    """Those of ``faults`` that can happen."""
    return [fault for fault in FAULTS if fault in faults and (fault != "cut" or transport == "wan")]


def styles_of(transport: str, fault: str, styles: Collection[str] = STYLES) -> list[str]:
    """Those of ``styles`` that ranks can have: over UCX survivors can shrink."""
    can_shrink = fault == "killed" and transport.startswith("ucx")
    return [style for style in STYLES if style in styles and (can_shrink or style not in REGROUPS)]


class ChaosError(Exception):
    """The victim's own."""


class Case:
    """A group, its calls, and what happens to one of its ranks.

    Attributes:
        number: of the case; with the seed it determines all others.
        transport: "ucx", "ucx-tcp", "wan" or "gloo".
        size, victim: of the group, and its rank that the fault strikes.
        fault, style: one of FAULTS and one of STYLES. "closed" leaves the communicator's ``with`` and catches the error
            after it; "caught" and "uncaught" never close it; "with" leaves its ``with`` and does not catch the error.
        timeout: of the calls, in seconds.
        aims_inside: at the middle of some large calls; the records tell what was hit.
        calls: of all ranks; number ``at`` is struck, and that before it is the same call.
        part: of its time that passes before the fault; the one before, the first of its kind, takes longer.
        other: what the victim calls instead, or None.
        pause: for how long the victim is stopped or late, in seconds.
        rest: between the start of a burst of calls and the wait for them, in seconds.
    """

    def __init__(
        self,
        number: int,
        seed: int,
        transport: str,
        timeout: float,
        faults: Collection[str] = FAULTS,
        styles: Collection[str] = STYLES,
    ) -> None:
        chosen = random.Random(f"{seed} {number}")
        self.number, self.transport = number, transport
        self.seed = chosen.randrange(1 << 30)
        self.size = chosen.choice((2, 3, 4) if transport == "gloo" else (3, 3, 4))
        self.victim = chosen.randrange(self.size)
        self.fault = chosen.choice(faults_over(transport, faults))
        self.aims_inside = self.fault != "other call" and chosen.random() < _INSIDE
        before = [chosen.choice(SMALL) for _ in range(chosen.randrange(4))]
        struck = chosen.choice(LARGE if self.aims_inside else (*SMALL, *LARGE))
        after = [chosen.choice(LARGE), chosen.choice(SMALL), chosen.choice(SMALL)]
        self.calls = [*before, struck, struck, *after]
        self.at = len(before) + 1
        self.part, self.pause = chosen.uniform(0.02, 0.45), timeout * chosen.uniform(1.2, 1.5)
        way = chosen.choice(("codec", "count", "collective"))
        self.other = other_call(struck, way) if self.fault == "other call" else None
        self.style, self.rest = chosen.choice(styles_of(transport, self.fault, styles)), chosen.choice((0, 0.01))
        self.timeout = _REGROUP * patience.factor() if self.style in REGROUPS else timeout


def say(folder: Path, number: int, **what: object) -> None:
    """Write it to the process's file, where the program reads it."""
    with (folder / f"{number}.out").open("a") as file:
        file.write(json.dumps(what) + "\n")


class Rank:
    """One rank of a case."""

    def __init__(self, case: Case, rank: int, folder: Path, array: Array, results: Results) -> None:
        self.case, self.rank, self.array, self.results = case, rank, array, results
        self.say = partial(say, folder, rank)
        self.is_victim = rank == case.victim
        self.ports: list[int] = []
        self.timer = threading.Timer(0, self.send_signal)  # of the fault
        self.call = -1

    def run(self, address: str) -> None:
        case = self.case
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
        before = descriptors_with_ucx() if case.style in REGROUPS else 0
        comm = self.connect(address)
        comm.timeout = case.timeout
        if self.is_victim:
            signal.signal(signal.SIGUSR2, lambda number, frame: self.suffer(comm))
        try:
            with comm if case.style in ("closed", "with") else nullcontext():
                self.make_calls(comm)
            self.say(done=True)
        except (qccl.QcclError, ChaosError, KeyboardInterrupt) as error:
            self.timer.cancel()  # the call was too slow, and the fault would strike the end of the process
            is_ours = isinstance(error, qccl.QcclError)
            what = {"error": type(error).__name__, "is_ours": is_ours, "text": str(error)}
            self.say(**what, call=self.call, at=time.time())
            if case.style in UNCAUGHT:
                raise
            if case.style in REGROUPS:
                self.regroup(comm, before)

    def connect(self, address: str) -> qccl.Communicator:
        transport = self.case.transport.partition("-")[0]
        if transport == "gloo":
            import torch.distributed as dist

            dist.init_process_group("gloo")
            return qccl.Communicator.from_torch(timeout=_START)
        comm = qccl.init("host", _START, rank=self.rank, size=self.case.size, address=address, transport=transport)
        if transport == "wan":
            self.ports = ports_of(comm.transport)
        return comm

    def make_calls(self, comm: qccl.Communicator) -> None:
        case, lasted = self.case, 0.0
        comm.barrier()
        for self.call, given in enumerate(case.calls):
            is_struck = self.is_victim and self.call == case.at
            if is_struck and case.other:
                given = case.other
            is_burst = case.aims_inside and self.call in (case.at - 1, case.at)
            outs = [given.out(comm.size, self.array) for _ in range(_BURST if is_burst else 1)]
            if is_burst:
                comm.barrier()
            if is_struck:
                self.strike(comm, lasted)
            begin = time.monotonic()
            given.make(comm, self.array, outs, case.rest)
            lasted = time.monotonic() - begin
            for out in outs:
                self.check(given, out)
        self.call += 1
        if self.timer.is_alive():
            self.timer.join()  # so that the fault always comes before the last barrier
        comm.barrier()

    def regroup(self, comm: qccl.Communicator, before: int) -> None:
        """Go on without the victim, and perhaps with a process that joins; leave no descriptor open."""
        size = comm.size
        comm = comm.shrink()
        members = [int(note) for note in comm.allgather(str(self.rank).encode())]
        assert members == [rank for rank in range(size) if rank != self.case.victim], members
        check_sums(comm)
        if self.case.style == "grows":
            self.say(address=comm.address)
            comm = comm.grow(size)
            assert (comm.rank, comm.size) == (members.index(self.rank), size)
            check_sums(comm)
        end_alike(comm)
        self.say(done=True, descriptors=descriptors() - before)

    def check(self, call: Call, result: Array) -> None:
        """Every bit must be right."""
        expected = self.results[call, self.case.size][self.rank]
        if not np.array_equal(result.view(np.uint32), expected.view(np.uint32)):
            places = np.flatnonzero(result.view(np.uint32) != expected.view(np.uint32))
            self.say(wrong=f"{call}: {len(places)} values differ, from number {places[0]} on")

    def strike(self, comm: qccl.Communicator, lasts: float) -> None:
        """Bring the fault about, now or in the middle of the next call."""
        case = self.case
        if case.aims_inside:
            self.timer = threading.Timer(case.part * lasts, self.send_signal)
            self.timer.daemon = True
            self.timer.start()
        elif case.fault in _SIGNALS:
            self.send_signal()
        else:
            self.say(struck=time.time())
            if case.other is None:
                self.suffer(comm)

    def send_signal(self) -> None:
        self.say(struck=time.time())
        os.kill(os.getpid(), _SIGNALS.get(self.case.fault, signal.SIGUSR2))

    def suffer(self, comm: qccl.Communicator) -> None:
        """The faults that this process brings about itself, in its handler of a signal or between two calls."""
        if self.case.fault == "raised":
            raise ChaosError("chaos")
        if self.case.fault == "late":
            time.sleep(self.case.pause)
        else:
            write_record(comm.record("its connections are cut"), os.environ[FOLDER])
            cut(self.ports, random.Random(self.case.seed))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def descriptors_with_ucx() -> int:
    """How many are open while there is no group: UCX, once it is loaded, has some of its own."""
    UcxTransport(lambda note: [note], _START).close()
    return descriptors()


def check_sums(comm: qccl.Communicator) -> None:
    """Twenty all-reduces of all sizes."""
    for call in range(20):
        x = np.full(1 + 7919 * call, comm.rank + 1, np.float32)
        comm.quantized_allreduce(x, codec=("none", "minmax8")[call % 2])
        assert (x == comm.size * (comm.size + 1) / 2).all(), (call, x)


def end_alike(comm: qccl.Communicator) -> None:
    """All ranks have made as many calls."""
    calls = [int(note) for note in comm.allgather(str(comm.calls).encode())]
    assert min(calls) == max(calls), calls
    comm.close()


def set_up(case: Case, rank: int, folder: Path, address: str) -> None:
    """The variables of a rank's process."""
    os.environ |= _SETTINGS | {FOLDER: str(folder / "records")}
    if case.transport == "ucx-tcp":
        os.environ["UCX_TLS"] = "tcp,self"
    if case.transport == "gloo":
        port = int(address.rpartition(":")[2])
        os.environ |= torch_variables(rank, case.size, port) | {"GLOO_SOCKET_IFNAME": "lo", "QCCL_TRANSPORT": "gloo"}


def be_a_rank(case: Case, rank: int, folder: Path, address: str, array: Array, results: Results) -> None:
    """In a process of its own: make the case's calls, and write to the folder what became of them."""
    set_up(case, rank, folder, address)
    Rank(case, rank, folder, array, results).run(address)


def be_a_newcomer(case: Case, folder: Path, address: str) -> None:
    """In a process of its own: join the survivors, as their last rank."""
    last = case.size - 1
    set_up(case, last, folder, address)
    comm = qccl.join(address, case.timeout)
    assert (comm.rank, comm.size) == (last, case.size)
    check_sums(comm)
    end_alike(comm)
    say(folder, case.size, done=True)
