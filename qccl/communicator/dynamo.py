"""Keeps TorchDynamo, which torch.compile() traces functions with, out of qccl's functions: they call C++.

This module never imports torch: a program that compiles functions has imported it.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any, TypeVar

__all__ = ["not_traced", "skip_tracing"]

_T = TypeVar("_T")
_REASON = "qccl's calls run outside of compiled graphs; leave fullgraph=True out"
#: functions that have no marks yet
_functions: list[FunctionType] = []


def not_traced(owner: _T) -> _T:
    """Decorates a function, or a class for all its functions: compiled programs call them as other programs do.

    The functions stay what they are, so calls take no more time.
    """
    functions = [owner] if isinstance(owner, FunctionType) else vars(owner).values()
    _functions.extend(each for each in functions if isinstance(each, FunctionType))
    skip_tracing()
    return owner


def skip_tracing() -> None:
    """Mark the functions that not_traced() decorates, if torch is loaded by now."""
    frames: Any = sys.modules.get("torch._C._dynamo.eval_frame")  # import torch loads it, but not TorchDynamo itself
    if not _functions or not hasattr(frames, "set_code_exec_strategy"):  # torch before 2.7 has none
        return
    skip = frames._FrameAction.SKIP
    skips_all = frames._FrameExecStrategy(skip, skip)  # a function, and those that it calls
    while _functions:  # torch.compiler.disable() sets the same marks, on a wrapper around each function
        function: Any = _functions.pop()
        function._torchdynamo_disable, function._torchdynamo_disable_msg = True, _REASON
        frames.set_code_exec_strategy(function.__code__, skips_all)
