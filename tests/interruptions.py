"""Exceptions at any point of a call, on one of two ranks: what must hold for both afterwards.

inject() makes one call of a Kind on each rank of a new communicator. On rank 0 an Interrupter raises KeyboardInterrupt
in it. Then both ranks go on: rank 0 makes the call again, with other values, if its first one was not made; both make a
further call. check() compares what they found with calls that nobody disturbed.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

import qccl

QCCL = str(Path(qccl.__file__).parent)
#: seconds that a call may wait; what was interrupted must be told to the other rank, so none waits so long
TIMEOUT = 30.0
#: chunks of CHUNK elements: several messages, and more than may be sent with a header
COUNT, CHUNK, FEW = 6000, 2048, 64


# -- the kinds of calls ----------------------------------------------------------------------------------------------


class Case:
    """Calls of one kind on one communicator.

    Attributes:
        inputs, outputs: arrays; fill() writes both.
        start: makes a call, and returns its Work, or None if the call has ended.
        plan: the user's plan that it runs, or None.
        work: the Work of the present call, as soon as the program has it.
    """

    def __init__(self, inputs, outputs, start: Callable[[], Any], plan: Any = None) -> None:
        self.inputs, self.outputs, self.start, self.plan = inputs, outputs, start, plan
        self.work: Any = None

    def run(self) -> None:
        """Make a call, and wait for it."""
        self.work = None
        self.work = self.start() or self.work
        if isinstance(self.work, qccl.Work):
            self.work.wait()

    def fill(self, rank: int, number: int, variant: str) -> None:
        """The values of a call; ``variant`` "again" is for a call that rank 0 repeats."""
        generator = np.random.default_rng([rank, number, variant == "again"])
        for array in self.outputs:
            array[:] = 12345
        for array in self.inputs:
            array[:] = generator.integers(-100, 100, array.size)

    def found(self) -> str:
        return b"".join(array.tobytes() for array in self.outputs).hex()


def _two(count: int = COUNT) -> list[np.ndarray]:
    return [np.zeros(count, np.float32), np.zeros(count, np.float32)]


def allreduce(in_place: bool = False, count: int = COUNT, **options: Any) -> Callable[[Any], Case]:
    def make(comm: Any) -> Case:
        x, out = _two(count)
        out = x if in_place else out
        return Case([x], [out], lambda: _ended(comm.quantized_allreduce(x, out, **options)))

    return make


def _ended(result: Any) -> Any:
    return result if isinstance(result, qccl.Work) else None


def coalesced(**options: Any) -> Callable[[Any], Case]:
    def make(comm: Any) -> Case:
        xs, outs = _two(3000), _two(3000)
        return Case(xs, outs, lambda: _ended(comm.quantized_allreduce_coalesced(xs, outs, **options)))

    return make


def reduce_scatter(**options: Any) -> Callable[[Any], Case]:
    def make(comm: Any) -> Case:
        x, out = np.zeros(COUNT, np.float32), np.zeros(COUNT // 2, np.float32)
        return Case([x], [out], lambda: _ended(comm.quantized_reduce_scatter(x, out, **options)))

    return make


def all_gather(**options: Any) -> Callable[[Any], Case]:
    def make(comm: Any) -> Case:
        x, out = np.zeros(COUNT // 2, np.float32), np.zeros(COUNT, np.float32)
        return Case([x], [out], lambda: _ended(comm.quantized_all_gather(x, out, **options)))

    return make


def broadcast(**options: Any) -> Callable[[Any], Case]:
    def make(comm: Any) -> Case:
        x, out = _two()
        return Case([x], [out], lambda: _ended(comm.quantized_broadcast(x, out, root=0, **options)))

    return make


def hierarchical(**options: Any) -> Callable[[Any], Case]:
    def make(comm: Any) -> Case:
        x, out = _two()
        return Case([x], [out], lambda: _ended(comm.hierarchical_allreduce(x, out, node_ids=[0, 1], **options)))

    return make


def peer_exchange(**options: Any) -> Callable[[Any], Case]:
    def make(comm: Any) -> Case:
        z, other = [1 - comm.rank], np.zeros(COUNT, np.float32)
        x, applied = _two()
        arguments = {"send_to": z, "replicas": {1 - comm.rank: other}, "applied": applied}
        return Case([x], [other, applied], lambda: _ended(comm.peer_exchange(x, **arguments, **options)))

    return make


def pointers(**options: Any) -> Callable[[Any], Case]:
    def make(comm: Any) -> Case:
        x, out = _two()
        where = x.ctypes.data, out.ctypes.data, COUNT, "float32", "sum", comm
        return Case([x], [out], lambda: qccl.quantized_allreduce(*where, **options))

    return make


def plan_run(key: str | None = None, **options: Any) -> Callable[[Any], Case]:
    def make(comm: Any) -> Case:
        x, out = _two()
        plan = comm.plan("allreduce", COUNT, key=key, **options).bind(x, out)
        return Case([x], [out], lambda: plan.run() is None, plan)

    return make


def plan_call(**options: Any) -> Callable[[Any], Case]:
    def make(comm: Any) -> Case:
        x, out = _two()
        plan = comm.plan("allreduce", COUNT, **options)
        return Case([x], [out], lambda: plan(x, out) is None, plan)

    return make


def plan_start(key: str | None = None, **options: Any) -> Callable[[Any], Case]:
    def make(comm: Any) -> Case:
        x, out = _two()
        plan = comm.plan("allreduce", COUNT, key=key, **options).bind(x, out)
        return Case([x], [out], lambda: plan.start(), plan)

    return make


def with_callback(**options: Any) -> Callable[[Any], Case]:
    def make(comm: Any) -> Case:
        x, out = _two()

        def start() -> None:
            case.work = comm.quantized_allreduce(x, out, async_op=True, **options)
            case.work.add_done_callback(lambda work: None)

        case = Case([x], [out], start)
        return case

    return make


def polled(**options: Any) -> Callable[[Any], Case]:
    def make(comm: Any) -> Case:
        x, out = _two()

        def start() -> None:
            case.work = comm.quantized_allreduce(x, out, async_op=True, **options)
            for _ in range(3):
                case.work.is_completed()

        case = Case([x], [out], start)
        return case

    return make


def traced(**options: Any) -> Callable[[Any], Case]:
    def make(comm: Any) -> Case:
        x, out = _two()
        return Case([x], [out], lambda: _ended(comm.quantized_allreduce(x, out, trace=[], **options)))

    return make


def gathered(comm: Any) -> Case:
    x, out = _two(FEW)

    def start() -> None:
        first, second = (np.frombuffer(each, np.float32) for each in comm.allgather(x.tobytes()))
        out[:] = first + 2 * second

    return Case([x], [out], start)


def barrier(comm: Any) -> Case:
    return Case([], [], comm.barrier)


class Kind(NamedTuple):
    """How a call is made, and how many equal ones precede it."""

    make: Callable[[Any], Case]
    warm: int


_EXACT: dict[str, Any] = {"codec": "none", "chunk": CHUNK}
_STATE: dict[str, Any] = {"codec": "minmax4+ef", "chunk": CHUNK, "key": "w"}
KINDS: dict[str, Kind] = {
    "first": Kind(allreduce(**_EXACT), 0),
    "second": Kind(allreduce(**_EXACT), 1),
    "repeated": Kind(allreduce(**_EXACT), 3),
    "repeated in place": Kind(allreduce(in_place=True, **_EXACT), 3),
    "repeated, few": Kind(allreduce(count=FEW), 3),
    "async, first": Kind(allreduce(async_op=True, **_EXACT), 0),
    "async": Kind(allreduce(async_op=True, **_EXACT), 3),
    "async, polled": Kind(polled(**_EXACT), 2),
    "async, callback": Kind(with_callback(**_EXACT), 2),
    "plan.start": Kind(plan_start(**_EXACT), 2),
    "plan.start, state": Kind(plan_start(**_STATE), 2),
    "plan.run": Kind(plan_run(**_EXACT), 3),
    "plan.run, first": Kind(plan_run(**_EXACT), 0),
    "plan.run, state": Kind(plan_run(**_STATE), 2),
    "plan()": Kind(plan_call(**_EXACT), 2),
    "coalesced, first": Kind(coalesced(**_EXACT), 0),
    "coalesced": Kind(coalesced(**_EXACT), 3),
    "coalesced, async": Kind(coalesced(async_op=True, **_EXACT), 3),
    "state, first": Kind(allreduce(**_STATE), 0),
    "state": Kind(allreduce(**_STATE), 3),
    "state, lr": Kind(allreduce(lr=0.5, **_STATE), 2),
    "state, async": Kind(allreduce(async_op=True, **_STATE), 2),
    "reduce-scatter": Kind(reduce_scatter(**_EXACT), 2),
    "reduce-scatter, state": Kind(reduce_scatter(**_STATE), 2),
    "all-gather": Kind(all_gather(**_EXACT), 2),
    "broadcast": Kind(broadcast(**_EXACT), 2),
    "hierarchical": Kind(hierarchical(**_EXACT), 2),
    "hierarchical, state": Kind(hierarchical(**_STATE), 2),
    "peer exchange": Kind(peer_exchange(**_EXACT), 2),
    "peer exchange, state": Kind(peer_exchange(**_STATE), 2),
    "pointers": Kind(pointers(**_EXACT), 2),
    "pointers, async": Kind(pointers(async_op=True, **_EXACT), 2),
    "nonfinite": Kind(allreduce(nonfinite="error", **_EXACT), 2),
    "nonfinite, async": Kind(allreduce(nonfinite="error", async_op=True, **_EXACT), 2),
    "trace": Kind(traced(**_EXACT), 1),
    "barrier": Kind(barrier, 1),
    "allgather": Kind(gathered, 1),
}


# -- interrupters ----------------------------------------------------------------------------------------------------


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

    ``again`` raises once more, at the entry of the function that follows so many others.
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
        if code.co_filename.endswith(
            "loopback.py"
        ):  # ranks share its lock; no signal can keep a "with" from releasing it
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

    def __init__(self, seconds: float, times: int = 1) -> None:
        self._seconds, self._left = seconds, times

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
            raise KeyboardInterrupt("from a signal")


class AfterTime(Interrupter):
    """Raises in this thread after some seconds, as Python does for other threads."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        lock, is_armed = threading.Lock(), True
        thread = ctypes.c_ulong(threading.get_ident())

        def interrupt() -> None:
            time.sleep(self._seconds)
            with lock:
                if is_armed:
                    self.place = f"after {1e6 * self._seconds:.0f} us"
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(KeyboardInterrupt))

        helper = threading.Thread(target=interrupt)
        helper.start()
        try:
            yield
        finally:
            with lock:
                is_armed = False
            helper.join()


