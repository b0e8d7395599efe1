"""The checks of tests/ranks on processes without MPI: any launcher, UCX over shared memory and TCP, mixed groups.

Ranks are forks of a process that has imported what all of them need, but for UCX.
"""

from __future__ import annotations

import pytest
from start_ranks import NETWORKS, assert_passed, checks, needs_ucx, start_plain

pytestmark = [pytest.mark.starts_first, pytest.mark.processes, needs_ucx]

#: which the ranks need not import, each for itself
IMPORTED = "numpy,pytest,qccl"

#: the pairs of size and network that every run has; the others take minutes
USUAL = [(2, "shared memory"), (3, "tcp")]


@pytest.mark.parametrize(
    ("n", "network"),
    [
        pytest.param(n, network, marks=pytest.mark.slow if (n, network) in USUAL else pytest.mark.every_size)
        for n in (1, 2, 3, 4, 5, 8)
        for network in ("shared memory", "tcp")
    ],
)
def test_checks_on(n, network):
    """Over TCP by the loopback interface alone: labs of other tests add and remove interfaces meanwhile."""
    interface = {"UCX_NET_DEVICES": "lo"} if network == "tcp" else {}
    assert_passed(start_plain(n, *checks(), limit=900, imported=IMPORTED, **NETWORKS[network], **interface), n)


@pytest.mark.slow
def test_checks_on_a_mixed_group():
    """Each rank has one peer that it reaches by shared memory, and two between sites."""
    assert_passed(start_plain(4, *checks("digests", "transport"), limit=300, imported=IMPORTED, **NETWORKS["mixed"]), 4)
