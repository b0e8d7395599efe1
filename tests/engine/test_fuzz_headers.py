"""A hundred rounds of fuzz_headers.py."""

from __future__ import annotations

import fuzz_headers
import pytest
from start_ranks import needs_ucx


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_rounds(first):
    kinds = [fuzz_headers.fuzz(seed) for seed in range(first, first + 25)]
    assert sum(bool(kind) for kind in kinds) > 15, "nearly every change is found"


@needs_ucx
def test_rounds_over_ucx():
    for seed in range(100, 105):
        fuzz_headers.fuzz(seed, fuzz_headers.outcomes_over_ucx)
