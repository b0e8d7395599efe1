"""FSDP2 with quantised gradients and weights: runs the checks of torch_fsdp_ranks.py on several processes."""

from __future__ import annotations

import importlib.util

import pytest
from start_ranks import start_plain

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
    pytest.mark.starts_first,
]

ALWAYS = ("exact", "bounds", "identical", "resumes", "chooses", "accumulates", "refuses", "corrects", "unused")


@pytest.mark.parametrize(("size", "names"), [(2, ALWAYS), (4, (*ALWAYS, "replicas", "smaller_groups"))])
def test_ranks(tmp_path, size: int, names: tuple[str, ...]) -> None:
    environment = {"QCCL_TRANSPORT": "auto", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    program = ("tests/support/torch_fsdp_ranks.py", str(tmp_path), *names)
    ended = start_plain(size, *program, limit=240, imported="torch.distributed.fsdp", **environment)
    assert ended.status == 0, ended.output
    for name in names:
        assert ended.output.count(f"{name} done") == size, ended.output
