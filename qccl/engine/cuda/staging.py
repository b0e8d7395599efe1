"""A program's transfers through host memory: their pinned memory, and the calls that streams make for them.

A send is copied from the device to pinned memory, and a flag makes the host proxy send it. A receive goes into pinned
memory, a flag releases the stream, and the message is copied to the device. All these calls are put on streams when the
run is: streams wait for flags by themselves (cuStreamWaitValue32). So such a call is ordered and asynchronous like any
other, and the host only moves messages.

Pinned memory has the slots of the wire buffers, once for sends and once for receives. So its size is bounded in the
same way, by the depth of the pipeline and the chunk, and the same spans tell when a slot may be written again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from qccl.base.deadline import Deadline
from qccl.base.errors import EngineError
from qccl.collectives.schedule import Exchange, Queue, Schedule, Span, Task, Transfer, accesses, dependencies
from qccl.engine.cuda.libraries import DEVICE_TO_HOST, HOST_TO_DEVICE, check_status, cuda_libraries
from qccl.engine.cuda.proxy import HostProxy, ProxyMessage, TransferBatch
from qccl.engine.cuda.streams import StreamTask
from qccl.transports.base import ApiCall

__all__ = ["Staging", "check_stream_flags"]

_ALIGNMENT = 256
_FLAG_NBYTES = 4


class _Copy(NamedTuple):
    """One copy between device and host.

    Attributes:
        transfers: the transfers that use the copy, each with its message's flag; several for one code to several ranks.
        flag: the flag that the device sets after the copy.
    """

    span: Span
    transfers: tuple[tuple[Transfer, int], ...]
    flag: int


class Staging:
    """The staged transfers of one program, and their pinned memory.

    Attributes:
        nbytes: bytes of pinned memory.
    """

    def __init__(
        self, schedule: Schedule, tasks: Sequence[StreamTask], address: Callable[[Span], int], proxy: HostProxy
    ) -> None:
        """``address`` gives the address of a span on the device."""
        self._address, self._proxy, self._number = address, proxy, 0
        self._count = 0  # flags so far
        self._copies = {
            s: list(self._copies_of(task)) for s, task in enumerate(tasks) if task.queue in (Queue.OUT, Queue.IN)
        }
        self._queues = {s: tasks[s].queue for s in self._copies}
        self._offsets: dict[tuple[Queue, str], int] = {}  # each buffer's offset, in each direction
        self.nbytes = _aligned(_FLAG_NBYTES * self._count)
        for s, copies in self._copies.items():
            for copied in copies:
                if (self._queues[s], copied.span.buffer) not in self._offsets:
                    self._offsets[self._queues[s], copied.span.buffer] = self.nbytes
                    self.nbytes += _aligned(schedule.buffers[copied.span.buffer].nbytes)
        self._memory: Any = cuda_libraries().cupy.cuda.alloc_pinned_memory(self.nbytes)
        self._base = int(self._memory.ptr)
        flags = (ctypes.c_uint32 * self._count).from_address(self._base)
        ctypes.memset(self._base, 0, ctypes.sizeof(flags))
        self._flags = memoryview(flags).cast("B").cast("I")
        self._before = self._uses(Queue.OUT) | self._uses(Queue.IN)
        self._messages = [message for s in self._copies for message in self._messages_of(s)]

    def begin(self, call: int, call_text: str, deadline: Deadline) -> None:
        """Give the proxy the messages of the next run, which is number ``call`` on all ranks."""
        self._number += 1
        batch = TransferBatch(
            self._messages, self._flags, self._number, call=call, call_text=call_text, deadline=deadline, kept=self
        )
        self._proxy.begin(batch)

    def calls(self, task: int, stream: int) -> list[ApiCall]:
        """The calls of a task, for the run that began last."""
        copy, calls = cuda_libraries().runtime.memcpyAsync, list[ApiCall]()
        for number, copied in enumerate(self._copies[task]):
            here, there, nbytes = self._host_address(task, copied.span), self._address(copied.span), len(copied.span)
            if self._queues[task] is Queue.OUT:
                for before, back in self._before[task, number]:
                    calls += [(self._wait, (stream, flag, back)) for _, flag in before.transfers]
                calls.append((copy, (here, there, nbytes, DEVICE_TO_HOST, stream)))
            else:
                calls += [(self._wait, (stream, flag, 0)) for _, flag in copied.transfers]
                calls.append((copy, (there, here, nbytes, HOST_TO_DEVICE, stream)))
            calls.append((self._set, (stream, copied.flag)))
        return calls

    # -- prepared once -----------------------------------------------------------------------------------------------

    def _copies_of(self, task: StreamTask) -> Iterator[_Copy]:
        """The copies of a task; each transfer and each copy gets a flag."""
        assert task.exchange is not None
        transfers = (*task.exchange.sends, *task.exchange.recvs)
        for span in dict.fromkeys(transfer.span for transfer in transfers):
            ours = tuple((transfer, self._new_flag()) for transfer in transfers if transfer.span == span)
            yield _Copy(span, ours, self._new_flag())

    def _new_flag(self) -> int:
        self._count += 1
        return self._count - 1

    def _uses(self, queue: Queue) -> dict[tuple[int, int], list[tuple[_Copy, int]]]:
        """For each copy of a queue, by task and number: the last copies that used its slot, and how many runs ago."""
        keys = [(s, i) for s, copies in self._copies.items() if self._queues[s] is queue for i in range(len(copies))]
        copies = [self._copies[s][i] for s, i in keys]
        uses = [Exchange((), (Transfer(0, copied.span),)) for copied in (*copies, *copies)]
        twice = [Task(i, op, *accesses(op)) for i, op in enumerate(uses)]
        found = dependencies(twice)[len(keys) :]
        return {
            key: [(copies[i % len(keys)], int(i < len(keys))) for i in before]
            for key, before in zip(keys, found, strict=True)
        }

    def _messages_of(self, task: int) -> Iterator[ProxyMessage]:
        is_send = self._queues[task] is Queue.OUT
        for number, copied in enumerate(self._copies[task]):
            address, nbytes = self._host_address(task, copied.span), len(copied.span)
            before = [(copied, 0)] if is_send else self._before[task, number]
            gates = tuple((each.flag, back) for each, back in before)
            for transfer, flag in copied.transfers:
                yield ProxyMessage(transfer.peer, is_send, address, nbytes, gates, flag)

    def _host_address(self, task: int, span: Span) -> int:
        """The address of a span in pinned memory."""
        return self._base + self._offsets[self._queues[task], span.buffer] + span.start

    # -- flags -------------------------------------------------------------------------------------------------------

    def _wait(self, stream: int, flag: int, back: int) -> None:
        """Make a stream wait until a flag has reached the run's number less ``back``."""
        _wait_value(stream, self._base + _FLAG_NBYTES * flag, self._number - back)

    def _set(self, stream: int, flag: int) -> None:
        """Make a stream set a flag to the run's number, after its earlier writes are visible."""
        _write_value(stream, self._base + _FLAG_NBYTES * flag, self._number)


def check_stream_flags(stream: int) -> None:
    """Raise an error if streams of this GPU cannot wait for flags and set them; ``stream`` must be idle."""
    gpu = cuda_libraries()
    memory = gpu.cupy.cuda.alloc_pinned_memory(_FLAG_NBYTES)
    flag = ctypes.c_uint32.from_address(memory.ptr)
    flag.value = 1
    _wait_value(stream, memory.ptr, 1)
    _write_value(stream, memory.ptr, 2)
    gpu.runtime.streamSynchronize(stream)  # nothing uses the memory after this
    if flag.value != 2:
        raise EngineError("streams of this GPU do not set flags in host memory, which inter='host' needs; leave it out")


def _wait_value(stream: int, address: int, number: int) -> None:
    bindings = cuda_libraries().bindings
    least = bindings.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ  # compares as proxy.reached()
    check_status(bindings.cuStreamWaitValue32(stream, address, number % (1 << 32), int(least)))


def _write_value(stream: int, address: int, number: int) -> None:
    bindings = cuda_libraries().bindings
    behind = bindings.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT  # after earlier writes are visible
    check_status(bindings.cuStreamWriteValue32(stream, address, number % (1 << 32), int(behind)))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
