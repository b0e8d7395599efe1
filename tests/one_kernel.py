"""A model of the all-reduce in one kernel (docs/one-kernel.md), and its exploration under a weak memory model.

A block has two threads. Both store and read data; thread 0 also sets flags and waits for them. A chunk has one value
for each thread, so a slot is half written while only one of the two is visible.

The memory model:

- **Stores** of data to a peer become visible in any order, at once or as late as the protocol allows: at the next
  release that covers them.
- **Release.** Setting a flag with release first makes visible the stores of the same thread, and those of the block's
  other thread before their last barrier. A relaxed flag makes nothing else visible.
- **Reads** return the present value or the one at the block's last acquire, which a cache may still have. If the two
  differ, a read may return either, and the run fails.
- **Acquire** is a wait that ends that choice: earlier copies in the cache are dropped.

A block whose wait was aborted has no result, so what it reads is not judged, but what it sends to others is.

``explore`` takes the steps of threads in every order, and remembers states; ``wander`` takes them in a random order.
Calls follow each other without any order between the blocks of a rank, which is weaker than kernels on one stream.

``explore`` looks for two kinds of wrong reads, one after the other. Data decides no branch, so neither kind depends on
when *other* data is stored or read. A read that comes too early is found if all stores are late, and threads wait and
read as soon as they can. A read of a slot that was overwritten is found if all stores are visible at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

T = TypeVar("T")

THREADS = 2

#: what can be left out of the protocol, and what that is
PARTS = {
    "flag 1": "the flag behind the codes of round 1",
    "release 1": "its release: the flag may overtake the codes",
    "barrier before flag 1": "the barrier between the stores of all threads and the flag",
    "wait 1": "the owner's wait for the codes of its shard",
    "wait 1 for the last rank": "the part of that wait that is for the last of the other ranks",
    "acquire 1": "its acquire: reads may return older values",
    "barrier after wait 1": "the barrier between the wait and the reads of all threads",
    "slots 1": "the third slot of round 1",
    "abort 1": "the look at the abort flag in the wait",
    "flag 2": "the flag behind the sum's codes",
    "release 2": "its release",
    "barrier before flag 2": "the barrier before it",
    "wait 2": "the wait for the sums of the other shards",
    "wait 2 for the last rank": "the part of that wait that is for the last of the other ranks",
    "acquire 2": "its acquire",
    "barrier after wait 2": "the barrier after it",
    "slots 2": "the second slot of round 2",
    "abort 2": "the look at the abort flag in the wait",
    "exit": "the end of a block after an aborted wait",
    "numbers": "the numbers in flags: a flag is only set, and never reset",
    "numbers across calls": "numbers that go on from call to call: each call begins again",
    "flags of each block": "flags of their own for each block: all blocks of a rank set the same",
}


class Failure(AssertionError):
    """A run of the model that is wrong: a stale read, a wrong result, or no thread that can go on."""


@dataclass(frozen=True)
class Setup:
    """What is explored.

    Attributes:
        calls: algorithm and chunks of each block, of consecutive calls.
        ahead: chunks whose codes a block stores before it reduces the chunk at hand ("two_shot").
        slots: chunks that the inboxes of round 1 and of round 2 have room for.
        resident: blocks of a rank that run at once; None: all of them.
        in_order: whether blocks begin in the order of their numbers.
        deadlines: whether any rank may be aborted at any moment.
        absent: a rank that never makes the last call.
        without: what is left out, one of PARTS.
    """

    ranks: int = 2
    blocks: int = 1
    calls: tuple[tuple[str, int], ...] = (("two_shot", 2), ("two_shot", 1))
    ahead: int = 1
    slots: tuple[int, int] = (3, 2)
    resident: int | None = None
    in_order: bool = True
    deadlines: bool = False
    absent: int | None = None
    without: str = ""


class Store(NamedTuple):
    """Store values in cells of peers; None is the thread's sum."""

    cells: tuple[tuple[int, int | None], ...]


class Signal(NamedTuple):
    """Set flags to a number."""

    flags: tuple[int, ...]
    number: int
    release: bool


class Wait(NamedTuple):
    """Wait until flags have reached a number, or for the abort flag."""

    flags: tuple[int, ...]
    number: int
    acquire: bool
    abort: bool


class Barrier(NamedTuple):
    """Wait for the block's threads; after an aborted wait, end them."""

    exits: bool


class Read(NamedTuple):
    """Read cells and add them to an own value, for each of several sums; ``expected`` is what each must be."""

    sums: tuple[tuple[tuple[int, ...], int, int], ...]


Op = Store | Signal | Wait | Barrier | Read

#: when stores become visible; "any": both are tried for each store
Visible = Literal["early", "late", "any"]


