"""Everything that needs MPI ranks: each start of mpiexec runs many checks (tests/ranks), and has a deadline."""

from __future__ import annotations

import re

import patience
import pytest
from start_ranks import CHECKS, assert_passed, start

pytestmark = [pytest.mark.starts_first, pytest.mark.mpi]


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_checks_on(n):
    assert_passed(start(n, *CHECKS, limit=900), n)


def raised(output):
    """By rank: the error and the seconds it took."""
    lines = re.findall(r"rank (\d) raised (\w+) after ([\d.]+) s", output)
    return {int(rank): (error, float(seconds)) for rank, error, seconds in lines}


def reasons(output):
    """The texts of the errors."""
    return re.findall(r"rank \d raised \w+ after [\d.]+ s: (.*)", output)


@pytest.mark.parametrize(("how", "within"), [("raise", 15), ("exit", 15), ("stop", 15), ("stop in the middle", 15)])
def test_a_rank_that_fails(how, within):
    """The others raise, and the job ends: also when the failed rank never answers again."""
    ended = start(3, "tests/ranks/fault.py", how, limit=40)
    found = raised(ended.output)
    assert sorted(found) == [0, 2], ended.output
    assert all(
        error in ("PeerLost", "CollectiveTimeout") and s < within * patience.factor() for error, s in found.values()
    ), ended.output
    assert (ended.status == 0) == (how == "exit"), ended.output
    cause = {"raise": "rank 1 gave up: ZeroDivisionError: on purpose", "exit": "rank 1 ended its process"}.get(how, "")
    assert all(cause in text for text in reasons(ended.output)), ended.output


@pytest.mark.parametrize("before", ["a barrier", "an all-gather"])
def test_a_rank_that_raises_before(before):
    """The others need not wait for the deadline to hear of it."""
    ended = start(3, "tests/ranks/fault.py", f"raise before {before}", limit=40)
    found = raised(ended.output)
    assert sorted(found) == [0, 2], ended.output
    assert all(error == "PeerLost" and seconds < 15 * patience.factor() for error, seconds in found.values()), (
        ended.output
    )
    cause = "rank 1 gave up: ZeroDivisionError: on purpose"
    assert all(cause in text for text in reasons(ended.output)), ended.output


def test_a_rank_that_is_late():
    """It hears what the others had to say, and all end by themselves."""
    ended = start(3, "tests/ranks/fault.py", "late", limit=40)
    found = raised(ended.output)
    assert sorted(found) == [0, 1, 2] and ended.status == 0, ended.output
    assert found[1][0] == "PeerLost"


def test_a_rank_that_is_late_for_a_split():
    """MPI's own split would wait for ever for those who gave up."""
    ended = start(2, "tests/ranks/fault.py", "late for a split", limit=40)
    assert sorted(raised(ended.output)) == [0, 1], ended.output


@pytest.mark.parametrize("how", ["stay", "fork"])
def test_what_is_no_failure(how):
    """A rank that stays longer than the others wait; children of os.fork() that end as Python does."""
    ended = start(3, "tests/ranks/fault.py", how, limit=40)
    assert ended.status == 0 and sorted(re.findall(r"rank (\d) left", ended.output)) == ["0", "1", "2"], ended.output


def test_a_rank_that_dies_ends_the_job():
    """What MPICH does with it (Open MPI, too, unless asked to survive)."""
    ended = start(3, "tests/ranks/fault.py", "die", limit=40)
    assert ended.status != 0 and ended.seconds < 20 * patience.factor(), ended.output


def test_calls_after_the_end_of_mpi():
    """They raise EngineError, or do nothing; MPI would end the process in nearly each of its functions."""
    ended = start(2, "tests/ranks/finalized.py", limit=60)
    assert ended.status == 0, ended.output
    found = re.findall(r"rank (\d): (.+?): (.+)", ended.output)
    assert len(found) == 2 * 22 and {outcome for _, _, outcome in found} == {"EngineError", "harmless"}, ended.output
    refused = {name for rank, name, outcome in found if rank == "1" and outcome == "EngineError"}
    assert refused == {
        *("a call", "a call under way", "wait", "state_dict in a call", "a plan", "a plan that has run"),
        *("barrier", "allgather", "split", "from_mpi", "init"),
    }, ended.output


@pytest.mark.parametrize("how", ["not closed", "closed early", "in a call"])
def test_receives_under_way_when_mpi_ends_after_the_interpreter(how):
    """Their memory stays: messages of ranks that end later come into it. Several ranks, so that some are in between."""
    ended = start(8, "tests/ranks/unclosed.py", how, limit=60, MALLOC_MMAP_THRESHOLD_="4096")
    assert ended.status == 0 and len(re.findall(r"rank \d ends", ended.output)) == 8, ended.output
