"""Symbolic execution: tracks which ranks' values each buffer holds, of which elements, and how they were quantised.

A range of a buffer holds either values (``Value``: a function of the ranks' inputs, element by element) or the bytes of
a code (``Wire``), from some element or byte on. Equal operations on equal contents give the *same* object, so two ranks
hold the same bits if they hold the same object, and no arithmetic is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from qccl.base.dtypes import DType
from qccl.codecs.base import Codec
from qccl.collectives.analysis.events import Computation, Event, MatchedTransfer
from qccl.collectives.analysis.intervals import IntervalMap
from qccl.collectives.schedule import (
    Commit,
    Decode,
    Encode,
    Op,
    Reduce,
    Role,
    Schedule,
    Span,
    StateBuffer,
    VerificationError,
    accesses,
)

__all__ = ["Contents", "Postcondition", "Precondition"]


#: largest alignment in bytes of the codes in one transfer
PADDING = 16


@dataclass(frozen=True, slots=True)
class Postcondition:
    """The final content of ``span``, from element ``first`` on.

    The content is the inputs of ``ranks``, each exactly once, combined by ``op``, times ``scale``.
    """

    span: Span
    ranks: Collection[int]
    first: int = 0
    op: str = "sum"
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Precondition:
    """The initial content of a buffer: the inputs of ``ranks``, from element ``first`` on.

    Rank numbers from the number of ranks on stand for inputs that several ranks share bit for bit.
    """

    buffer: str
    ranks: Collection[int]
    first: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A function of the inputs of ``ranks`` (a bit mask), element by element; ``op`` is None for a single rank's."""

    ranks: int
    op: str | None = None
    scale: float = 1.0

    def __str__(self) -> str:
        return f"values of {_named(self.ranks)}"


@dataclass(frozen=True, slots=True, eq=False)
class Wire:
    """A code of ``count`` elements from ``first`` on, made by ``rank``; ``value`` is its decoded value.

    ``index`` is the first element's number in random keys; it differs from ``first`` if parts have own
    buckets.
    """

    codec: Codec
    dtype: DType | None
    value: Value
    first: int
    count: int
    nbytes: int
    rank: int
    round: int
    index: int

    def __str__(self) -> str:
        return f"a code of elements {self.first}..{self.first + self.count} of {_named(self.value.ranks)}"


@dataclass(slots=True)
class _Cell:
    """Elements ``start`` to ``stop`` of a buffer hold ``content`` from its element or byte ``offset`` on."""

    start: int
    stop: int
    content: Value | Wire
    offset: int
    writer: int | None = None
    unread: bool = False

    def split(self, at: int) -> _Cell:
        rest = _Cell(at, self.stop, self.content, self.offset + at - self.start, self.writer, self.unread)
        self.stop = at
        return rest


@dataclass(frozen=True, slots=True)
class _Term:
    """``count`` elements of a value from ``first`` on."""

    value: Value
    first: int
    count: int


