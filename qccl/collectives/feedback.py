"""Gives state to the operations of a schedule that name codecs with error feedback or momentum.

A round that encodes with a codec such as "onebit+ef" names it in its operations. Here each of these becomes an
operation of the plain codec with a State, whose buffers hold one value per element of the caller's array. A rank
encodes its own values outside its shard and the sums inside it, so one vector holds the residuals of both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from qccl.base.dtypes import FLOAT32, DType
from qccl.codecs.base import Codec
from qccl.codecs.feedback import feedback_of, momentum_of
from qccl.collectives.schedule import (
    Buffer,
    Commit,
    Decode,
    Encode,
    Exchange,
    Op,
    Reduce,
    Role,
    Schedule,
    Span,
    State,
    StateBuffer,
    buffer_name,
    state_buffers,
)

__all__ = ["encoded_parts", "residuals_of", "sums_of", "with_feedback"]

#: suffix of the buffer with the new values of a state buffer
_NEXT = ".next"


def with_feedback(schedule: Schedule, guard: Iterable[str], spans_guarded: Iterable[Span] = ()) -> Schedule:
    """The schedule with state where operations name stateful codecs; the same schedule if none does.

    Its state buffers (Role.STATE) are "residual" and "momentum", or for several arrays "residual 0" and so on. A call
    changes them if the buffers named by ``guard``, and ``spans_guarded``, are finite at its end. They are as long as
    the caller's array; a part that no operation uses stays zero.
    """
    codecs = {id(op.codec): op.codec for op in schedule.ops if not isinstance(op, Exchange | Commit)}
    if not any([codec.state_names for codec in codecs.values()]):
        return schedule
    sums = {op.out for op in schedule.ops if isinstance(op, Reduce) and op.srcs and "residual" in op.codec.state_names}
    ops = tuple(_with_state(op, schedule.buffers, sums) for op in schedule.ops)
    used = [each for kind in ("residual", "momentum") for each in _used(ops, kind)]
    if not used:
        return replace(schedule, ops=ops)
    arrays = {span.buffer: own.buffer for span, own in used}
    names = [*schedule.buffers]
    owners = {name: schedule.buffers[array] for name, array in sorted(arrays.items(), key=lambda e: names.index(e[1]))}
    dtypes = {each.old.buffer: each.dtype for op in ops if isinstance(op, Reduce) for each in state_buffers(op.state)}
    buffers = {name: Buffer(owner.size, dtypes[name], Role.STATE, owner.index) for name, owner in owners.items()}
    buffers |= {name + _NEXT: Buffer(owner.size, dtypes[name], Role.WORK) for name, owner in owners.items()}
    spans = _joined(span for span, _ in used)
    guarded = tuple(Span(name, 0, size) for name in guard if (size := schedule.buffers[name].size))
    commit = Commit((*guarded, *spans_guarded), tuple(_state_buffer(span, dtypes[span.buffer]) for span in spans))
    return replace(schedule, buffers={**schedule.buffers, **buffers}, ops=(*ops, commit))


def sums_of(schedule: Schedule) -> list[tuple[str, int, int]]:
    """The parts (buffer, start, stop) of residuals that do not belong to this rank's own values.

    They belong to sums that the rank owns, or stay zero because the rank does not encode these elements.
    """
    own, parts = [each[:3] for each in encoded_parts(schedule) if not each[3]], []
    for name in residuals_of(schedule):
        here, size = 0, schedule.buffers[name].size
        for _, start, stop in (*[each for each in own if each[0] == name], (name, size, size)):
            if here < start:
                parts.append((name, here, start))
            here = stop
    return parts


def encoded_parts(schedule: Schedule) -> list[tuple[str, int, int, bool]]:
    """The parts (buffer, start, stop) of residuals that this rank uses, and whether each belongs to a sum."""
    found = []
    for sums in (False, True):
        states = (op for op in schedule.ops if isinstance(op, Reduce) and op.state and op.state.sums == sums)
        found += [(s.buffer, s.start, s.stop, sums) for s in _joined(span for span, _ in _used(states, "residual"))]
    return found


def residuals_of(schedule: Schedule) -> list[str]:
    """The buffers that hold residuals."""
    used = {span.buffer for span, _ in _used(schedule.ops, "residual")}
    return [name for name in schedule.buffers if name in used]


def _with_state(op: Op, buffers: Mapping[str, Buffer], sums: Collection[Span | None]) -> Op:
    """The operation with the plain codec, and with its part of the state if it reads own values or ``sums``."""
    match op:
        case Encode(codec, src, wire, index, round_) if codec.state_names:
            state = _state(src, buffers[src.buffer], codec, encodes=True)
            return Reduce(codec.plain, (), src, 0, wire, None, index=index, round=round_, state=state)
        case Reduce(codec=codec, own=own, wire=wire) if codec.state_names:
            state = None if own is None else _state(own, buffers[own.buffer], codec, encodes=wire is not None)
            if state is not None and (op.srcs or own in sums):
                state = replace(state, sums=True)
            return replace(op, codec=codec.plain, state=state)
        case Decode(codec=codec) if codec.state_names:
            return replace(op, codec=codec.plain)
    return op


def _state(values: Span, buffer: Buffer, codec: Codec, *, encodes: bool) -> State | None:
    """The state of an operation on own values in a buffer; only one that encodes has a residual."""
    names = {kind: buffer_name(kind, buffer.index) for kind in codec.state_names if encodes or kind != "residual"}
    beta, dtype = feedback_of(codec)
    found = {
        kind: _state_buffer(Span(name, values.start, values.stop), dtype if kind == "residual" else FLOAT32)
        for kind, name in names.items()
    }
    return State(found.get("residual"), found.get("momentum"), momentum_of(codec), beta) if found else None


def _state_buffer(old: Span, dtype: DType) -> StateBuffer:
    return StateBuffer(old, Span(old.buffer + _NEXT, old.start, old.stop), dtype)


def _used(ops: Iterable[Op], kind: str) -> Iterator[tuple[Span, Span]]:
    """The spans of one kind of state that operations use; with each, the span of own values that it belongs to."""
    for op in ops:
        if isinstance(op, Reduce) and op.own is not None and op.state is not None:
            each: StateBuffer | None = getattr(op.state, kind)
            if each is not None:
                yield each.old, op.own


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Disjoint spans in order; neighbours without a gap are joined."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.buffer, span.start)):
        if found and (found[-1].buffer, found[-1].stop) == (span.buffer, span.start):
            span = Span(span.buffer, found.pop().start, span.stop)
        found.append(span)
    return found
