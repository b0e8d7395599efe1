"""Reproducible float32 samples of the distributions on which the codecs' errors differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Values = NDArray[np.float32]

__all__ = ["SAMPLES", "relative_error"]

_OFFSET = 100.0


def _gauss(count: int, draw: int = 0) -> Values:
    return np.random.default_rng(draw).standard_normal(count, np.float32)


def _outliers(count: int, draw: int = 0) -> Values:
    """Each value is independently multiplied by 1000 with a probability of 1e-4."""
    x = _gauss(count, draw)
    x[np.random.default_rng([1, draw]).random(count) < 1e-4] *= 1000
    return x


def _gradient(count: int, draw: int = 0) -> Values:
    """Gradients of a small network's weights, from consecutive steps of its training.

    A network with two hidden ReLU layers learns to classify eight clusters of points; the first 20 steps are left out.
    """
    rng = np.random.default_rng(draw)
    sizes = (32, 128, 128, 8)
    weights = [rng.standard_normal((a, b)) * np.sqrt(2 / a) for a, b in pairwise(sizes)]
    centres = rng.standard_normal((8, 32))
    found: list[NDArray[np.float64]] = []
    for step in range(20 + -(-count // sum(w.size for w in weights))):
        label = rng.integers(0, 8, 64)
        inputs = [centres[label] + 1.5 * rng.standard_normal((64, 32))]
        for w in weights[:-1]:
            inputs.append(np.maximum(inputs[-1] @ w, 0))
        score = inputs[-1] @ weights[-1]
        chance = np.exp(score - score.max(axis=1, keepdims=True))
        back = (chance / chance.sum(axis=1, keepdims=True) - np.eye(8)[label]) / 64
        for layer in reversed(range(len(weights))):
            gradient = inputs[layer].T @ back
            back = (back @ weights[layer].T) * (inputs[layer] > 0)
            weights[layer] = weights[layer] - 0.1 * gradient
            if step >= 20:
                found.append(gradient.reshape(-1))
    return np.concatenate(found)[:count].astype(np.float32)


#: name -> function of (count, draw); another draw has other values
SAMPLES: Mapping[str, Callable[..., Values]] = {
    "Gaussian": _gauss,
    "Laplace": lambda count, draw=0: np.asarray(np.random.default_rng(draw).laplace(size=count), np.float32),
    "Student t(3)": lambda count, draw=0: np.asarray(np.random.default_rng(draw).standard_t(3, size=count), np.float32),
    f"Gaussian + {_OFFSET:.0f}": lambda count, draw=0: _gauss(count, draw) + np.float32(_OFFSET),
    "1e-4 of them x1000": _outliers,
    "gradient": _gradient,
}


def relative_error(decoded: Values, x: Values) -> float:
    """L2 norm of the error over the L2 norm of ``x``.

    If the mean of ``x`` is much larger than its deviation, the norm is that of ``x`` less its mean. Otherwise a large
    offset would hide the error.
    """
    exact = x.astype(np.float64)
    mean = float(exact.mean())
    centred = exact - mean if abs(mean) > 10 * float(exact.std()) else exact
    return float(np.linalg.norm(decoded - exact) / np.linalg.norm(centred))
