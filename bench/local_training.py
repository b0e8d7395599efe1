"""DiLoCo in the trainings of this folder: ranks train alone, and average what changed every few steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

import qccl

__all__ = ["is_local", "local_recipe", "options_of", "outer_of", "replayed_step"]

_PREFIX = "diloco:"
#: local steps between two changes of the parameters while steps are timed
_EVERY = 5


def is_local(method: str) -> bool:
    """Whether a method is "diloco:OPTIONS:CODEC", such as "diloco:period=8,fragments=2,delay=3:trellis2+ef"."""
    return method.startswith(_PREFIX)


def options_of(method: str) -> dict[str, Any]:
    """The arguments of DiLoCo that a method names, and its codec."""
    options, _, codec = method.removeprefix(_PREFIX).partition(":")
    given = dict(option.split("=") for option in options.split(","))
    return {"codec": codec} | {name: float(v) if "." in v else int(v) for name, v in given.items()}


def outer_of(comm: qccl.Communicator, params: Any, method: str) -> qccl.DiLoCo:
    """DiLoCo as a method says."""
    return qccl.DiLoCo(comm, params, **options_of(method))


def local_recipe(recipe: Any, outer: qccl.DiLoCo) -> Any:
    """A recipe of docs/examples whose updates count as local steps, and whose quality is the common parameters'."""

    def update(model: Any, optimizer: Any) -> None:
        recipe.update(model, optimizer)
        outer.after_local_step()

    def quality(model: Any, data: Any, positions: int) -> float:
        own = [p.detach().clone() for p in model.parameters()]
        _write(model, outer.common)
        found = recipe.quality(model, data, positions)
        _write(model, own)
        return float(found)

    return SimpleNamespace(**{**vars(recipe), "update": update, "quality": quality})


def _write(model: Any, values: Sequence[Any]) -> None:
    for p, value in zip(model.parameters(), values, strict=True):
        p.data.copy_(value)


def replayed_step(
    outer: qccl.DiLoCo, params: Sequence[np.ndarray[Any, Any]], seconds: float, rank: int
) -> Callable[[bool], None]:
    """A function that takes a local step, with or without DiLoCo, and sleeps ``seconds`` in place of computing.

    Some steps change the parameters, as a codec's time may depend on its values.
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