# -- one injection ---------------------------------------------------------------------------------------------------


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
            _disturbed(comm, case, kind.warm, record)
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


def _disturbed(comm: Any, case: Case, number: int, record: Record) -> None:
    case.fill(comm.rank, number, "")
    case.run()
    record.results.append(case.found())
    record.states.append(_state(comm))


def _disturb(comm: Any, case: Case, number: int, record: Record, interrupter: Interrupter, variant: str) -> None:
    calls, sequence = comm.calls, comm._session.sequence
    case.fill(0, number, variant)
    given = case.found()
    try:
        with interrupter.armed():
            case.run()
    except KeyboardInterrupt:
        found, record.raised = case.found(), "KeyboardInterrupt"
    except BaseException as error:
        found, record.raised = case.found(), f"{type(error).__name__}: {error}"
    record.place = interrupter.place
    record.states.append(_state(comm))
    try:
        if record.raised:
            _go_on(comm, case, number, record, (calls, sequence), (given, found))
    except qccl.QcclError as error:
        record.story = "failed"
        time.sleep(0.002)
        if case.found() != found:
            record.faults.append("the array was written after the exception")
        record.results.append(f"{type(error).__name__}: {error}")
        raise
    record.results.append(case.found())
    record.states.append(_state(comm))


def _go_on(comm: Any, case: Case, number: int, record: Record, before: tuple[int, int], found: tuple[str, str]) -> None:
    if isinstance(case.work, qccl.Work):
        record.story = "started"
        case.work.wait()
    elif comm._session.sequence == before[1] and comm._session.failure is None:
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
    """Locks that are held for ever, and plans that stay busy."""
    engine = comm._session.engine
    held: list[str] = []

    def try_locks() -> None:
        for name, lock in (("engine", engine._lock), ("plans", comm._plans._lock)):
            if not lock.acquire(timeout=5):
                held.append(name)
            else:
                lock.release()

    thread = threading.Thread(target=try_locks)
    thread.start()
    thread.join()
    record.faults += [f"the lock of the {name} is held" for name in held]
    if not record.is_usable:
        return
    if case.plan is not None and case.plan.is_active():
        record.faults.append("the plan is busy")
    if record.story != "made" and any(pool.busy for pool in comm._plans._pools.values()):
        record.faults.append("a plan of the cache is busy")
    if engine._loop.wanted:
        record.faults.append("a thread seems to want to drive")
    if getattr(comm._session, "unsettled", 0):
        record.faults.append("something is unsettled")


