"""Error feedback and momentum: turns a stateless schedule into the schedule of a codec with state.

Each operation that encodes the caller's values becomes a Reduce with a State, whose buffers hold one fp32 per element
of the caller's arrays. A rank encodes its own values outside its shard and the sums inside it, so one vector holds the
residuals of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qccl.codecs.base import Codec
from qccl.codecs.feedback import momentum_of
from qccl.dtypes import FLOAT32
from qccl.schedule import Buffer, Commit, Encode, Op, Reduce, Role, Schedule, Span, State, StateBuffer

__all__ = ["NEXT", "sums_of", "with_feedback"]

#: suffix of the buffer with the new values of a state buffer
NEXT = ".next"


def with_feedback(schedule: Schedule, codec: Codec, scale: float) -> Schedule:
    """The schedule of a sum, scaled by ``scale``, with the state of ``codec``; the same schedule if it has none.

    Its state buffers (Role.STATE) are "residual" and "momentum", or for several arrays "residual 0" and so on.
    """
    outputs = {n: b for n, b in schedule.buffers.items() if b.role is Role.OUTPUT and b.size}
    alone = schedule.size == 1
    kinds = [kind for kind in codec.state_names if not (alone and kind == "residual")]  # alone, nothing is encoded
    if not kinds or not outputs:
        return schedule
    ops: list[Op]
    if alone:
        ops = [_alone(name, output, schedule.buffers, codec, scale) for name, output in outputs.items()]
    else:
        ops = [_with_feedback(op, kinds, momentum_of(codec)) for op in schedule.ops]
    names = [(f"{kind}{_suffix(name)}", output.size) for kind in kinds for name, output in outputs.items()]
    buffers = {name: Buffer(size, FLOAT32, Role.STATE) for name, size in names}
    buffers |= {name + NEXT: Buffer(size, FLOAT32, Role.WORK) for name, size in names}
    guard = tuple(Span(name, 0, output.size) for name, output in outputs.items())
    commit = Commit(guard, tuple(_state_buffer(name, 0, size) for name, size in names))
    return replace(schedule, buffers={**schedule.buffers, **buffers}, ops=(*ops, commit))


def sums_of(schedule: Schedule) -> list[tuple[str, int, int]]:
    """The parts (buffer, start, stop) of the state with residuals of sums, not of this rank's own values."""
    residuals = [op.state.residual for op in schedule.ops if isinstance(op, Reduce) and op.srcs and op.state]
    return [(each.old.buffer, each.old.start, each.old.stop) for each in residuals if each]


def _with_feedback(op: Op, kinds: list[str], mu: float) -> Op:
    """The operation with its part of the state, if it encodes."""
    match op:
        case Encode(codec, src, wire, index, round_):
            state = _state(src, kinds, mu)
            return Reduce(codec, (), src, 0, wire, None, index=index, round=round_, state=state)
        case Reduce(own=own, wire=wire) if own is not None and wire is not None:
            return replace(op, state=_state(own, kinds, mu))
    return op


def _alone(name: str, output: Buffer, buffers: Mapping[str, Buffer], codec: Codec, scale: float) -> Op:
    """The operation of a rank without peers: momentum only."""
    source = f"input{_suffix(name)}"
    own = Span(source if source in buffers else name, 0, output.size)
    state = _state(own, ["momentum"], momentum_of(codec))
    return Reduce(codec.plain, (), own, 0, None, Span(name, 0, output.size), scale=scale, state=state)


def _state(values: Span, kinds: list[str], mu: float) -> State:
    suffix = _suffix(values.buffer)
    found = {kind: _state_buffer(kind + suffix, values.start, values.stop) for kind in kinds}
    return State(**found, mu=mu)


def _state_buffer(name: str, start: int, stop: int) -> StateBuffer:
    return StateBuffer(Span(name, start, stop), Span(name + NEXT, start, stop))


def _suffix(name: str) -> str:
    """The rest of a buffer's name after "input" or "output"."""
    return name.removeprefix("input").removeprefix("output")
