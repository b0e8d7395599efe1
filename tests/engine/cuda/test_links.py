"""The links between GPUs: what the driver says of them, and what follows for chunks, queues and nodes."""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
import threading
from pathlib import Path

import fake_cuda
import fake_nccl
import numpy as np
import patience
import pytest
from cuda_ranks import on_gpus, values

import qccl
from qccl.collectives import spec_of_plan
from qccl.collectives.chunks import GPU
from qccl.collectives.schedule import Role
from qccl.engine.cuda.links import common_link, halves
from qccl.engine.cuda.streams import stream_tasks

BUS_IDS = [f"0000:{device:02d}:00.0" for device in range(8)]  # as the fake runtime has them
PAGE = (Path(__file__).parents[3] / "docs" / "cuda.md").read_text()


class Nvml:
    """libnvidia-ml with the GPUs of ``bus_ids``, of which ``linked(a, b)`` says whether NVLink connects two.

    Its functions are of C, so that arguments of other types are refused.
    """

    def __init__(self, linked=lambda a, b: True, bus_ids=BUS_IDS):
        unsigned, enum, pointer = map(ctypes.POINTER, (ctypes.c_uint, ctypes.c_int, ctypes.c_void_p))

        def count(found):
            found[0] = len(bus_ids)
            return 0

        def handle(index, found):
            found[0] = 0x1000 + index
            return 0

        def place(gpu, info):
            bus_id = f"0000{bus_ids[gpu - 0x1000].upper()}".encode()
            ctypes.memmove(info, b"\x01" * 36 + bus_id + b"\0" + b"\x7f" * (31 - len(bus_id)), 68)
            return 0

        def status(a, b, index, found):
            assert index == 2
            found[0] = 0 if linked(a - 0x1000, b - 0x1000) else 5
            return 0

        def function(call, *arguments):
            return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(call)

        self.nvmlInit_v2 = function(lambda: 0)
        self.nvmlDeviceGetCount_v2 = function(count, unsigned)
        self.nvmlDeviceGetHandleByIndex_v2 = function(handle, ctypes.c_uint, pointer)
        self.nvmlDeviceGetPciInfo_v3 = function(place, ctypes.c_void_p, ctypes.c_void_p)
        self.nvmlDeviceGetP2PStatus = function(status, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, enum)


def links():
    """The module that the fakes have loaded."""
    return sys.modules["qccl.engine.cuda.links"]


def old_driver():
    found = Nvml()
    del found.nvmlDeviceGetPciInfo_v3
    return found


def failing():
    found = Nvml()
    found.nvmlInit_v2 = lambda: 9
    return found


