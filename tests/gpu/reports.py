"""What the process of a section tells scripts/gpu-check, besides its result. It imports nothing that must be built."""

from __future__ import annotations

import faulthandler
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["PART", "Missing", "each_of", "report", "stacks_before"]

#: begins a line of output with a part of a section's figures
PART = "qccl-gpu-check-part: "
#: how long before its limit a process says where its threads are
_EARLIER_SECONDS = 3.0


class Missing(Exception):
    """A check cannot run here; the text says why."""


def report(name: str, figures: Any) -> Any:
    """Tell a part of a section's figures at once, in case that the section does not end; returns the part."""
    print(PART + json.dumps({name: figures}), flush=True)
    return figures


def each_of(checks: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Make all checks, also after one has failed, and report each; their figures by name.

    Raises AssertionError with the failures, and the figures of the others.
    """
    figures, failures = {}, []
    for name, check in checks.items():
        try:
            figures[name] = report(name, check())
        except Missing:
            raise
        except Exception as error:
            traceback.print_exc()
            failures.append(f"{name}: {type(error).__name__}: {error}")
            report(name, f"failed: {error}")
    if failures:
        raise AssertionError("; ".join(failures), figures)
    return figures


def stacks_before(limit: float) -> None:
    """Print where all threads are shortly before this process is ended, ``limit`` seconds from now."""
    faulthandler.dump_traceback_later(max(limit - _EARLIER_SECONDS, limit / 2), file=sys.__stderr__)
