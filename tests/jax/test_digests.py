"""The bits of all collectives on ranks that find each other by JAX."""

from __future__ import annotations

import pytest
from start_ranks import assert_passed, checks, needs_ucx, start_plain

pytestmark = [pytest.mark.processes, needs_ucx]


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.every_size)])
def test_under_jax(n):
    ended = start_plain(n, *checks("digests"), limit=110, QCCL_TEST_FRAMEWORK="jax", JAX_PLATFORMS="cpu")
    assert_passed(ended, n)
