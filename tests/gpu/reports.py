"""What the process of a section tells scripts/gpu-check, besides its result. It imports nothing that must be built."""

from __future__ import annotations

import faulthandler
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["FAILED", "PART", "Missing", "each_of", "report", "stacks_before"]

#: begins a line of output with a part of a section's figures
PART = "qccl-gpu-check-part: "
#: begins what is reported of a part that has failed
FAILED = "failed: "
#: how long before its limit a process says where its threads are
_EARLIER_SECONDS = 3.0


class Missing(Exception):
    """A check cannot run here; the text says why."""


def report(name: str, figures: Any) -> Any:
    """Tell a part of a section's figures at once, in case that the section does not end; returns the part."""
    print(PART + json.dumps({name: figures}), flush=True)
    return figures


def each_of(checks: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Make all checks, also after one has failed or cannot run, and report each; their figures by name.

    Raises AssertionError with the failures, and the figures of the others; if none has failed, Missing with the checks
    that cannot run.
    """
    figures, failures, missing = {}, [], []
    for name, check in checks.items():
        try:
            figures[name] = report(name, check())
        except Missing as error:
            missing.append(f"{name}: {error}")
            report(name, f"not run: {error}")
        except Exception as error:
            traceback.print_exc()
            failures.append(f"{name}: {type(error).__name__}: {error}")
            report(name, f"{FAILED}{error}")
    if failures:
        raise AssertionError("; ".join(failures), figures)
    if missing:
        raise Missing("; ".join(missing))
    return figures


def stacks_before(limit: float) -> None:
    """Print where all threads are shortly before this process is ended, ``limit`` seconds from now."""
    faulthandler.dump_traceback_later(max(limit - _EARLIER_SECONDS, limit / 2), file=sys.__stderr__)