class State(NamedTuple):
    """A moment of a run. Entries of ``late``: the thread, or -1 after a barrier; the cell; the value."""

    at: tuple[int, ...]  # of each thread: the next operation; -1 before the block begins
    sums: tuple[int, ...]  # of each thread: the last sum that it read
    memory: tuple[int, ...]
    cached: tuple[tuple[int, ...], ...]  # of each block: memory at its last acquire
    late: tuple[tuple[tuple[int, int, int], ...], ...]  # of each block: stores that nobody sees yet
    abort: tuple[bool, ...]  # of each rank
    aborted: tuple[bool, ...]  # of each block: whether a wait was aborted


class Model:
    """The programs of all threads, and the steps that they can take."""

    def __init__(self, setup: Setup, visible: Visible = "any") -> None:
        assert setup.without in ("", *PARTS), setup.without
        self.setup, self._stores = setup, visible
        #: operations that need no step of their own: a thread executes them as soon as it can
        self._eager: tuple[type, ...] = () if visible == "any" else (Store,)
        if visible != "any" and not setup.deadlines:
            self._eager = (Store, Wait, Read) if visible == "late" else (Store, Wait, Signal)
        self._cells: dict[tuple[object, ...], int] = {}
        self._blocks = [(rank, block) for rank in range(setup.ranks) for block in range(setup.blocks)]
        self.programs = [
            tuple(self._program(rank, block, thread)) for rank, block in self._blocks for thread in range(THREADS)
        ]

    def first(self) -> State:
        """The state before the first step."""
        started = 0 if self.setup.resident is None else -1
        memory = (0,) * len(self._cells)
        blocks = len(self._blocks)
        state = State(
            *((started,) * len(self.programs), (0,) * len(self.programs), memory, (memory,) * blocks),
            *(((),) * blocks, (False,) * self.setup.ranks, (False,) * blocks),
        )
        return self._settled(state)

    # -- programs

    def _cell(self, *name: object) -> int:
        return self._cells.setdefault(name, len(self._cells))

    def has(self, part: str) -> bool:
        """Whether a part of the protocol is not left out."""
        return self.setup.without != part

    def peers(self, rank: int) -> list[int]:
        """All other ranks."""
        return [peer for peer in range(self.setup.ranks) if peer != rank]

    def _slot(self, round: int, number: int) -> int:
        return number % (self.setup.slots[round - 1] - (not self.has(f"slots {round}")))

    def flag(self, round: int, rank: int, source: int, block: int) -> int:
        """The flag in ``rank``'s memory that ``source`` sets."""
        return self._cell("flag", round, rank, source, block if self.has("flags of each block") else 0)

    def data(self, round: int, rank: int, source: int, block: int, number: int, thread: int) -> int:
        """The cell in ``rank``'s memory that ``source`` stores to."""
        return self._cell("data", round, rank, source, block, self._slot(round, number), thread)

    def _program(self, rank: int, block: int, thread: int) -> Iterator[Op]:
        chunk = _Chunk(self, rank, block, thread)
        before = 0
        for call, (algorithm, chunks) in enumerate(self.setup.calls):
            if (rank, call) == (self.setup.absent, len(self.setup.calls) - 1):
                return
            whole = algorithm == "one_shot"
            ahead, pushed, end = 0 if whole else self.setup.ahead, before, before + chunks
            for number in range(before, end):
                while pushed < min(number + ahead + 1, end):
                    yield from chunk.push(pushed, before, whole)
                    pushed += 1
                yield from chunk.reduce(number, before, whole)
                if not whole:
                    yield from chunk.gather(number, before)
            before += chunks

    # -- steps

    def after(self, state: State) -> Iterator[State]:
        """The states after each possible step."""
        for thread in range(len(self.programs)):
            yield from self.steps(state, thread)
        if self.setup.deadlines:
            for rank, abort in enumerate(state.abort):
                if not abort:
                    yield state._replace(abort=_changed(state.abort, rank, True))

    def steps(self, state: State, thread: int) -> Iterator[State]:
        """The states after each possible step of one thread."""
        op = self._op(state, thread)
        if op is not None:
            yield from map(self._settled, self._step(state, thread, op))
        elif state.at[thread] < 0 and thread % THREADS == 0 and self._may_start(state, thread // THREADS):
            yield self._settled(self._move(state, thread, thread + 1))

    def ended(self, state: State) -> bool:
        """Whether all threads have ended."""
        return all(at == len(program) for at, program in zip(state.at, self.programs, strict=True))

    def _may_start(self, state: State, which: int) -> bool:
        rank, block = self._blocks[which]
        first = rank * self.setup.blocks
        starts = [state.at[each * THREADS] for each in range(first, first + self.setup.blocks)]
        running = sum(
            any(0 <= state.at[t] < len(self.programs[t]) for t in range(each * THREADS, (each + 1) * THREADS))
            for each in range(first, first + self.setup.blocks)
        )
        waiting = self.setup.in_order and any(start < 0 for start in starts[:block])
        return self.setup.resident is not None and running < self.setup.resident and not waiting

    def _move(self, state: State, *threads: int) -> State:
        at = list(state.at)
        for thread in threads:
            at[thread] += 1
        return state._replace(at=tuple(at))

    def _step(self, state: State, thread: int, op: Op) -> Iterator[State]:
        block = thread // THREADS
        match op:
            case Store(cells):
                stores = [(cell, state.sums[thread] if value is None else value) for cell, value in cells]
                written = {cell for cell, _ in stores}
                others = tuple(entry for entry in state.late[block] if entry[1] not in written)
                moved = self._move(state, thread)
                if self._stores != "late":
                    yield _visible(moved._replace(late=_changed(state.late, block, others)), stores)
                if self._stores != "early":
                    late = others + tuple((thread, *store) for store in stores)
                    yield moved._replace(late=_changed(state.late, block, late))
            case Signal(flags, number, release):
                moved = self._move(state, thread)
                if release:
                    covered = [entry[1:] for entry in state.late[block] if entry[0] in (thread, -1)]
                    others = tuple(entry for entry in state.late[block] if entry[0] not in (thread, -1))
                    moved = _visible(moved._replace(late=_changed(state.late, block, others)), covered)
                yield _visible(moved, [(flag, max(number, moved.memory[flag])) for flag in flags])
            case Wait(flags, number, acquire, abort):
                moved = self._move(state, thread)
                if all(state.memory[flag] >= number for flag in flags):
                    yield moved._replace(cached=_changed(state.cached, block, state.memory)) if acquire else moved
                if abort and state.abort[self._blocks[block][0]]:
                    yield moved._replace(aborted=_changed(state.aborted, block, True))
            case Read(sums):
                total = 0
                for cells, own, expected in sums:
                    total = own + sum(self._read(state, block, cell) for cell in cells)
                    if total != expected and not state.aborted[block]:
                        raise Failure(f"{self._named(thread)} got a wrong result, from {self._names(cells)}")
                yield self._move(state, thread)._replace(sums=_changed(state.sums, thread, total))
            case Barrier():
                pass  # _after_barrier moves the threads together

    def _settled(self, state: State) -> State:
        """The state after all operations that need no step of their own: barriers, and those in ``_eager``."""
        while True:
            before = state
            for thread in range(len(self.programs)):
                while isinstance(op := self._op(state, thread), self._eager):
                    moved = next(self._step(state, thread, op), None)
                    if moved is None:
                        break
                    state = moved
            for block in range(len(self._blocks)):
                state = self._after_barrier(state, block)
            if state is before:
                return state

    def _after_barrier(self, state: State, block: int) -> State:
        """The state after a barrier, if all threads of the block are at one."""
        threads = range(block * THREADS, (block + 1) * THREADS)
        ops = [self._op(state, thread) for thread in threads]
        if not all(isinstance(op, Barrier) for op in ops):
            return state
        late = tuple((-1, cell, value) for _, cell, value in state.late[block])
        moved = self._move(state, *threads)._replace(late=_changed(state.late, block, late))
        if state.aborted[block] and all(isinstance(op, Barrier) and op.exits for op in ops):
            at = list(moved.at)
            for thread in threads:
                at[thread] = len(self.programs[thread])
            moved = moved._replace(at=tuple(at))
        return moved

    def _op(self, state: State, thread: int) -> Op | None:
        program, at = self.programs[thread], state.at[thread]
        return program[at] if 0 <= at < len(program) else None

    def _read(self, state: State, block: int, cell: int) -> int:
        if state.memory[cell] != state.cached[block][cell] and not state.aborted[block]:
            raise Failure(f"{self._named(block * THREADS)} may read an older value from {self._names([cell])}")
        return state.memory[cell]

    def _named(self, thread: int) -> str:
        rank, block = self._blocks[thread // THREADS]
        return f"rank {rank}'s block {block}"

    def _names(self, cells: tuple[int, ...] | list[int]) -> str:
        names = list(self._cells)
        return ", ".join(" ".join(map(str, names[cell])) for cell in cells)

    def stuck(self, state: State) -> Failure:
        """The failure of a state in which threads have not ended, and none can go on."""
        found = [
            f"{self._named(t)} at {self._op(state, t)}" for t, at in enumerate(state.at) if at < len(self.programs[t])
        ]
        return Failure("deadlock: " + "; ".join(found))


@dataclass(frozen=True)
class _Chunk:
    """The operations of one thread for one chunk; ``before`` is the number of chunks before the call."""

    model: Model
    rank: int
    block: int
    thread: int

    def push(self, number: int, before: int, whole: bool) -> Iterator[Op]:
        """Store the codes of round 1 in the owners' memory; ``whole``: those of the whole vector in everyone's."""
        cells = [
            (self._to(1, peer, number), _value(self.rank, 0 if whole else peer, self.block, number, self.thread))
            for peer in self.model.peers(self.rank)
        ]
        yield from self._send(1, tuple(cells), number, before)

    def reduce(self, number: int, before: int, whole: bool) -> Iterator[Op]:
        """Sum the codes that have arrived and the own values; send the sum, or (``whole``) only store it."""
        shard = 0 if whole else self.rank
        yield from self._await(1, number, before)
        cells = tuple(self._from(1, peer, number) for peer in self.model.peers(self.rank))
        own = _value(self.rank, shard, self.block, number, self.thread)
        yield Read(((cells, own, self._total(shard, number)),))
        if not whole:
            to = tuple((self._to(2, peer, number), None) for peer in self.model.peers(self.rank))
            yield from self._send(2, to, number, before)

    def gather(self, number: int, before: int) -> Iterator[Op]:
        """Decode the sums of the other shards."""
        yield from self._await(2, number, before)
        peers = self.model.peers(self.rank)
        yield Read(tuple(((self._from(2, peer, number),), 0, self._total(peer, number)) for peer in peers))

    def _send(self, round: int, cells: tuple[tuple[int, int | None], ...], number: int, before: int) -> Iterator[Op]:
        model = self.model
        yield Store(cells)
        if model.has(f"barrier before flag {round}"):
            yield Barrier(exits=False)
        if self.thread == 0 and model.has(f"flag {round}"):
            flags = [model.flag(round, peer, self.rank, self.block) for peer in model.peers(self.rank)]
            yield Signal(tuple(flags), self._number(number, before), model.has(f"release {round}"))

    def _await(self, round: int, number: int, before: int) -> Iterator[Op]:
        model = self.model
        if self.thread == 0 and model.has(f"wait {round}"):
            peers = model.peers(self.rank)
            if not model.has(f"wait {round} for the last rank"):
                peers = peers[:-1]
            flags = tuple(model.flag(round, self.rank, peer, self.block) for peer in peers)
            acquire, abort = model.has(f"acquire {round}"), model.has(f"abort {round}")
            yield Wait(flags, self._number(number, before), acquire, abort)
        if model.has(f"barrier after wait {round}"):
            yield Barrier(exits=model.has("exit"))

    def _number(self, number: int, before: int) -> int:
        if not self.model.has("numbers"):
            return 1
        return 1 + number - (0 if self.model.has("numbers across calls") else before)

    def _to(self, round: int, peer: int, number: int) -> int:
        return self.model.data(round, peer, self.rank, self.block, number, self.thread)

    def _from(self, round: int, peer: int, number: int) -> int:
        return self.model.data(round, self.rank, peer, self.block, number, self.thread)

    def _total(self, shard: int, number: int) -> int:
        ranks = range(self.model.setup.ranks)
        return sum(_value(rank, shard, self.block, number, self.thread) for rank in ranks)


def _value(rank: int, shard: int, block: int, number: int, thread: int) -> int:
    """A rank's value of a thread's part of a chunk: no sum of some equals another one, or a sum of others."""
    return 1 << (rank + 8 * (shard + 8 * (thread + THREADS * (block + 4 * number))))


def _changed(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _visible(state: State, stores: list[tuple[int, int]]) -> State:
    memory = list(state.memory)
    for cell, value in stores:
        memory[cell] = value
    return state._replace(memory=tuple(memory))


def explore(setup: Setup, visible: tuple[Visible, ...] = ("late", "early"), most: int = 100_000) -> int:
    """Take all steps in all orders; returns the number of states. Raises Failure for the first run that is wrong."""
    return sum(_explore(Model(setup, each), most) for each in visible)


def _explore(model: Model, most: int) -> int:
    seen = {model.first()}
    todo = list(seen)
    while todo:
        state = todo.pop()
        later = list(model.after(state))
        if not later and not model.ended(state):
            raise model.stuck(state)
        for each in later:
            if each not in seen:
                seen.add(each)
                todo.append(each)
        if len(seen) > most:
            raise ValueError(f"more than {most} states of {model.setup}; explore fewer ranks, chunks or calls")
    return len(seen)


def wander(setup: Setup, seed: int) -> None:
    """One run with steps in a random order. Raises Failure if it is wrong."""
    model, rng = Model(setup), random.Random(seed)
    state = model.first()
    threads = list(range(len(model.programs)))
    while not model.ended(state):
        if setup.deadlines and rng.random() < 0.01:
            state = state._replace(abort=_changed(state.abort, rng.randrange(setup.ranks), True))
        rng.shuffle(threads)
        later = next(filter(None, (list(model.steps(state, thread)) for thread in threads)), None)
        if later is not None:
            state = rng.choice(later)
        elif not setup.deadlines or all(state.abort):
            raise model.stuck(state)
