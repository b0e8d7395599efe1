"""The ranks of a torch.distributed group over gloo, each a process: bytes, failures, and that processes end."""

from __future__ import annotations

import importlib.util

import pytest
from torch_processes import run

pytestmark = [
    pytest.mark.starts_first,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]


@pytest.mark.parametrize(
    ("size", "names"), [(1, ("calls", "refused")), (2, ("calls", "keeps", "stays_away")), (3, ("calls", "mismatch"))]
)
def test_ranks(tmp_path, size, names):
    for rank in run(tmp_path, size, *names):
        rank.check(names[-1])


def test_ranks_that_share_two_machines_use_two_levels(tmp_path):
    """Without a word about nodes: gradients of DDP and FSDP2, FSDP2's weights, and the process group's tensors."""
    names = [f"torch_node_ranks.{name}" for name in ("compressed", "sharded", "grouped")]
    for rank in run(tmp_path, 4, *names):
        rank.check(names[-1])


def test_a_rank_that_fails_and_ranks_that_do_not_close(tmp_path):
    ranks = run(tmp_path, 3, "raises", "leaves")
    for rank in ranks:
        rank.check("leaves")
    assert all("a reason of its own" in rank.out for rank in ranks[1:])


@pytest.mark.parametrize("name", ["dies", "dies_in_setup"])
def test_a_rank_that_dies(tmp_path, name):
    for rank in run(tmp_path, 3, name)[1:]:
        rank.check(name)


@pytest.mark.parametrize("name", ["stops", "never_comes"])
def test_a_process_ends_soon_after_a_rank_has_stopped(tmp_path, name):
    first, *_, last = run(tmp_path, 3, name)
    first.check(name)
    assert last.status == "stopped" and first.time - float(first.out.split()[0]) < 15
