"""How fast a codec is on one core of this machine, and how large its error on given values is."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from qccl.codecs import Codec
from qccl.codecs.feedback import feedback_of, momentum_of
from qccl.codecs.floats import storage
from qccl.codecs.operations import Operations
from qccl.costs.step import Speed
from qccl.dtypes import FLOAT32

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["relative_error", "speed_of"]

#: passes of which the fastest counts: others can only be disturbed ones
_PASSES = 5


def relative_error(codec: Codec, values: NDArray[np.float32]) -> float:
    """The L2 norm of what one encoding loses, relative to that of the values; 0 where all are zeros."""
    lost = values - codec.decode(codec.encode(values), values.size, FLOAT32)
    norm = float(np.linalg.norm(values.astype(np.float64)))  # squares of float32 may be too large for float32
    return float(np.linalg.norm(lost.astype(np.float64))) / norm if norm else 0.0


def speed_of(codec: Codec, values: NDArray[np.float32]) -> Speed:
    """Time the codec's kernels on ``values``; an encoder with state updates it. The error is relative_error()."""
    count, decoded = values.size, np.empty_like(values)
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
    kept = sum(_seconds(partial(np.copyto, new, old)) for old, new in state.values())  # a call's last operation
    return Speed((_seconds(encode) + kept) / count, _seconds(decode) / count, relative_error(codec, values))


def _seconds(run: Callable[[], object]) -> float:
    """The least time of a few passes."""
    times = []
    for _ in range(_PASSES):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)
