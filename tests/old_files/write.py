"""Writes files as users have them: states, a profile and records. ``write.py FOLDER`` makes a new folder.

Later versions must read them: tests/test_old_files.py loads each, and goes on with the training that saved it. The
folder's name is that of the commit whose code wrote it. Files of a later version go to a folder of their own; the old
ones stay.

- ``NAME.rankR.npz``, ``.pt`` and ``NAME.pt``: the state of a training of tests/tools/old_trainings.py,
  tests/jax/old_jax_training.py or tests/torch/old_torch_trainings.py after 3 of its 6 steps; of one rank, or of all.
- ``NAME.sums.npz``: for each rank, the sum of what the other 3 steps computed.
- ``group_profile.json``: the profile of a group.
- ``threads-N-rank-R.json``: records of ranks of which one was late for the last call.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("support", "tools", "jax", "torch"))

import old_jax_training
from old_trainings import SAVED_AFTER, SIZE, TRAININGS, Training, sum_of_steps
from start_ranks import start_plain

import qccl


def write_training(name: str, make: Callable[[qccl.Communicator], Training], folder: Path) -> None:
    def run(comm: qccl.Communicator) -> np.ndarray:
        training = make(comm)
        for number in range(SAVED_AFTER):
            training.step(number)
        training.save(str(folder / name))
        return sum_of_steps(training)

    np.savez_compressed(folder / f"{name}.sums.npz", *qccl.run_ranks(SIZE, run))


def write_torch(folder: Path) -> None:
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = start_plain(SIZE, "tests/torch/old_torch_trainings.py", str(folder), limit=600, **environment)
    assert ended.status == 0, ended.output


def write_profile(folder: Path) -> None:
    def run(comm: qccl.Communicator) -> None:
        profile = comm.profile()
        if comm.rank == 0:
            profile.save(folder / "group_profile.json")

    qccl.run_ranks(SIZE, run)


def write_records(folder: Path) -> None:
    def run(comm: qccl.Communicator) -> None:
        x = np.ones(1000, np.float32)
        comm.quantized_allreduce(x, codec="minmax4+ef", key="layer")
        if comm.rank == 1:
            time.sleep(2)
        comm.quantized_allreduce(x, codec="minmax8", timeout=1.0)

    os.environ["QCCL_RECORDS"] = str(folder)
    try:
        qccl.run_ranks(SIZE, run)
    except qccl.QcclError as error:
        print(f"as it should: {error}")


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir()  # an existing folder is an error: its files stay as they are
    for name, make in (TRAININGS | {"jax": old_jax_training.training}).items():
        write_training(name, make, folder)
    write_torch(folder)
    write_profile(folder)
    write_records(folder)


if __name__ == "__main__":
    main()