class Contents:
    """The contents of all buffers of all ranks.

    Buffers with Role.INPUT hold the rank's input; in place there are none, and buffers with Role.OUTPUT hold it.
    """

    def __init__(
        self, schedules: Sequence[Schedule], given: Callable[[Schedule], Iterable[Precondition]] | None = None
    ) -> None:
        self.schedules = schedules
        self.memory: list[dict[str, IntervalMap[_Cell]]] = []
        #: (rank, round) -> the elements whose random numbers were used
        self.drawn: defaultdict[tuple[int, int], IntervalMap[_Cell]] = defaultdict(IntervalMap)
        self._values: dict[tuple[object, ...], Value] = {}
        self._wires: dict[tuple[object, ...], Wire] = {}
        self._codecs: dict[int, int] = {}
        self._numbers: dict[Codec, int] = {}
        self._draws: dict[int, bool] = {}
        for schedule in schedules:
            self.memory.append({name: IntervalMap() for name in schedule.buffers})
            for each in (given or _given)(schedule):
                size, mask = schedule.buffers[each.buffer].size, _mask(each.ranks)
                if size:
                    value = self.value(("given", mask), mask, None, 1.0)
                    self.memory[-1][each.buffer].put(_Cell(0, size, value, each.first))
            for name, size, first in _states(schedule):
                value = self.value(("state", schedule.rank, name), _mask([schedule.rank]), None, 1.0)
                self.memory[-1][name].put(_Cell(0, size, value, first))

    def happen(self, event: Event) -> None:
        """Apply an event. Raises VerificationError if it reads or writes wrong data."""
        match event:
            case Computation():
                _Operation(self, event.rank, event.op_index).compute()
            case MatchedTransfer():
                target, shift = event.received, event.received.start - event.sent.start
                for run in _Operation(self, event.source, event.send_op).read(event.sent, padded=True):
                    span = Span(target.buffer, run.start + shift, run.stop + shift)
                    _Operation(self, event.target, event.recv_op).write(span, [run])

    def check(self, wants: Sequence[Iterable[Postcondition]]) -> None:
        """Check each rank's postconditions, and that ranks with equal postconditions hold the same bits."""
        models: dict[tuple[object, ...], tuple[int, set[tuple[int, int, Value | Wire]]]] = {}
        for rank, wanted in enumerate(wants):
            for want in wanted:
                reader = _Operation(self, rank, None)
                runs = reader.read(want.span)
                reader.compare(want, runs)
                bits = {(run.offset, run.stop - run.start, run.content) for run in runs}
                key = (_mask(want.ranks), want.first, len(want.span))
                model_rank, model = models.setdefault(key, (rank, bits))
                for offset, count, _ in bits - model:
                    reader.fail(f"elements {offset}..{offset + count} are not the same bits as on rank {model_rank}")

    def check_state(self) -> None:
        """Raise VerificationError if state that an operation uses is not replaced, or belongs to other elements."""
        for rank, schedule in enumerate(self.schedules):
            reader = _Operation(self, rank, None)
            first_of = {name: first for name, _, first in _states(schedule)}
            for span in (span for op in schedule.ops for span in accesses(op)[0] if span.buffer in first_of):
                name = span.buffer
                for run in reader.read(span):
                    if run.content is self._values["state", rank, name] or run.offset != first_of[name] + run.start:
                        reader.fail(
                            f"{name}[{run.start}:{run.stop}] ends as {run.content}, from element {run.offset} on"
                        )

    def check_all_read(self) -> None:
        """Raise VerificationError if a code was made or received and never used."""
        for rank, memory in enumerate(self.memory):
            for name, cells in memory.items():
                for cell in cells:
                    if cell.unread:
                        message = f"writes {name}[{cell.start}:{cell.stop}] ({cell.content}), but nothing ever reads it"
                        raise VerificationError(rank, cell.writer, message)

    def value(self, key: tuple[object, ...], ranks: int, op: str | None, scale: float) -> Value:
        """The unique value that the computation ``key`` gives."""
        found = self._values.get(key)
        if found is None:
            found = self._values[key] = Value(ranks, op, scale)
        return found

    def wire(
        self, codec: Codec, dtype: DType | None, term: _Term, nbytes: int, rank: int, round_number: int, index: int
    ) -> Wire:
        """The unique code that this quantisation gives; the last three arguments choose its random numbers."""
        number = self._number(codec)
        counter = (rank, round_number, index) if self._draws[number] else None
        key = (term.value, term.first, term.count, number, str(dtype), counter)
        found = self._wires.get(key)
        if found is None:
            exact = codec.name == "none"
            decoded = term.value if exact else Value(term.value.ranks, term.value.op, term.value.scale)
            found = self._wires[key] = Wire(
                codec, dtype, decoded, term.first, term.count, nbytes, rank, round_number, index
            )
        return found

    def _number(self, codec: Codec) -> int:
        """The number of a codec and of all equal ones; numbers are compared faster than codecs."""
        found = self._codecs.get(id(codec))
        if found is None:
            found = self._codecs[id(codec)] = self._numbers.setdefault(codec, len(self._numbers))
            self._draws[found] = codec.decoder_draws or codec.kernel().draws
        return found


