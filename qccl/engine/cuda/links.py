"""The links between the GPUs of a communicator, which decide how many chunks a call has, and the halves of a machine.

Each rank describes its GPU in the first exchange of a communicator, and all ranks conclude the same from that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

from qccl.engine.cuda.libraries import cuda_libraries

__all__ = ["common_link", "describe", "halves"]

_PCI_DEVICES = Path("/sys/bus/pci/devices")
#: NVML_P2P_CAPS_INDEX_NVLINK
_OVER_NVLINK = 2
#: bytes of nvmlPciInfo_t, and of what precedes its last member, the bus id
_PCI_INFO_NBYTES, _BUS_ID_START = 68, 36


def describe(device: int) -> str:
    """Describe a GPU: its bus id, the NUMA node of its socket (-1: unknown), and the bus ids that it has NVLink to."""
    bus_id = _short(cuda_libraries().runtime.deviceGetPCIBusId(device))
    try:
        numa_node = int((_PCI_DEVICES / bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        numa_node = -1
    return " ".join((bus_id, str(numa_node), *_over_nvlink(bus_id)))


def common_link(machines: Sequence[str], described: Sequence[str]) -> str:
    """The slowest link between two ranks, a key of chunks.GPU; ``machines`` has each rank's machine()."""
    if len(set(machines)) > 1:
        return "network"
    gpus = [each.split() for each in described]
    return "NVLink" if all(other in peers for (_, _, *peers), (other, *_) in permutations(gpus, 2)) else "PCIe"


def halves(described: Sequence[str]) -> tuple[int, ...]:
    """Each rank's half of a machine, 0 or 1, if two sockets have equally many ranks; otherwise an empty tuple."""
    sockets = [each.split()[1] for each in described]
    first, *others = dict.fromkeys(sockets)
    if len(others) != 1 or "-1" in sockets or sockets.count(first) * 2 != len(sockets) or len(sockets) < 4:
        return ()
    return tuple(int(socket != first) for socket in sockets)


def _short(bus_id: str) -> str:
    """Write a bus id like Linux: NVML has 8 digits of the domain, CUDA 4, both in capitals."""
    return bus_id[-len("0000:00:00.0") :].lower()


def _nvml() -> Any:
    """NVML, the driver's library that NCCL also uses. It ignores CUDA_VISIBLE_DEVICES, and shows all GPUs."""
    return ctypes.CDLL("libnvidia-ml.so.1")


def _over_nvlink(bus_id: str) -> list[str]:
    """The bus ids of the GPUs that this one has NVLink to, also through switches, as far as NVML knows."""
    gpus: dict[str, ctypes.c_void_p] = {}
    count, status = ctypes.c_uint(), ctypes.c_int()
    try:
        nvml = _nvml()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        for index in range(count.value):
            gpu, info = ctypes.c_void_p(), ctypes.create_string_buffer(_PCI_INFO_NBYTES)
            if not nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(gpu)):
                nvml.nvmlDeviceGetPciInfo_v3(gpu, info)
                gpus[_short(info.raw[_BUS_ID_START:].split(b"\0")[0].decode())] = gpu
        this = gpus.pop(bus_id)
        asked = {
            other: nvml.nvmlDeviceGetP2PStatus(this, gpu, _OVER_NVLINK, ctypes.byref(status)) or status.value
            for other, gpu in gpus.items()
        }
    except (OSError, AttributeError, KeyError):  # no library, an old one, or a GPU that it does not show
        return []
    return [other for other, failed in asked.items() if not failed]
