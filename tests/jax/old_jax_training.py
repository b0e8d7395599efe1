"""A training with JAX whose state is kept as a file of an older qccl: see tests/old_files/write.py."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from old_trainings import Training, gradient, rank_file

import qccl
import qccl.jax


def training(comm: qccl.Communicator) -> Training:
    """A gradient transformation without a key, whose state is in the communicator's."""
    transformation = qccl.jax.reduce_gradients("minmax2:bucket=32+ef", comm=comm)

    def step(number: int) -> np.ndarray:
        shapes = [(8, 12), 50]
        gradients = {f"{i}": jnp.asarray(gradient(comm.rank, number, shape, i)) for i, shape in enumerate(shapes)}
        reduced, _ = transformation.update(gradients, ())
        return np.concatenate([np.asarray(reduced[name]).ravel() for name in reduced])

    return Training(
        step,
        lambda path: qccl.save_state(rank_file(path, comm), comm.state_dict()),
        lambda path: comm.load_state_dict(qccl.load_state(rank_file(path, comm))),
    )
