"""One rank of chaos.py: it makes the calls of its case, checks every result, and brings its fault about."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
from chaos_calls import LARGE, SMALL, Array, Call, Results, other_call
from wan_cuts import cut
from wan_groups import ports_of

import qccl
from qccl.records import FOLDER, write_record

__all__ = ["FAULTS", "HARMLESS", "Case", "be_a_rank"]

#: what happens to the victim; the last two cost no call its result
FAULTS = ("killed", "stopped", "stopped for good", "raised", "interrupted", "late", "other call", "SIGUSR1", "cut")
HARMLESS = ("SIGUSR1", "cut")
_SIGNALS = {
    **{"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "stopped for good": signal.SIGSTOP},
    **{"interrupted": signal.SIGINT, "SIGUSR1": signal.SIGUSR1},
}
#: the part of the faults that happen in the middle of a large call, if they can
_INSIDE = 0.85
#: large calls under way at once, which are struck inside; as many before them tell how long they last
_BURST = 4
_SETTINGS = {
    **{"OMP_NUM_THREADS": "1", "QCCL_WAN_SHARED_MEMORY": "0", "QCCL_INSECURE": "1"},
    **{"QCCL_WAN_CONNECTIONS": "2"},
}


class ChaosError(Exception):
    """The victim's own."""


class Case:
    """A group, its calls, and what happens to one of its ranks.

    Attributes:
        number: of the case; with the seed it determines all others.
        transport: "ucx", "ucx-tcp" or "wan".
        size, victim: of the group, and its rank that the fault strikes.
        fault: one of FAULTS.
        aims_inside: at the middle of some large calls; the records tell what was hit.
        calls: of all ranks; number ``at`` is struck, and that before it is the same call.
        part: of its time that passes before the fault; the one before, the first of its kind, takes longer.
        other: what the victim calls instead, or None.
        pause: for how long the victim is stopped or late, in seconds.
    """

    def __init__(self, number: int, seed: int, transport: str, timeout: float) -> None:
        chosen = random.Random(f"{seed} {number}")
        self.number, self.transport, self.timeout = number, transport, timeout
        self.seed = chosen.randrange(1 << 30)
        self.size = chosen.choice((3, 3, 4))
        self.victim = chosen.randrange(self.size)
        faults = [fault for fault in FAULTS if fault != "cut" or transport == "wan"]
        self.fault = chosen.choice(faults)
        self.aims_inside = self.fault != "other call" and chosen.random() < _INSIDE
        before = [chosen.choice(SMALL) for _ in range(chosen.randrange(4))]
        struck = chosen.choice(LARGE if self.aims_inside else (*SMALL, *LARGE))
        after = [chosen.choice(LARGE), chosen.choice(SMALL), chosen.choice(SMALL)]
        self.calls = [*before, struck, struck, *after]
        self.at = len(before) + 1
        self.part, self.pause = chosen.uniform(0.02, 0.45), timeout * chosen.uniform(1.2, 1.5)
        way = chosen.choice(("codec", "count", "collective"))
        self.other = other_call(struck, way) if self.fault == "other call" else None


class Rank:
    """One rank of a case."""

    def __init__(self, case: Case, rank: int, folder: Path, array: Array, results: Results) -> None:
        self.case, self.rank, self.folder, self.array, self.results = case, rank, folder, array, results
        self.ports: list[int] = []

    def say(self, **what: object) -> None:
        with (self.folder / f"{self.rank}.out").open("a") as file:
            print(json.dumps(what), file=file)

    def run(self, address: str) -> None:
        case = self.case
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
        transport = case.transport.partition("-")[0]
        comm = qccl.init("host", 60.0, rank=self.rank, size=case.size, address=address, transport=transport)
        comm.timeout = case.timeout
        if transport == "wan":
            self.ports = ports_of(comm.transport)
        is_victim = self.rank == case.victim
        if is_victim:
            signal.signal(signal.SIGUSR2, lambda number, frame: self.suffer(comm))
        other = case.other if is_victim else None
        call, lasted = -1, 0.0
        try:
            with comm:
                comm.barrier()
                for call, given in enumerate(case.calls):
                    if other and call == case.at:
                        given = other
                    is_burst = case.aims_inside and call in (case.at - 1, case.at)
                    outs = [given.out(comm.size, self.array) for _ in range(_BURST if is_burst else 1)]
                    if is_burst:
                        comm.barrier()
                    if is_victim and call == case.at:
                        self.strike(comm, lasted)
                    begin = time.monotonic()
                    given.make(comm, self.array, outs)
                    lasted = time.monotonic() - begin
                    for out in outs:
                        self.check(given, out)
                call += 1
                comm.barrier()
            self.say(done=call)
        except (qccl.QcclError, ChaosError, KeyboardInterrupt) as error:
            self.say(error=type(error).__name__, text=str(error), call=call)

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
            threading.Thread(target=self.strike_later, args=(case.part * lasts,), daemon=True).start()
            return
        self.say(struck=True)
        if case.fault in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[case.fault])
        elif case.other is None:
            self.suffer(comm)

    def strike_later(self, seconds: float) -> None:
        time.sleep(seconds)
        self.say(struck=True)
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


def be_a_rank(case: Case, rank: int, folder: Path, address: str, array: Array, results: Results) -> None:
    """In a process of its own: make the case's calls, and write to the folder what became of them."""
    os.environ |= _SETTINGS | {FOLDER: str(folder / "records")}
    if case.transport == "ucx-tcp":
        os.environ["UCX_TLS"] = "tcp,self"
    Rank(case, rank, folder, array, results).run(address)
