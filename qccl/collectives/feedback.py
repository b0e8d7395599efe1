"""All-reduce that remembers: from a schedule without memory to the one of a codec with error feedback or momentum.

Everything that encodes values of the caller's becomes a Reduce with a State, in buffers that hold one fp32 per element
of the caller's arrays. What rank r sends of an element and, in its shard, what it makes of the sum are different
elements, so one vector has both residuals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qccl.codecs.base import Codec
from qccl.codecs.feedback import momentum_of
from qccl.dtypes import FLOAT32
from qccl.schedule import Buffer, Commit, Encode, Op, Reduce, Role, Schedule, Span, State, StateBuffer

__all__ = ["NEXT", "with_feedback"]

#: what a state buffer's name has behind it for the values of the call under way
NEXT = ".next"


def with_feedback(schedule: Schedule, codec: Codec, scale: float) -> Schedule:
    """The schedule of a sum with the state of ``codec``; the same schedule if it has none.

    Its state buffers (Role.STATE) are "residual" and "momentum", or for several arrays "residual 0" and so on.
    ``scale`` is the sum's.
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
    commit = Commit(guard, tuple(_carried(name, 0, size) for name, size in names))
    return replace(schedule, buffers={**schedule.buffers, **buffers}, ops=(*ops, commit))


def _with_feedback(op: Op, kinds: list[str], mu: float) -> Op:
    """An operation with its part of the state, if it encodes."""
    match op:
        case Encode(codec, src, wire, index, round_):
            state = _state(src, kinds, mu)
            return Reduce(codec, (), src, 0, wire, None, index=index, round=round_, state=state)
        case Reduce(own=own, wire=wire) if own is not None and wire is not None:
            return replace(op, state=_state(own, kinds, mu))
    return op


def _alone(name: str, output: Buffer, buffers: Mapping[str, Buffer], codec: Codec, scale: float) -> Op:
    """What a rank without peers does: its momentum."""
    source = f"input{_suffix(name)}"
    own = Span(source if source in buffers else name, 0, output.size)
    state = _state(own, ["momentum"], momentum_of(codec))
    return Reduce(codec.plain, (), own, 0, None, Span(name, 0, output.size), scale=scale, state=state)


def _state(values: Span, kinds: list[str], mu: float) -> State:
    state_buffers = {kind: _carried(f"{kind}{_suffix(values.buffer)}", values.start, values.stop) for kind in kinds}
    return State(**state_buffers, mu=mu)


def _carried(name: str, start: int, stop: int) -> StateBuffer:
    return StateBuffer(Span(name, start, stop), Span(name + NEXT, start, stop))


def _suffix(name: str) -> str:
    """What follows "input" or "output" in the name of a buffer."""
    return name.removeprefix("input").removeprefix("output")
