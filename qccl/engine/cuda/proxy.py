"""A host proxy thread: it moves messages between hosts for an engine whose work is on a device.

Device and proxy synchronise through flags: 32-bit words in pinned memory. For a message to another rank the device sets
the first flag ("the codes are in host memory") and the proxy the last ("the message has been sent"). For a message from
another rank the proxy sets the first flag ("it has arrived") and the device the last ("its slot is free again"). Flags
hold run numbers, so they are never reset. The proxy calls no function of CUDA, because another thread may be capturing,
which forbids many of them.

The proxy is the only user of its transport. Its thread moves messages in the order of begin(), and ends when all have
ended.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qccl.base.deadline import Deadline
from qccl.base.errors import CollectiveTimeout, EngineError, QcclError, as_failure
from qccl.engine.progress import ProgressThread
from qccl.transports.base import Transport

__all__ = ["HostProxy", "ProxyMessage", "TransferBatch"]

#: how long a failing rank waits for the proxy's thread to release the transport
_GRACE_SECONDS = 1.0
_NAP_SECONDS = 1e-3
#: calls after which tags are reused
_TAGS = 4096
_HALF = 1 << 31


def reached(flag: int, number: int) -> bool:
    """Whether a flag has reached a run number. Both wrap around after 32 bits; the device compares in the same way."""
    return (flag - number) % (1 << 32) < _HALF


@dataclass(frozen=True, slots=True, eq=False)
class ProxyMessage:
    """A message that is sent or received in each run of a program.

    Attributes:
        address, nbytes: the memory of the message.
        gates: pairs (flag, back): the message starts when the flag has reached the run's number less ``back``.
        done: the flag that is set to the run's number when the message has ended.
    """

    peer: int
    is_send: bool
    address: int
    nbytes: int
    gates: tuple[tuple[int, int], ...]
    done: int


class TransferBatch:
    """The messages of one run.

    Attributes:
        flags: the flags, by the numbers in the messages.
        number: the run's number among the runs of its program, from 1 on.
        tag: the tag of the messages, which differs between calls that may be under way at once.
        deadline: the run's deadline.
        kept: the messages' memory, kept until all have ended.
        left: number of messages that have not ended.
    """

    def __init__(
        self,
        messages: Sequence[ProxyMessage],
        flags: memoryview,
        number: int,
        *,
        call: int,
        call_text: str,
        deadline: Deadline,
        kept: object,
    ) -> None:
        self.messages, self.flags, self.number = messages, flags, number
        self.tag = 1 + call % _TAGS
        self.call_text, self.deadline, self.kept = call_text, deadline, kept
        self.left = len(messages)

    def may_start(self, message: ProxyMessage) -> bool:
        """Whether all flags that the message waits for have been reached."""
        return all(reached(self.flags[flag], self.number - back) for flag, back in message.gates)

    def release(self) -> None:
        """After a failure: set all flags that the device waits for. Data copied afterwards is discarded."""
        for message in self.messages:
            self.flags[message.done] = self.number % (1 << 32)


class HostProxy:
    """Moves the messages of batches over one transport, on a thread of its own.

    Attributes:
        detached: batches under way (see progress.Driven).
    """

    def __init__(self, transport: Transport, on_failure: Callable[[QcclError], None]) -> None:
        """The proxy's thread calls ``on_failure`` with its error."""
        self.transport = transport
        self.detached = 0
        self._on_failure = on_failure
        self._turn = threading.Lock()  # held while the transport is used
        self._state = threading.Lock()  # guards the attributes below; never held while anything blocks
        self._batches: list[TransferBatch] = []
        self._waiting: dict[bool, deque[tuple[TransferBatch, ProxyMessage]]] = {True: deque(), False: deque()}
        self._ended: str | None = None
        self._progress_thread = ProgressThread(self)

    def begin(self, batch: TransferBatch) -> None:
        """Take over the messages of a run. Call this before a stream waits for their flags."""
        with self._state:
            if self._ended is not None:
                raise EngineError(self._ended)
            if not batch.messages:
                return
            self._batches.append(batch)
            self.detached += 1
            for message in batch.messages:
                self._waiting[message.is_send].append((batch, message))
        self._progress_thread.wake_at_once()

    def drive(self) -> bool:
        """Move messages in the progress thread; see progress.Driven."""
        error: BaseException | None = None
        with self._turn:
            try:
                idle = 0
                while self.detached and self._ended is None:
                    idle = 0 if self._advance(idle) else idle + 1
            except BaseException as caught:
                error = caught
        if error is not None:
            ours = as_failure(self.transport.rank, error)
            self._on_failure(ours)  # before abort() releases the streams, so that their later work is discarded
            self.abort(str(ours))
        return True

    def close(self, deadline: Deadline) -> None:
        """Wait until all messages have ended, at the latest at the deadline, and end the thread. Idempotent."""
        while self.detached and self._ended is None and not deadline.is_over:
            time.sleep(_NAP_SECONDS)
        if self.detached and self._ended is None:
            self.abort(f"rank {self.transport.rank} left while messages were under way")
        with self._state:
            self._ended = self._ended or "the engine was closed"
        self._progress_thread.join()

    def abort(self, reason: str) -> None:
        """Release all streams that wait for messages, then abort the transport."""
        with self._state:
            self._ended = self._ended or reason
            under_way = list(self._batches)
            self.detached = 0
        for batch in under_way:  # in their order: a flag never decreases
            batch.release()
        taken = self._turn.acquire(timeout=_GRACE_SECONDS)
        try:
            self.transport.abort(reason)
        finally:
            if taken:
                self._turn.release()
        self.stop()

    def stop(self) -> None:
        """Let the thread end."""
        self._progress_thread.stop()

    def _advance(self, idle: int) -> bool:
        """Start messages whose gates are open, and finish ended ones. Returns False if there was nothing to do."""
        started = self._start(self._waiting[False]) + self._start(self._waiting[True])
        ended = self.transport.poll(idle=0 if started else idle)
        for token in ended:
            self._finish(*token)  # type: ignore[misc]
        if started or ended:
            return True
        with self._state:
            overdue = [batch for batch in self._batches if batch.deadline.is_over]
        if overdue:
            raise CollectiveTimeout(
                f"rank {self.transport.rank} reached the deadline of {overdue[0].call_text}: "
                f"{overdue[0].left} messages between nodes have not ended"
            )
        return False

    def _start(self, waiting: deque[tuple[TransferBatch, ProxyMessage]]) -> int:
        """Post the messages of one direction whose gates are open, in their order. Returns how many were posted."""
        started = 0
        while waiting and waiting[0][0].may_start(waiting[0][1]):
            batch, message = waiting.popleft()
            post = self.transport.send if message.is_send else self.transport.receive
            post(message.peer, batch.tag, message.address, message.nbytes, (batch, message))
            started += 1
        return started

    def _finish(self, batch: TransferBatch, message: ProxyMessage) -> None:
        """Set the flag of a message that has ended."""
        batch.flags[message.done] = batch.number % (1 << 32)
        batch.left -= 1
        if batch.left == 0:
            with self._state:
                if batch in self._batches:
                    self._batches.remove(batch)
                    self.detached -= self._ended is None
