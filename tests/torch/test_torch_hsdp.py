"""HSDP with quantised averages between replicas: runs the checks of torch_hsdp_ranks.py on 2 replicas of 2 shards."""

from __future__ import annotations

import importlib.util

import pytest
from start_ranks import start_plain

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

NAMES = ("exact", "bounds", "replicas", "accumulates", "resumes", "other_meshes", "lists", "refuses")


def test_two_replicas_of_two_shards(tmp_path) -> None:
    environment = {"QCCL_TRANSPORT": "auto", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    program = ("tests/support/torch_hsdp_ranks.py", str(tmp_path), *NAMES)
    ended = start_plain(4, *program, limit=240, imported="torch.distributed.fsdp", **environment)
    assert ended.status == 0, ended.output
    for name in NAMES:
        assert ended.output.count(f"{name} done") == 4, ended.output