@pytest.mark.parametrize(
    ("nvml", "expected"),
    [
        (Nvml(), BUS_IDS[:1] + BUS_IDS[2:]),
        (Nvml(lambda a, b: a // 2 == b // 2), BUS_IDS[:1]),  # pairs with a bridge
        (Nvml(lambda a, b: False), []),
        (Nvml(bus_ids=BUS_IDS[2:]), []),  # a container that does not have this GPU
        (old_driver(), []),
        (failing(), []),
        (None, []),
    ],
    ids=["all", "pairs", "no NVLink", "another's", "old", "failing", "no library"],
)
def test_what_a_rank_says_of_its_gpu(nvml, expected, world, cupy):
    world.nvml = nvml
    bus_id, numa_node, *others = links().describe(1).split()
    assert (bus_id, numa_node, others) == (BUS_IDS[1], "-1", expected)


@pytest.mark.packages
def test_the_constants_are_those_of_nvml():
    links = importlib.import_module("qccl.engine.cuda.links")
    nvml = pytest.importorskip("cuda.bindings.nvml", reason="needs cuda-python for CUDA 13", exc_type=ImportError)
    assert links._OVER_NVLINK == nvml.GpuP2PCapsIndex.P2P_CAPS_INDEX_NVLINK
    assert nvml.GpuP2PStatus.P2P_STATUS_OK == 0
    *_, (name, _, (nbytes,)) = nvml.pci_info_dtype.descr
    assert (name, links._PCI_INFO_NBYTES) == ("bus_id", nvml.pci_info_dtype.itemsize)
    assert nbytes == links._PCI_INFO_NBYTES - links._BUS_ID_START


def described(*gpus):
    return [" ".join((BUS_IDS[gpu], "0", *(BUS_IDS[other] for other in others))) for gpu, others in gpus]


@pytest.mark.parametrize(
    ("machines", "gpus", "link"),
    [
        ("aaa", described((0, (1, 2)), (1, (0, 2, 3)), (2, (0, 1))), "NVLink"),
        ("aaa", described((0, (1,)), (1, (0,)), (2, (3,))), "PCIe"),  # a bridge for two of them
        ("aa", described((0, (1,)), (1, ())), "PCIe"),  # one of them does not know it
        ("aa", described((0, (1,)), (0, (1,))), "PCIe"),  # one GPU for both
        ("ab", described((0, (1,)), (1, (0,))), "network"),
    ],
)
def test_the_slowest_link_decides(machines, gpus, link):
    assert common_link(machines, gpus) == link


@pytest.mark.parametrize(
    ("numa_nodes", "expected"),
    [
        ("0 0 1 1", (0, 0, 1, 1)),
        ("1 0 1 0", (0, 1, 0, 1)),
        ("2 2 2 5 5 5", (0, 0, 0, 1, 1, 1)),
        ("0 1", ()),  # halves of one rank would encode what one node need not
        ("0 0 0 1", ()),
        ("0 0 1 1 2 2", ()),
        ("0 0 -1 -1", ()),
        ("-1 -1 -1 -1", ()),
        ("0 0 0 0", ()),
    ],
)
def test_halves_of_a_machine(numa_nodes, expected):
    gpus = [f"{BUS_IDS[rank]} {node}" for rank, node in enumerate(numa_nodes.split())]
    assert halves(gpus) == expected


# -- what follows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nvlinks", ["all", "all but one", "none"])
def test_all_ranks_have_the_chunks_of_the_slowest_link(nvlinks, world, cupy):
    apart = {"all": set(), "all but one": {(1, 2), (2, 1)}, "none": None}[nvlinks]
    world.nvml = Nvml(lambda a, b: apart is not None and (a, b) not in apart)
    link = "NVLink" if nvlinks == "all" else "PCIe"

    @on_gpus(3)
    def agree(comm):
        assert comm.transport.link == link and comm._session.engine.chunking is GPU[link]
        pair = comm.split(comm.rank // 2)  # ranks 0 and 1 have NVLink in both cases
        expected = "PCIe" if nvlinks == "none" and pair.size > 1 else "NVLink"
        assert pair.transport.link == expected and f"nccl over {expected}" in repr(pair)

    agree()


def cell(link: str, mib: int, dtype: str = "float32") -> str:
    """The table of docs/cuda.md: launches, groups and workspace of an all-reduce on 8 ranks."""
    itemsize = 4 if dtype == "float32" else 2
    spec = spec_of_plan("allreduce", (mib << 20) // itemsize, dtype, "minmax8", None, {})
    schedule = spec.schedule(0, 8, in_place=True, chunking=GPU[link])
    tasks = stream_tasks(schedule)
    groups = sum(task.exchange is not None for task in tasks)
    workspace = sum(buffer.nbytes for buffer in schedule.buffers.values() if buffer.role is Role.WORK)
    return f"{len(tasks) - groups} + {groups}, {round(workspace / (1 << 20))} MiB"


@pytest.mark.parametrize("link", GPU)
def test_launches_and_groups_of_a_call(link):
    [row] = re.findall(rf"^\| {link} \|(.*)\|$", PAGE, re.MULTILINE)
    cells = [each.strip() for each in row.split("|")]
    sizes = [(4, "float32"), (25, "float32"), (64, "float32"), (64, "bfloat16"), (256, "float32"), (1024, "float32")]
    assert cells == [cell(link, *each) for each in sizes]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_call_over_nvlink(dtype):
    launches, groups = map(int, re.findall(r"\d+", cell("NVLink", 64, dtype))[:2])
    assert launches <= 12 and groups <= 4


@pytest.mark.parametrize("link", GPU)
def test_two_large_calls_are_under_way_at_once(link, world, cupy):
    """64 MiB on 8 ranks, of which only one is there, so nothing ends; the second call does not wait for the first."""
    from qccl.engine.cuda import CudaBackend
    from qccl.engine.cuda.nccl import NcclTransport

    class Alone(NcclTransport):
        def __init__(self):
            self.rank = self.local_rank = self.device = 0
            self.local_size = self.size = 8
            self.nodes, self.host, self.link = (0,) * 8, None, link
            self.stream = cupy.cuda.Stream(non_blocking=True).ptr
            self.comm = fake_nccl.Communicator(world, fake_nccl.Meeting(8), 0)

        def allgather(self, item, timeout):
            return [item] * self.size

        def check(self):
            pass

        def abort(self, reason):
            self.comm.abort()

        close = check

    def count() -> dict[str, int]:
        ours = {*comm._session.engine.device.queues.values()}
        kinds = [each[0] for each in world.calls if each[0] == "group" or ours.intersection(each)]
        return {kind: kinds.count(kind) for kind in ("group", "launch", "record", "wait")}

    world.frozen = True
    comm = qccl.Communicator._from_transport(Alone(), 60.0, CudaBackend)
    arrays = [fake_cuda.Array((16 << 20,), np.float32) for _ in range(2)]
    works = []
    caller = threading.Thread(
        target=lambda: works.extend(comm.quantized_allreduce(each, async_op=True) for each in arrays)
    )
    caller.start()
    try:
        patience.wait_until(lambda: len(works) == 2, what="the second call returns while the first is under way")
        assert not any(work.is_completed() for work in works)
        found = count()
        groups = found.pop("group")
        entries = sum(found.values()) + 5 * groups
        pending = comm._session.engine._pending
        assert pending._entries == entries <= 1000 and groups <= 12
    finally:
        comm.abort()
        world.frozen = False
        caller.join(60)


@on_gpus(4)
def check_default_nodes(comm, nodes):
    """A call without ``node_ids`` is the one with these."""
    found = []
    for given in ({}, {"node_ids": nodes}):
        x = fake_cuda.array(values(comm.rank, 3000), comm.rank)
        comm.hierarchical_allreduce(x, codec="minmax4", **given)
        plan = comm.plan("hierarchical_allreduce", 3000, codec="minmax4", **given)
        comm.check()
        found += [x.get().tobytes(), plan.spec.node_ids]
    assert found[:2] == found[2:] and found[1] == nodes


@pytest.mark.parametrize("machine", ["two sockets", "one socket", "two sockets with NVLink"])
def test_the_halves_are_the_default_nodes(machine, world, cupy, tmp_path, monkeypatch):
    monkeypatch.setattr(links(), "_PCI_DEVICES", tmp_path)
    for device in range(4):
        (tmp_path / BUS_IDS[device]).mkdir()
        (tmp_path / BUS_IDS[device] / "numa_node").write_text(f"{device // 2 if machine != 'one socket' else 0}\n")
    world.nvml = Nvml() if "NVLink" in machine else None
    check_default_nodes(nodes=(0, 0, 1, 1) if machine == "two sockets" else (0,) * 4)