class _Operation:
    """One operation of one rank, which reads and writes that rank's memory; errors name it."""

    __slots__ = ("memory", "op_index", "rank", "schedule", "world")

    def __init__(self, world: Contents, rank: int, op_index: int | None) -> None:
        self.world = world
        self.rank = rank
        self.op_index = op_index
        self.schedule = world.schedules[rank]
        self.memory = world.memory[rank]

    @property
    def op(self) -> Op:
        assert self.op_index is not None
        return self.schedule.ops[self.op_index]

    def fail(self, message: str) -> NoReturn:
        raise VerificationError(self.rank, self.op_index, message)

    def read(self, span: Span, *, padded: bool = False) -> list[_Cell]:
        """The content of a span in as few cells as possible; fails if part of it was never written.

        ``padded``: less than PADDING bytes between codes may be unwritten.
        """
        cells = self.memory[span.buffer].covered(span.start, span.stop)
        if len(cells) == 1 and cells[0].start == span.start and cells[0].stop == span.stop:
            cells[0].unread = False
            return cells
        runs: list[_Cell] = []
        position = span.start
        for cell in cells:
            cell.unread = False
            if cell.start > position and not (padded and span.start < position > cell.start - PADDING):
                break
            last = runs[-1] if runs else None
            if (
                last is not None
                and last.content is cell.content
                and last.offset + cell.start - last.start == cell.offset
            ):
                last.stop = cell.stop
            else:
                runs.append(_Cell(cell.start, cell.stop, cell.content, cell.offset))
            position = cell.stop
        if position < span.stop:
            stop = next((cell.start for cell in cells if cell.start > position), span.stop)
            self.fail(f"reads {span}, but {span.buffer}[{position}:{stop}] was never written")
        return runs

    def write(self, span: Span, runs: Sequence[_Cell]) -> None:
        """Write the content of cells to a span of the same length."""
        cells, wire = self.memory[span.buffer], self.schedule.buffers[span.buffer].dtype is None
        position = span.start
        for run in runs:
            stop = position + run.stop - run.start
            unread = wire and not _is_padding(run)
            for old in cells.put(_Cell(position, stop, run.content, run.offset, self.op_index, unread)):
                if old.unread:
                    self.fail(
                        f"writes {span} too early: nothing has yet read {old.content} in "
                        f"{span.buffer}[{old.start}:{old.stop}], written by op {old.writer}"
                    )
            position = stop

    def put(self, span: Span, term: _Term) -> None:
        """Write values into a span."""
        if len(span) != term.count:
            self.fail(f"writes {term.count} elements to {span}")
        self.write(span, [_Cell(0, term.count, term.value, term.first)])

    def values(self, span: Span) -> _Term:
        """The content of a span of values, as one value."""
        runs = self.read(span)
        first, value = runs[0].offset, runs[0].content
        if len(runs) == 1 and isinstance(value, Value):
            return _Term(value, first, len(span))
        for run in runs:
            here = first + run.start - span.start
            if not isinstance(run.content, Value) or not isinstance(value, Value):
                self.fail(f"reads {run.content} in {span} as values")
            found = run.content
            if (run.offset, found.ranks, found.op, found.scale) != (here, value.ranks, value.op, value.scale):
                self.fail(f"reads {span}, which holds element {here - 1} of {value}, then {run.offset} of {found}")
        assert isinstance(value, Value)
        key = ("joined", *((run.content, run.stop - run.start) for run in runs))
        return _Term(self.world.value(key, value.ranks, value.op, value.scale), first, len(span))

    def decoded(self, codec: Codec, span: Span, dtype: DType | None, maker: tuple[int, int, int]) -> _Term:
        """The decoded value of the code in a wire span; ``maker`` is its assumed rank, round and first element."""
        runs = self.read(span)
        wire = runs[0].content
        if len(runs) > 1 or runs[0].offset != 0 or not isinstance(wire, Wire) or wire.nbytes != len(span):
            found = ", ".join(f"bytes {r.offset}..{r.offset + r.stop - r.start} of {r.content}" for r in runs)
            self.fail(f"decodes {span}, which is not one whole code: it holds {found}")
        if wire.codec is not codec and wire.codec != codec:
            self.fail(f"decodes {span} with {codec!r}, but {wire.codec!r} made it")
        if dtype is not None and wire.dtype != dtype:
            self.fail(f"decodes {span} to {dtype}, but it was made from {wire.dtype}")
        if codec.decoder_draws and maker != (wire.rank, wire.round, wire.index):
            self.fail(
                f"decodes {span} as made by rank {maker[0]} in round {maker[1]} from element {maker[2]} on, but it was "
                f"made by rank {wire.rank} in round {wire.round} from element {wire.index} on"
            )
        return _Term(wire.value, wire.first, wire.count)

    def combine(self, terms: Sequence[_Term], op: str, scale: float) -> _Term:
        """``op`` of all terms in the given order, times ``scale``; each rank may be in one term only."""
        first = terms[0]
        if len(terms) == 1 and scale == 1.0:
            return first
        ranks = 0
        for term in terms:
            if (term.first, term.count) != (first.first, first.count):
                self.fail(
                    f"combines elements {first.first}..{first.first + first.count} of {_named(first.value.ranks)} with "
                    f"elements {term.first}..{term.first + term.count} of {_named(term.value.ranks)}"
                )
            if ranks & term.value.ranks:
                self.fail(f"counts {_named(ranks & term.value.ranks)} twice")
            if term.value.op not in (None, op) or term.value.scale != first.value.scale:
                self.fail(f"combines by {op} values that were combined by {term.value.op}, scale {term.value.scale}")
            ranks |= term.value.ranks
        key = (op, scale, *(term.value for term in terms))
        value = self.world.value(key, ranks, op, first.value.scale * scale)
        return _Term(value, first.first, first.count)

    def encode(self, codec: Codec, dtype: DType | None, term: _Term, span: Span, index: int, round_number: int) -> Wire:
        """Write the code of a term; fails if random numbers would be used a second time."""
        wire = self.world.wire(codec, dtype, term, len(span), self.rank, round_number, index)
        used = _Cell(index, index + term.count, wire, 0)
        for old in self.world.drawn[self.rank, round_number].put(used):
            if old.content is not wire:
                self.fail(
                    f"uses the random numbers of elements {old.start}..{old.stop} in round {round_number} again: "
                    f"first for {old.content}, now for {wire}"
                )
        self.write(span, [_Cell(0, len(span), wire, 0)])
        return wire

    def compute(self) -> None:
        """Apply a compute operation."""
        buffers, op = self.schedule.buffers, self.op
        match op:
            case Encode():
                dtype = buffers[op.src.buffer].dtype
                self.encode(op.codec, dtype, self.values(op.src), op.wire, op.index, op.round)
            case Decode():
                term = self.decoded(op.codec, op.wire, buffers[op.dst.buffer].dtype, (op.rank, op.round, op.index))
                if op.accumulate:
                    term = self.combine([self.values(op.dst), term], "sum", 1.0)
                self.put(op.dst, term)
            case Reduce():
                self._reduce(op)
            case Commit():
                for span in op.guard:
                    self.read(span)
                for state_buffers in op.state_buffers:
                    self.write(state_buffers.old, self.read(state_buffers.new))

    def _reduce(self, op: Reduce) -> None:
        values = op.own or op.out
        dtype = None if values is None else self.schedule.buffers[values.buffer].dtype
        makers = op.src_ranks if op.codec.decoder_draws else (0,) * len(op.srcs)
        if len(makers) != len(op.srcs):
            self.fail(f"has {len(op.srcs)} sources, but {len(makers)} ranks that made them")
        terms = [
            self.decoded(op.codec, src, dtype, (maker, op.src_round, op.index))
            for src, maker in zip(op.srcs, makers, strict=True)
        ]
        if op.own is not None:
            own = self.values(op.own)
            if op.state is not None and op.state.momentum is not None:
                own = self._with_state(own, op.state.momentum, op.state.mu)
            terms.insert(op.own_index, own)
        total = self.combine(terms, op.op, op.scale)
        if op.state is not None and op.state.residual is not None:
            total = self._with_state(total, op.state.residual, (op.wire, op.state.beta))
        if op.wire is not None:
            wire = self.encode(op.codec, dtype, total, op.wire, op.index, op.round)
            total = _Term(wire.value, wire.first, wire.count)
        if op.out is not None:
            self.put(op.out, total)

    def _with_state(self, term: _Term, state_buffers: StateBuffer, how: object) -> _Term:
        """The values of a term corrected by their state; the same computation gives the next state."""
        old = self.values(state_buffers.old)
        if (old.first, old.count) != (term.first, term.count):
            self.fail(f"adds {state_buffers.old}, from element {old.first} on, to values from element {term.first} on")
        value = term.value
        corrected = self.world.value(("with", value, old.value, how), value.ranks, value.op, value.scale)
        left = self.world.value(("left", value, old.value, how), _mask([self.rank]), None, 1.0)
        self.put(state_buffers.new, _Term(left, term.first, term.count))
        return _Term(corrected, term.first, term.count)

    def compare(self, want: Postcondition, runs: Sequence[_Cell]) -> None:
        """Fail unless the cells fulfil a postcondition."""
        ranks, shift = _mask(want.ranks), want.first - want.span.start
        for run in runs:
            here, content = f"{want.span.buffer}[{run.start}:{run.stop}]", run.content
            if isinstance(content, Wire) or run.offset != run.start + shift:
                self.fail(f"{here} ends as {content}, from element {run.offset} on; wanted is {run.start + shift}")
            if missing := ranks & ~content.ranks:
                self.fail(f"{here} ends without the contribution of {_named(missing)}")
            if extra := content.ranks & ~ranks:
                self.fail(f"{here} ends with a contribution of {_named(extra)} that is not wanted")
            if content.op not in (None, want.op) or content.scale != want.scale:
                self.fail(f"{here} ends as {content.op} x {content.scale}; wanted is {want.op} x {want.scale}")


def _given(schedule: Schedule) -> Iterator[Precondition]:
    """The buffers that hold a rank's input, with Role.INPUT or else Role.OUTPUT; together they are one vector."""
    for role in (Role.INPUT, Role.OUTPUT):
        found = [(name, b.size) for name, b in schedule.buffers.items() if b.role is role]
        if found:
            first = 0
            for name, size in found:
                yield Precondition(name, (schedule.rank,), first)
                first += size
            return


def _states(schedule: Schedule) -> Iterator[tuple[str, int, int]]:
    """Name, size and first element of each state buffer; its index names the caller's array to which it belongs."""
    first = {schedule.buffers[each.buffer].index: each.first for each in _given(schedule)}
    for name, buffer in schedule.buffers.items():
        if buffer.role is Role.STATE:
            yield name, buffer.size, first.get(buffer.index, 0)


def _is_padding(cell: _Cell) -> bool:
    """Whether a cell is the rest of an old code, in the padding between two codes that were sent together."""
    return isinstance(cell.content, Wire) and cell.stop - cell.start < min(PADDING, cell.content.nbytes)


def _mask(ranks: Iterable[int]) -> int:
    return sum(1 << rank for rank in set(ranks))


def _named(mask: int) -> str:
    ranks = [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
