"""NCCL on the fake GPUs of fake_device.py.

A communicator is made when all ranks have come, and the transfers of a group take place when both sides have come to
them.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import defaultdict, deque
from typing import Any

import numpy as np
from fake_device import World

BARRIER_SECONDS = 60.0


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"NCCL_ERROR_{status}: fake")
        self.status = status


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
        self.comm = next(world.numbers)

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
        assert datatype == 1 and (pair[0] != pair[1] or self._meeting.size == 1)
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
        self._meeting.barrier.wait(BARRIER_SECONDS)
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
        self._meeting.left.add(self._rank)
        self.comm = 0

    def destroy(self) -> None:
        self._world.calls.append(("destroy", self._rank))
        self._meeting.left.add(self._rank)
        while self._world.destroy_waits and len(self._meeting.left) < self._meeting.size:
            if self._world.ended.wait(0.005):
                break
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
