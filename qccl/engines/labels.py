"""What a trace says of the steps of a schedule: their lanes, names and arguments."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qccl.intervals import IntervalMap
from qccl.schedule import Buffer, Commit, Decode, Encode, Exchange, Node, Op, Reduce

__all__ = ["Label", "group_label", "labels"]

Args = dict[str, int | str]


class Label(NamedTuple):
    """Lane, name and arguments of a trace event (see TraceEvent)."""

    lane: str
    name: str
    args: Args


@dataclass(slots=True)
class _Written:
    start: int
    stop: int
    node: int

    def split(self, at: int) -> _Written:
        rest = _Written(at, self.stop, self.node)
        self.stop = at
        return rest


def labels(program: Sequence[Node], buffers: Mapping[str, Buffer]) -> list[Label]:
    """A label for each node; Exchanges are nodes for each leg.

    A schedule numbers no chunks. A message is that of chunk k if so many came before it with the same peer, direction
    and round, and a computation is of the chunk whose message it makes or takes.
    """
    sources, readers = _flow(program)
    args = [_arguments(node, buffers) for node in program]
    for i in sorted(_legs(program), key=lambda i: (program[i].is_send, i)):  # sends may pass on what was received
        made_by = sources[i] if program[i].is_send else readers[i]
        for other in sorted(made_by, key=lambda j: program[j].leg is not None):
            if program[other].leg is None or program[i].is_send:
                known = _message(program[other].op, args[other], is_send=program[i].is_send)
                args[i] = known | args[i]
                break
    seen: Counter[tuple[int, bool, int | str | None]] = Counter()
    for i, leg in _legs(program).items():
        key = leg, program[i].is_send, args[i].get("round")
        args[i]["chunk"] = seen[key]
        seen[key] += 1
    for i, node in enumerate(program):
        near = [j for j in (*sources[i], *readers[i]) if program[j].leg is not None]
        if node.leg is None and near:
            args[i]["chunk"] = args[near[0]]["chunk"]
    return [_label(node, each) for node, each in zip(program, args, strict=True)]


def _legs(program: Sequence[Node]) -> dict[int, int]:
    """The nodes that are transfers, with their peers."""
    return {i: node.leg.peer for i, node in enumerate(program) if node.leg is not None}


def _flow(program: Sequence[Node]) -> tuple[list[list[int]], list[list[int]]]:
    """For each node, those that wrote what it reads, and those that read what it wrote."""
    written: defaultdict[str, IntervalMap[_Written]] = defaultdict(IntervalMap)
    sources: list[list[int]] = [[] for _ in program]
    readers: list[list[int]] = [[] for _ in program]
    for i, node in enumerate(program):
        for span in node.reads():
            for cell in written[span.buffer].covered(span.start, span.stop) if len(span) else ():
                sources[i].append(cell.node)
                readers[cell.node].append(i)
        for span in node.writes():
            if len(span):
                written[span.buffer].put(_Written(span.start, span.stop, i))
    return sources, readers


def _arguments(node: Node, buffers: Mapping[str, Buffer]) -> Args:
    args: Args = {"operation": node.op_index}
    if node.leg is not None:
        nbytes = len(node.leg.span) * buffers[node.leg.span.buffer].itemsize
        return args | {"peer": node.leg.peer, "bytes": nbytes, "message": node.sequence}
    match node.op:
        case Encode(codec, src, wire, round=number):
            return args | {"codec": codec.spec(), "round": number, "elements": len(src), "bytes": len(wire)}
        case Decode(codec, wire, dst, round=number):
            return args | {"codec": codec.spec(), "round": number, "elements": len(dst), "bytes": len(wire)}
        case Reduce(codec, srcs, own, wire=wire, out=out, round=number):
            nbytes = sum(map(len, srcs)) + len(wire or ())
            count = len(own or out or ())
            return args | {"codec": codec.spec(), "round": number, "elements": count, "bytes": nbytes}
        case Exchange(sends, recvs):
            sent, received = (sum(len(leg.span) for leg in legs) for legs in (sends, recvs))
            peers = sorted({leg.peer for leg in (*sends, *recvs)})
            return args | {"bytes": sent, "received bytes": received, "peers": ", ".join(map(str, peers))}
        case Commit(carried=carried):
            return args | {"elements": sum(len(each.new) for each in carried)}


def _message(op: Op, known: Args, *, is_send: bool) -> Args:
    """What is known of a message by the operation that makes it or takes it."""
    found: Args = {key: known[key] for key in ("codec", "round", "elements") if key in known}
    if isinstance(op, Reduce) and not is_send:
        found["round"] = op.src_round
    return found


def _label(node: Node, args: Args) -> Label:
    if node.leg is not None:
        lane, kind = ("send", "send") if node.is_send else ("recv", "receive")
    else:
        lane, kind = node.lane.value, type(node.op).__name__.lower()
    return Label(lane, f"{kind} chunk {args['chunk']}" if "chunk" in args else kind, args)


def group_label(group: Sequence[Node], buffers: Mapping[str, Buffer]) -> Label:
    """The one label of operations that a device does at once: their sums, and what else the first one has."""
    each = [_arguments(node, buffers) for node in group]
    sums = {
        key: sum(value for args in each if isinstance(value := args.get(key), int))
        for key in ("elements", "bytes", "received bytes")
        if key in each[0]
    }
    kind = type(group[0].op).__name__.lower()
    return Label(group[0].lane.value, f"{kind} {group[0].op_index}", each[0] | sums | {"operations": len(group)})
