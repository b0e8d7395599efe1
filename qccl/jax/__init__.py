"""All-reduce for JAX: trees of arrays in, trees of new arrays out, in compiled functions and between them.

    import qccl.jax

    gradients = qccl.jax.allreduce(jax.grad(loss)(parameters, batch), codec="minmax8")

Nothing of qccl imports this package; a program that imports it has JAX.
"""

from __future__ import annotations

from qccl.jax.trees import allreduce, default_communicator, reduce_gradients

__all__ = ["allreduce", "default_communicator", "reduce_gradients"]
