"""All-reduce of arrays of several element types: one call of the communicator for each type."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from qccl.base.dtypes import DTYPES
from qccl.base.errors import ArgumentError, MismatchError
from qccl.codecs.base import Codec
from qccl.communicator.communicator import Communicator

__all__ = ["Reduction", "check_type"]

_ENCODED = {dtype.name for dtype in DTYPES}


def check_type(what: str, dtype: Any, op: str, codec: Codec) -> None:
    """Raise ArgumentError unless arrays of this type can be reduced: encoded, or exactly (see Reduction.run())."""
    if dtype.name == "float64" and "momentum" in codec.state_names:
        raise ArgumentError(
            f"{what} has element type float64, and +nesterov keeps momenta of {', '.join(sorted(_ENCODED))}; leave "
            f"+nesterov out and use the optimiser's momentum, or reduce the arrays of float64 by a call of their own"
        )
    is_integer = getattr(dtype, "kind", "") in ("i", "u")  # JAX's types of random keys have no kind
    if dtype.name in _ENCODED or dtype.name == "float64" or (is_integer and op == "sum"):
        return
    if is_integer:
        raise ArgumentError(f"{what} has element type {dtype}, and op='avg' would round its mean; use op='sum' for it")
    raise ArgumentError(
        f"{what} has element type {dtype}; allowed are {', '.join(sorted(_ENCODED))}, and float64 and integers, "
        f"which are sent exactly"
    )


@dataclass(frozen=True, eq=False)
class Reduction:
    """An all-reduce of a list of arrays with given options.

    Attributes:
        op: "sum" or "avg".
        keys: a key for each array, for codecs that keep state; None for other codecs.
        options: further keywords of Communicator.quantized_allreduce_coalesced().
    """

    comm: Communicator
    codec: Codec
    op: str
    keys: tuple[str, ...] | None
    options: dict[str, Any]

    def run(self, xs: Sequence[Any], outs: Sequence[np.ndarray]) -> None:
        """Write the reduced ``xs`` to ``outs``. Returns when all calls have ended."""
        by_type: dict[str, list[int]] = {}
        for i, x in enumerate(xs):
            by_type.setdefault(x.dtype.name if x.dtype.name in _ENCODED else "", []).append(i)
        exact = by_type.pop("", [])
        for numbers in by_type.values():
            if self.keys is None:
                given, taken = [xs[i] for i in numbers], [outs[i] for i in numbers]
                self.comm.quantized_allreduce_coalesced(given, taken, op=self.op, codec=self.codec, **self.options)
            else:
                self._reduce_each([(self.keys[i], xs[i], outs[i]) for i in numbers])
        if exact:
            self._reduce_exactly([np.asarray(xs[i]) for i in exact], [outs[i] for i in exact])

    def _reduce_each(self, arrays: list[tuple[str, Any, np.ndarray]]) -> None:
        """Make one call for each array, because state belongs to one array; all are under way together."""
        with ExitStack() as started:  # waits for all calls, also after an error: they use the caller's memory
            for key, x, out in arrays:
                options = {"op": self.op, "codec": self.codec, "key": key, "async_op": True, **self.options}
                started.callback(self.comm.quantized_allreduce(x, out, **options).wait)

    def _reduce_exactly(self, xs: list[np.ndarray], outs: list[np.ndarray]) -> None:
        """Gather all ranks' arrays, and add them in rank order."""
        form = ", ".join(f"{x.dtype}{list(x.shape)}" for x in xs).encode()
        found = self.comm.allgather(form + b"\n" + b"".join(x.tobytes() for x in xs))
        forms, values = zip(*(item.split(b"\n", 1) for item in found), strict=True)
        for rank, other in enumerate(forms):
            if other != forms[0]:
                raise MismatchError(
                    f"the ranks' exact leaves differ: rank 0 has {forms[0].decode()}, and rank {rank} {other.decode()}"
                )
        start = 0
        for out in outs:
            each = [np.frombuffer(v, out.dtype, out.size, start).reshape(out.shape) for v in values]
            start += out.nbytes
            out[...] = each[0]
            for addend in each[1:]:
                out[...] += addend
            if self.op == "avg":
                out[...] /= self.comm.size
