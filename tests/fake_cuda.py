"""A GPU made of a random scheduler: the part of CuPy and cuda-python that qccl uses, with device memory on the host.

What is put on streams is not done at once. It becomes nodes of a graph whose edges are exactly what CUDA promises (the
order of a stream, and events), and nodes whose predecessors are done run in an order drawn at random, whenever the host
asks whether something is done. A missing edge therefore shows as wrong bytes. Kernels do their jobs with the host's
compiled codecs; the transfers of an NCCL group take place when both sides have come to them.

Also as on a GPU: what a capture must not do raises, memory freed is given again at once (to the same stream), and a
communicator of NCCL is made when all ranks have come.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import itertools
import os
import random
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

NOT_READY = 600
NCCL_VERSION = 22800
DEVICES = 8
BARRIER_SECONDS = 10.0


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError{status}: fake")
        self.status = status


class CUDADriverError(CUDARuntimeError):
    pass


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"NCCL_ERROR_{status}: fake")
        self.status = status


class CompileException(Exception):
    pass


class OutOfMemoryError(MemoryError):
    pass


class Node:
    """Something on a stream. ``run`` returns False while it cannot be done yet."""

    def __init__(self, what: str, after: set[Node], run: Any = None) -> None:
        self.what, self.after, self.run, self.done = what, after, run, False
        self.device, self.stream = -1, 0


class World:
    """All devices, their streams and events, and what is under way."""

    def __init__(self, seed: int = 0) -> None:
        self.lock = threading.RLock()
        self.random = random.Random(seed)
        self.local = threading.local()
        self.numbers = itertools.count(0x1000, 16)
        self.pending: list[Node] = []
        self.tail: dict[int, Node | None] = {-1 - device: None for device in range(DEVICES)}
        self.recorded: dict[int, tuple[Node | None, int | None]] = {}  # event -> node, capture
        self.captures: dict[int, Capture] = {}  # stream -> the capture it is part of
        self.calls: list[tuple[Any, ...]] = []  # what the host asked for, for tests of the order
        self.memory: dict[int, Block] = {}
        self.pinned: weakref.WeakSet[Block] = weakref.WeakSet()
        self.devices: dict[int, int] = {}  # address -> device
        self.arenas: defaultdict[int, list[Block]] = defaultdict(list)
        self.event_devices: dict[int, int] = {}
        self.stream_devices: dict[int, int] = {}
        self.priorities: dict[int, int] = {}
        self.meetings: dict[bytes, Meeting] = {}
        self.reused = 0  # allocations that got memory which had been given back
        self.error = 0  # what eventQuery returns
        self.frozen = False  # nothing runs
        self.ends = True  # the last kernels of runs do their work; if not, runs begin and hang
        self.queue_entries = 1 << 30  # how many nodes a stream's queue holds; a thread that puts one more waits
        self.driver = threading.RLock()  # held by a thread that waits for room in a queue, and while events are asked
        self.patience = 20.0  # seconds until the host that waits takes a device to hang
        self.holds: Callable[[Node], bool] = lambda node: False  # what is not done, although it could be
        self.is_serial = False  # a device does everything in the order in which it was put there, as with one queue
        self.last: dict[int, Node] = {}  # of each device
        self.free_memory = 1 << 30
        self.no_stream_memory = False  # the driver cannot let a stream write words

    # -- streams ---------------------------------------------------------------------------------------------------

    def stream(self, number: int) -> int:
        """The stream of a number: each device has its own legacy default stream."""
        return -1 - self.local.__dict__.get("device", 0) if number in (0, 1) else number

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
            node.device = self.local.__dict__.get("device", 0)
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
            capture = self.captures.get(stream)
            node = self.tail[stream] if capture is None else capture.tail[stream]
            self.recorded[event] = node, None if capture is None else id(capture)

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
                        node.done, node.run, node.after = True, None, set()
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

    def is_empty(self, stream: int) -> bool:
        self.run()
        with self.lock:
            node = self.tail[self.stream(stream)]
            return node is None or node.done

    def forbid_in_capture(self) -> None:
        if self.captures:
            raise CUDARuntimeError(900)  # cudaErrorStreamCaptureUnsupported


class Capture:
    def __init__(self, origin: int) -> None:
        self.origin = origin
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
            world.stream_devices[self.ptr] = world.local.__dict__.get("device", 0)

    def __enter__(self) -> Stream:
        self._world.local.__dict__.setdefault("streams", []).append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._world.local.streams.pop()

    def synchronize(self) -> None:
        self._world.forbid_in_capture()
        node = self._world.tail[self._world.stream(self.ptr)]
        self._world.finish(lambda: node is None or node.done)

    def begin_capture(self) -> None:
        self._world.captures[self.ptr] = Capture(self.ptr)

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
        if not joined.issuperset(capture.nodes):
            raise CUDARuntimeError(904)  # cudaErrorStreamCaptureUnjoined
        return Graph(world, capture.nodes)


class Event:
    def __init__(self, world: World, disable_timing: bool = False) -> None:
        self._world, self.ptr = world, next(world.numbers)
        world.event_devices[self.ptr] = world.local.__dict__.get("device", 0)

    def record(self, stream: Stream) -> None:
        self._world.record(self.ptr, stream.ptr)


class Block:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.content = ctypes.create_string_buffer(nbytes + 256)
        base = ctypes.addressof(self.content)
        self.ptr = -(-base // 256) * 256


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
        world.devices[self.ptr] = world.local.__dict__.get("device", 0)

    def __del__(self) -> None:
        self._arena.append(self._block)


class Array:
    """cupy.ndarray, as far as it is used: device memory with a shape and an element type; NumPy computes."""

    world: World  # set by modules()

    def __init__(
        self, shape: Any, dtype: Any, memptr: Any = None, device: int | None = None, code: int = 2
    ) -> None:  # fmt: skip
        from dlpack import Producer

        device = self.world.local.__dict__.get("device", 0) if device is None else device
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

    def __and__(self, other: Any) -> np.ndarray:
        return self.values & other

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


# -- NCCL ------------------------------------------------------------------------------------------------------------


class Meeting:
    """What the ranks of one communicator share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.transfers: defaultdict[tuple[int, int], tuple[deque[list[Any]], deque[list[Any]]]] = defaultdict(
            lambda: (deque(), deque())
        )
        self.collectives: defaultdict[int, dict[int, tuple[int, int, int]]] = defaultdict(dict)
        self.splits: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self.children: dict[Any, Meeting] = {}
        self.aborted: set[int] = set()


