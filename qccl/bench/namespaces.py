"""Network namespaces from inside this process: a thread enters one, and the sockets that it opens stay there."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

__all__ = ["NAMESPACES", "inside", "switch_offloads_off"]

NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_SIOCETHTOOL = 0x8946
#: ETHTOOL_S: checksums of sent packets, segmentation by the device and by the kernel, joining of received packets
_OFFLOADS = {"tx": 0x17, "tso": 0x1F, "gso": 0x24, "gro": 0x2C}

_Result = TypeVar("_Result")


def inside(namespace: str, call: Callable[[], _Result]) -> _Result:
    """``call()`` by a thread in a network namespace; sockets and files of /sys that it opens belong to it.

    Raises OSError if there is no such namespace.
    """

    def enter() -> _Result:
        with open(NAMESPACES / namespace, "rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"entering the namespace {namespace}: {os.strerror(number)}")
        return call()

    with ThreadPoolExecutor(1) as thread:  # the thread ends, and with it its stay there
        return thread.submit(enter).result()


def switch_offloads_off(namespace: str, interfaces: Iterable[str]) -> None:
    """Let ``interfaces`` send packets as a wire carries them: at most the MTU, with checksums. Raises OSError.

    As ``ethtool -K INTERFACE tx off tso off gso off gro off``.
    """

    def switch() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            for interface in interfaces:
                for command in _OFFLOADS.values():
                    value = ctypes.create_string_buffer(struct.pack("II", command, 0))
                    request = struct.pack("16sP16x", interface.encode(), ctypes.addressof(value))
                    fcntl.ioctl(any_socket, _SIOCETHTOOL, request)

    inside(namespace, switch)
