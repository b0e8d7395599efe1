"""The tools ``ip`` and ``tc``, which build the lab, and network namespaces from inside this process.

A thread enters a namespace, and the sockets that it opens stay there.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from qccl.base.errors import QcclError

__all__ = ["NAMESPACES", "LabError", "congestion_control", "inside", "run", "set_congestion_control"]
__all__ += ["switch_offloads_off"]

NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_SIOCETHTOOL = 0x8946
#: ETHTOOL_S commands: checksums of sent packets, segmentation by the device and by the kernel, joining on receipt
_OFFLOADS = {"tx": 0x17, "tso": 0x1F, "gso": 0x24, "gro": 0x2C}

#: the kernel's file with TCP's congestion control, the algorithm that decides how fast it sends, of a namespace
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")

_Result = TypeVar("_Result")


class LabError(QcclError):
    """The lab's network could not be built, differs from the request, or traffic bypassed it."""


def inside(namespace: str, call: Callable[[], _Result]) -> _Result:
    """Do ``call()`` by a thread in a network namespace, to which the sockets and files of /sys that it opens belong.

    Raises OSError if there is no such namespace.
    """

    def enter() -> _Result:
        with open(NAMESPACES / namespace, "rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"entering the namespace {namespace}: {os.strerror(number)}")
        return call()

    with ThreadPoolExecutor(1) as thread:  # a thread of its own, as it cannot leave the namespace
        return thread.submit(enter).result()


def switch_offloads_off(namespace: str, interfaces: Iterable[str]) -> None:
    """Let ``interfaces`` send packets as a wire carries them: at most the MTU, with checksums. Raises OSError.

    This is ``ethtool -K INTERFACE tx off tso off gso off gro off``.
    """

    def switch() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            for interface in interfaces:
                for command in _OFFLOADS.values():
                    value = ctypes.create_string_buffer(struct.pack("II", command, 0))
                    request = struct.pack("16sP16x", interface.encode(), ctypes.addressof(value))
                    fcntl.ioctl(any_socket, _SIOCETHTOOL, request)

    inside(namespace, switch)


def run(*command: str, check: bool = True) -> str:
    """Run a tool and return its output. Raises LabError if it fails and ``check`` is set."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        if not check:
            return ""
        raise LabError(f"{' '.join(command)}: {error}") from error
    if check and done.returncode != 0:
        raise LabError(f"{' '.join(command)} failed: {done.stderr.strip()}; the kernel may lack veth, bridge or tbf")
    return done.stdout


def congestion_control() -> str:
    """The congestion control in this process's namespace; a new namespace has the machine's."""
    try:
        return _CONGESTION.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def set_congestion_control(namespace: str, name: str) -> None:
    """Let new connections in a namespace use ``name``. Raises LabError if the kernel does not have it."""
    try:
        inside(namespace, lambda: _CONGESTION.write_text(name, encoding="ascii"))
    except OSError as error:
        available = _AVAILABLE.read_text(encoding="ascii").split() if _AVAILABLE.exists() else []
        raise LabError(
            f"--tcp {name}: this kernel has no such congestion control, or does not permit it ({error.strerror}); it "
            f"has {', '.join(available) or 'none'}, and modprobe tcp_{name} may load it"
        ) from error
