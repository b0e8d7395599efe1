"""A process group of torch on fake GPUs: what all ranks say where rank 0 can make no id for NCCL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import qccl
from qccl.torch import process_group
from qccl.torch.process_group import ProcessGroupQccl


def test_no_rank_waits_where_rank_0_can_make_no_id(cupy, monkeypatch):
    """Each raises rank 0's reason long before the set-up's time is over."""
    store, nccl = torch.distributed.HashStore(), cupy.cuda.nccl

    def refuse():
        raise nccl.NcclError(2)

    def run(rank):
        own = SimpleNamespace(rank=lambda: rank, size=lambda: 2, _store=store)
        with pytest.raises(qccl.EngineError) as caught:
            ProcessGroupQccl._connect(own, torch.device("cuda", rank), 10.0)
        return str(caught.value), caught.value.code

    monkeypatch.setattr(nccl, "get_unique_id", refuse)
    with ThreadPoolExecutor(2) as pool:
        (first, code), (second, _) = pool.map(run, range(2))
    assert "NCCL_ERROR_SYSTEM_ERROR" in first and code == 2
    assert second.startswith("rank 0: ") and "NCCL_ERROR_SYSTEM_ERROR" in second


def test_the_communicator_has_the_ranks_gpu_and_the_groups_timeout(cupy, monkeypatch):
    store = torch.distributed.HashStore()
    monkeypatch.setattr(process_group, "Communicator", lambda unique_id, *place, **how: (*place, how))

    def run(rank):
        own = SimpleNamespace(rank=lambda: rank, size=lambda: 2, _store=store)
        return ProcessGroupQccl._connect(own, torch.device("cuda", rank), 10.0)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    assert found == [(rank, 2, {"timeout": 10.0, "device": rank}) for rank in range(2)]
