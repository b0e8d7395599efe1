"""Tests whose body is what each rank does, where the ranks are threads."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import qccl

__all__ = ["on_ranks"]


def on_ranks(
    size: int, *, runner: Callable[..., Any] = qccl.run_ranks, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that each of ``size`` ranks runs: its first argument is the communicator.

    An argument with the annotation threading.Event or threading.Barrier is one that all ranks share. Further ones are
    fixtures and parameters of the test; ``options`` are those of ``runner``, which raises what a rank raised.
    """
    makers = {"threading.Event": threading.Event, "threading.Barrier": lambda: threading.Barrier(size)}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function)
        others = [*signature.parameters.values()][1:]
        shared = {each.name: makers[each.annotation] for each in others if each.annotation in makers}

        @functools.wraps(function)
        def test(**given: Any) -> None:
            given |= {name: make() for name, make in shared.items()}
            runner(size, lambda comm: function(comm, **given), **options)

        test.__signature__ = signature.replace(parameters=[each for each in others if each.name not in shared])
        return test

    return decorate
