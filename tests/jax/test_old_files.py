"""Files of a training with JAX that an older qccl wrote (old_files/write.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from old_jax_training import training
from old_trainings import FOLDER, SIZE, check_goes_on, sum_of_steps

import qccl


def test_a_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    check_goes_on(training, "jax", tmp_path)


def test_a_state_may_be_loaded_before_its_transformation_is_made() -> None:
    def run(comm: qccl.Communicator) -> bytes:
        comm.load_state_dict(qccl.load_state(FOLDER / f"jax.rank{comm.rank}.npz"))
        return sum_of_steps(training(comm)).tobytes()

    with np.load(FOLDER / "jax.sums.npz") as sums:
        assert qccl.run_ranks(SIZE, run) == [sums[f"arr_{rank}"].tobytes() for rank in range(SIZE)]