class NcclCommunicator:
    def __init__(self, world: World, size: int, unique_id: bytes, rank: int) -> None:
        with world.lock:
            meeting = world.meetings.setdefault(unique_id, Meeting(size))
        meeting.barrier.wait(BARRIER_SECONDS)
        self._join(world, meeting, rank)

    def _join(self, world: World, meeting: Meeting, rank: int) -> None:
        self._world, self._meeting, self._rank = world, meeting, rank
        self._collective = itertools.count()
        self._split = itertools.count()
        self.asynchronous_error = 0
        self.comm = 1

    def rank_id(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._meeting.size

    def device_id(self) -> int:
        return self._rank

    def send(self, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._transfer(0, (self._rank, peer), address, count, datatype, stream)

    def recv(self, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._transfer(1, (peer, self._rank), address, count, datatype, stream)

    def _transfer(self, side: int, pair: tuple[int, int], address: int, count: int, datatype: int, stream: int) -> None:
        assert datatype == 1 and pair[0] != pair[1]
        group = self._world.local.group
        assert group is not None, "a transfer outside a group"
        group.append((self._meeting, stream, side, pair, address, count, self._rank))

    def allGather(self, source: int, target: int, count: int, datatype: int, stream: int) -> None:
        nbytes = count * {1: 1, 6: 2, 7: 4}[datatype]

        def gather(parts: dict[int, tuple[int, int, int]]) -> None:
            for rank, (their, _, _) in parts.items():
                ctypes.memmove(target + rank * nbytes, their, nbytes)

        self._together(source, target, nbytes, stream, gather)

    def broadcast(self, source: int, target: int, count: int, datatype: int, root: int, stream: int) -> None:
        self._together(source, target, count, stream, lambda parts: ctypes.memmove(target, parts[root][0], count))

    def allReduce(self, source: int, target: int, count: int, datatype: int, op: int, stream: int) -> None:
        dtype = {7: np.float32, 6: np.float16}[datatype]
        nbytes = count * np.dtype(dtype).itemsize

        def reduce(parts: dict[int, tuple[int, int, int]]) -> None:
            values = [np.frombuffer(ctypes.string_at(parts[r][0], nbytes), dtype) for r in sorted(parts)]
            total = np.sum(values, axis=0, dtype=dtype)
            ctypes.memmove(target, total.ctypes.data, nbytes)

        self._together(source, target, nbytes, stream, reduce)

    def reduceScatter(self, source: int, target: int, count: int, datatype: int, op: int, stream: int) -> None:
        """In the ranks' order and in fp32, as qccl adds, so that results can be compared byte for byte."""
        dtype = np.dtype({7: np.float32, 6: np.float16}[datatype])
        combine = {0: np.add, 2: np.maximum, 3: np.minimum}[op]
        nbytes = count * dtype.itemsize

        def reduce(parts: dict[int, tuple[int, int, int]]) -> None:
            mine = [ctypes.string_at(parts[r][0] + self._rank * nbytes, nbytes) for r in sorted(parts)]
            with np.errstate(all="ignore"):  # a slot has undefined bytes behind its chunk
                total = functools.reduce(combine, [np.frombuffer(part, dtype).astype(np.float32) for part in mine])
                result = total.astype(dtype)
            ctypes.memmove(target, result.ctypes.data, nbytes)

        self._world.calls.append(("reduceScatter", self._meeting.size))
        self._together(source, target, nbytes * self._meeting.size, stream, reduce)

    def _together(self, source: int, target: int, nbytes: int, stream: int, finish: Any) -> None:
        meeting, number = self._meeting, next(self._collective)
        seen: dict[str, bytes] = {}

        def run() -> bool:
            if self._rank in meeting.aborted:
                return True
            arrived = meeting.collectives[number]
            if self._rank not in arrived:
                seen["mine"] = ctypes.string_at(source, nbytes)
                kept = ctypes.create_string_buffer(seen["mine"], nbytes or 1)
                arrived[self._rank] = ctypes.addressof(kept), nbytes, id(kept)
                meeting.splits[-1 - number][self._rank] = kept  # keeps it alive
            if len(arrived) < meeting.size:
                return False
            finish(arrived)
            return True

        self._world.put(stream, "collective", run)

    def commSplit(self, color: int, key: int) -> NcclCommunicator | None:
        number = next(self._split)
        with self._world.lock:
            self._meeting.splits[number][self._rank] = color, key
        self._meeting.barrier.wait(10)
        entries = self._meeting.splits[number]
        if color < 0:
            return None
        members = sorted((k, r) for r, (c, k) in entries.items() if c == color)
        with self._world.lock:
            child = self._meeting.children.setdefault((number, color), Meeting(len(members)))
        comm = NcclCommunicator.__new__(NcclCommunicator)
        comm._join(self._world, child, members.index((key, self._rank)))
        return comm

    def check_async_error(self) -> None:
        if self.asynchronous_error == 7:
            raise KeyError(7)
        if self.asynchronous_error:
            raise NcclError(self.asynchronous_error)

    def abort(self) -> None:
        self._world.calls.append(("abort", self._rank))
        self._meeting.aborted.add(self._rank)
        self.comm = 0

    def destroy(self) -> None:
        self._world.calls.append(("destroy", self._rank))
        self.comm = 0


def group_start(world: World) -> None:
    assert world.local.__dict__.get("group") is None
    world.local.group = []


def group_end(world: World) -> None:
    transfers, world.local.group = world.local.group, None
    world.calls.append(("group", len(transfers)))
    for stream in dict.fromkeys(transfer[1] for transfer in transfers):
        _put_group(world, stream, [transfer for transfer in transfers if transfer[1] == stream])


def _put_group(world: World, stream: int, transfers: list[tuple[Any, ...]]) -> None:
    """A node that is done when all of its transfers are; each run of it (a graph has many) posts them anew."""
    state: dict[str, list[list[Any]]] = {}

    def run() -> bool:
        if any(rank in meeting.aborted for meeting, *_, rank in transfers):
            return True
        if "posted" not in state:
            state["posted"] = [[address, count, False] for *_, address, count, _ in transfers]
            for (meeting, _, side, pair, *_), entry in zip(transfers, state["posted"], strict=True):
                meeting.transfers[pair][side].append(entry)
        for meeting, _, _, pair, *_ in transfers:
            sends, receives = meeting.transfers[pair]
            while sends and receives:
                source, target = sends.popleft(), receives.popleft()
                assert source[1] == target[1], f"a send of {source[1]} bytes meets a receive of {target[1]}"
                ctypes.memmove(target[0], source[0], source[1])
                source[2] = target[2] = True
        if all(entry[2] for entry in state["posted"]):
            state.clear()
            return True
        return False

    world.put(stream, f"group of {len(transfers)}", run)


# -- the modules -----------------------------------------------------------------------------------------------------


class _StreamMaker:
    """cupy.cuda.Stream, which is called, and has the default stream as an attribute."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.null = Stream(world, ptr=0)

    def __call__(self, **arguments: Any) -> Stream:
        return Stream(self._world, **arguments)

    def from_external(self, stream: Any) -> Stream:
        return Stream(self._world, ptr=stream.__cuda_stream__()[1])


#: what the kernels of the checks themselves do
_SIMPLE = {
    "spin": lambda nanoseconds: None,
    "copy": lambda source, target, words: ctypes.memmove(target, source, 4 * words),
    "race": lambda target: None,
}


class _MemoryType(IntEnum):
    CU_MEMORYTYPE_HOST = 1
    CU_MEMORYTYPE_DEVICE = 2


def _pointer_attributes(world: World, count: int, wanted: list[int], address: int) -> tuple[Any, list[int]]:
    for start, block in world.memory.items():
        if start <= address < start + block.nbytes:
            return _Result.CUDA_SUCCESS, [2, world.devices.get(start, 0), 0, start, block.nbytes]
    return _Result.CUDA_SUCCESS, [0, -2, 0, 0, 0]


_RELAXED = 2


class _Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_SUPPORTED = 801


def _status(call: Callable[[], object]) -> int:
    """What a function of the driver returns, for a call that raises."""
    try:
        call()
    except CUDARuntimeError as error:
        return error.status
    return 0


def _copy(world: World, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    if kind == 1 and not _is_pinned(world, source):  # pageable memory has been read when the call returns
        content = ctypes.string_at(source, nbytes)
        world.put(stream, "copy to device", lambda: ctypes.memmove(target, content, nbytes))
    else:
        world.put(stream, f"copy {kind}", lambda: ctypes.memmove(target, source, nbytes))


def _pinned(world: World, nbytes: int) -> Block:
    world.forbid_in_capture()
    block = Block(nbytes)
    ctypes.memset(block.ptr, 0xA5, nbytes)
    with world.lock:
        world.pinned.add(block)
    return block


def _is_pinned(world: World, address: int) -> bool:
    with world.lock:
        return any(block.ptr <= address < block.ptr + block.nbytes for block in world.pinned)


def _word(world: World, address: int) -> Any:
    assert _is_pinned(world, address) and address % 4 == 0
    return ctypes.c_uint32.from_address(address)


def _wait_value(world: World, stream: int, address: int, value: int, flags: int) -> tuple[Any]:
    word = _word(world, address)
    assert flags == 0 and 0 <= value < 1 << 32
    world.calls.append(("wait value", stream, address, value))
    world.put(stream, f"wait for {value}", lambda: ctypes.c_int32(word.value - value).value >= 0)
    return (_Result.CUDA_SUCCESS,)


def _write_value(world: World, stream: int, address: int, value: int, flags: int) -> tuple[Any]:
    word = _word(world, address)
    assert flags == 0 and 0 <= value < 1 << 32
    if world.no_stream_memory:
        return (_Result.CUDA_ERROR_NOT_SUPPORTED,)

    def run() -> None:
        word.value = value

    world.put(stream, f"tell {value}", run)
    return (_Result.CUDA_SUCCESS,)


def modules(world: World, kernels: Any) -> dict[str, ModuleType]:
    """The modules to put into sys.modules; ``kernels(name, arguments)`` returns what a launch does."""
    functions: dict[int, str] = {}

    def module(name: str, **content: Any) -> ModuleType:
        made = ModuleType(name)
        made.__dict__.update(content)
        return made

    def launch(f: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int, stream: int, args: int, extra: int) -> None:  # fmt: skip  # noqa: E501
        world.calls.append(("launch", functions[f], stream))
        assert gx > 0 < gy and gz > 0 < bx and extra == 0
        world.put(stream, functions[f], kernels(functions[f], (gx, gy, gz), args))

    def raw_module(*, code: str, options: tuple[str, ...]) -> Any:
        def get_function(name: str) -> Any:
            return lambda grid, block, arguments: world.put(
                world.local.streams[-1].ptr, name, lambda: _SIMPLE[name](*map(int, arguments))
            )

        return SimpleNamespace(get_function=get_function)

    def compile_using_nvrtc(code: str, options: tuple[str, ...], *, name_expressions: tuple[str, ...]) -> Any:
        world.forbid_in_capture()
        assert "#include" in code and "--fmad=false" in options
        return b"cubin", {name: f"mangled {name}" for name in name_expressions}

    class Module:
        def load(self, binary: bytes) -> None:
            assert binary == b"cubin"

        def get_function(self, mangled: str) -> Any:
            pointer = next(world.numbers)
            functions[pointer] = mangled.removeprefix("mangled ")
            return SimpleNamespace(ptr=pointer)

    def copy_now(target: int, source: int, nbytes: int, kind: int) -> None:
        world.forbid_in_capture()
        ctypes.memmove(target, source, nbytes)

    def query(is_done: Callable[[], bool]) -> tuple[int]:
        with world.driver:
            if world.captures and not world.local.__dict__.get("is_relaxed"):
                return (900,)  # cudaErrorStreamCaptureUnsupported
            return (0 if is_done() else world.error or NOT_READY,)

    def exchange_mode(mode: int) -> tuple[_Result, int]:
        before = world.local.__dict__.get("is_relaxed", False)
        world.local.is_relaxed = mode == _RELAXED
        return _Result.CUDA_SUCCESS, _RELAXED if before else 0

    def set_device(device: int) -> None:
        if not 0 <= device < DEVICES:
            raise CUDARuntimeError(101)
        world.local.device = device

    runtime = module(
        "cupy.cuda.runtime",
        CUDARuntimeError=CUDARuntimeError,
        getDevice=lambda: world.local.__dict__.get("device", 0),
        setDevice=set_device,
        getDeviceCount=lambda: DEVICES,
        memGetInfo=lambda: (world.free_memory, world.free_memory),
        eventElapsedTime=lambda a, b: 1.0,
        streamWaitEvent=world.wait,
        streamIsCapturing=lambda stream: stream in world.captures,
        memcpy=copy_now,
        memset=ctypes.memset,
        streamSynchronize=lambda stream: Stream(world, ptr=stream).synchronize(),
        deviceSynchronize=lambda: world.finish(lambda: world.is_idle(world.local.__dict__.get("device", 0))),
        getDeviceProperties=lambda device: {"name": b"Fake 100"},
        deviceGetPCIBusId=lambda device: f"0000:{device:02d}:00.0",
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 12090,
        memcpyAsync=lambda *arguments: _copy(world, *arguments),
        memsetAsync=lambda address, value, nbytes, stream: world.put(
            stream, "memset", lambda: ctypes.memset(address, value, nbytes)
        ),
    )
    driver = module("cupy.cuda.driver", CUDADriverError=CUDADriverError, launchKernel=launch)
    unique = itertools.count()
    nccl = module(
        "cupy.cuda.nccl",
        NcclError=NcclError,
        NcclCommunicator=lambda size, unique_id, rank: NcclCommunicator(world, size, unique_id, rank),
        available=True,
        get_version=lambda: NCCL_VERSION,
        get_unique_id=lambda: next(unique).to_bytes(128, "big"),
        groupStart=lambda: group_start(world),
        groupEnd=lambda: group_end(world),
    )
    streams = _StreamMaker(world)
    cuda = module(
        "cupy.cuda",
        compiler=SimpleNamespace(compile_using_nvrtc=compile_using_nvrtc, CompileException=CompileException),
        nvrtc=SimpleNamespace(getVersion=lambda: (12, 9)),
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        Device=lambda: SimpleNamespace(compute_capability="90"),
        function=SimpleNamespace(Module=Module),
        runtime=runtime,
        driver=driver,
        nccl=nccl,
        Stream=streams,
        get_elapsed_time=lambda begin, end: 1.0,
        set_allocator=lambda allocator: None,
        Event=lambda **arguments: Event(world, **arguments),
        alloc=lambda nbytes: Pointer(world, nbytes),
        alloc_pinned_memory=lambda nbytes: _pinned(world, nbytes),
        get_current_stream=lambda device=None: (world.local.__dict__.get("streams") or [streams.null])[-1],
        UnownedMemory=lambda ptr, size, owner, device: SimpleNamespace(ptr=ptr),
        MemoryPointer=lambda memory, offset: memory,
    )
    Array.world = world
    cupy = module(
        "cupy",
        __version__="14.0.0",
        cuda=cuda,
        ndarray=Array,
        empty=Array,
        RawModule=raw_module,
    )
    bindings = module(
        "cuda.bindings.driver",
        CUpointer_attribute=SimpleNamespace(
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE=2,
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL=9,
            CU_POINTER_ATTRIBUTE_IS_MANAGED=8,
            CU_POINTER_ATTRIBUTE_RANGE_START_ADDR=11,
            CU_POINTER_ATTRIBUTE_RANGE_SIZE=12,
        ),
        CUmemorytype=_MemoryType,
        CUresult=_Result,
        CUstreamCaptureMode=SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=_RELAXED),
        CUstreamWaitValue_flags=SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0),
        CUstreamWriteValue_flags=SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT=0),
        cuEventRecord=lambda event, stream: (_status(lambda: world.record(event, stream)),),
        cuEventQuery=lambda event: query(lambda: world.is_done(event)),
        cuStreamQuery=lambda stream: query(lambda: world.is_empty(stream)),
        cuStreamWaitValue32=lambda *arguments: _wait_value(world, *arguments),
        cuStreamWriteValue32=lambda *arguments: _write_value(world, *arguments),
        cuPointerGetAttributes=lambda n, wanted, address: _pointer_attributes(world, n, wanted, address),
        cuThreadExchangeStreamCaptureMode=exchange_mode,
    )
    package = module("cuda", bindings=module("cuda.bindings", driver=bindings))
    return {
        "cupy": cupy,
        "cupy.cuda": cuda,
        "cupy.cuda.runtime": runtime,
        "cupy.cuda.driver": driver,
        "cupy.cuda.nccl": nccl,
        "cuda": package,
        "cuda.bindings": package.bindings,
        "cuda.bindings.driver": bindings,
    }


def _run_while_flags_are_read(world: World) -> None:
    """Do some of what can be done whenever the host looks at the flags of runs."""
    flags = importlib.import_module("qccl.cuda.flags").RunFlags
    read = flags._read

    def run_and_read(self: Any, word: int) -> int:
        world.run()
        return read(self, word)

    flags._read = run_and_read


@contextlib.contextmanager
def installed(world: World, kernels: Any) -> Any:
    """Put the modules in place, and forget what was made of them afterwards."""
    from qccl.cuda import libraries

    made = modules(world, kernels)
    parts = ("device", "engine", "flags", "kernels", "memory", "nccl", "program", "run", "staging", "state", "watchdog")
    ours = tuple(f"qccl.cuda.{part}" for part in parts)
    saved = {name: sys.modules.pop(name, None) for name in (*made, *ours)}
    sys.modules.update(made)
    libraries.cuda_libraries.cache_clear()
    folder = os.environ.get("QCCL_CACHE_DIR")
    _run_while_flags_are_read(world)
    os.environ["QCCL_CACHE_DIR"] = ""  # what the fake compiles is of no use to others
    try:
        yield made["cupy"]
    finally:
        del os.environ["QCCL_CACHE_DIR"]
        if folder is not None:
            os.environ["QCCL_CACHE_DIR"] = folder
        for engine in list(getattr(sys.modules.get("qccl.cuda.engine"), "_live", ())):
            engine.close(0.1)
        for thread in threading.enumerate():
            if thread.name.startswith("qccl"):
                thread.join(5)
        libraries.cuda_libraries.cache_clear()
        for name, module in saved.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
