"""Keeps TorchDynamo, the tracer of torch.compile(), out of qccl's functions, because they call C++.

This module never imports torch: a program that compiles functions has imported it.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any, TypeVar

__all__ = ["not_traced", "skip_tracing"]

_T = TypeVar("_T")
_REASON = "qccl's calls run outside of compiled graphs; leave fullgraph=True out, or use the operators torch.ops.qccl"
#: functions that have not been marked yet
_functions: list[FunctionType] = []


def not_traced(owner: _T) -> _T:
    """Decorate a function, or a class and so all its functions: compiled programs then call them without tracing.

    The functions are not wrapped, so calls take no more time.
    """
    functions = [owner] if isinstance(owner, FunctionType) else vars(owner).values()
    _functions.extend(each for each in functions if isinstance(each, FunctionType))
    skip_tracing()
    return owner


def skip_tracing() -> None:
    """Mark the functions that not_traced() decorates, if torch is loaded by now."""
    frames: Any = sys.modules.get("torch._C._dynamo.eval_frame")  # import torch loads it, but not TorchDynamo itself
    if not _functions or not hasattr(frames, "set_code_exec_strategy"):  # torch before 2.7 has no such function
        return
    skip = frames._FrameAction.SKIP
    skips_all = frames._FrameExecStrategy(skip, skip)  # for a function, and for the functions that it calls
    while _functions:  # torch.compiler.disable() sets the same marks, on a wrapper around each function
        function: Any = _functions.pop()
        function._torchdynamo_disable, function._torchdynamo_disable_msg = True, _REASON
        frames.set_code_exec_strategy(function.__code__, skips_all)
