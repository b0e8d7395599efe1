"""TCP's congestion control: the algorithm by which it decides how fast to send. Each network namespace has its own."""

from __future__ import annotations

from pathlib import Path

from qccl.bench.namespaces import inside
from qccl.bench.tools import LabError

__all__ = ["congestion_control", "set_congestion_control"]

_SETTING = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


def congestion_control() -> str:
    """The algorithm in this process's namespace; a new one has the machine's."""
    try:
        return _SETTING.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def set_congestion_control(namespace: str, name: str) -> None:
    """Let new connections in a namespace use ``name``. Raises LabError if the kernel does not have it."""
    try:
        inside(namespace, lambda: _SETTING.write_text(name, encoding="ascii"))
    except OSError as error:
        available = _AVAILABLE.read_text(encoding="ascii").split() if _AVAILABLE.exists() else []
        raise LabError(
            f"--tcp {name}: this kernel has no such congestion control, or does not permit it ({error.strerror}); it "
            f"has {', '.join(available) or 'none'}, and modprobe tcp_{name} may load it"
        ) from error
