"""Exceptions at any point of a call, on one of two ranks: what must hold for both afterwards.

inject() makes one call of a Kind on each rank of a new communicator. On rank 0 an Interrupter raises KeyboardInterrupt
in it. Then both ranks go on: rank 0 makes the call again, with other values, if its first one was not made; both make a
further call. problems() compares what they found with calls that nobody disturbed.

``interruptions.py MODE ARGUMENT...`` is one of two ranks of a launcher, over UCX. MODE is "entries" or "instructions"
with a stride, or "times" with seconds and a seed; names of kinds may follow. Rank 0 prints how many injections went on
how, and what was wrong; then it exits with status 1.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from interruption_kinds import KINDS, Case, Kind

import qccl

QCCL = str(Path(qccl.__file__).parent)
#: seconds that a call may wait; what was interrupted must be told to the other rank, so none waits so long
TIMEOUT = 30.0
#: the result of a call that has ended, but whose returned value an exception has kept from the program
_LOST = "lost"


class Interrupter:
    """Interrupts nothing.

    Attributes:
        place: where it raised, or "".
    """

    place = ""

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Raise inside."""
        yield


class AtEntry(Interrupter):
    """Raises at the entry of qccl's function number ``number``; with ``opcodes``, before such an instruction.

    That is more than a signal does, whose handler Python runs after some of the instructions only. ``again`` raises
    once more, at the entry of the function that follows so many others.
    """

    def __init__(self, number: int, *, opcodes: bool = False, again: int | None = None) -> None:
        self._number, self._opcodes, self._again = number, opcodes, again
        self._polls = 0

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)
            sys.setprofile(None)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(QCCL):
            return None
        if code.co_name == "poll":  # as often as it must
            self._polls += 1
            if self._polls > 2:
                return None
        if not self._opcodes:
            self._count(frame)
            return None
        if code.co_filename.endswith("loopback.py"):  # ranks share its lock, and no signal comes while "with" takes it
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace_opcode

    def _trace_opcode(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            self._count(frame)
        return self._trace_opcode

    def _count(self, frame: FrameType) -> None:
        self._number -= 1
        if self._number != -1:
            return
        self.place = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
        if self._again is not None:
            sys.setprofile(self._profile)
        raise KeyboardInterrupt("injected")  # which ends the trace

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(QCCL):
            self._again -= 1
            if self._again == -1:
                self.place += f", {frame.f_code.co_qualname}"
                raise KeyboardInterrupt("injected again")


class AtSignal(Interrupter):
    """A signal whose handler raises in the main thread, some seconds after the begin, and ``times - 1`` times more."""

    def __init__(self, seconds: float, times: int = 1, kind: type[BaseException] = KeyboardInterrupt) -> None:
        self._seconds, self._left, self._kind = seconds, times, kind

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        signal.signal(signal.SIGALRM, self._handle)  # which stays, because a signal may arrive late
        signal.setitimer(signal.ITIMER_REAL, self._seconds)
        try:
            yield
        finally:
            self._left = 0
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        place = frame
        while frame is not None and not frame.f_code.co_filename.startswith(QCCL):
            frame = frame.f_back
        if frame is not None and self._left:  # not while the test itself runs
            self._left -= 1
            self.place += f"{place.f_code.co_qualname}:{place.f_lineno} "
            if self._left:
                signal.setitimer(signal.ITIMER_REAL, max(self._seconds, 2e-4))
            raise self._kind("from a signal")


class AfterTime(Interrupter):
    """Raises in this thread after some seconds, as Python does for other threads."""

    def __init__(self, seconds: float, kind: type[BaseException] = KeyboardInterrupt) -> None:
        self._seconds, self._kind = seconds, kind

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        lock, is_armed, begun = threading.Lock(), True, threading.Lock()
        thread = ctypes.c_ulong(threading.get_ident())

        def interrupt() -> None:
            begun.acquire()
            time.sleep(self._seconds)
            with lock:
                if is_armed:
                    self.place = f"after {1e6 * self._seconds:.0f} us"
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(self._kind))

        helper = threading.Thread(target=interrupt)
        begun.acquire()
        helper.start()
        begun.release()  # the exception may come from here on
        try:
            yield
        finally:
            with lock:
                is_armed = False
            helper.join()


@dataclass
class Record:
    """What one rank found: its results in the order of its calls, or the text of an error; its states; faults."""

    place: str = ""
    raised: str = ""
    story: str = "undisturbed"
    results: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    is_usable: bool = False


