"""The method of this folder's trainings that needs no DistributedDataParallel: ``qccl.DiLoCo``.

It is "diloco:OPTIONS:CODEC", such as "diloco:period=8,fragments=2,delay=3:trellis2+ef", where OPTIONS are keyword
arguments with commas between them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

import qccl

__all__ = ["changed", "is_local", "local_recipe", "outer_of", "replayed_local_step", "step_of"]

#: local steps between two changes of the parameters while steps are timed
_EVERY = 5


def is_local(method: str) -> bool:
    """Whether ranks of this method train alone between outer steps."""
    return method.startswith("diloco:")


def _options(text: str) -> dict[str, Any]:
    """The keyword arguments of DiLoCo, which are numbers."""
    return {name: json.loads(value) for name, value in (option.split("=") for option in text.split(","))}


def changed(recipe: Any, **parts: Any) -> Any:
    """The recipe with other functions in place of some of its own."""
    return SimpleNamespace(**vars(recipe) | parts)


def outer_of(comm: qccl.Communicator, params: Any, method: str) -> qccl.DiLoCo:
    """DiLoCo as a method says."""
    _, options, codec = method.split(":", 2)
    return qccl.DiLoCo(comm, params, codec=codec, **_options(options))


def local_recipe(recipe: Any, outer: qccl.DiLoCo) -> Any:
    """A recipe whose updates count as local steps, and whose quality is that of the common parameters."""

    def update(model: Any, optimizer: Any) -> None:
        recipe.update(model, optimizer)
        outer.after_local_step()

    def quality(model: Any, data: Any, positions: int) -> float:
        own = [p.detach().clone() for p in model.parameters()]
        _write(model, outer.common)
        found = recipe.quality(model, data, positions)
        _write(model, own)
        return float(found)

    return changed(recipe, update=update, quality=quality)


def _write(model: Any, values: Sequence[Any]) -> None:
    for p, value in zip(model.parameters(), values, strict=True):
        p.data.copy_(value)


def step_of(
    comm: qccl.Communicator, shapes: Sequence[Sequence[int]], method: str, seconds: float, rank: int
) -> tuple[Callable[[], None], int]:
    """Make a function that takes a local step; also returns the steps that are timed together: a period.

    A step sleeps for ``seconds`` instead of computing.
    """
    params = [np.zeros(shape, np.float32) for shape in shapes]
    outer = outer_of(comm, params, method)
    return replayed_local_step(outer, params, seconds, rank), int(_options(method.split(":")[1])["period"])


def replayed_local_step(
    outer: qccl.DiLoCo, params: Sequence[np.ndarray[Any, Any]], seconds: float, rank: int
) -> Callable[..., None]:
    """Make a function that takes a local step, with or without DiLoCo: it sleeps for ``seconds`` instead of computing.

    Some steps change the parameters, because a codec's time may depend on its values.
    """
    rng = np.random.default_rng(rank)
    changes = [rng.standard_normal(p.shape, np.float32) * np.float32(1e-3) for p in params]
    taken = 0

    def step(with_outer_steps: bool = True) -> None:
        nonlocal taken
        time.sleep(seconds)
        if taken % _EVERY == 0:
            for p, change in zip(params, changes, strict=True):
                p += change
        taken += 1
        if with_outer_steps:
            outer.after_local_step()

    return step
