"""Everything that needs MPI ranks: each start of mpiexec runs many checks (tests/ranks), and has a deadline."""

from __future__ import annotations

import re

import patience
import pytest
from start_ranks import assert_passed, checks, start

pytestmark = [pytest.mark.starts_first, pytest.mark.mpi]


@pytest.mark.quick
def test_the_transport_and_the_engine_on_two_ranks():
    assert_passed(start(2, *checks("transport", "engine"), limit=300), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "names"),
    [
        (1, ()),  # all of them
        (2, ("collectives", "digests", "mpi", "staging")),
        (3, ("collectives", "engine", "transport", "staging")),
        (4, ("collectives",)),
    ],
)
def test_checks_on(n, names):
    """What does not depend on the number of ranks is checked with few of them."""
    assert_passed(start(n, *checks(*names), limit=900), n)


GAVE_UP, ENDED = "rank 1 gave up: ZeroDivisionError: on purpose", "rank 1 ended its process"


@pytest.mark.parametrize(
    ("how", "raising", "errors", "cause"),
    [
        ("raise", "02", {"PeerLost"}, GAVE_UP),
        ("raise before a barrier", "02", {"PeerLost"}, GAVE_UP),
        ("raise before an all-gather", "02", {"PeerLost"}, GAVE_UP),
        ("exit", "02", {"PeerLost"}, ENDED),
        ("stop", "02", {"PeerLost", "CollectiveTimeout"}, ""),
        ("stop in the middle", "02", {"PeerLost", "CollectiveTimeout"}, ""),
        ("late", "012", {"PeerLost", "CollectiveTimeout"}, ""),
        ("late for a split", "01", {"PeerLost", "CollectiveTimeout"}, ""),
    ],
)
def test_a_rank_that_fails(how, raising, errors, cause):
    """The others raise long before their deadlines, and the job ends: also when the failed rank never answers again.

    One that is late hears what the others had to say, and all end by themselves. MPI's own split would wait for ever.
    """
    ended = start(len({*raising, "1"}), "tests/ranks/fault.py", how, limit=40)
    found = re.findall(r"rank (\d) raised (\w+) after ([\d.]+) s: (.*)", ended.output)
    assert "".join(sorted(rank for rank, *_ in found)) == raising, ended.output
    for rank, error, seconds, text in found:
        assert error in errors and float(seconds) < 15 * patience.factor() and cause in text, ended.output
        assert how != "late" or rank != "1" or error == "PeerLost", ended.output
    assert how == "late for a split" or (ended.status == 0) == (how in ("exit", "late")), ended.output


@pytest.mark.parametrize("how", ["stay", "fork"])
def test_what_is_no_failure(how):
    """A rank that stays longer than the others wait; children of os.fork() that end as Python does."""
    ended = start(3, "tests/ranks/fault.py", how, limit=40)
    assert ended.status == 0 and sorted(re.findall(r"rank (\d) left", ended.output)) == ["0", "1", "2"], ended.output


def test_calls_after_the_end_of_mpi():
    """They raise EngineError, or do nothing; MPI would end the process in nearly each of its functions."""
    ended = start(2, "tests/ranks/finalized.py", limit=60)
    assert ended.status == 0, ended.output
    found = re.findall(r"rank (\d): (.+?): (.+)", ended.output)
    assert len(found) == 2 * 22 and {outcome for _, _, outcome in found} == {"EngineError", "harmless"}, ended.output
    refused = {name for rank, name, outcome in found if rank == "1" and outcome == "EngineError"}
    assert refused == {
        *("a call", "a call under way", "wait", "state_dict in a call", "a plan", "a plan that has run"),
        *("barrier", "allgather", "split", "check", "from_mpi", "init"),
    }, ended.output


@pytest.mark.parametrize("how", ["not closed", "closed early", "in a call"])
def test_receives_under_way_when_mpi_ends_after_the_interpreter(how):
    """Their memory stays: messages of ranks that end later come into it. Several ranks, so that some are in between."""
    ended = start(8, "tests/ranks/unclosed.py", how, limit=60, MALLOC_MMAP_THRESHOLD_="4096")
    assert ended.status == 0 and len(re.findall(r"rank \d ends", ended.output)) == 8, ended.output