def inject(
    parent: Any, kind: Kind, interrupter: Interrupter, variant: str = "", spare: list[Any] | None = None
) -> list[Record]:
    """Collective: the records of both ranks. ``spare``: communicators that may be used again, as they stayed usable."""
    comm = spare.pop() if spare else parent.split(0)
    comm.timeout = TIMEOUT
    record = Record()
    case = kind.make(comm)
    for i in range(kind.warm):
        case.fill(comm.rank, i, "")
        case.run()
    record.states.append(_state(comm))
    parent.barrier()
    try:
        if comm.rank:
            case.fill(comm.rank, kind.warm, "")
            case.run()
            record.results.append(case.found())
            record.states.append(_state(comm))
        else:
            _disturb(comm, case, kind.warm, record, interrupter, variant)
        case.fill(comm.rank, kind.warm + 1, "")
        case.run()
        record.results.append(case.found())
        record.is_usable = True
    except qccl.QcclError as error:
        record.results.append(f"{type(error).__name__}: {error}")
    record.states.append(_state(comm))
    _inspect(comm, case, record)
    texts = parent.allgather(json.dumps(asdict(record)).encode())
    records = [Record(**json.loads(text)) for text in texts]
    if spare is not None and all(each.is_usable and not each.faults for each in records):
        comm.reset()
        spare.append(comm)
    else:
        comm.close() if record.is_usable else comm.abort("the end of the test")
        comm.transport.close()
    return records


def _disturb(comm: Any, case: Case, number: int, record: Record, interrupter: Interrupter, variant: str) -> None:
    calls, sequence = comm.calls, comm._session.numbers.sequence
    case.fill(0, number, variant)
    case.work = None  # of an earlier call: the exception may come before this one
    given = case.found()
    try:
        with interrupter.armed():
            case.run()
    except KeyboardInterrupt:
        found, record.raised = case.found(), "KeyboardInterrupt"
    except BaseException as error:
        found, record.raised = case.found(), f"{type(error).__name__}: {error}"
    record.place = interrupter.place
    is_abandoned = bool(comm._session.unsettled)  # it came in the guard itself, where no signal can: see guard.py
    record.states.append(_state(comm))
    try:
        if record.raised:
            _go_on(comm, case, number, record, (calls, sequence), (given, found))
    except qccl.QcclError as error:
        record.story = "failed"
        if is_abandoned:  # the group ended with this use of the communicator, and the call went on until then
            found = case.found()
        time.sleep(0.002)
        if case.found() != found:
            record.faults.append("the array was written after the exception")
        record.results.append(f"{type(error).__name__}: {error}")
        raise
    is_lost = record.story == "made" and case.returns and case.found() == given
    record.results.append(_LOST if is_lost else case.found())
    record.states.append(_state(comm))


def _go_on(comm: Any, case: Case, number: int, record: Record, before: tuple[int, int], found: tuple[str, str]) -> None:
    if isinstance(case.work, qccl.Work):
        record.story = "started"
        case.work.wait()
    elif comm._session.numbers.sequence == before[1] and not comm._session.end.is_over:
        record.story = "not made"
        if found[0] != found[1]:
            record.faults.append("a call that was not made wrote its array")
        if comm.calls != before[0]:
            record.faults.append(f"comm.calls is {comm.calls}, not {before[0]}")
        case.fill(0, number, "again")
        case.run()
    else:
        record.story = "made"
        comm.check()
        if case.plan is not None:  # the exception came when start() had nothing left to do
            case.plan.wait()
        comm._session.engine.wait_until_idle(TIMEOUT)


def _state(comm: Any) -> str:
    saved = comm.state_dict()["keys"]
    return b"".join(each.tobytes() for key in sorted(saved) for each in saved[key]["values"].values()).hex()


def _inspect(comm: Any, case: Case, record: Record) -> None:
    """A lock that is held for ever, and programs and plans that stay busy."""
    session, engine = comm._session, comm._session.engine

    def try_lock() -> None:
        if not engine._lock.acquire(timeout=60):
            record.faults.append("the lock of the engine is held")
        else:
            engine._lock.release()

    thread = threading.Thread(target=try_lock)
    thread.start()
    thread.join()
    if record.is_usable:
        signs = {
            "the plan is busy": case.plan is not None and case.plan.is_active(),
            "a program is busy": any(compiled.is_busy for compiled in comm._session.programs),
            "a thread seems to want to drive": engine._loop.wanted,
            "something is unsettled": session.unsettled,
            "a thread seems to be at the end of a Work": session.calling or session.ending,
        }
        record.faults += [fault for fault, is_there in signs.items() if is_there]


