"""A GPU made of a random scheduler: its streams, events, graphs and memory, as CuPy gives them.

What is put on streams is not done at once. It becomes nodes of a graph whose edges are exactly what CUDA promises (the
order of a stream, and events), and nodes whose predecessors are done run in an order drawn at random, whenever the host
asks whether something is done. A missing edge therefore shows as wrong bytes.

Also as on a GPU: what a capture must not do raises, and memory freed is given again at once (to the same stream).
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from stub_libraries import Refused

DEVICES = 8


class CUDARuntimeError(Refused, RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.args = (f"cudaError{status}: fake",)


class Node:
    """Something on a stream. ``run`` returns False while it cannot be done yet."""

    def __init__(self, what: str, after: set[Node], run: Any = None) -> None:
        self.what, self.after, self.run, self.done = what, after, run, False
        self.device, self.stream = -1, 0
        self.ended = 0.0  # in time.perf_counter() seconds


class World:
    """All devices, their streams and events, and what is under way."""

    numbers = itertools.count(0x1000, 16)  # of streams and so on: no two worlds know the same one

    def __init__(self, seed: int = 0) -> None:
        self.lock = threading.RLock()
        self.random = random.Random(seed)
        self.local = threading.local()
        self.contexts: set[int] = set()  # devices with a primary context: on an H100 each takes 534 MiB
        self.pending: list[Node] = []
        self.tail: dict[int, Node | None] = {-1 - device: None for device in range(DEVICES)}
        self.recorded: dict[int, tuple[Node | None, int | None]] = {}  # event -> node, capture
        self.times: dict[int, float] = {}  # event -> when it was recorded
        self.elapses: float | None = 1.0  # milliseconds between any two events; None: those that the host sees
        self.captures: dict[int, Capture] = {}  # stream -> the capture it is part of
        self.kernels: dict[int, str] = {}  # those that were loaded, by their numbers
        self.calls: list[tuple[Any, ...]] = []  # what the host asked for, for tests of the order
        self.memory: dict[int, Block] = {}
        self.asked: list[int] = []  # the numbers of attributes of a pointer that the driver was asked for
        self.pinned: weakref.WeakSet[Block] = weakref.WeakSet()
        self.devices: dict[int, int] = {}  # address -> device
        self.arenas: defaultdict[int, list[Block]] = defaultdict(list)
        self.event_devices: dict[int, int] = {}
        self.stream_devices: dict[int, int] = {}
        self.priorities: dict[int, int] = {}
        self.meetings: dict[bytes, Any] = {}  # unique id -> fake_nccl.Meeting
        self.communicators: dict[int, Any] = {}  # ncclComm_t -> fake_nccl.Communicator
        self.destroy_waits = False  # ncclCommDestroy waits for the other ranks, as it may
        self.ended = threading.Event()  # nothing waits any more
        self.reused = 0  # allocations that got memory which had been given back
        self.error = 0  # what eventQuery returns
        self.frozen = False  # nothing runs
        self.ends = True  # the last kernels of runs do their work; if not, runs begin and hang
        self.queue_entries = 1024  # of a stream; a thread that puts one more waits
        self.driver = threading.RLock()  # held by a thread that waits for room in a queue, and while events are asked
        self.patience = 60.0  # seconds until the host that waits takes a device to hang
        self.holds: Callable[[Node], bool] = lambda node: False  # what is not done, although it could be
        self.is_serial = False  # a device does everything in the order in which it was put there, as with one queue
        self.last: dict[int, Node] = {}  # of each device
        self.free_memory = 1 << 30  # what the driver says, and the most bytes that it gives at once
        self.full: set[int] = set()  # devices on which the driver has no memory left
        self.no_stream_memory = False  # the driver cannot let a stream write words
        self.nvml: Any = None  # libnvidia-ml.so.1, if there is one
        self.threads_before = set(threading.enumerate())  # of other tests

    # -- devices ---------------------------------------------------------------------------------------------------

    def current_device(self) -> int:
        return self.local.__dict__.get("device", 0)

    def device(self) -> int:
        """The thread's device, for what needs the device's primary context, which becomes the current one."""
        self.set_device(self.current_device())
        return self.current_device()

    def has_context(self) -> bool:
        """Whether the thread has a current context, without which the driver does nothing."""
        return "device" in self.local.__dict__

    def set_device(self, device: int) -> None:
        if not 0 <= device < DEVICES:
            raise CUDARuntimeError(101)
        self.local.device = device
        self.contexts.add(device)  # since CUDA 12

    # -- streams ---------------------------------------------------------------------------------------------------

    def stream(self, number: int) -> int:
        """The stream of a number: each device has its own legacy default stream."""
        return -1 - self.device() if number in (0, 1) else number

    def put(self, stream: int, what: str, run: Any = None) -> Node:
        stream = self.stream(stream)
        self._wait_for_room(stream)
        with self.lock:
            if stream not in self.tail:
                raise CUDARuntimeError(400)
            capture = self.captures.get(stream)
            before = self.tail[stream] if capture is None else capture.tail[stream]
            node = Node(what, {before} if before else set(), run)
            node.stream = stream
            node.device = self.current_device()
            if self.is_serial:
                node.after |= {self.last[node.device]} if node.device in self.last else set()
                self.last[node.device] = node
            if capture is None:
                self.tail[stream] = node
                self.pending.append(node)
            else:
                capture.tail[stream] = node
                capture.nodes.append(node)
            return node

    def _wait_for_room(self, stream: int) -> None:
        """As a launch into a full queue: no other thread is answered by the driver meanwhile."""
        if self._queued(stream) >= self.queue_entries:
            with self.driver:
                self.finish(lambda: self._queued(stream) < self.queue_entries)

    def _queued(self, stream: int) -> int:
        with self.lock:
            return sum(node.stream == stream for node in self.pending)

    def record(self, event: int, stream: int) -> None:
        with self.lock:
            self.calls.append(("record", event, stream))
            stream = self.stream(stream)
            if self.stream_devices.get(stream, -1 - stream) != self.event_devices[event]:
                raise CUDARuntimeError(400)  # an event and a stream of different devices
            if stream not in self.tail:
                raise CUDARuntimeError(400)
            if stream < 0 and (ended := [each for each in self.captures.values() if each.is_global]):
                for each in ended:
                    each.is_invalid = True
                raise CUDARuntimeError(906)  # cudaErrorStreamCaptureImplicit
            capture = self.captures.get(stream)
            node = self.tail[stream] if capture is None else capture.tail[stream]
            self.recorded[event] = node, None if capture is None else id(capture)
            self.times[event] = time.perf_counter()

    def wait(self, stream: int, event: int) -> None:
        self._wait_for_room(self.stream(stream))  # not with the lock, which every other thread needs
        with self.lock:
            self.calls.append(("wait", stream, event))
            stream = self.stream(stream)
            node, captured = self.recorded[event]
            if captured is not None and stream not in self.captures:
                joined = next(c for c in self.captures.values() if id(c) == captured)
                self.captures[stream] = joined
                joined.tail[stream] = node
                return
            mine = self.captures.get(stream)
            if (id(mine) if mine else None) != captured:
                raise CUDARuntimeError(905)  # cudaErrorStreamCaptureIsolation
            if node is not None and not node.done:
                self.put(stream, "wait").after.add(node)

    def run(self, budget: int = 20) -> None:
        """Do some of what can be done."""
        with self.lock:
            for _ in range(0 if self.frozen else budget):
                able = [n for n in self.pending if all(p.done for p in n.after) and not self._is_held(n)]
                self.random.shuffle(able)
                for node in able:
                    if node.run is None or node.run() is not False:
                        node.done, node.run, node.after, node.ended = True, None, set(), time.perf_counter()
                        self.pending.remove(node)
                        break
                else:
                    return

    def _is_held(self, node: Node) -> bool:
        return self.holds(node) or (node.what == "qccl_end" and not self.ends)

    def finish(self, condition: Any) -> None:
        """Run until ``condition``; other threads may have to bring what is missing."""
        deadline = time.monotonic() + self.patience
        while not condition():
            self.run()
            assert time.monotonic() < deadline, f"the device hangs at {[n.what for n in self.pending]}"

    def is_idle(self, device: int) -> bool:
        with self.lock:
            return not any(node.device == device for node in self.pending)

    def is_done(self, event: int) -> bool:
        self.run()
        with self.lock:
            node, captured = self.recorded.get(event, (None, None))
            if captured is not None:
                raise CUDARuntimeError(907)  # cudaErrorCapturedEvent
            return node is None or node.done

    def elapsed(self, begin: int, end: int) -> float:
        """Milliseconds between two events, whose streams have come to them."""
        if self.elapses is not None:
            return self.elapses
        found = []
        for event in (begin, end):
            node, _ = self.recorded[event]
            if node is not None and not node.done:
                raise CUDARuntimeError(600)
            found.append(max(self.times[event], node.ended if node is not None else 0.0))
        return (found[1] - found[0]) * 1e3

    def is_empty(self, stream: int) -> bool:
        self.run()
        with self.lock:
            node = self.tail[self.stream(stream)]
            return node is None or node.done

    def forbid_in_capture(self) -> None:
        if self.captures:
            raise CUDARuntimeError(900)  # cudaErrorStreamCaptureUnsupported


class Capture:
    def __init__(self, origin: int, is_global: bool) -> None:
        self.origin, self.is_global = origin, is_global
        self.is_invalid = False  # something that it forbids has ended it
        self.tail: dict[int, Node | None] = {origin: None}
        self.nodes: list[Node] = []


class Graph:
    """What a capture has become; launch() puts a copy of it on a stream."""

    def __init__(self, world: World, nodes: list[Node]) -> None:
        self._world, self.nodes = world, nodes

    def launch(self, stream: Stream) -> None:
        world = self._world
        with world.lock:
            first = world.put(stream.ptr, "graph begins")
            copies: dict[Node, Node] = {}
            for node in self.nodes:
                after = {copies[p] for p in node.after} or {first}
                copies[node] = Node(node.what, after, node.run)
                copies[node].device = first.device
                world.pending.append(copies[node])
            world.put(stream.ptr, "graph ends").after.update(copies.values())


# -- CuPy ------------------------------------------------------------------------------------------------------------


class Stream:
    def __init__(
        self, world: World, priority: int | None = None, non_blocking: bool = False, ptr: int | None = None
    ) -> None:
        self._world, self.ptr = world, next(world.numbers) if ptr is None else ptr
        if ptr is None:
            world.tail[self.ptr] = None
            world.priorities[self.ptr] = priority or 0
            world.stream_devices[self.ptr] = world.device()

    def __enter__(self) -> Stream:
        self._world.local.__dict__.setdefault("streams", []).append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._world.local.streams.pop()

    def synchronize(self) -> None:
        self._world.forbid_in_capture()
        node = self._world.tail[self._world.stream(self.ptr)]
        self._world.finish(lambda: node is None or node.done)

    def begin_capture(self, mode: int = 2) -> None:
        """In the mode 0 (global, as PyTorch's captures) or 2 (relaxed)."""
        self._world.captures[self.ptr] = Capture(self.ptr, mode == 0)

    def is_capturing(self) -> bool:
        capture = self._world.captures.get(self.ptr)
        if capture is not None and capture.is_invalid:
            raise RuntimeError("the stream was capturing, but an error has invalidated the capture sequence")
        return capture is not None

    def end_capture(self) -> Graph:
        world = self._world
        capture = world.captures[self.ptr]
        joined, queue = set(), deque([capture.tail[self.ptr]])
        while queue:
            node = queue.popleft()
            if node is not None and node not in joined:
                joined.add(node)
                queue.extend(node.after)
        for stream in [s for s, c in world.captures.items() if c is capture]:
            del world.captures[stream]
        if capture.is_invalid:
            raise CUDARuntimeError(901)  # cudaErrorStreamCaptureInvalidated
        if not joined.issuperset(capture.nodes):
            raise CUDARuntimeError(904)  # cudaErrorStreamCaptureUnjoined
        return Graph(world, capture.nodes)


class Event:
    def __init__(self, world: World, disable_timing: bool = False) -> None:
        self._world, self.ptr = world, next(world.numbers)
        world.event_devices[self.ptr] = world.device()

    def record(self, stream: Stream) -> None:
        self._world.record(self.ptr, stream.ptr)


class Block:
    numbers = itertools.count(1)  # of allocations; none is used twice

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.number = nbytes, next(self.numbers)
        self.content = ctypes.create_string_buffer(nbytes + 256)
        base = ctypes.addressof(self.content)
        self.ptr = -(-base // 256) * 256


class DriverMemory:
    """cupy.cuda.memory.Memory: device memory that is not of the pool, freed when forgotten."""

    def __init__(self, world: World, nbytes: int) -> None:
        world.forbid_in_capture()
        device = world.device()
        if nbytes > world.free_memory or device in world.full:
            raise CUDARuntimeError(2)  # cudaErrorMemoryAllocation
        self._world, self._block = world, Block(nbytes)
        self.ptr, self.size = self._block.ptr, nbytes
        ctypes.memset(self.ptr, 0xA5, nbytes)
        world.memory[self.ptr], world.devices[self.ptr] = self._block, device
        world.calls.append(("malloc", self.ptr, nbytes))

    def __del__(self) -> None:
        if hasattr(self, "_block"):
            ctypes.memset(self.ptr, 0x5A, self.size)  # what still uses it gets wrong bytes
            self._world.calls.append(("free", self.ptr))
            del self._world.memory[self.ptr]


class Pointer:
    """Device memory from the pool: given back when forgotten, and then given again on the same stream."""

    def __init__(self, world: World, nbytes: int) -> None:
        world.forbid_in_capture()
        streams = world.local.__dict__.get("streams")
        self._arena = world.arenas[streams[-1].ptr if streams else 0]
        with world.lock:
            fitting = next((b for b in self._arena if b.nbytes >= nbytes), None)
            if fitting is not None:
                self._arena.remove(fitting)
                world.reused += 1
        self._block = fitting or Block(nbytes)
        ctypes.memset(self._block.ptr, 0xA5, self._block.nbytes)
        self.ptr = self._block.ptr
        world.memory[self.ptr] = self._block
        world.devices[self.ptr] = world.device()

    def __del__(self) -> None:
        self._arena.append(self._block)


class Array:
    """cupy.ndarray, as far as it is used: device memory with a shape and an element type; NumPy computes."""

    world: World  # set by modules()

    def __init__(
        self, shape: Any, dtype: Any, memptr: Any = None, device: int | None = None, code: int = 2
    ) -> None:  # fmt: skip
        from dlpack import Producer

        device = self.world.device() if device is None else device
        count = int(np.prod(shape))
        nbytes = count * np.dtype(dtype).itemsize
        self._memory = memptr or Pointer(self.world, nbytes)
        content = (ctypes.c_char * max(nbytes, 1)).from_address(self._memory.ptr)
        self.values = np.frombuffer(content, dtype, count).reshape(shape)
        self.device = device
        self.data = SimpleNamespace(ptr=self._memory.ptr)
        self.orders: list[int | None] = []  # the streams that exports were to be ordered with
        self._producer = Producer(self.values, code, device=(2, device))
        self.world.devices[self._memory.ptr] = device

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    @property
    def size(self) -> int:
        return self.values.size

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None) -> Any:
        self.orders.append(stream)
        return self._producer.__dlpack__(max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._producer.__dlpack_device__()

    def __getitem__(self, which: slice) -> Array:
        part = self.values[which]
        return Array(part.shape, part.dtype, SimpleNamespace(ptr=part.ctypes.data, whole=self), self.device)

    def view(self, dtype: Any) -> Any:
        return self.values.view(dtype)

    def set(self, values: np.ndarray, stream: Any = None) -> None:
        self.values[...] = values

    def get(self) -> np.ndarray:
        return self.values.copy()


def array(values: np.ndarray, device: int = 0, code: int = 2) -> Array:
    """A copy of ``values`` on a device; ``code`` is DLPack's of the element type."""
    made = Array(values.shape, values.dtype, device=device, code=code)
    made.values[...] = values
    return made
