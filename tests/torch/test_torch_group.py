"""The backend "qccl" of torch.distributed, on processes: torch_group_ranks.py says what each does."""

from __future__ import annotations

import importlib.util
import re

import pytest
from torch_processes import run

from qccl.errors import ArgumentError, CodecError

pytestmark = [
    pytest.mark.starts_first,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]


def run_group(folder, size, *names):
    for rank in run(folder, size, *(f"torch_group_ranks.{name}" for name in names)):
        yield rank, f"torch_group_ranks.{names[-1]}"


@pytest.mark.parametrize("size", [2, 4])
def test_group(tmp_path, size):
    names = (
        "releases",
        "exact",
        "compressed",
        "tensors",
        "asynchronous",
        "callbacks",
        "options",
        "auto",
        "ddp",
        "fsdp",
    )
    for rank, last in run_group(tmp_path, size, *names):
        rank.check(last)


def test_a_rank_that_dies(tmp_path):
    for rank, last in list(run_group(tmp_path, 3, "dies"))[::2]:
        rank.check(last)


@pytest.mark.parametrize("name", ["QCCL_CODEC", "QCCL_ALL_GATHER_CODEC"])
def test_an_error_of_a_variables_codec_names_the_variable(name, monkeypatch):
    from qccl.torch import Options

    for wrong, kind, text in (("onebit+ef", ArgumentError, "keeps its residual"), ("minmx8", CodecError, "minmax")):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(kind, match=f"^{name}='{re.escape(wrong)}'.*{text}"):
            Options()
        given = Options(codec="minmax4", all_gather_codec="none")  # its options win over the variables
        assert (given.codec, given.all_gather_codec) == ("minmax4", "none")
    with pytest.raises(ArgumentError, match=r"^codec='minmax4\+ef' keeps its residual"):
        Options(codec="minmax4+ef", all_gather_codec="none")
