"""Ranges of calls for profilers: NVIDIA's Nsight by NVTX, and Intel's VTune by ITT, as QCCL_RANGES says."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from qccl.base.errors import ArgumentError

__all__ = ["VARIABLE", "Ranges", "ranges"]

#: the environment variable that names the profiler's interface
VARIABLE = "QCCL_RANGES"
#: value of QCCL_RANGES -> the package, and its context manager that makes a range
_KINDS = {"nvtx": ("nvtx", "annotate"), "itt": ("ittapi", "task")}
_DOMAIN = "qccl"

#: makes a range with this name
Ranges = Callable[[str], AbstractContextManager[Any]]


def ranges() -> Ranges | None:
    """The function that makes ranges, if QCCL_RANGES is set. Raises ArgumentError for a wrong value or no package."""
    wanted = os.environ.get(VARIABLE, "")
    if not wanted:
        return None
    if wanted not in _KINDS:
        raise ArgumentError(f'{VARIABLE} is {wanted!r}; there are "nvtx" and "itt"')
    package, function = _KINDS[wanted]
    try:
        return partial(getattr(importlib.import_module(package), function), domain=_DOMAIN)
    except ImportError as error:
        raise ArgumentError(
            f"{VARIABLE}={wanted} needs the package {package}: pip install {package} ({error})"
        ) from error
