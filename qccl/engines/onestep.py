"""Small calls in one step: encode, one message to each rank and from each, combine.

Most of the time of a small call is the interpreter's, so this does what Execution does in a straight line.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from qccl.engines.agreement import CONTROL_TAG, HEADER_NBYTES, Header, disagreement
from qccl.engines.program import Eager, Execution, Leg
from qccl.schedule import Commit, Node

if TYPE_CHECKING:
    from qccl.engines.program import Program

__all__ = ["OneStep", "OneStepExecution"]


class OneStep(NamedTuple):
    """A program all of whose messages go with the headers.

    Attributes:
        before: what is computed before anything is sent.
        sends: message to each other rank.
        receives: by rank, the node and the leg of its data.
        after: what is computed when the data of all ranks is there.
        last: what is computed when the sends have ended, too.
    """

    before: tuple[Callable[[], None], ...]
    sends: tuple[tuple[int, Eager], ...]
    receives: dict[int, tuple[int, Leg]]
    after: tuple[Callable[[], None], ...]
    last: tuple[Callable[[], None], ...]

    @staticmethod
    def of(program: Program, every: Sequence[Node], waiting: set[int]) -> OneStep | None:
        """The steps of ``program``, or None where it has more."""
        sends = []
        receives = {}
        for i, (leg, node) in enumerate(zip(program.legs, every, strict=True)):
            if leg is None:
                continue
            if i in program.eager:
                sends.append((leg.peer, program.eager[i]))
            elif not node.is_send and not node.sequence and program.counts[i] == 1:
                receives[leg.peer] = i, leg
            else:
                return None
        if program.bare_peers or len(receives) != len(sends) or not sends:
            return None
        kernels = program.kernels
        last = {i for i, node in enumerate(every) if isinstance(node.op, Commit)}
        before = tuple(k for i, k in enumerate(kernels) if k is not None and i not in waiting)
        after = tuple(k for i, k in enumerate(kernels) if k is not None and i in waiting and i not in last)
        return OneStep(before, tuple(sends), receives, after, tuple(k for i in last if (k := kernels[i]) is not None))


class OneStepExecution(Execution):
    """A run of such a program."""

    __slots__ = ("_missing", "_sending", "_steps")

    def __init__(self, program: Program, header: Header, deadline: float, steps: OneStep) -> None:
        super().__init__(program, header, deadline)
        self._steps = steps
        self._sending = self._missing = len(steps.sends)

    def waits_for(self) -> str:
        if not self.begun or self.unheard:
            return super().waits_for()
        return f"waiting for {self._missing} ranks' data and for {self._sending} sends to end"

    def begin(self, peers: tuple[int, ...]) -> None:
        steps = self._steps
        self.begun = True
        self.unheard = set(peers)
        for kernel in steps.before:
            kernel()
        send, token = self._program.transport.send, (self, -1)
        for peer, message in steps.sends:
            message.fill(self._packed, self.sequence)
            send(peer, CONTROL_TAG, message.buffer, token)

    def agree(self, peer: int, message: bytes) -> None:
        if not message.startswith(self._packed):
            raise disagreement(self._packed, message, self._program.transport.rank, peer)
        self.unheard.discard(peer)
        node, leg = self._steps.receives[peer]
        if len(message) == HEADER_NBYTES + leg.nbytes:
            ctypes.memmove(leg.address, message[HEADER_NBYTES:], leg.nbytes)
            self._arrived()
        elif len(message) > HEADER_NBYTES:
            self._keep(peer, message[HEADER_NBYTES:])  # which raises
        else:
            leg.start(leg.peer, self._base + leg.tag, leg.buffer, (self, node))

    def completed(self, node: int) -> None:
        if node >= 0:
            self._arrived()
            return
        self._sending -= 1
        if not self._sending and not self._missing:
            self._finish()

    def _arrived(self) -> None:
        self._missing -= 1
        if self._missing:
            return
        for kernel in self._steps.after:
            kernel()
        if not self._sending:
            self._finish()

    def _finish(self) -> None:
        for kernel in self._steps.last:
            kernel()
        super()._finish()
