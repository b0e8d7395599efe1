"""What one rank's exception is for the others, and texts of errors."""

from __future__ import annotations

import copy
import pickle

import pytest

from qccl.base import errors
from qccl.base.errors import ArgumentError, CollectiveTimeout, EngineError, MismatchError, PeerLost, QcclError


@pytest.mark.parametrize(
    ("kind", "base"), [(ArgumentError, ValueError), (CollectiveTimeout, TimeoutError), (PeerLost, ConnectionError)]
)
def test_errors_are_those_of_python_too(kind, base):
    assert issubclass(kind, QcclError) and issubclass(kind, base)


@pytest.mark.parametrize("kind", [getattr(errors, name) for name in errors.__all__ if name[0].isupper()])
def test_a_class_alone_can_be_raised(kind):
    """PyThreadState_SetAsyncExc() gives a thread a class, of which Python makes the error without arguments."""
    with pytest.raises(kind):
        raise kind


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
    """The error itself, if it says which rank has failed; of others, who gave up, and why."""
    told, found = errors.for_others(3, error), errors.as_failure(3, error)
    assert str(told) == text and (told is error or (told.rank, f"rank 3 gave up: {told.reason}") == (3, text))
    assert found is error if isinstance(error, QcclError) else type(found) is PeerLost and str(found) == text


@pytest.mark.parametrize(
    "error", [PeerLost("rank 1 was lost", 1), errors.gave_up(2, "enough"), PeerLost("a rank was lost")], ids=str
)
def test_copies_of_a_lost_rank(error):
    """Other processes, and later calls, get the same text and attributes."""
    text = str(error)
    for each in (pickle.loads(pickle.dumps(error)), copy.copy(error), errors.with_text(error, text)):
        assert type(each) is PeerLost and (str(each), each.args) == (text, (text,))
        assert (each.rank, each.reason) == (error.rank, error.reason)
    assert errors.with_text(EngineError("no", 7), "again: no").code == 7


def test_errors_of_a_transport_are_marked():
    mine, other = PeerLost("rank 1 left"), PeerLost("rank 1 left")
    assert errors.own(mine) is mine and errors.is_own(mine) and not errors.is_own(other)
    assert not errors.is_own(KeyboardInterrupt())


def test_numbers_of_ranks():
    assert [errors.ranks_text(ranks) for ranks in ([1], [1, 2])] == ["rank 1", "ranks 1, 2"]
    assert EngineError("out of memory", 3).code == 3 and EngineError("none").code is None
