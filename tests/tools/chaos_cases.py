"""Cases of chaos.py: groups of 2 to 4 ranks of which one is struck once, mostly in the middle of a large call."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import patience
from chaos_calls import LARGE, SMALL, Known, other_call
from forked_ranks import Forks
from plain_ranks import free_ports, torch_variables
from wan_cuts import cut
from wan_groups import ports_of

import qccl
from qccl.bench.verdict import findings
from qccl.observe.records import FOLDER, GroupRecord, read_record, write_record

#: what happens to the victim; the last two cost no call its result
STRIKES = ("killed", "stopped", "stopped for good", "raised", "interrupted", "late", "other call", "SIGUSR1", "cut")
_HARMLESS = ("SIGUSR1", "cut")
#: what a rank does with its error
_UNCAUGHT = ("uncaught", "with")
STYLES = ("closed", "caught", *_UNCAUGHT)
#: of the verdict on the records where it is not "named" or "nothing to name"
UNNAMED = ("among others", "wrongly named", "not named")
_SIGNALS = {
    **{"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "stopped for good": signal.SIGSTOP},
    **{"interrupted": signal.SIGINT, "SIGUSR1": signal.SIGUSR1},
}
#: the part of the strikes that happen in the middle of a large call, if they can
_INSIDE = 0.85
#: how long ranks that start wait for each other, those whose peer is killed over UCX, and what else a case may take
_START, _KILLED, _PATIENCE = 60.0, 20.0, 30.0
#: large calls under way at once, which are struck inside; as many before them tell how long they last
_BURST = 4


def strikes_over(transport: str, strikes: Collection[str] = STRIKES) -> list[str]:
    """Those that can happen."""
    return [strike for strike in STRIKES if strike in strikes and (strike != "cut" or transport == "wan")]


class ChaosError(Exception):
    """The victim's own."""


class Case:
    """A group, its calls, and what happens to one of its ranks.

    Attributes:
        number: of the case; with the seed it determines all others.
        size, victim: of the group, and its rank that is struck.
        style: "closed" leaves the communicator's ``with`` and catches the error after it; "caught" and "uncaught" never
            close it; "with" leaves its ``with`` and does not catch the error.
        aims_inside: at the middle of some large calls; the records tell what was hit.
        calls: of all ranks; number ``at`` is struck, and that before it is the same call.
        part: of its time that passes before the strike; the one before, the first of its kind, takes longer.
        other: what the victim calls instead, or None.
        pause: for how long the victim is stopped or late, in seconds.
        rest: between the start of a burst of calls and the wait for them, in seconds.
        is_noticed: UCX must tell the others of the loss, long before their deadline.
    """

    def __init__(
        self, number: int, seed: int, transport: str, timeout: float, strikes: Collection[str], styles: Collection[str]
    ) -> None:
        chosen = random.Random(f"{seed} {number}")
        self.number, self.transport, self.seed = number, transport, chosen.randrange(1 << 30)
        self.size = chosen.choice((2, 3, 4) if transport == "gloo" else (3, 3, 4))
        self.victim = chosen.randrange(self.size)
        self.strike = chosen.choice(strikes_over(transport, strikes))
        self.aims_inside = self.strike != "other call" and chosen.random() < _INSIDE
        before = [chosen.choice(SMALL) for _ in range(chosen.randrange(4))]
        struck = chosen.choice(LARGE if self.aims_inside else (*SMALL, *LARGE))
        after = [chosen.choice(LARGE), chosen.choice(SMALL), chosen.choice(SMALL)]
        self.calls, self.at = [*before, struck, struck, *after], len(before) + 1
        self.part, self.pause = chosen.uniform(0.02, 0.45), timeout * chosen.uniform(1.2, 1.5)
        way = chosen.choice(("codec", "count", "collective"))
        self.other = other_call(struck, way) if self.strike == "other call" else None
        self.style, self.rest = chosen.choice(list(styles)), chosen.choice((0, 0.01))
        self.is_noticed = self.strike == "killed" and transport.startswith("ucx")
        self.timeout = _KILLED * patience.factor() if self.is_noticed else timeout


# -- the processes ---------------------------------------------------------------------------------------------------


def set_up(transport: str, rank: int, size: int, address: str) -> None:
    """The variables of a rank's process, and its handler of SIGINT, which jobs in the background ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= {"OMP_NUM_THREADS": "1", "QCCL_INSECURE": "1", "QCCL_WAN_CONNECTIONS": "2"}
    os.environ |= {"UCX_TLS": "tcp,self"} if transport in ("ucx-tcp", "wan") else {}
    if transport == "gloo":
        port = int(address.rpartition(":")[2])
        os.environ |= torch_variables(rank, size, port) | {"GLOO_SOCKET_IFNAME": "lo", "QCCL_TRANSPORT": "gloo"}


def connect(transport: str, rank: int, size: int, address: str, timeout: float = _START) -> qccl.Communicator:
    if transport == "gloo":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return qccl.Communicator.from_torch(timeout=timeout)
    name = transport.partition("-")[0]
    return qccl.init("host", timeout, rank=rank, size=size, address=address, transport=name)


def say(folder: Path, number: int, **what: object) -> None:
    """Write it to the process's file, where the program reads it."""
    with (folder / f"{number}.out").open("a") as file:
        file.write(json.dumps(what) + "\n")


