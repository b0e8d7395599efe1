"""The checks of tests/ranks on processes without MPI: any launcher, UCX over shared memory and TCP, mixed groups."""

from __future__ import annotations

import importlib.util
import re

import pytest
from start_ranks import CHECKS, NETWORKS, assert_passed, needs_ucx, start_plain, start_torchrun

pytestmark = [pytest.mark.starts_first, needs_ucx]

DIGESTS = tuple(part.replace("tests/ranks", "tests/ranks/check_digests.py") for part in CHECKS)
MIXED = (
    *(part.replace("tests/ranks", "tests/ranks/check_collectives.py") for part in CHECKS),
    "tests/ranks/check_transport.py",
)
#: the pairs of size and network that every run has; the others take minutes
USUAL = [(2, "shared memory"), (3, "tcp")]


def needs(module: str):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


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
    assert_passed(start_plain(n, *CHECKS, limit=900, **NETWORKS[network], **interface), n)


@pytest.mark.slow
def test_checks_on_a_mixed_group():
    """Each rank has one peer that it reaches by shared memory, and two between sites."""
    assert_passed(start_plain(4, *MIXED, limit=300, **NETWORKS["mixed"]), 4)


@needs("torch")
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.every_size)])
def test_under_torchrun(n):
    assert_passed(start_torchrun(n, *DIGESTS, limit=110, QCCL_TEST_FRAMEWORK="torch"), n)


@needs("jax")
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.every_size)])
def test_under_jax(n):
    assert_passed(start_plain(n, *DIGESTS, limit=110, QCCL_TEST_FRAMEWORK="jax", JAX_PLATFORMS="cpu"), n)


@pytest.mark.parametrize(
    "how",
    [
        *("raise", "exit", "stop"),
        *(pytest.param(how, marks=pytest.mark.every_size) for how in ("stop in the middle", "raise before a barrier")),
    ],
)
def test_a_rank_that_fails(how):
    """The others raise before their deadlines, and the job ends."""
    ended = start_plain(3, "tests/ranks/fault.py", how, limit=40)
    found = re.findall(r"rank (\d) raised (\w+) after ([\d.]+) s: (.*)", ended.output)
    assert sorted(rank for rank, *_ in found) == ["0", "2"], ended.output
    assert all(error in ("PeerLost", "CollectiveTimeout") and float(s) < 15 for _, error, s, _ in found), ended.output
    assert (ended.status == 0) == (how == "exit"), ended.output
    cause = {"exit": "rank 1 ended its process"}.get(how, "" if "stop" in how else "ZeroDivisionError: on purpose")
    assert all(cause in text for *_, text in found), ended.output


@pytest.mark.parametrize("how", [pytest.param("stay", marks=pytest.mark.every_size), "fork"])
def test_what_is_no_failure(how):
    """A rank that stays longer than the others wait; children of os.fork() that end as Python does."""
    ended = start_plain(3, "tests/ranks/fault.py", how, limit=40)
    assert ended.status == 0 and sorted(re.findall(r"rank (\d) left", ended.output)) == ["0", "1", "2"], ended.output