# -- what must hold --------------------------------------------------------------------------------------------------


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
            if _is_error(result):
                if not result.startswith("PeerLost") or "rank 0 gave up" not in result:
                    found.append(f"rank {rank}, call {number}: {result}")
            elif result != truth[rank].results[number]:
                found.append(f"rank {rank}, call {number}: a wrong value")
        allowed = {state for each in expected for state in each[rank].states}
        if "" in allowed:  # before the first call, which begins with zeros
            allowed |= {"0" * len(state) for state in allowed}
        if not set(record.states) <= allowed:
            found.append(f"rank {rank}: its residuals are neither those before nor those after a call")
    if mine.is_usable != other.is_usable:
        found.append(f"usable on ranks 0 and 1: {mine.is_usable}, {other.is_usable}")
    return found


def _is_error(result: str) -> bool:
    return ":" in result


def describe(name: str, records: list[Record], found: list[str]) -> str:
    return f"{name}, {records[0].place} ({records[0].story}): {'; '.join(found)}"


class Tally(NamedTuple):
    """How rank 0's calls went on, by number, and what was wrong."""

    stories: Counter[str]
    wrong: list[str]

    def add(self, name: str, records: list[Record], expected: Expected) -> None:
        mine = records[0]
        self.stories[mine.story if mine.raised else "swallowed" if mine.place else "undisturbed"] += 1
        if found := problems(records, expected):
            self.wrong.append(describe(name, records, found))


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
    return tally


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
    return tally
