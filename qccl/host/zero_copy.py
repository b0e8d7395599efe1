"""Values that are sent as they are need no copy: they are sent from where they lie.

In a schedule all transfers are between wire slots, with an Encode before each send, which under the codec "none" only
copies. This leaves out those copies that nobody would miss. A send that goes without still occupies its slot, so no
more messages are under way than before; and what overwrites the values waits for it.

Receives stay in slots: a transfer that its rank has given up may still come, and must not meet the caller's memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from qccl.schedule import Encode, Node, Span, dependencies

__all__ = ["direct"]


def direct(program: Sequence[Node], least: int) -> tuple[list[Node], list[tuple[int, ...]]]:
    """The program without copies of ``least`` bytes and more, where it can do without; and what each node needs."""
    found, needed = list(program), dependencies(program)
    copies = {i: node.op for i, node in enumerate(program) if isinstance(node.op, Encode) and _copies(node.op, least)}
    if not copies:
        return found, needed
    followers: defaultdict[int, list[int]] = defaultdict(list)
    for i, earlier in enumerate(needed):
        for j in earlier:
            if j in copies:
                followers[j].append(i)
    left_out = set[int]()
    for copy, op in copies.items():
        sends = [i for i in followers[copy] if _overlap(program[i].reads(), op.wire)]
        others = [i for i in followers[copy] if i not in sends]
        if (
            sends
            and all(_sends(program[i], op.wire) and needed[i] == (copy,) for i in sends)
            and sends[-1] < min(others, default=len(program))
        ):
            left_out.add(copy)
            for i in sends:
                found[i] = replace(program[i], place=op.src)
    return _without(found, left_out)


def _copies(op: Encode, least: int) -> bool:
    return op.codec.name == "none" and len(op.wire) >= least


def _sends(node: Node, wire: Span) -> bool:
    return node.transfer is not None and node.is_send and node.transfer.span == wire


def _overlap(spans: Sequence[Span], wire: Span) -> bool:
    return any(s.buffer == wire.buffer and s.start < wire.stop and wire.start < s.stop for s in spans)


def _without(program: Sequence[Node], left_out: set[int]) -> tuple[list[Node], list[tuple[int, ...]]]:
    """The program without some nodes, whose followers need what these needed."""
    kept: list[Node] = []
    needed: list[tuple[int, ...]] = []
    stands_for: list[tuple[int, ...]] = []  # of each old node, the new ones: itself, or what it needed
    for i, (node, earlier) in enumerate(zip(program, dependencies(program), strict=True)):
        needs = tuple(sorted({k for j in earlier for k in stands_for[j]}))
        if i in left_out:
            stands_for.append(needs)
        else:
            stands_for.append((len(kept),))
            kept.append(node)
            needed.append(needs)
    return kept, needed
