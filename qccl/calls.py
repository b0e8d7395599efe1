"""The collectives as methods: each takes its arrays, checks its arguments, and says what is to be run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from qccl.arguments import CodecLike
from qccl.buffers import Memory, Values
from qccl.dtypes import DType
from qccl.errors import ArgumentError
from qccl.signatures import AllReduce, Signature

if TYPE_CHECKING:
    from qccl.trace import TraceEvent

__all__ = ["Collectives", "Run"]


class Run(NamedTuple):
    """How a call is run, which changes nothing in what it computes; see Collectives.quantized_allreduce."""

    async_op: bool
    nonfinite: str
    stream: Any
    timeout: float | None
    trace: list[TraceEvent] | None


class Collectives(ABC):
    """What a Communicator can do with arrays."""

    _memory: Memory

    def quantized_allreduce(
        self,
        x: Any,
        out: Any = None,
        *,
        codec: CodecLike = "minmax8",
        op: str | int = "sum",
        async_op: bool = False,
        algorithm: str = "auto",
        chunk: int | None = None,
        nonfinite: str = "propagate",
        dtype: DType | str | None = None,
        stream: Any = None,
        timeout: float | None = None,
        trace: list[TraceEvent] | None = None,
    ) -> Any:
        """Combine ``x`` over all ranks, with encoded traffic; every rank gets bit-identical values.

        Args:
            x: array of float32, float16 or bfloat16, dense, of any shape; on CUDA in the memory of this rank's GPU.
            out: where the result goes, like ``x``; None means into ``x`` itself.
            codec: e.g. ``"minmax8"``, ``"minmax4:bucket=256"``, a dict of the same, or a Codec.
            op: "sum", "avg" (the global mean), "min" or "max", or NCCL's number for it.
            async_op: return a Work at once instead of the result.
            algorithm: "two_round", "one_shot", or "auto" (by size).
            chunk: elements in a step of the pipeline; None means a good default.
            nonfinite: "propagate" lets NaN and infinity through (they spoil their bucket); "error" raises
                ArgumentError on every rank when the result has any.
            dtype: "bfloat16" reads an array of uint16 as bfloat16.
            stream: on CUDA, the stream (a number, or an object with ``__cuda_stream__``) behind which the call is put,
                and which goes on when it is done; None means the current stream of the library that made ``x``.
            timeout: seconds for this call; None means the communicator's.
            trace: a list that receives the call's TraceEvents (on CUDA when synchronize() has returned).

        Returns:
            The output array, or its Work. On the host the result is there; on CUDA it will be, for whatever comes later
            on the stream, and it is known to be good after Work.synchronize() or check().

        Errors: ArgumentError, CodecError and InvalidBufferError before anything is sent; MismatchError,
        CollectiveTimeout, PeerLost and EngineError from the call.
        """
        source, target, result = self._pair(x, out, dtype)
        if target.count != source.count:
            raise ArgumentError(f"x has {source.count} elements and out has {target.count}; they must be equal")
        signature = AllReduce.make(source.count, source.dtype, codec, chunk, source.order, op=op, algorithm=algorithm)
        run = Run(async_op, nonfinite, stream, timeout, trace)
        return self._run(signature, {"input": source, "output": target}, result, run)

    def _pair(self, x: Any, out: Any, dtype: DType | str | None) -> tuple[Values, Values, Any]:
        """The memory of both arrays (the same where ``out`` is None), and the one that is returned."""
        source = self._memory.from_array(x, dtype=dtype, writable=out is None, what="x")
        if out is None:
            return source, source, x
        return source, self._memory.from_array(out, dtype=source.dtype, writable=True, what="out"), out

    @abstractmethod
    def _run(self, signature: Signature, arrays: Mapping[str, Values], result: Any, how: Run) -> Any:
        """One call of a collective: its result, or its Work."""
