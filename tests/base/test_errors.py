"""What one rank's exception is for the others, and texts of errors."""

from __future__ import annotations

import pytest

from qccl.base import errors
from qccl.base.errors import ArgumentError, CollectiveTimeout, EngineError, MismatchError, PeerLost, QcclError


@pytest.mark.parametrize(
    ("kind", "base"), [(ArgumentError, ValueError), (CollectiveTimeout, TimeoutError), (PeerLost, ConnectionError)]
)
def test_errors_are_those_of_python_too(kind, base):
    assert issubclass(kind, QcclError) and issubclass(kind, base)


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ZeroDivisionError("in a loop"), "rank 3 gave up: ZeroDivisionError: in a loop"),
        (KeyboardInterrupt(), "rank 3 gave up: KeyboardInterrupt: "),
        (Silent(), "rank 3 gave up: Silent: <its str() failed>"),
        (PeerLost("rank 1 gave up: enough"), "rank 1 gave up: enough"),
        (MismatchError("ranks [0, 2] differ"), "ranks [0, 2] differ"),
        (CollectiveTimeout("my time limit"), "rank 3 gave up: CollectiveTimeout: my time limit"),
        (EngineError("rank 1 is lost"), "rank 3 gave up: EngineError: rank 1 is lost"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_other_ranks_hear_of_an_exception(error, text):
    """The error itself, if it says which rank has failed; of others, who gave up."""
    assert errors.failure_text(3, error) == text
    found = errors.gave_up(3, error)
    assert found is error if isinstance(error, QcclError) else type(found) is PeerLost and str(found) == text


def test_errors_of_a_transport_are_marked():
    mine, other = PeerLost("rank 1 left"), PeerLost("rank 1 left")
    assert errors.own(mine) is mine and errors.is_own(mine) and not errors.is_own(other)
    assert not errors.is_own(KeyboardInterrupt())


def test_numbers_of_ranks():
    assert [errors.ranks_text(ranks) for ranks in ([1], [1, 2])] == ["rank 1", "ranks 1, 2"]
    assert EngineError("out of memory", 3).code == 3 and EngineError("none").code is None
