"""Checks that both engines make: of a schedule before it is compiled, and of the addresses of each run.

The proof that a schedule is right is verify() in collectives/analysis/, which tests call.
"""

from __future__ import annotations

from collections.abc import Mapping

from qccl.base.errors import ArgumentError, EngineError
from qccl.collectives.schedule import Buffer, Exchange, Role, Schedule

__all__ = ["caller_buffers", "check_addresses"]


def caller_buffers(schedule: Schedule) -> dict[str, Buffer]:
    """The caller's buffers, by name; each run is given their addresses.

    Raises EngineError if a transfer uses one of them. A library may still write to the memory of an abandoned receive,
    so transfers must use the workspace, which outlives them.
    """
    for i, op in enumerate(schedule.ops):
        for transfer in (*op.sends, *op.recvs) if isinstance(op, Exchange) else ():
            name = transfer.span.buffer
            if schedule.buffers[name].role is not Role.WORK:
                raise EngineError(f"operation {i} transfers {name!r}; transfers must be in work buffers")
    return {name: buffer for name, buffer in schedule.buffers.items() if buffer.role is not Role.WORK}


def check_addresses(addresses: Mapping[str, int], needed: Mapping[str, Buffer]) -> None:
    """Raise ArgumentError unless exactly the ``needed`` buffers have addresses."""
    if addresses.keys() != needed.keys():
        raise ArgumentError(f"addresses are needed for {sorted(needed)}, not for {sorted(addresses)}")
