"""The tools that build the lab: ``ip`` and ``tc``."""

from __future__ import annotations

import subprocess

from qccl.errors import QcclError

__all__ = ["LabError", "run"]


class LabError(QcclError):
    """The lab's network could not be built, is not what was asked for, or traffic bypassed it."""


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
