"""Messages between hosts for an engine whose work is on a device: started and told of by words in memory that both see.

A word is 32 bits in memory of the host that the device reads and writes, too. In a message to another rank the device
has the first word ("the codes are here") and the courier the last ("they have left"); in one that comes it is the other
way round ("they have come", "their place is free again"). Words hold numbers of runs, so nothing is ever reset, and
neither side asks the other anything: the courier calls nothing of the device's library, which other threads may have
in a state that forbids it, such as a capture.

The courier is the only one that uses its transport. It moves messages in the order in which they were given to it, on
a thread of its own, for as long as there are any.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qccl.engine.progress import ProgressThread
from qccl.errors import CollectiveTimeout, EngineError, QcclError, gave_up
from qccl.transports.base import Transport

__all__ = ["HostProxy", "Message", "TransferBatch"]

#: how long a failing rank waits for the courier's thread to let go of the transport
_GRACE_SECONDS = 1.0
_NAP_SECONDS = 1e-3
#: messages of calls so far apart never meet: tags go round
_TAGS = 4096
_HALF = 1 << 31


def reached(word: int, number: int) -> bool:
    """Whether a word has come to a number of a run. Both go round after 32 bits, as the device compares them."""
    return (word - number) % (1 << 32) < _HALF


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """What is sent or received in each run of a program.

    Attributes:
        buffer: the transport's, of the memory it is in.
        gates: words that must have reached the number of the run before it starts, or the number so many runs before.
        done: the word that is set to the run's number when it has ended.
    """

    peer: int
    is_send: bool
    buffer: object
    gates: tuple[tuple[int, int], ...]
    done: int


class TransferBatch:
    """The messages of one run.

    Attributes:
        words: by the numbers that the messages name.
        number: of the run, among those of its program, from 1 on.
        call: of the run, among those of all ranks: messages of different calls do not meet.
        deadline: in time.monotonic() seconds.
        kept: what must live until all messages have ended: their memory.
        left: messages that have not ended.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        words: memoryview,
        number: int,
        *,
        call: int,
        what: str,
        deadline: float,
        kept: object,
    ) -> None:
        self.messages, self.words, self.number = messages, words, number
        self.tag = 1 + call % _TAGS
        self.what, self.deadline, self.kept = what, deadline, kept
        self.left = len(messages)

    def may_start(self, message: Message) -> bool:
        return all(reached(self.words[word], self.number - back) for word, back in message.gates)

    def release(self) -> None:
        """Tell the device that everything has ended, whatever became of it."""
        for message in self.messages:
            self.words[message.done] = self.number % (1 << 32)


class HostProxy:
    """Moves the messages of trips over one transport, on a thread of its own.

    Attributes:
        detached: trips under way (see background.Driven).
    """

    def __init__(self, transport: Transport, on_failure: Callable[[QcclError], None]) -> None:
        """``on_failure`` is called on the courier's thread with what went wrong."""
        self.transport = transport
        self.detached = 0
        self._on_failure = on_failure
        self._turn = threading.Lock()  # held while the transport is used
        self._state = threading.Lock()  # of what follows; never held while anything blocks
        self._trips: list[TransferBatch] = []
        self._waiting: dict[bool, deque[tuple[TransferBatch, Message]]] = {True: deque(), False: deque()}
        self._ended: str | None = None
        self._progress_thread = ProgressThread(self)

    def begin(self, batch: TransferBatch) -> None:
        """Take over the messages of a run. What the device is to wait for may only then be put on its streams."""
        with self._state:
            if self._ended is not None:
                raise EngineError(self._ended)
            if not batch.messages:
                return
            self._trips.append(batch)
            self.detached += 1
            for message in batch.messages:
                self._waiting[message.is_send].append((batch, message))
        self._progress_thread.attend(at_once=True)

    def drive(self) -> None:
        """The thread's turn: see background.Driven."""
        error: BaseException | None = None
        with self._turn:
            try:
                idle = 0
                while self.detached and self._ended is None:
                    idle = 0 if self._advance(idle) else idle + 1
            except BaseException as caught:
                error = caught
        if error is not None:
            ours = error if isinstance(error, QcclError) else gave_up(self.transport.rank, error)
            self._on_failure(ours)  # first, because nobody may take for a result what streams do when they are let go
            self.abort(str(ours))

    def close(self, timeout: float) -> None:
        """Wait until the last messages have gone, at the latest ``timeout`` seconds, and end the thread. Idempotent."""
        deadline = time.monotonic() + timeout
        while self.detached and self._ended is None and time.monotonic() < deadline:
            time.sleep(_NAP_SECONDS)
        if self.detached and self._ended is None:
            self.abort(f"rank {self.transport.rank} left while messages were under way")
        with self._state:
            self._ended = self._ended or "the engine was closed"
        self._progress_thread.end()

    def abort(self, reason: str) -> None:
        """Give up at once: no stream of the device waits for a message any more, and the transport is given up."""
        with self._state:
            self._ended = self._ended or reason
            under_way = list(self._trips)
            self.detached = 0
        for batch in under_way:  # in order: words never go back
            batch.release()
        taken = self._turn.acquire(timeout=_GRACE_SECONDS)
        try:
            self.transport.abort(reason)
        finally:
            if taken:
                self._turn.release()
        self.dismiss()

    def dismiss(self) -> None:
        """Let the thread end."""
        self._progress_thread.dismiss()

    def _advance(self, idle: int) -> bool:
        """Start what may start, and act on what has ended; whether there was any."""
        started = self._start(self._waiting[False]) + self._start(self._waiting[True])
        ended = self.transport.poll(idle=0 if started else idle)
        for token in ended:
            self._finish(*token)  # type: ignore[misc]
        if started or ended:
            return True
        with self._state:
            late = [batch for batch in self._trips if batch.deadline < time.monotonic()]
        if late:
            raise CollectiveTimeout(
                f"rank {self.transport.rank} reached the deadline of {late[0].what}: {late[0].left} messages between "
                f"nodes have not ended"
            )
        return False

    def _start(self, waiting: deque[tuple[TransferBatch, Message]]) -> int:
        """Post the messages of one direction whose turn has come, in their order; how many."""
        started = 0
        while waiting and waiting[0][0].may_start(waiting[0][1]):
            batch, message = waiting.popleft()
            post = self.transport.send if message.is_send else self.transport.receive
            post(message.peer, batch.tag, message.buffer, (batch, message))
            started += 1
        return started

    def _finish(self, batch: TransferBatch, message: Message) -> None:
        """A message has ended."""
        batch.words[message.done] = batch.number % (1 << 32)
        batch.left -= 1
        if batch.left == 0:
            with self._state:
                if batch in self._trips:
                    self._trips.remove(batch)
                    self.detached -= self._ended is None