class Expected(NamedTuple):
    """Records of undisturbed calls, by the variant of rank 0's first one."""

    usual: list[Record]
    again: list[Record]

    @classmethod
    def of(cls, parent: Any, kind: Kind, spare: list[Any]) -> Expected:
        return cls(*(inject(parent, kind, Interrupter(), variant, spare) for variant in ("", "again")))


def problems(records: list[Record], expected: Expected) -> list[str]:
    """What is wrong with the records of both ranks."""
    mine, other = records
    found = [f"rank {rank}: {fault}" for rank, record in enumerate(records) for fault in record.faults]
    if mine.raised not in ("", "KeyboardInterrupt"):
        found.append(f"rank 0 raised {mine.raised}")
    truth = expected.again if mine.story == "not made" else expected.usual
    for rank, record in enumerate(records):
        for number, result in enumerate(record.results):
            if ":" in result:  # the text of an error
                if not result.startswith("PeerLost") or "rank 0 gave up" not in result:
                    found.append(f"rank {rank}, call {number}: {result}")
            elif result not in (_LOST, truth[rank].results[number]):
                found.append(f"rank {rank}, call {number}: a wrong value")
        allowed = {state for each in expected for state in each[rank].states}
        if "" in allowed:  # before the first call, which begins with zeros
            allowed |= {"0" * len(state) for state in allowed}
        if not set(record.states) <= allowed:
            found.append(f"rank {rank}: its residuals are neither those before nor those after a call")
    if mine.is_usable != other.is_usable:
        found.append(f"usable on ranks 0 and 1: {mine.is_usable}, {other.is_usable}")
    return found


class Tally(NamedTuple):
    """How rank 0's calls went on, by number, and what was wrong."""

    stories: Counter[str]
    wrong: list[str]

    def add(self, name: str, records: list[Record], expected: Expected) -> None:
        mine = records[0]
        self.stories[mine.story if mine.raised else "swallowed" if mine.place else "undisturbed"] += 1
        if found := problems(records, expected):
            self.wrong.append(f"{name}, {mine.place} ({mine.story}): {'; '.join(found)}")


def every_entry(
    parent: Any,
    names: Sequence[str],
    *,
    opcodes: bool = False,
    stride: int = 1,
    first: int = 0,
    again: int | None = None,
) -> Tally:
    """Collective: an exception at each ``stride``-th function entry (instruction) of a call of each kind."""
    tally = Tally(Counter(), [])
    for name in names:
        kind, number, spare = KINDS[name], first, []
        expected = Expected.of(parent, kind, spare)
        while True:
            records = inject(
                parent, kind, AtEntry(number, opcodes=opcodes, again=again), spare=spare if kind.warm else None
            )
            if not records[0].place:
                break
            tally.add(name, records, expected)
            number += stride
        close(spare)
    return tally


def close(spare: list[Any]) -> None:
    """Collective: close the communicators that inject() has left for further calls."""
    for comm in spare:
        comm.close()


def at_random_times(parent: Any, seconds: float, seed: int, names: Sequence[str] = tuple(KINDS)) -> Tally:
    """Collective: signals whose handler raises, at random times in calls of all kinds, for some seconds."""
    tally, expected, spare = Tally(Counter(), []), {}, []
    chosen, end = random.Random(seed), time.monotonic() + seconds
    while parent.allgather(bytes([time.monotonic() < end]))[0] != b"\0":
        name = chosen.choice(names)  # the same on both ranks
        if name not in expected:
            expected[name] = Expected.of(parent, KINDS[name], spare)
        after = 2e-6 * 2000 ** chosen.random()
        records = inject(parent, KINDS[name], AtSignal(after, chosen.choice([1, 1, 2])), spare=spare)
        tally.add(name, records, expected[name])
    close(spare)
    return tally


def main(mode: str, argument: str, *more: str) -> int:
    with qccl.init("host", 60.0) as parent:
        assert parent.transport.name == "ucx"
        if mode == "times":
            tally = at_random_times(parent, float(argument), int(more[0]), more[1:] or tuple(KINDS))
        else:
            tally = every_entry(parent, more or tuple(KINDS), opcodes=mode == "instructions", stride=int(argument))
    if parent.rank == 0:
        print(json.dumps(tally.stories), *tally.wrong, sep="\n")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
