"""NCCL on the fake GPUs of fake_device.py.

A communicator is made when all ranks have come, and the transfers of a group take place when both sides have come to
them.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
from fake_device import World
from stub_libraries import Refused, write

BARRIER_SECONDS = 60.0
NCCL_VERSION = 22800
#: ncclResult_t
_SYSTEM_ERROR, _INVALID_ARGUMENT = 2, 4


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
        self.left: set[int] = set()  # ranks that have aborted or destroyed it

    def meet(self) -> None:
        try:
            self.barrier.wait(BARRIER_SECONDS)
        except threading.BrokenBarrierError:
            raise Refused(_SYSTEM_ERROR) from None


class Communicator:
    """A rank of a Meeting."""

    def __init__(self, world: World, meeting: Meeting, rank: int) -> None:
        self._world, self._meeting, self._rank = world, meeting, rank
        self._collective = itertools.count()
        self._split = itertools.count()
        self.asynchronous_error = 0
        self.device = world.device()
        self.is_freed = False
        self.handle = next(world.numbers)
        world.communicators[self.handle] = self

    def send(self, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._transfer(0, (self._rank, peer), address, count, datatype, stream)

    def recv(self, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._transfer(1, (peer, self._rank), address, count, datatype, stream)

    def _transfer(self, side: int, pair: tuple[int, int], address: int, count: int, datatype: int, stream: int) -> None:
        assert datatype == 1 and (pair[0] != pair[1] or self._meeting.size == 1)
        group = self._world.local.group
        assert group is not None, "a transfer outside a group"
        group.append((self._meeting, stream, side, pair, address, count, self._rank))

    def gather(self, source: int, target: int, count: int, datatype: int, stream: int) -> None:
        nbytes = count * {1: 1, 6: 2, 7: 4}[datatype]

        def copy(parts: dict[int, tuple[int, int, int]]) -> None:
            for rank, (their, _, _) in parts.items():
                ctypes.memmove(target + rank * nbytes, their, nbytes)

        self._together(source, target, nbytes, stream, copy)

    def broadcast(self, source: int, target: int, count: int, datatype: int, root: int, stream: int) -> None:
        self._together(source, target, count, stream, lambda parts: ctypes.memmove(target, parts[root][0], count))

    def reduce(self, source: int, target: int, count: int, datatype: int, op: int, stream: int) -> None:
        dtype = {7: np.float32, 6: np.float16}[datatype]
        nbytes = count * np.dtype(dtype).itemsize

        def add(parts: dict[int, tuple[int, int, int]]) -> None:
            values = [np.frombuffer(ctypes.string_at(parts[r][0], nbytes), dtype) for r in sorted(parts)]
            total = np.sum(values, axis=0, dtype=dtype)
            ctypes.memmove(target, total.ctypes.data, nbytes)

        self._together(source, target, nbytes, stream, add)

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

    def split(self, color: int, key: int) -> Communicator | None:
        number = next(self._split)
        with self._world.lock:
            self._meeting.splits[number][self._rank] = color, key
        self._meeting.meet()
        entries = self._meeting.splits[number]
        if color < 0:
            return None
        members = sorted((k, r) for r, (c, k) in entries.items() if c == color)
        with self._world.lock:
            child = self._meeting.children.setdefault((number, color), Meeting(len(members)))
        return Communicator(self._world, child, members.index((key, self._rank)))

    def abort(self) -> None:
        self.is_freed = True
        self._world.calls.append(("abort", self._rank))
        self._meeting.aborted.add(self._rank)
        self._meeting.left.add(self._rank)

    def destroy(self) -> None:
        self.is_freed = True
        self._world.calls.append(("destroy", self._rank))
        self._meeting.left.add(self._rank)
        while self._world.destroy_waits and len(self._meeting.left) < self._meeting.size:
            if self._world.ended.wait(0.005):
                break


def functions(world: World) -> dict[str, Callable[..., Any]]:
    """NCCL's functions by their names."""
    unique = itertools.count()

    def of(handle: int) -> Communicator:
        if handle not in world.communicators:
            raise Refused(_INVALID_ARGUMENT)
        assert not world.communicators[handle].is_freed, "a communicator is used that was freed"
        return world.communicators[handle]

    def initialise(found: int, size: int, unique_id: Any, rank: int, config: int) -> None:
        with world.lock:
            meeting = world.meetings.setdefault(bytes(unique_id), Meeting(size))
        meeting.meet()
        write(found, ctypes.c_size_t, Communicator(world, meeting, rank).handle)

    def split(handle: int, color: int, key: int, found: int, config: int) -> None:
        made = of(handle).split(color, key)
        write(found, ctypes.c_size_t, made.handle if made else 0)

    def tell(number: Callable[[Communicator], int]) -> Callable[[int, int], None]:
        return lambda handle, found: write(found, ctypes.c_int, number(of(handle)))

    def on_stream(name: str) -> Callable[..., None]:
        return lambda *arguments: getattr(of(arguments[-2]), name)(*arguments[:-2], arguments[-1])

    return {
        "ncclGetVersion": lambda found: write(found, ctypes.c_int, NCCL_VERSION),
        "ncclGetUniqueId": lambda found: ctypes.memmove(found, next(unique).to_bytes(128, "big"), 128) and 0,
        "ncclCommInitRankConfig": initialise,
        "ncclCommSplit": split,
        "ncclCommAbort": lambda handle: of(handle).abort(),
        "ncclCommDestroy": lambda handle: of(handle).destroy(),
        "ncclCommGetAsyncError": tell(lambda comm: comm.asynchronous_error),
        "ncclCommUserRank": tell(lambda comm: comm._rank),
        "ncclCommCount": tell(lambda comm: comm._meeting.size),
        "ncclCommCuDevice": tell(lambda comm: comm.device),
        "ncclGroupStart": lambda: group_start(world),
        "ncclGroupEnd": lambda: group_end(world),
        "ncclSend": on_stream("send"),
        "ncclRecv": on_stream("recv"),
        "ncclAllGather": on_stream("gather"),
        "ncclBroadcast": on_stream("broadcast"),
        "ncclAllReduce": on_stream("reduce"),
    }


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
