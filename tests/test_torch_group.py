"""The backend "qccl" of torch.distributed, on processes: torch_group_ranks.py says what each does."""

from __future__ import annotations

import importlib.util

import pytest
from test_torch import run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def run_group(folder, size, *names):
    for rank in run(folder, size, *(f"torch_group_ranks.{name}" for name in names)):
        yield rank, f"torch_group_ranks.{names[-1]}"


@pytest.mark.parametrize("size", [2, 4])
def test_group(tmp_path, size):
    names = ("exact", "compressed", "tensors", "asynchronous", "callbacks", "options", "ddp", "fsdp")
    for rank, last in run_group(tmp_path, size, *names):
        rank.check(last)


def test_a_rank_that_dies(tmp_path):
    for rank, last in list(run_group(tmp_path, 3, "dies"))[::2]:
        rank.check(last)
