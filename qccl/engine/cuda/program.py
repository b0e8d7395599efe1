"""A schedule compiled for a GPU: its kernels, its tables and work buffers, and the calls that put a run on streams.

The tables of all launches are written once: jobs in device memory, arguments in host memory. From run to run only the
addresses of the caller's buffers, the call's number and the learning rate change. So a run is a list of prepared calls
(launch, record, wait, NCCL group), made one after the other.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from qccl.base.dtypes import DType
from qccl.base.errors import ArgumentError, EngineError
from qccl.base.trace import TraceEvent
from qccl.collectives.schedule import Commit, Op, Queue, Reduce, Role, Schedule, Span, Task, Transfer, accesses
from qccl.engine.base import caller_buffers
from qccl.engine.cuda import source as cuda_source
from qccl.engine.cuda.device import Device
from qccl.engine.cuda.kernels import kernels
from qccl.engine.cuda.libraries import cuda_libraries
from qccl.engine.cuda.proxy import HostProxy
from qccl.engine.cuda.run import CudaRun
from qccl.engine.cuda.source import ADDRESSES, DIRECT_BUFFERS, MEMORY_WORDS, TABLE_WORD, Launch
from qccl.engine.cuda.staging import Staging
from qccl.engine.cuda.streams import HOME, StreamTask, stream_tasks
from qccl.engine.cuda.workspace import Workspace
from qccl.engine.labels import launch_label
from qccl.observe.tallies import Counted, traffic
from qccl.transports.base import ApiCall, DeviceTransfer, DeviceTransport

__all__ = ["CudaProgram"]

_ALIGNMENT = 256
#: entries that an NCCL group makes in its stream's queue: at most three waits, a kernel and an event (enqueue.cc, 2.30)
_GROUP_ENTRIES = 5
_END_KERNELS = (cuda_source.BEGIN_KERNEL, cuda_source.END_KERNEL)


class CudaProgram:
    """A compiled schedule. It may be started again while it runs.

    The program owns its tables, which outlive a run; its work buffers and scratch are in the communicator's workspace.

    Attributes:
        workspace_nbytes: bytes of the program's own memory, on the device and pinned.
        callers: the caller's buffers, by name; each run is given their addresses.
        users: always 0: streams order the runs.
    """

    users = 0

    def __init__(
        self,
        device: Device,
        transport: DeviceTransport,
        schedule: Schedule,
        workspace: Workspace,
        proxy: HostProxy | None = None,
        counted: Counted | None = None,
    ) -> None:
        """``proxy`` moves the messages of transfers through host memory; schedules with staged peers need it.

        ``counted``: the totals to which count_run() adds, or None.
        """
        self._device, self._transport = device, transport
        self._schedule = schedule
        self._counted, self._traffic = counted, traffic(schedule)
        self._tasks = stream_tasks(schedule)
        works = [name for name, buffer in schedule.buffers.items() if buffer.role is Role.WORK]
        self.callers = caller_buffers(schedule)
        self._addresses = _Addresses([*works, *self.callers])
        self._launches = {s: self._launch(task.ops) for s, task in enumerate(self._tasks) if _is_launch(task)}
        self._call, self._run = ctypes.c_uint64(), ctypes.c_uint32()  # arguments of the first and the last kernel
        self._is_replay = ctypes.c_uint32()
        self._kept: list[Any] = []  # objects that launches' arguments point to
        names = [name for launch in self._launches.values() for name in launch.kernels]
        draws = any(launch.draws for launch in self._launches.values())
        names += [cuda_source.ADDRESS_KERNEL] * bool(self._addresses.table_nbytes)
        self._functions([*names, *_END_KERNELS])  # compiled together
        self._prepared = self._upload(workspace)
        self._table_arguments = [self._pack(*each) for each in self._addresses.table_arguments()]
        self._begin_arguments, self._end_arguments = self._pack_ends(draws=draws)
        cuda = cuda_libraries().cupy.cuda
        self._arrival = cuda.Event(disable_timing=True)
        self._events = {s: cuda.Event(disable_timing=True) for s, task in enumerate(self._tasks) if task.records}
        self._calls: dict[bool, list[ApiCall]] = {}
        self._entries = 0
        self._staging: Staging | None = None
        if proxy is not None and any(task.queue in (Queue.OUT, Queue.IN) for task in self._tasks):
            self._staging = Staging(schedule, self._tasks, self._address, proxy)
            self.workspace_nbytes += self._staging.nbytes

    def count_run(self) -> None:
        """Count a run that is on its streams."""
        if self._counted is not None:
            self._counted.tally.add(self._counted.elements, *self._traffic)

    def label(self, schedule: Schedule) -> None:
        """Do nothing: the program always keeps the labels."""

    def check_capture(self, *, traced: bool) -> None:
        """Raise ArgumentError if a run cannot be put into a graph."""
        if traced:
            raise ArgumentError("a call that is put into a graph cannot be traced; leave trace out")
        if self._schedule.staged_peers:
            raise ArgumentError(
                "a call with inter='host' cannot be put into a graph: the host must move its messages in every run; "
                "leave inter out"
            )

    @property
    def entries(self) -> int:
        """The number of entries that a run makes in the queues of its streams."""
        if not self._entries:
            groups = sum(task.exchange is not None and task.queue is Queue.COMM for task in self._tasks)
            self._entries = len(self._calls_on(self._device.queues, captured=False)) + (_GROUP_ENTRIES - 1) * groups
            self._entries += 2  # the wait for the caller's stream, and the run's event
        return self._entries

    def wait_for_streams(self, streams: Sequence[int], queues: Mapping[Queue, int]) -> None:
        """Order the next run after the present work of ``streams``."""
        runtime, arrival, home = cuda_libraries().runtime, self._arrival.ptr, queues[HOME]
        for stream in streams:
            runtime.eventRecord(arrival, stream)
            runtime.streamWaitEvent(home, arrival)

    def enqueue(
        self,
        run: CudaRun,
        queues: Mapping[Queue, int],
        addresses: Mapping[str, int],
        *,
        lr: float,
        trace: list[TraceEvent] | None,
    ) -> None:
        """Put a run on the streams of ``queues``, and record its event behind it."""
        for name, address in addresses.items():
            self._addresses[name] = address
        # replays of a graph count on from here, with numbers that no call outside a graph has
        self._call.value = (run.call + 1) << 32 if run.captured else run.call
        self._is_replay.value, self._run.value = run.captured, run.number
        self._addresses.words[cuda_source.LR_WORD] = int.from_bytes(struct.pack("<f", lr), "little")
        if self._staging is not None:
            self._staging.begin(run.header.sequence, run.call_text, run.deadline)
        calls = self._traced_calls(queues, run, trace) if trace is not None else self._calls_on(queues, run.captured)
        for function, arguments in calls:
            function(*arguments)
        cuda_libraries().runtime.eventRecord(run.event.ptr, queues[HOME])

    # -- the calls of a run ------------------------------------------------------------------------------------------

    def _calls_on(self, queues: Mapping[Queue, int], captured: bool) -> list[ApiCall]:
        if captured not in self._calls:
            self._calls[captured] = [
                c for s in range(len(self._tasks)) for part in self._calls_of(s, queues) for c in part
            ]
        return self._calls[captured]

    def _calls_of(self, number: int, queues: Mapping[Queue, int]) -> tuple[list[ApiCall], list[ApiCall], list[ApiCall]]:
        """The calls of a task: waits, work, and the record of its event."""
        runtime = cuda_libraries().runtime
        task = self._tasks[number]
        stream = queues[task.queue]
        waits: list[ApiCall] = [(runtime.streamWaitEvent, (stream, self._events[w].ptr)) for w in task.waits]
        done: list[ApiCall] = []
        if task.records and number < len(self._tasks) - 1:
            done.append((runtime.eventRecord, (self._events[number].ptr, stream)))
        return waits, self._work(number, stream), done

    def _work(self, number: int, stream: int) -> list[ApiCall]:
        task = self._tasks[number]
        if not task.ops:
            return self._begin_calls(stream) if number == 0 else [self._end_call(stream)]
        if number in self._prepared:
            gpu, prepared = cuda_libraries(), self._prepared[number]
            calls: list[ApiCall] = []
            if prepared.scratch_nbytes:
                calls.append((gpu.runtime.memsetAsync, (prepared.scratch, 0, prepared.scratch_nbytes, stream)))
            launch = gpu.driver.launchKernel
            return calls + [(launch, (*kernel, stream, arguments, 0)) for kernel, arguments in prepared.launches]
        if self._staging is not None and task.queue in (Queue.OUT, Queue.IN):
            return self._staging.calls(number, stream)
        if task.exchange is None:
            return []
        sends, receives = (self._transfers(transfers) for transfers in (task.exchange.sends, task.exchange.recvs))
        return self._transport.exchange(sends, receives, stream)

    def _transfers(self, transfers: Sequence[Transfer]) -> list[DeviceTransfer]:
        return [
            DeviceTransfer(transfer.peer, self._address(transfer.span), self._nbytes(transfer.span))
            for transfer in transfers
        ]

    def _begin_calls(self, stream: int) -> list[ApiCall]:
        """The first kernel, after kernels that write a table with the addresses which launches do not pass."""
        name, threads = cuda_source.ADDRESS_KERNEL, cuda_source.THREADS
        table = [self._call_of(name, threads, arguments, stream) for arguments in self._table_arguments]
        return [*table, self._call_of(cuda_source.BEGIN_KERNEL, 1, self._begin_arguments, stream)]

    def _end_call(self, stream: int) -> ApiCall:
        return self._call_of(cuda_source.END_KERNEL, cuda_source.THREADS, self._end_arguments, stream)

    def _call_of(self, name: str, threads: int, arguments: int, stream: int) -> ApiCall:
        """The launch of one block of a kernel."""
        kernel = self._functions([name])[name]
        return cuda_libraries().driver.launchKernel, (kernel, 1, 1, 1, threads, 1, 1, 0, stream, arguments, 0)

    # -- a traced run ------------------------------------------------------------------------------------------------

    def _traced_calls(self, queues: Mapping[Queue, int], run: CudaRun, trace: list[TraceEvent]) -> list[ApiCall]:
        """The calls of a run, with an event before and after each task; ``trace`` is filled when the run is done."""
        gpu = cuda_libraries()
        record, begin, now = gpu.runtime.eventRecord, gpu.cupy.cuda.Event(), time.perf_counter()
        calls: list[ApiCall] = [(record, (begin.ptr, queues[HOME]))]
        events = []
        for s, task in enumerate(self._tasks):
            waits, work, done = self._calls_of(s, queues)
            if not task.ops:
                calls += [*waits, *work, *done]
                continue
            start, stop = gpu.cupy.cuda.Event(), gpu.cupy.cuda.Event()
            stream = queues[task.queue]
            calls += [*waits, (record, (start.ptr, stream)), *work, (record, (stop.ptr, stream)), *done]
            ops = [(i, task.exchange or self._schedule.ops[i]) for i in task.ops]
            launched = [Task(i, op, *accesses(op)) for i, op in ops]
            label = launch_label(launched, self._schedule.buffers)
            events.append((task.queue.value, label.name, label.args, start, stop))

        def finish() -> None:
            def at(event: Any) -> float:
                return now + float(gpu.runtime.eventElapsedTime(begin.ptr, event.ptr)) / 1e3

            trace.extend(
                TraceEvent(self._schedule.rank, queue, name, at(start), at(stop), args)
                for queue, name, args, start, stop in events
            )

        run.finish = finish
        return calls

    # -- prepared once -----------------------------------------------------------------------------------------------

    def _launch(self, ops: Sequence[int]) -> Launch:
        found = [self._schedule.ops[i] for i in ops]
        return cuda_source.launch(found, self._schedule.rank, self._dtype(found[0]), self._buffer_ref)

    def _dtype(self, op: Op) -> DType:
        read, written = accesses(op)
        spans: tuple[Span | None, ...] = (*written, *read)
        if isinstance(op, Reduce):
            spans = (op.own, op.out)
        elif isinstance(op, Commit):
            spans = op.guard
        for span in filter(None, spans):
            dtype = self._schedule.buffers[span.buffer].dtype
            if dtype is not None:
                return dtype
        raise EngineError(f"{type(op).__name__} has no values: all its buffers are of bytes")

    def _functions(self, names: Iterable[str]) -> dict[str, int]:
        many = (cuda_source.MANY_BUFFERS,) if self._addresses.table_nbytes else ()
        return kernels(self._device.number, names, *many)

    def _buffer_ref(self, span: Span) -> tuple[int, int]:
        """The buffer's number and the byte offset of a span."""
        return self._addresses.numbers[span.buffer], span.start * self._schedule.buffers[span.buffer].itemsize

    def _address(self, span: Span) -> int:
        return self._addresses[span.buffer] + self._buffer_ref(span)[1]

    def _nbytes(self, span: Span) -> int:
        return len(span) * self._schedule.buffers[span.buffer].itemsize

    def _upload(self, workspace: Workspace) -> dict[int, _Prepared]:
        """Give all buffers their addresses, write the tables, and prepare the launches of each task."""
        shared, own = _Arena(), _Arena()
        works = {n: shared.take(b.nbytes) for n, b in self._schedule.buffers.items() if b.role is Role.WORK}
        scratch = {s: shared.take(launch.scratch_nbytes) for s, launch in self._launches.items()}
        counter = own.put(bytes(cuda_source.CALL_NBYTES))
        table, sizes = own.take(self._addresses.table_nbytes), own.put(self._sizes_of_results())
        tables = {
            s: [own.put(table.tobytes()) for table in (launch.jobs, launch.sources, launch.blocks)]
            for s, launch in self._launches.items()
        }
        self._workspace = workspace.take(shared.nbytes)
        self._tables = self._device.allocate(own.nbytes, "the tables of a plan")
        self.workspace_nbytes = own.nbytes
        base, work = self._tables.ptr, self._workspace.ptr if shared.nbytes else 0
        for name, offset in works.items():
            self._addresses[name] = work + offset
        self._addresses.words[cuda_source.CALL_WORD] = base + counter
        self._addresses.words[TABLE_WORD] = base + table
        self._addresses.words[cuda_source.FAILED_WORD] = self._device.flags.address
        self._result_sizes = ctypes.c_uint64(base + sizes)
        self._counter = ctypes.c_uint64(base + counter)
        self._kept += self._device.write({base + offset: content for offset, content in own.content.items()})
        return {
            s: self._prepare(launch, *(*(base + offset for offset in tables[s]), work + scratch[s]))
            for s, launch in self._launches.items()
        }

    def _prepare(self, launch: Launch, jobs: int, sources: int, blocks: int, scratch: int) -> _Prepared:
        functions = self._functions(launch.kernels)
        parameters = launch.parameters.copy()
        parameters["scratch"], parameters["blocks"] = scratch, blocks
        blob = ctypes.create_string_buffer(parameters.tobytes())
        arguments = self._pack(ctypes.c_uint64(jobs), ctypes.c_uint64(sources), blob, self._addresses.words)
        return _Prepared(
            [((functions[name], *launch.geometry), arguments) for name in launch.kernels],
            scratch,
            launch.scratch_nbytes * launch.clears_scratch,
        )

    def _pack_ends(self, *, draws: bool) -> tuple[int, int]:
        """The arguments of the first and the last kernel; the first stores the call's number if kernels draw."""
        common = self._is_replay, ctypes.c_uint64(self._device.flags.address), self._run
        counter = self._counter if draws else ctypes.c_uint64()
        begin = self._pack(counter, self._call, *common)
        count = ctypes.c_uint32(len(self._schedule.buffers))
        return begin, self._pack(self._addresses.words, self._result_sizes, *common, count)

    def _sizes_of_results(self) -> bytes:
        """The bytes of each buffer that holds results, 0 for the others, in the order of their numbers."""
        buffers = [self._schedule.buffers[name] for name in self._addresses.numbers]
        sizes = [buffer.nbytes if buffer.role is Role.OUTPUT else 0 for buffer in buffers]
        return struct.pack(f"<{len(sizes)}Q", *sizes)

    def _pack(self, *arguments: Any) -> int:
        """The address of a launch's arguments: pointers to each of them."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
        self._kept += [pointers, *arguments]
        return ctypes.addressof(pointers)


class _Addresses:
    """The addresses of named buffers: launches pass the first DIRECT_BUFFERS, and a table on the device has the rest.

    Attributes:
        words: the kernels' Memory argument.
        numbers: the number by which kernels know each buffer.
        table_nbytes: size of the table; 0 without a table.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.numbers = {name: i for i, name in enumerate(names)}
        self.words = (ctypes.c_uint64 * MEMORY_WORDS)()
        self._others = max(len(self.numbers) - DIRECT_BUFFERS, 0)
        self.table_nbytes = 8 * self._others
        self._table = (ctypes.c_uint64 * (-(-self._others // ADDRESSES) * ADDRESSES))()

    def __getitem__(self, name: str) -> int:
        number = self.numbers[name]
        return int(self.words[number] if number < DIRECT_BUFFERS else self._table[number - DIRECT_BUFFERS])

    def __setitem__(self, name: str, address: int) -> None:
        number = self.numbers[name]
        if number < DIRECT_BUFFERS:
            self.words[number] = address
        else:
            self._table[number - DIRECT_BUFFERS] = address

    def table_arguments(self) -> Iterator[tuple[Any, ...]]:
        """The arguments of the ADDRESS_KERNELs that write the table; launches read the values."""
        table = self.words[TABLE_WORD]
        for first in range(0, self._others, ADDRESSES):
            values = (ctypes.c_uint64 * ADDRESSES).from_buffer(self._table, 8 * first)
            count = min(self._others - first, ADDRESSES)
            yield ctypes.c_uint64(table + 8 * first), values, ctypes.c_uint32(count)


class _Prepared(NamedTuple):
    """The launches of a task (each: function, geometry and arguments), and the memory to clear before them."""

    launches: list[tuple[tuple[int, ...], int]]
    scratch: int
    scratch_nbytes: int


class _Arena:
    """Offsets of consecutive blocks of memory, and the initial contents of some blocks."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.content: dict[int, bytes] = {}

    def take(self, nbytes: int) -> int:
        offset = self.nbytes
        self.nbytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return offset

    def put(self, content: bytes) -> int:
        offset = self.take(len(content))
        if content:
            self.content[offset] = content
        return offset


def _is_launch(task: StreamTask) -> bool:
    return bool(task.ops) and task.queue is Queue.COMPUTE
