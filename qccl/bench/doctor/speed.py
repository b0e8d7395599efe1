"""The speed of a codec on one core of this machine, and its error."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from qccl.base.dtypes import FLOAT32
from qccl.bench.sweep.data import gaussian
from qccl.codecs import Codec
from qccl.codecs.feedback import feedback_of, momentum_of
from qccl.codecs.floats import storage
from qccl.codecs.operations import Operations

__all__ = ["CodecSpeed", "measure_speed"]

#: least and most passes, of which the fastest counts because disturbances only add time. After the least number they
#: end when they have taken _ENOUGH_SECONDS, some time slices of a busy processor
_LEAST_PASSES, _MOST_PASSES, _ENOUGH_SECONDS = 5, 50, 0.02


@dataclass(frozen=True)
class CodecSpeed:
    """A codec on one core.

    Attributes:
        encode, decode: seconds for an element, from the fastest pass.
        error: the relative L2 error of one encoding.
        spread: the median of the passes' times divided by the least one.
    """

    encode: float
    decode: float
    error: float
    spread: float = 1.0


def measure_speed(codec: Codec, count: int) -> CodecSpeed:
    """Time the codec's kernels on ``count`` Gaussian values; an encoder with state updates it."""
    values, decoded = gaussian(0, 0, count, FLOAT32, seed=0), np.empty(count, np.float32)
    beta, kept_as = feedback_of(codec)
    kinds: dict[str, Any] = {"residual": storage(kept_as), "momentum": np.float32}
    state = {name: [np.zeros(count, kinds[name]) for _ in range(2)] for name in codec.state_names}  # old and new
    wire = np.empty(codec.encoded_nbytes(count, FLOAT32), np.uint8)
    kernels = Operations(codec, FLOAT32)
    encode, decode = kernels.encode(values, wire), kernels.decode(wire, decoded)
    encode()
    decode()
    if codec.state_names:
        residual, momentum = state.get("residual", ()), state.get("momentum", ())
        mu = momentum_of(codec)
        encode = kernels.reduce([], values, wire, residual=residual, momentum=momentum, mu=mu, beta=beta)
        encode()
    kept = sum(min(_times(partial(np.copyto, new, old))) for old, new in state.values())  # a call's last operation
    encoding, decoding = _times(encode), _times(decode)
    lost = values - codec.decode(codec.encode(values), count, FLOAT32)
    error = float(np.linalg.norm(lost) / np.linalg.norm(values))
    spread = max(median(times) / min(times) for times in (encoding, decoding))
    return CodecSpeed((min(encoding) + kept) / count, min(decoding) / count, error, spread)


def _times(run: Callable[[], object]) -> list[float]:
    """Time a few passes, in seconds."""
    times: list[float] = []
    while len(times) < _LEAST_PASSES or (len(times) < _MOST_PASSES and sum(times) < _ENOUGH_SECONDS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return times
