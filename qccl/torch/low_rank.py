"""Low-rank compression of gradients: PowerSGD, with factors that travel by one of qccl's codecs.

Vogels, Karimireddy and Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(arXiv 1905.13727). Algorithm 1 approximates a matrix M (n x m), the mean over the ranks, by P Q^T of rank r with one
step of the power iteration, which begins with the Q of the step before. On rank w, with its own M_w:

    P = mean of M_w Q,  orthonormalised
    Q_w = M_w^T P,      Q = mean of Q_w
    result = P Q^T

Algorithm 2 is error feedback: M_w = G_w + E_w with the gradient G_w and the residual E_w, and E_w <- M_w - P Q_w^T.
Here the encoded factors have errors, too. An error of P does not matter, because E_w is computed from P. The error of
Q is the mean of the residuals R_w of its call (qccl.collectives.feedback), which each rank knows. They belong to this
step's P, so they do not stay with the call: E_w <- M_w - P (Q_w - R_w)^T. So the mean of all E_w is the difference
between the gradients and the results so far.

P and Q must have the same bits on all ranks (qccl.torch.factors). Values that stay on one rank may be computed by
PyTorch's matrix products. The factors are stored as rows, r x n and r x m, so that a codec's buckets follow one vector
of a factor.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qccl.base.dtypes import FLOAT32
from qccl.codecs import ErrorFeedback, NoCodec
from qccl.codecs.feedback import feedback_of
from qccl.collectives.schedule import buffer_name
from qccl.communicator.communicator import Communicator
from qccl.communicator.state import StateArray
from qccl.torch.factors import matrix_shape, orthonormal_rows, outer_sum
from qccl.torch.groups import ParameterGroup
from qccl.torch.state import owned_parts

if TYPE_CHECKING:
    from qccl.base.trace import TraceEvent

__all__ = ["LowRank"]


class LowRank:
    """The reduction of one group's gradients by factors, step by step: begin(), exchange(), finish().

    All ranks make the two calls of all groups in the same order. The residuals, and Q for the next step, are state of
    the communicator under the group's key. If a result is not finite on the ranks, no state of the group changes.
    """

    def __init__(
        self, group: ParameterGroup, comm: Communicator, timeout: float | None, trace: list[TraceEvent] | None
    ) -> None:
        assert group.codec is not None
        self._group, self._comm, self._timeout, self._trace = group, comm, timeout, trace
        self._shapes = [matrix_shape(p) for p in group.parameters]
        made = {"dtype": torch.float32, "device": "cpu"}
        self._p = [torch.zeros(group.rank, rows, **made) for rows, _ in self._shapes]
        self._q = [torch.zeros(group.rank, columns, **made) for _, columns in self._shapes]
        self._own = [torch.zeros_like(q) for q in self._q]
        self._plain = group.codec.plain
        second = self._plain if self._plain == NoCodec() else ErrorFeedback(self._plain)
        self._second = ParameterGroup(f"{group.key} factors", second, group.names, tuple(self._q))
        self._sums = owned_parts(self._second, comm.rank, comm.nodes) if second.state_names else []
        self._beta, kept = feedback_of(group.codec)
        residuals = {buffer_name("residual", i): (count, kept) for i, count in enumerate(group.counts)}
        factors = {buffer_name("factor", i): (q.numel(), FLOAT32) for i, q in enumerate(self._q)}
        self._forms = residuals | factors

    def begin(self, gradients: Sequence[Any], lr: float | None) -> None:
        """Start the call of P. ``gradients`` are flat, parts of DDP's buckets, and later hold the results.

        ``lr`` is the learning rate; None means a constant rate.
        """
        self._gradients, self._lr = gradients, lr or 1.0
        state = self._comm.state.take(self._group.key, self._group.low_rank_owner, self._forms, lr)
        self._memory = self._comm.state.at_rest(state) if lr == 0 else state.memory
        self._matrices = []
        for i, (gradient, shape) in enumerate(zip(gradients, self._shapes, strict=True)):
            matrix = gradient.view(shape).float()  # the gradient itself if it is float32
            matrix.add_(self._kept("residual", i).view(shape), alpha=self._beta / self._lr)
            self._matrices.append(matrix)
        if self._comm.size == 1:
            return
        for i, matrix in enumerate(self._matrices):
            start = self._orthonormal(self._kept("factor", i).view(self._group.rank, -1), 2 * i)
            torch.mm(start, matrix.t(), out=self._p[i])
        self._work = self._call(self._p, self._plain)

    def exchange(self) -> None:
        """Wait for P, and start the call of Q. Raises the error of the call."""
        if self._comm.size == 1:
            return
        self._work.wait()
        self._are_finite = [_is_finite(p) for p in self._p]
        for i, (p, matrix) in enumerate(zip(self._p, self._matrices, strict=True)):
            p.copy_(self._orthonormal(p if self._are_finite[i] else torch.zeros_like(p), 2 * i + 1))
            torch.mm(p, matrix, out=self._q[i])
            self._own[i].copy_(self._q[i])
        keeps = bool(self._second.state_names)
        self._work = self._call(self._q, self._second.codec, self._second.key if keeps else None)

    def finish(self) -> None:
        """Wait for Q, write the results to the gradients, and set the state for the next step."""
        if self._comm.size == 1:
            self._finish_alone()
            return
        self._work.wait()
        for i, lost in self._drained():
            self._own[i].view(-1).sub_(lost)
        finite = [was and _is_finite(q) for was, q in zip(self._are_finite, self._q, strict=True)]
        for i, (matrix, p, q) in enumerate(zip(self._matrices, self._p, self._q, strict=True)):
            if all(finite):
                matrix.addmm_(p.t(), self._own[i], alpha=-1)
                self._keep_residual(i, matrix)
                self._kept("factor", i).copy_(q.view(-1))
            if finite[i]:
                outer_sum(p, q, matrix)
            else:
                matrix.fill_(torch.nan)
        self._write_back()

    def _finish_alone(self) -> None:
        """Add the residual to the gradient: a single rank needs no factors."""
        for i, matrix in enumerate(self._matrices):
            if _is_finite(matrix):
                self._kept("residual", i).zero_()
        self._write_back()

    def _write_back(self) -> None:
        """Copy results to the gradients of other types than float32, which have separate matrices."""
        for gradient, matrix in zip(self._gradients, self._matrices, strict=True):
            if matrix.dtype != gradient.dtype:
                gradient.copy_(matrix.view(-1))
        self._matrices, self._gradients = [], []

    def _call(self, arrays: Sequence[Any], codec: Any, key: str | None = None) -> Any:
        return self._comm.quantized_allreduce_coalesced(
            arrays, codec=codec, op="avg", key=key, timeout=self._timeout, trace=self._trace, async_op=True
        )

    def _orthonormal(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        seed = zlib.crc32(f"{self._group.key} {number}".encode())
        return torch.from_numpy(orthonormal_rows(rows.numpy(), seed))

    def _drained(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Take the residual of each Q from the call's state, which becomes zeros; its mean is Q's error."""
        lost = self._comm.state.drain(self._second.key)
        for name, start, stop in self._sums:
            lost[name][start:stop] *= self._comm.size  # the owner alone has the error of the mean itself
        for i in range(len(self._q)):
            if buffer_name("residual", i) in lost:
                yield i, torch.from_numpy(lost[buffer_name("residual", i)])

    def _keep_residual(self, i: int, values: torch.Tensor) -> None:
        """Store a residual, multiplied by the learning rate as in qccl's calls."""
        self._kept("residual", i).copy_(values.view(-1) if self._lr == 1 else values.view(-1) * self._lr)

    def _kept(self, kind: str, i: int) -> torch.Tensor:
        """The memory of a state buffer."""
        return _view(self._memory[buffer_name(kind, i)])


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite, by NumPy, which is 15 times as fast as PyTorch 2.13."""
    return bool(np.isfinite(tensor.numpy()).all())


def _view(array: StateArray) -> torch.Tensor:
    """View the elements of a state buffer on the host, without a copy."""
    memory = (ctypes.c_char * array.nbytes).from_address(array.memory.address)
    return torch.frombuffer(memory, dtype=getattr(torch, array.dtype.name))
