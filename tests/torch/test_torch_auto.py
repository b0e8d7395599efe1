"""compress(codec="auto") in this process: budgets, the times of a pass, and one rank's samples."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from qccl.errors import ArgumentError

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)


def test_budgets() -> None:
    from qccl.torch.auto import budget_of

    assert [budget_of(each) for each in (None, 3, "3 s", "50ms", np.float32(0.5))] == [None, 3.0, 3.0, 0.05, 0.5]
    for wrong in ("3", "3 minutes", "-1 s", "", 0, True, float("nan"), [1.0]):
        with pytest.raises(ArgumentError, match="budget"):
            budget_of(wrong)


def test_calls_that_overlap_count_once_and_end_beside_the_backward_pass_or_after_it() -> None:
    from qccl.torch.clock import PassTimes

    times = PassTimes(begin=10.0, last=14.0, started={0: 10.0, 1: 11.0, 2: 13.5}, ended={0: 12.0, 1: 11.5, 2: 15.0})
    assert (times.seconds, times.hidden, times.exposed) == (3.5, 2.5, 1.0)
    assert PassTimes(last=14.0, started={0: 10.0}, ended={0: 12.0}).exposed == 0.0


@pytest.mark.parametrize("count", [0, 1, 7, (1 << 16) + 1, 1 << 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_samples_are_copies_of_elements_of_the_gradient(count: int, dtype: str) -> None:
    import torch

    from qccl.torch.auto import _sampled

    gradient = torch.arange(count, dtype=torch.float32).to(getattr(torch, dtype))
    taken = _sampled(gradient)
    assert taken.dtype == np.float32 and taken.size == min(count, 1 << 16)
    assert set(taken.tolist()) <= set(gradient.float().tolist())
    if count:
        assert taken[0] == gradient[0] and taken[-1] == gradient[-1]
        gradient += 1
        assert taken[0] == 0


def test_errors_of_hard_values() -> None:
    """Zeros lose nothing; denormals and single elements have finite errors."""
    from qccl import codecs
    from qccl.costs.speed import relative_error
    from qccl.torch.auto import CANDIDATES

    cases = (np.zeros(5), np.zeros(0), np.ones(1), np.full(100, 1e-45), np.r_[1e30, np.zeros(999)])
    for values in cases:
        for spec in CANDIDATES:
            error = relative_error(codecs.get(spec), values.astype(np.float32))
            assert 0 <= error < 10
            assert error == 0 or (values.any() and spec != "none")
