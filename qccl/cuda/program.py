"""A schedule made ready for a GPU: its workspace, its kernels and tables, and the calls that put a run on streams.

Everything that a launch is told lies in memory that is written once: the jobs on the device, the arguments on the host.
What changes from run to run are the addresses of the caller's buffers and the call's number, and those are a few words.
So a run is a list of prepared calls, done one after the other: launch, record, wait, group.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from qccl.cuda import source as cuda_source
from qccl.cuda.kernels import kernels
from qccl.cuda.proxy import HostProxy
from qccl.cuda.run import CudaRun
from qccl.cuda.runtime import require
from qccl.cuda.source import Launch
from qccl.cuda.staging import Staging
from qccl.cuda.streams import HOME, Step, steps
from qccl.dtypes import DType
from qccl.engine.control import Header
from qccl.engine.labels import group_label
from qccl.errors import ArgumentError, EngineError
from qccl.schedule import Commit, Node, Op, Queue, Reduce, Role, Schedule, Span, Transfer, reads, writes
from qccl.trace import TraceEvent
from qccl.transports.base import Call, DeviceTransfer

if TYPE_CHECKING:
    from qccl.cuda.engine import CudaEngine

__all__ = ["CudaProgram"]

_ALIGNMENT = 256


class CudaProgram:
    """A compiled schedule with its workspace. It may be started again while it runs.

    Attributes:
        workspace_nbytes: bytes of the workspace, tables included.
    """

    def __init__(self, engine: CudaEngine, schedule: Schedule, proxy: HostProxy | None = None) -> None:
        """``proxy`` moves what goes through host memory; it is needed where ranks have distant peers."""
        if (schedule.rank, schedule.size) != (engine.rank, engine.size):
            raise ArgumentError(
                f"the schedule is for rank {schedule.rank} of {schedule.size}, and this is rank {engine.rank} of "
                f"{engine.size}"
            )
        self._engine = engine
        self._schedule = schedule
        self._steps = steps(schedule)
        self._numbers = {name: i for i, name in enumerate(schedule.buffers)}
        self._bound = {n: i for n, i in self._numbers.items() if schedule.buffers[n].role is not Role.WORK}
        self._launches = {s: self._launch(step.ops) for s, step in enumerate(self._steps) if _is_launch(step)}
        self._memory = (ctypes.c_uint64 * cuda_source.MEMORY_WORDS)()
        self._call = ctypes.c_uint64()  # the arguments of the kernel that sets the call's number
        self._is_replay = ctypes.c_uint32()
        self._kept: list[Any] = []  # what the arguments of launches point to
        names = [name for launch in self._launches.values() for name in launch.kernels]
        draws = any(launch.draws for launch in self._launches.values())
        kernels(engine.device, [*names, cuda_source.CALL_KERNEL] if draws else names)  # compiled together
        self._prepared = self._upload()
        self._count_arguments = self._pack(self._counter, self._call, self._is_replay) if draws else 0
        cuda = require().cupy.cuda
        self._arrival = cuda.Event(disable_timing=True)
        self._events = {s: cuda.Event(disable_timing=True) for s, step in enumerate(self._steps) if step.records}
        self._calls: dict[bool, list[Call]] = {}
        self._staging: Staging | None = None
        if proxy is not None and any(step.queue in (Queue.OUT, Queue.IN) for step in self._steps):
            self._staging = Staging(schedule, self._steps, self._transfer_address, proxy)
            self.workspace_nbytes += self._staging.nbytes

    def start(
        self,
        bindings: Mapping[str, int],
        *,
        call: int,
        header: Header,
        deadline: float,
        trace: list[TraceEvent] | None = None,
        schedule: Schedule | None = None,
        streams: Sequence[int] = (),
        lr: float = 1.0,
    ) -> CudaRun:
        """Begin a run; see engines.base.Program."""
        if bindings.keys() != self._bound.keys():
            raise ArgumentError(f"addresses are needed for {sorted(self._bound)}, not for {sorted(bindings)}")
        streams = tuple(streams) or (0,)
        captured = self._engine.is_capturing(streams[0])
        if captured and trace is not None:
            raise ArgumentError("a call that is put into a graph cannot be traced; leave trace out")
        if captured and self._schedule.staged_peers:
            raise ArgumentError(
                "a call with inter='host' cannot be put into a graph: the host must move its messages in every run; "
                "leave inter out"
            )
        run = CudaRun(self._engine, f"{header.text} (call {header.sequence})", deadline, streams[0], captured=captured)

        def enqueue(queues: Mapping[Queue, int], event: int) -> None:
            for name, number in self._bound.items():
                self._memory[number] = bindings[name]
            # replays of a graph count on from here, in numbers that no call outside a graph has
            self._call.value = (call + 1) << 32 if captured else call
            self._is_replay.value = captured
            self._memory[cuda_source.LR_WORD] = int.from_bytes(struct.pack("<f", lr), "little")
            if self._staging is not None:
                self._staging.begin(header.sequence, run.what, deadline)
            calls = self._traced_calls(queues, run, trace) if trace is not None else self._calls_on(queues, captured)
            for function, arguments in calls:
                function(*arguments)
            require().runtime.eventRecord(event, queues[HOME])

        def arrive(queues: Mapping[Queue, int]) -> None:
            self._arrive(streams[:1] if captured else streams, queues[HOME])

        self._engine.start(self, run, arrive, enqueue)
        return run

    # -- a run -------------------------------------------------------------------------------------------------------

    def _arrive(self, streams: Sequence[int], home: int) -> None:
        """Everything comes behind what is on the caller's streams."""
        runtime, arrival = require().runtime, self._arrival.ptr
        for stream in streams:
            runtime.eventRecord(arrival, stream)
            runtime.streamWaitEvent(home, arrival)

    def _calls_on(self, queues: Mapping[Queue, int], captured: bool) -> list[Call]:
        if captured not in self._calls:
            self._calls[captured] = [c for s in range(len(self._steps)) for part in self._step(s, queues) for c in part]
        return self._calls[captured]

    def _step(self, number: int, queues: Mapping[Queue, int]) -> tuple[list[Call], list[Call], list[Call]]:
        """What a step waits for, what it does, and what it tells."""
        runtime = require().runtime
        step = self._steps[number]
        stream = queues[step.queue]
        waits: list[Call] = [(runtime.streamWaitEvent, (stream, self._events[w].ptr)) for w in step.waits]
        done: list[Call] = []
        if step.records and number < len(self._steps) - 1:
            done.append((runtime.eventRecord, (self._events[number].ptr, stream)))
        return waits, self._work(number, stream), done

    def _work(self, number: int, stream: int) -> list[Call]:
        step = self._steps[number]
        if number == 0:
            return [self._count_call(stream)] if self._count_arguments else []
        if number in self._prepared:
            gpu, prepared = require(), self._prepared[number]
            calls: list[Call] = []
            if prepared.scratch_nbytes:
                calls.append((gpu.runtime.memsetAsync, (prepared.scratch, 0, prepared.scratch_nbytes, stream)))
            launch = gpu.driver.launchKernel
            return calls + [(launch, (*kernel, stream, arguments, 0)) for kernel, arguments in prepared.launches]
        if self._staging is not None and step.queue in (Queue.OUT, Queue.IN):
            return self._staging.calls(number, stream)
        if step.exchange is None:
            return []
        sends, receives = (self._transfers(transfers) for transfers in (step.exchange.sends, step.exchange.recvs))
        return self._engine.transport.exchange(sends, receives, stream)

    def _transfers(self, transfers: Sequence[Transfer]) -> list[DeviceTransfer]:
        return [
            DeviceTransfer(transfer.peer, self._transfer_address(transfer.span), self._nbytes(transfer.span))
            for transfer in transfers
        ]

    def _transfer_address(self, span: Span) -> int:
        if self._schedule.buffers[span.buffer].role is not Role.WORK:
            raise EngineError(f"a leg transfers {span.buffer!r}; legs must be in work buffers")
        return self._address(span)

    def _count_call(self, stream: int) -> Call:
        """Random numbers are keyed by a number on the device, which the replays of a graph count up themselves."""
        kernel = kernels(self._engine.device, [cuda_source.CALL_KERNEL])[cuda_source.CALL_KERNEL]
        return require().driver.launchKernel, (kernel, 1, 1, 1, 1, 1, 1, 0, stream, self._count_arguments, 0)

    # -- a traced run ------------------------------------------------------------------------------------------------

    def _traced_calls(self, queues: Mapping[Queue, int], run: CudaRun, trace: list[TraceEvent]) -> list[Call]:
        """The same calls, with an event before and after each step; ``trace`` is filled when the run is done."""
        gpu = require()
        begin, now = gpu.cupy.cuda.Event(), time.perf_counter()
        calls: list[Call] = [(gpu.runtime.eventRecord, (begin.ptr, queues[HOME]))]
        events = []
        for s, step in enumerate(self._steps):
            waits, work, done = self._step(s, queues)
            if not step.ops:
                calls += [*waits, *work, *done]
                continue
            start, stop = gpu.cupy.cuda.Event(), gpu.cupy.cuda.Event()
            record, stream = gpu.runtime.eventRecord, queues[step.queue]
            calls += [*waits, (record, (start.ptr, stream)), *work, (record, (stop.ptr, stream)), *done]
            group = [Node(i, step.exchange or self._schedule.ops[i]) for i in step.ops]
            label = group_label(group, self._schedule.buffers)
            events.append((step.queue.value, label.name, label.args, start, stop))

        def finish() -> None:
            def at(event: Any) -> float:
                return now + float(gpu.runtime.eventElapsedTime(begin.ptr, event.ptr)) / 1e3

            trace.extend(
                TraceEvent(self._schedule.rank, queue, name, at(start), at(stop), args)
                for queue, name, args, start, stop in events
            )

        run.finish = finish
        return calls

    # -- what is made once -------------------------------------------------------------------------------------------

    def _launch(self, ops: Sequence[int]) -> Launch:
        found = [self._schedule.ops[i] for i in ops]
        return cuda_source.launch(found, self._schedule.rank, self._dtype(found[0]), self._place)

    def _dtype(self, op: Op) -> DType:
        spans: tuple[Span | None, ...] = (*writes(op), *reads(op))
        if isinstance(op, Reduce):
            spans = (op.own, op.out)
        elif isinstance(op, Commit):
            spans = op.guard
        for span in filter(None, spans):
            dtype = self._schedule.buffers[span.buffer].dtype
            if dtype is not None:
                return dtype
        raise EngineError(f"{type(op).__name__} without values: all its buffers are of bytes")

    def _place(self, span: Span) -> tuple[int, int]:
        """Buffer number and byte offset."""
        return self._numbers[span.buffer], span.start * self._schedule.buffers[span.buffer].itemsize

    def _address(self, span: Span) -> int:
        number, offset = self._place(span)
        return int(self._memory[number]) + offset

    def _nbytes(self, span: Span) -> int:
        return len(span) * self._schedule.buffers[span.buffer].itemsize

    def _upload(self) -> dict[int, _Prepared]:
        """Take the workspace, write the tables into it, and prepare the launches of each step."""
        layout = _Layout()
        works = {n: layout.take(b.nbytes) for n, b in self._schedule.buffers.items() if b.role is Role.WORK}
        counter = layout.take(cuda_source.CALL_NBYTES)
        layout.content[counter] = bytes(cuda_source.CALL_NBYTES)
        scratch = {s: layout.take(launch.scratch_nbytes) for s, launch in self._launches.items()}
        tables = {
            s: (layout.put(launch.jobs.tobytes()), layout.put(launch.sources.tobytes()))
            for s, launch in self._launches.items()
        }
        self._workspace = self._engine.allocate(max(layout.nbytes, 1))
        self.workspace_nbytes = layout.nbytes
        base = self._workspace.ptr
        for name, offset in works.items():
            self._memory[self._numbers[name]] = base + offset
        self._memory[cuda_source.CALL_WORD] = base + counter
        self._counter = ctypes.c_uint64(base + counter)
        self._kept += self._engine.write({base + offset: content for offset, content in layout.content.items()})
        return {
            s: self._prepare(launch, base + tables[s][0], base + tables[s][1], base + scratch[s])
            for s, launch in self._launches.items()
        }

    def _prepare(self, launch: Launch, jobs: int, sources: int, scratch: int) -> _Prepared:
        functions = kernels(self._engine.device, launch.kernels)
        parameters = launch.parameters.copy()
        parameters["scratch"] = scratch
        blob = ctypes.create_string_buffer(parameters.tobytes())
        arguments = self._pack(ctypes.c_uint64(jobs), ctypes.c_uint64(sources), blob, self._memory)
        geometry = (*launch.grid, *launch.block, launch.shared)
        return _Prepared(
            [((functions[name], *geometry), arguments) for name in launch.kernels],
            scratch,
            launch.scratch_nbytes * launch.clears_scratch,
        )

    def _pack(self, *arguments: Any) -> int:
        """The address of a launch's arguments: pointers to each of them."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
        self._kept += [pointers, *arguments]
        return ctypes.addressof(pointers)


class _Prepared(NamedTuple):
    """The launches of a step, each a function with its geometry, and its arguments; and memory that is zero before."""

    launches: list[tuple[tuple[int, ...], int]]
    scratch: int
    scratch_nbytes: int


class _Layout:
    """Offsets of pieces of memory one after the other, and what some of them contain from the start."""

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


def _is_launch(step: Step) -> bool:
    return bool(step.ops) and step.queue is Queue.COMPUTE
