"""Send uncompressed values from where they are, without a copy.

In a schedule all transfers are between wire slots, with an Encode before each send, and under the codec "none" that
Encode only copies. This module drops such a copy if nothing but sends reads it. The send then takes the values from
their own buffer. It still reserves its wire slot, so the number of messages under way does not grow, and operations
that overwrite the values wait for it.

Receives stay in slots: a library may still complete a receive that was given up, and then must not write to the
caller's memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from qccl.schedule import Encode, Node, Span, dependencies

__all__ = ["remove_copies"]


def remove_copies(program: Sequence[Node], least: int) -> tuple[list[Node], list[tuple[int, ...]]]:
    """The program without needless copies of ``least`` bytes and more, and for each node the nodes that it needs."""
    found, needed = list(program), dependencies(program)
    copies = {i: node.op for i, node in enumerate(program) if isinstance(node.op, Encode) and _copies(node.op, least)}
    if not copies:
        return found, needed
    followers: defaultdict[int, list[int]] = defaultdict(list)
    for i, earlier in enumerate(needed):
        for j in earlier:
            if j in copies:
                followers[j].append(i)
    dropped = set[int]()
    for copy, op in copies.items():
        sends = [i for i in followers[copy] if _overlap(program[i].reads(), op.wire)]
        others = [i for i in followers[copy] if i not in sends]
        if (
            sends
            and all(_sends(program[i], op.wire) and needed[i] == (copy,) for i in sends)
            and sends[-1] < min(others, default=len(program))
        ):
            dropped.add(copy)
            for i in sends:
                found[i] = replace(program[i], source=op.src)
    return _without(found, dropped)


def _copies(op: Encode, least: int) -> bool:
    return op.codec.name == "none" and len(op.wire) >= least


def _sends(node: Node, wire: Span) -> bool:
    return node.transfer is not None and node.is_send and node.transfer.span == wire


def _overlap(spans: Sequence[Span], wire: Span) -> bool:
    return any(s.buffer == wire.buffer and s.start < wire.stop and wire.start < s.stop for s in spans)


def _without(program: Sequence[Node], dropped: set[int]) -> tuple[list[Node], list[tuple[int, ...]]]:
    """The program without some nodes. A node that needed a dropped one needs that one's own needs instead."""
    kept: list[Node] = []
    needed: list[tuple[int, ...]] = []
    new_numbers: list[tuple[int, ...]] = []  # for each old node: itself, or the nodes that a dropped one needed
    for i, (node, earlier) in enumerate(zip(program, dependencies(program), strict=True)):
        needs = tuple(sorted({k for j in earlier for k in new_numbers[j]}))
        if i in dropped:
            new_numbers.append(needs)
        else:
            new_numbers.append((len(kept),))
            kept.append(node)
            needed.append(needs)
    return kept, needed