class Rank:
    """One rank of a case: it makes the calls, checks every result, and brings its strike about."""

    def __init__(self, case: Case, rank: int, folder: Path, known: Known) -> None:
        self.case, self.rank, self.known = case, rank, known
        self.say = partial(say, folder, rank)
        self.ports: list[int] = []
        self.timer = threading.Timer(0, self.send_signal)  # of the strike
        self.call = -1

    def run(self, address: str) -> None:
        case = self.case
        comm = connect(case.transport, self.rank, case.size, address)
        comm.timeout = case.timeout
        if case.transport == "wan":
            self.ports = ports_of(comm.transport)
        if self.rank == case.victim:
            signal.signal(signal.SIGUSR2, lambda number, frame: self.suffer(comm))
        try:
            with comm if case.style in ("closed", "with") else nullcontext():
                self.make_calls(comm)
            self.say(done=True)
        except (qccl.QcclError, ChaosError, KeyboardInterrupt) as error:
            self.timer.cancel()  # the call was too slow, and the strike would hit the end of the process
            is_ours = isinstance(error, qccl.QcclError)
            what = {"error": type(error).__name__, "is_ours": is_ours, "text": str(error)}
            self.say(**what, call=self.call, at=time.time())
            if case.style in _UNCAUGHT:
                raise

    def make_calls(self, comm: qccl.Communicator) -> None:
        case, lasted, array = self.case, 0.0, self.known.arrays[self.rank]
        comm.barrier()
        for self.call, given in enumerate(case.calls):
            is_struck = self.rank == case.victim and self.call == case.at
            if is_struck and case.other:
                given = case.other
            is_burst = case.aims_inside and self.call in (case.at - 1, case.at)
            outs = [given.out(comm.size, array) for _ in range(_BURST if is_burst else 1)]
            if is_burst:
                comm.barrier()
            if is_struck:
                self.strike(comm, lasted)
            begin = time.monotonic()
            given.make(comm, array, outs, case.rest if is_burst else 0)
            lasted = time.monotonic() - begin
            if faults := [fault for out in outs if (fault := self.known.fault(given, case.size, self.rank, out))]:
                self.say(wrong=faults[0])
        self.call += 1
        if self.timer.is_alive():
            self.timer.join()  # so that the strike always comes before the last barrier
        comm.barrier()

    def strike(self, comm: qccl.Communicator, lasts: float) -> None:
        """Bring the strike about, now or in the middle of the next call."""
        case = self.case
        if case.aims_inside:
            self.timer = threading.Timer(case.part * lasts, self.send_signal)
            self.timer.daemon = True
            self.timer.start()
        elif case.strike in _SIGNALS:
            self.send_signal()
        else:
            self.say(struck=time.time())
            if case.other is None:
                self.suffer(comm)

    def send_signal(self) -> None:
        self.say(struck=time.time())
        os.kill(os.getpid(), _SIGNALS.get(self.case.strike, signal.SIGUSR2))

    def suffer(self, comm: qccl.Communicator) -> None:
        """The strikes that this process brings about itself, in its handler of a signal or between two calls."""
        if self.case.strike == "raised":
            raise ChaosError("chaos")
        if self.case.strike == "late":
            time.sleep(self.case.pause)
        else:
            write_record(comm.record("its connections are cut"), os.environ[FOLDER])
            cut(self.ports, random.Random(self.case.seed))


def be_a_rank(case: Case, rank: int, folder: Path, address: str, known: Known) -> None:
    """In a process of its own: make the case's calls, and write to the folder what became of them."""
    os.environ[FOLDER] = str(folder / "records")
    set_up(case.transport, rank, case.size, address)
    Rank(case, rank, folder, known).run(address)


# -- the program that starts and judges them -------------------------------------------------------------------------


