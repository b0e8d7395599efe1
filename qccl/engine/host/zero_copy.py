"""Send uncompressed values from where they are, without a copy.

In a schedule all transfers are between wire slots, with an Encode before each send, and under the codec "none" that
Encode only copies. This module drops such a copy if only sends read it. The send then takes the values from
their own buffer. It still reserves its wire slot, so the number of messages under way does not grow, and operations
that overwrite the values wait for it.

Receives stay in slots: a library may still complete an abandoned receive, which must not write to the caller's memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from qccl.collectives.schedule import Encode, Span, Task, dependencies

__all__ = ["remove_copies"]


def remove_copies(program: Sequence[Task], least: int) -> tuple[list[Task], list[tuple[int, ...]]]:
    """Drop needless copies of at least ``least`` bytes. Returns the tasks, and for each the tasks that it needs.

    A send then needs the tasks that its copy needed. Tasks that overwrite the values or the wire slot wait for the
    sends instead of the copy.
    """
    needed = dependencies(program)
    copies = _needless_copies(program, needed, least)
    if not copies:
        return list(program), needed
    source_of = {send: op.src for op, sends in copies.values() for send in sends}
    kept: list[Task] = []
    kept_needed: list[tuple[int, ...]] = []
    numbers: list[tuple[int, ...]] = []  # for each old task: its new number, or the tasks that a dropped one needed
    for i, task in enumerate(program):
        needs: set[int] = set()
        for j in needed[i]:
            needs.update(numbers[j])
            if j in copies and i not in copies[j][1]:
                needs.update(*(numbers[send] for send in copies[j][1]))
        ordered = tuple(sorted(needs))
        if i in copies:
            numbers.append(ordered)
        else:
            numbers.append((len(kept),))
            source = source_of.get(i)
            kept.append(task if source is None else replace(task, reads=(*task.reads, source), source=source))
            kept_needed.append(ordered)
    return kept, kept_needed


def _needless_copies(
    program: Sequence[Task], needed: Sequence[Sequence[int]], least: int
) -> dict[int, tuple[Encode, list[int]]]:
    """Find the copies that only sends read until the slot is used again; each with its sends."""
    copies: dict[int, Encode] = {}
    for i, task in enumerate(program):
        if isinstance(task.op, Encode) and task.op.codec.name == "none" and len(task.op.wire) >= least:
            copies[i] = task.op
    followers: defaultdict[int, list[int]] = defaultdict(list)
    for i, earlier in enumerate(needed):
        for j in earlier:
            if j in copies:
                followers[j].append(i)
    found = {}
    for copy, op in copies.items():
        sends = [i for i in followers[copy] if _overlap(program[i].reads, op.wire)]
        others = [i for i in followers[copy] if i not in sends]
        if (
            sends
            and all(_sends(program[i], op.wire) and needed[i] == (copy,) for i in sends)
            and sends[-1] < min(others, default=len(program))
        ):
            found[copy] = op, sends
    return found


def _sends(task: Task, wire: Span) -> bool:
    return task.transfer is not None and task.is_send and task.transfer.span == wire


def _overlap(spans: Sequence[Span], wire: Span) -> bool:
    return any(s.buffer == wire.buffer and s.start < wire.stop and wire.start < s.stop for s in spans)
