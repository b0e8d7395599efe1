"""Labels of a schedule's tasks in a trace: queue, name and arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from qccl.collectives.schedule import Buffer, Commit, Decode, Encode, Exchange, Op, Reduce, Task, pieces

__all__ = ["Label", "labels", "launch_label"]

Args = dict[str, int | str]


class Label(NamedTuple):
    """The queue, name and arguments of a trace event (see TraceEvent)."""

    queue: str
    name: str
    args: Args


def labels(program: Sequence[Task], buffers: Mapping[str, Buffer]) -> list[Label]:
    """Make a label for each task; each transfer of an Exchange must be a task of its own.

    A schedule does not number chunks, so this counts messages: message k with the same peer, direction and round
    carries chunk k. A computation gets the chunk of the first message that it encodes or decodes.
    """
    sources, readers = _flow(program)
    args = [_arguments(task, buffers) for task in program]
    _describe_messages(program, args, sources, readers)
    _number_chunks(program, args, sources, readers)
    return [_label(task, each) for task, each in zip(program, args, strict=True)]


def _describe_messages(
    program: Sequence[Task], args: list[Args], sources: Sequence[list[int]], readers: Sequence[list[int]]
) -> None:
    """Copy codec, round and elements to each transfer from the operation that encodes or decodes its message."""
    transfers = [i for i, task in enumerate(program) if task.transfer is not None]
    for i in sorted(transfers, key=lambda i: program[i].is_send):  # receives first: a send may forward a message
        is_send = program[i].is_send
        near = sources[i] if is_send else readers[i]
        others = [j for j in near if program[j].transfer is None]
        if is_send:
            others += [j for j in near if program[j].transfer is not None]
        if others:
            args[i] = _message(program[others[0]].op, args[others[0]], is_send=is_send) | args[i]


def _number_chunks(
    program: Sequence[Task], args: list[Args], sources: Sequence[list[int]], readers: Sequence[list[int]]
) -> None:
    seen: Counter[tuple[int, bool, int | str | None]] = Counter()
    for i, task in enumerate(program):
        if task.transfer is not None:
            key = task.transfer.peer, task.is_send, args[i].get("round")
            args[i]["chunk"] = seen[key]
            seen[key] += 1
    for i, task in enumerate(program):
        messages = [j for j in (*sources[i], *readers[i]) if program[j].transfer is not None]
        if task.transfer is None and messages:
            args[i]["chunk"] = args[messages[0]]["chunk"]


def _flow(program: Sequence[Task]) -> tuple[list[list[int]], list[list[int]]]:
    """Find for each task the tasks that wrote its inputs, and the tasks that read its outputs."""
    pieces_of, _ = pieces([span for task in program for span in (*task.reads, *task.writes)])
    writers: dict[int, int] = {}
    sources: list[list[int]] = []
    readers: list[list[int]] = [[] for _ in program]
    for i, task in enumerate(program):
        read = chain.from_iterable([pieces_of[span] for span in task.reads])
        sources.append(list(dict.fromkeys([writers[piece] for piece in read if piece in writers])))
        for source in sources[i]:
            readers[source].append(i)
        for piece in chain.from_iterable([pieces_of[span] for span in task.writes]):
            writers[piece] = i
    return sources, readers


def _arguments(task: Task, buffers: Mapping[str, Buffer]) -> Args:
    args: Args = {"operation": task.op_index}
    if task.transfer is not None:
        nbytes = len(task.transfer.span) * buffers[task.transfer.span.buffer].itemsize
        return args | {"peer": task.transfer.peer, "bytes": nbytes, "message": task.sequence}
    match task.op:
        case Encode(codec, src, wire, round=number):
            return args | {"codec": codec.spec(), "round": number, "elements": len(src), "bytes": len(wire)}
        case Decode(codec, wire, dst, round=number):
            return args | {"codec": codec.spec(), "round": number, "elements": len(dst), "bytes": len(wire)}
        case Reduce(codec, srcs, own, wire=wire, out=out, round=number):
            nbytes = sum(map(len, srcs)) + len(wire or ())
            count = len(own or out or ())
            return args | {"codec": codec.spec(), "round": number, "elements": count, "bytes": nbytes}
        case Exchange(sends, recvs):
            sent, received = (sum(len(transfer.span) for transfer in transfers) for transfers in (sends, recvs))
            peers = sorted({transfer.peer for transfer in (*sends, *recvs)})
            return args | {"bytes": sent, "received bytes": received, "peers": ", ".join(map(str, peers))}
        case Commit(state_buffers=state_buffers):
            return args | {"elements": sum(len(each.new) for each in state_buffers)}


def _message(op: Op, known: Args, *, is_send: bool) -> Args:
    """Make the arguments of a message from the arguments of the operation that encodes or decodes it."""
    found: Args = {key: known[key] for key in ("codec", "round", "elements") if key in known}
    if isinstance(op, Reduce) and not is_send:
        found["round"] = op.src_round
    return found


def _label(task: Task, args: Args) -> Label:
    if task.transfer is not None:
        queue, kind = ("send", "send") if task.is_send else ("recv", "receive")
    else:
        queue, kind = task.queue.value, type(task.op).__name__.lower()
    return Label(queue, f"{kind} chunk {args['chunk']}" if "chunk" in args else kind, args)


def launch_label(launched: Sequence[Task], buffers: Mapping[str, Buffer]) -> Label:
    """Make one label for the operations of one launch: the first operation's, with the sums of all sizes."""
    each = [_arguments(task, buffers) for task in launched]
    sums = {
        key: sum(value for args in each if isinstance(value := args.get(key), int))
        for key in ("elements", "bytes", "received bytes")
        if key in each[0]
    }
    kind = type(launched[0].op).__name__.lower()
    args = each[0] | sums | {"operations": len(launched)}
    return Label(launched[0].queue.value, f"{kind} {launched[0].op_index}", args)