class CaseGroup:
    """The ranks of a case."""

    def __init__(self, case: Case, known: Known) -> None:
        self.case = case
        self.folder = Path(tempfile.mkdtemp(prefix="chaos."))
        self.forks = Forks(self.folder)
        self.numbers, self.hung = list(range(case.size)), list[int]()
        self.limit = time.monotonic() + _PATIENCE * patience.factor() + 5 * case.timeout
        address = f"127.0.0.1:{free_ports(1)[0]}"
        for rank in self.numbers:
            self.forks.start(rank, partial(be_a_rank, case, rank, self.folder, address, known))

    def advance(self) -> bool:
        """Do what is due; whether all processes have ended."""
        case, forks = self.case, self.forks
        forks.watch()
        if case.victim in forks.stopped:
            if case.strike == "stopped" and time.monotonic() > forks.stopped[case.victim] + case.pause:
                forks.signal(case.victim, signal.SIGCONT)
            elif case.strike == "stopped for good" and len(forks.running) == 1:
                forks.signal(case.victim, signal.SIGKILL)
        if time.monotonic() > self.limit and forks.running:
            self.hung += forks.running
            forks.end()
        return not forks.running

    def end(self) -> None:
        self.forks.end()

    def said(self) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {number: {} for number in self.numbers}
        for number, what in found.items():
            path = self.folder / f"{number}.out"
            text = path.read_text() if path.exists() else ""
            for line in text[: text.rfind("\n") + 1].splitlines():
                what.update(json.loads(line))
        return found

    def wrongs(self, said: dict[int, dict[str, Any]], grace: float, notice: float) -> Iterator[str]:
        """What must not happen, whatever the strike."""
        case, struck = self.case, said[self.case.victim].get("struck")
        is_gone = case.strike in ("killed", "stopped for good") and struck is not None
        for rank, what in said.items():
            status = self.forks.statuses[rank]
            if rank in self.hung:
                yield f"rank {rank} hung"
                continue
            if "wrong" in what:
                yield f"rank {rank} took wrong values for right: {what['wrong']}"
            if re.search("terminate called|Fatal Python error", self.forks.errors(rank)):
                yield f"rank {rank} aborted"
            if rank == case.victim and is_gone and status == -signal.SIGKILL:
                continue
            if status != self.status_of(what):
                yield f"rank {rank} ended with {status}"
            if "done" not in what and "error" not in what:
                yield f"rank {rank} said nothing"
            if rank != case.victim and "error" in what:
                yield from self.wrongs_of_error(rank, what, struck, notice)
            if struck and self.seconds_to_end(rank, what, struck) > case.timeout + grace:
                yield f"rank {rank} ended {self.seconds_to_end(rank, what, struck):.1f} s after the strike"

    def status_of(self, what: dict[str, Any]) -> int:
        """The exit status of a process that has said so."""
        if "error" not in what or self.case.style not in _UNCAUGHT:
            return 0
        return -signal.SIGINT if what["error"] == "KeyboardInterrupt" else 1

    def seconds_to_end(self, rank: int, what: dict[str, Any], struck: float) -> float:
        """From the strike to the end of a rank that its error has ended; 0 where a rank had a reason to stay longer."""
        case = self.case
        stays = rank == case.victim and case.strike not in ("raised", "interrupted")
        stays |= case.strike in _HARMLESS
        return 0.0 if stays or "error" not in what else self.forks.ends[rank] - struck

    def wrongs_of_error(self, rank: int, what: dict[str, Any], struck: float | None, notice: float) -> Iterator[str]:
        """What is wrong with the error of a rank that was not struck."""
        case = self.case
        if not what["is_ours"]:
            yield f"rank {rank} raised {what['error']}"
        if not re.search(r"\brank \d+", what["text"]):
            yield f"rank {rank} raised an error that names no rank: {what['text']}"
        if not case.is_noticed:
            return
        if what["error"] != "PeerLost" or not re.search(rf"\brank {case.victim} was lost", what["text"]):
            yield f"rank {rank} does not name the lost rank: {what['text']}"
        if struck is None or what["at"] > struck + notice:
            yield f"rank {rank} raised late: {what['at']}, after {struck}"

    def verdict(self, grace: float, notice: float) -> dict[str, Any]:
        """The case, its outcome, and what was wrong."""
        case, said = self.case, self.said()
        records = {record.rank: record for record in map(read_record, (self.folder / "records").glob("*.json"))}
        found = findings(records) if records else []
        blamed = sorted({rank for each in found for rank in each.ranks})
        wrong = list(self.wrongs(said, grace, notice))
        struck = said[case.victim].get("struck")
        if not struck or not any("error" in what for rank, what in said.items() if rank != case.victim):
            outcome = "nothing to name"
        elif not blamed:
            outcome = "not named"
        elif case.victim in blamed:
            outcome = "named" if blamed == [case.victim] else "among others"
        else:
            outcome = "wrongly named"
        seconds = max(self.seconds_to_end(rank, what, struck) for rank, what in said.items()) if struck else 0
        result = {
            **{"case": case.number, "transport": case.transport, "strike": case.strike, "style": case.style},
            **{"size": case.size, "victim": case.victim, "inside": is_inside(records, case.victim)},
            **{"outcome": outcome, "wrong": wrong, "seconds to end": seconds},
        }
        if wrong or outcome in UNNAMED:
            errors = {rank: self.forks.errors(rank)[-3000:] for rank in said}
            result |= {"said": said, "blamed": blamed, "sentences": [each.text for each in found], "stderr": errors}
        shutil.rmtree(self.folder)
        return result


def is_inside(records: dict[int, GroupRecord], victim: int) -> bool:
    """Whether a transfer of the victim was under way in the call that has not ended."""
    if victim in records:
        return any(call.transfers for call in records[victim].calls if call.state != "ended")
    calls = [call for record in records.values() for call in record.calls if call.state != "ended"]
    return any(each.peer == victim for call in calls if victim not in call.missing for each in call.transfers)
