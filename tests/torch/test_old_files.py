"""Files of trainings with PyTorch that an older qccl wrote (old_files/write.py)."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import old_torch_trainings
import pytest
import torch.distributed as dist
from old_trainings import FOLDER, SIZE, sum_of_steps
from on_ranks import on_ranks

TRAININGS = {made.__name__: made for made in old_torch_trainings.TRAININGS}


def test_every_file_is_loaded() -> None:
    assert {path.name.split(".")[0] for path in FOLDER.glob("*.pt")} == TRAININGS.keys()


@pytest.mark.parametrize("name", TRAININGS)
@on_ranks(SIZE)
def test_a_training_goes_on(name: str, tmp_path: Path) -> None:
    """A model that loads the files, saves others and is made again from these goes on; without files it does not."""
    path = f"{FOLDER / name}"
    with np.load(f"{path}.sums.npz") as sums:
        wanted = sums[f"arr_{dist.get_rank()}"]
    with ExitStack() as ends:
        training = TRAININGS[name](ends)
        training.load(path)
        training.save(f"{tmp_path / name}")
    dist.barrier()  # rank 0 may save for all
    with ExitStack() as ends:
        training = TRAININGS[name](ends)
        training.load(f"{tmp_path / name}")
        found = sum_of_steps(training)
    is_exact = not name.endswith("_full") and "low_rank" not in name
    if is_exact:
        assert found.tobytes() == wanted.tobytes(), f"{name}: {np.abs(found - wanted).max()}"
    else:
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert error <= 0.02, f"{name}: {error}"
    with ExitStack() as ends:
        other = sum_of_steps(TRAININGS[name](ends))
    error = np.linalg.norm(other - wanted) / np.linalg.norm(wanted)
    assert error >= 0.2, f"{name} without its files: {error}"
