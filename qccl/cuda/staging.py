"""The legs of a program that go through host memory: where they lie there, and what streams do for them.

A leg that is sent is copied from the device to pinned memory, and a word says so to the courier, which sends it. One
that comes is received into pinned memory, a word lets the stream go on, and it is copied to the device. All of it is
put on streams when the run is: they wait for words by themselves (cuStreamWaitValue32), so that such a call is ordered
and asynchronous as every other one is, and the host only moves messages.

Pinned memory has the places that the wire buffers have, once for what goes out and once for what comes in. So it is
bounded as they are, by the depth of the pipeline and the size of a chunk, and what may be written again follows from
the spans here, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from qccl.cuda.proxy import HostProxy, Message, TransferBatch
from qccl.cuda.runtime import require
from qccl.cuda.streams import Step
from qccl.errors import EngineError
from qccl.schedule import Exchange, Node, Queue, Schedule, Span, Transfer, dependencies
from qccl.transports.base import Call

__all__ = ["Staging", "try_out"]

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
_ALIGNMENT = 256
_WORD_NBYTES = 4


class _Copied(NamedTuple):
    """One copy between device and host.

    Attributes:
        legs: that it is for, each with the word of its message; several where one code is sent to several ranks.
        word: what the device sets behind it.
    """

    span: Span
    transfers: tuple[tuple[Transfer, int], ...]
    word: int


class Staging:
    """The staged legs of one program, and their pinned memory.

    Attributes:
        nbytes: of pinned memory.
    """

    def __init__(
        self, schedule: Schedule, steps: Sequence[Step], address: Callable[[Span], int], proxy: HostProxy
    ) -> None:
        """``address`` is that of a span on the device."""
        self._address, self._courier, self._number = address, proxy, 0
        self._count = 0  # of words
        self._copies = {
            s: list(self._copied(step)) for s, step in enumerate(steps) if step.queue in (Queue.OUT, Queue.IN)
        }
        self._queues = {s: steps[s].queue for s in self._copies}
        self._places: dict[tuple[Queue, str], int] = {}  # of each buffer, in each direction
        self.nbytes = _aligned(_WORD_NBYTES * self._count)
        for s, copies in self._copies.items():
            for copied in copies:
                if (self._queues[s], copied.span.buffer) not in self._places:
                    self._places[self._queues[s], copied.span.buffer] = self.nbytes
                    self.nbytes += _aligned(schedule.buffers[copied.span.buffer].nbytes)
        self._memory: Any = require().cupy.cuda.alloc_pinned_memory(self.nbytes)
        self._base = int(self._memory.ptr)
        words = (ctypes.c_uint32 * self._count).from_address(self._base)
        ctypes.memset(self._base, 0, ctypes.sizeof(words))
        self._words = memoryview(words).cast("B").cast("I")
        self._before = self._uses(Queue.OUT) | self._uses(Queue.IN)
        self._messages = [message for s in self._copies for message in self._messages_of(s)]

    def begin(self, call: int, what: str, deadline: float) -> None:
        """A run is about to be put on its streams: ``call`` is its number on all ranks."""
        self._number += 1
        batch = TransferBatch(
            self._messages, self._words, self._number, call=call, what=what, deadline=deadline, kept=self
        )
        self._courier.begin(batch)

    def calls(self, step: int, stream: int) -> list[Call]:
        """What a step puts on its stream in a run that has begun."""
        copy, calls = require().runtime.memcpyAsync, list[Call]()
        for number, copied in enumerate(self._copies[step]):
            here, there, nbytes = self._place(step, copied.span), self._address(copied.span), len(copied.span)
            if self._queues[step] is Queue.OUT:
                for before, back in self._before[step, number]:
                    calls += [(self._wait, (stream, word, back)) for _, word in before.transfers]
                calls.append((copy, (here, there, nbytes, _DEVICE_TO_HOST, stream)))
            else:
                calls += [(self._wait, (stream, word, 0)) for _, word in copied.transfers]
                calls.append((copy, (there, here, nbytes, _HOST_TO_DEVICE, stream)))
            calls.append((self._tell, (stream, copied.word)))
        return calls

    # -- what is made once -------------------------------------------------------------------------------------------

    def _copied(self, step: Step) -> Iterator[_Copied]:
        """The copies of a step; each leg and each copy gets a word."""
        assert step.exchange is not None
        transfers = (*step.exchange.sends, *step.exchange.recvs)
        for span in dict.fromkeys(transfer.span for transfer in transfers):
            ours = tuple((transfer, self._new_word()) for transfer in transfers if transfer.span == span)
            yield _Copied(span, ours, self._new_word())

    def _new_word(self) -> int:
        self._count += 1
        return self._count - 1

    def _uses(self, queue: Queue) -> dict[tuple[int, int], list[tuple[_Copied, int]]]:
        """For each copy of a lane, by step and number: the last ones that used its place, and how many runs ago."""
        keys = [(s, i) for s, copies in self._copies.items() if self._queues[s] is queue for i in range(len(copies))]
        copies = [self._copies[s][i] for s, i in keys]
        twice = [Node(i, Exchange((), (Transfer(0, copied.span),))) for i, copied in enumerate([*copies, *copies])]
        found = dependencies(twice)[len(keys) :]
        return {
            key: [(copies[i % len(keys)], int(i < len(keys))) for i in before]
            for key, before in zip(keys, found, strict=True)
        }

    def _messages_of(self, step: int) -> Iterator[Message]:
        is_send = self._queues[step] is Queue.OUT
        for number, copied in enumerate(self._copies[step]):
            buffer = self._courier.transport.buffer(self._place(step, copied.span), len(copied.span))
            before = [(copied, 0)] if is_send else self._before[step, number]
            gates = tuple((each.word, back) for each, back in before)
            for transfer, word in copied.transfers:
                yield Message(transfer.peer, is_send, buffer, gates, word)

    def _place(self, step: int, span: Span) -> int:
        """The address in pinned memory."""
        return self._base + self._places[self._queues[step], span.buffer] + span.start

    # -- words -------------------------------------------------------------------------------------------------------

    def _wait(self, stream: int, word: int, back: int) -> None:
        """Let a stream wait until a word has reached the number of the run, or of the one so many runs before."""
        _wait_value(stream, self._base + _WORD_NBYTES * word, self._number - back)

    def _tell(self, stream: int, word: int) -> None:
        """Let a stream set a word to the number of the run, when all before it can be seen."""
        _write_value(stream, self._base + _WORD_NBYTES * word, self._number)


def try_out(stream: int) -> None:
    """Raise what the driver says, if streams cannot wait for words and set them; ``stream`` has nothing to do yet."""
    gpu = require()
    memory = gpu.cupy.cuda.alloc_pinned_memory(_WORD_NBYTES)
    word = ctypes.c_uint32.from_address(memory.ptr)
    word.value = 1
    _wait_value(stream, memory.ptr, 1)
    _write_value(stream, memory.ptr, 2)
    gpu.runtime.streamSynchronize(stream)  # and now nobody uses the memory
    if word.value != 2:
        raise EngineError("a stream of this GPU does not set words in host memory, as inter='host' needs; leave it out")


def _wait_value(stream: int, address: int, number: int) -> None:
    bindings = require().bindings
    least = bindings.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ  # compares as courier.reached()
    _check(bindings.cuStreamWaitValue32(stream, address, number % (1 << 32), int(least)))


def _write_value(stream: int, address: int, number: int) -> None:
    bindings = require().bindings
    behind = bindings.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT  # when all before it can be seen
    _check(bindings.cuStreamWriteValue32(stream, address, number % (1 << 32), int(behind)))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _check(answer: tuple[Any]) -> None:
    """Raise what the driver says as CuPy would."""
    (status,) = answer
    if status:
        raise require().driver.CUDADriverError(int(status))
