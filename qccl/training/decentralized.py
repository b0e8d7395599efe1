"""Decentralised SGD in low precision: each rank sends its peers the encoded change of its model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from qccl import codecs
from qccl.base.errors import ArgumentError, MismatchError
from qccl.base.scalars import as_real
from qccl.collectives.arguments import CodecLike, count_of
from qccl.communicator.communicator import Communicator
from qccl.communicator.dynamo import not_traced
from qccl.training.weights import matrix, spectral_gap

__all__ = ["LowPrecisionDecentralized"]


@not_traced
class LowPrecisionDecentralized:
    """Each rank follows its own gradients and averages its model with its peers' models.

    A step on rank i, with weights W and a replica of each peer's model, which only codes update::

        z = sum over j of W[i][j] x_j - lr g_i - x_i        x_j are the replicas
        x_i += Q(z)                                         the peers receive Q(z) and add it to their replicas

    A rank adds the decoded change to its own model, as its peers do, so replicas always equal models bit for bit.
    With ``codec="none"`` this is decentralised SGD in full precision.

    Sources: Tang et al. 2018, arXiv 1803.06443 (DCD-PSGD); Bagua's "Low Precision Decentralized SGD", section
    "Algorithm".

    Attributes:
        model: the caller's array, with the current model.
        weights: the matrix W.
        spectral_gap: 1 minus the second largest absolute eigenvalue of W: the rate at which models converge (0: never).
        peers: the ranks that this rank averages with; they never change.
        replicas: the peers' models, by rank.
        steps: the number of steps so far.
    """

    def __init__(
        self,
        comm: Communicator,
        model: Any,
        *,
        weights: str | Sequence[Sequence[float]] | Any = "ring",
        codec: CodecLike = "minmax8",
    ) -> None:
        """Collective. Models may differ; the ranks exchange them once, exactly.

        ``model`` is a mutable array (NumPy, CuPy, torch) and is changed in place. ``weights`` are "ring", "complete",
        "exponential" (distances 1, 2, 4, ... both ways), or a symmetric matrix whose rows sum to 1; all ranks must pass
        the same.
        """
        if not hasattr(model, "shape") or not hasattr(model, "dtype"):
            raise ArgumentError(f"the model must be an array (NumPy, CuPy, torch), not {type(model).__name__}")
        comm.memory.from_array(model, writable=True, what="the model")
        self.comm, self.model = comm, model
        self.weights = matrix(weights, comm.size)
        self.spectral_gap = spectral_gap(self.weights)
        self._codec = codecs.get(codec)
        if self._codec.state_names:
            raise ArgumentError(
                f"LowPrecisionDecentralized takes codecs without +ef and +nesterov, not {self._codec.spec()}: the next "
                f"change of the model has the error of this code anyway; use {self._codec.plain.spec()}"
            )
        self._row = [float(w) for w in self.weights[comm.rank]]
        linked = self.weights[comm.rank] + self.weights[:, comm.rank]  # row and column: symmetry has a tolerance
        self.peers = tuple(rank for rank, w in enumerate(linked) if w and rank != comm.rank)
        self.steps = 0
        self._check_agreement()
        self.replicas = {peer: _blank(model) for peer in self.peers}
        comm.peer_exchange(model, send_to=self.peers, replicas=self.replicas, codec="none")

    def step(self, gradient: Any, lr: float) -> Any:
        """Collective: one step with the gradient of this rank's model; returns the model."""
        given, wanted = _kind(gradient), _kind(self.model)
        if given != wanted:
            raise ArgumentError(f"the gradient has the shape and type {given}, and the model has {wanted}")
        rate = as_real(lr)  # a NumPy scalar would promote the model's type
        if rate is None or not math.isfinite(rate):
            raise ArgumentError(f"lr must be a finite number, the learning rate of this step, not {lr!r}")
        z = self.model * (self._row[self.comm.rank] - 1.0) - gradient * rate
        for peer, replica in self.replicas.items():
            z += replica * self._row[peer]
        self.comm.peer_exchange(z, send_to=self.peers, replicas=self.replicas, applied=self.model, codec=self._codec)
        self.steps += 1
        return self.model

    def state_dict(self) -> dict[str, Any]:
        """Copy the data from which a later run on equally many ranks continues bit for bit.

        A codec that draws random numbers needs the communicator's state_dict(), too.
        """
        replicas = {peer: _copy(replica) for peer, replica in self.replicas.items()}
        return {"model": _copy(self.model), "replicas": replicas, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state_dict() of the same rank with the same peers; all ranks must load the same step."""
        if not isinstance(state, Mapping) or not {"model", "replicas", "steps"} <= set(state):
            raise ArgumentError("a state is the dict that state_dict() returned, with model, replicas and steps")
        replicas = state["replicas"]
        if not isinstance(replicas, Mapping) or tuple(replicas) != self.peers:
            found = list(replicas) if isinstance(replicas, Mapping) else replicas
            raise ArgumentError(f"the state has replicas of ranks {found}; peers are {self.peers}")
        steps = count_of(state["steps"], 'the state\'s "steps"')
        wanted = _kind(self.model)
        for array in (state["model"], *replicas.values()):
            if _kind(array) != wanted:
                raise ArgumentError(
                    f"the state has an array of the shape and type {_kind(array)}, and the model has {wanted}"
                )
        self.model[...] = state["model"]
        for peer, replica in replicas.items():
            self.replicas[peer][...] = replica
        self.steps = steps

    def _check_agreement(self) -> None:
        """Raise MismatchError on all ranks unless they have the same weights and codec."""
        said = self.weights.tobytes() + codecs.identity(self._codec).encode()
        found = self.comm.allgather(hashlib.sha256(said).digest())
        others = [rank for rank, digest in enumerate(found) if digest != found[0]]
        if others:
            raise MismatchError(f"ranks {others} have other weights, or another codec, than rank 0")


def _kind(array: Any) -> tuple[Any, Any]:
    """The shape and the element type."""
    return getattr(array, "shape", None), getattr(array, "dtype", None)


def _copy(array: Any) -> Any:
    return array.clone() if hasattr(array, "clone") else array.copy()


def _blank(like: Any) -> Any:
    """Make an array of -0: adding a value to -0 gives that value bit for bit."""
    blank = _copy(like)
    blank[...] = -0.0
    return blank
