"""Totals of calls: what a rank sends in a run of a schedule, and which programs have a row."""

from __future__ import annotations

import pytest
from schedule_cases import one_rank
from threads import CODEC, Caller, outcomes, ramp

from qccl.collectives.allreduce import one_shot, two_round
from qccl.dtypes import FLOAT32
from qccl.engine.tallies import CallStats, Tallies, traffic


@pytest.mark.parametrize(("make", "parts"), [(one_shot, [576] * 2), (two_round, [192] * 4)])
def test_traffic_is_all_that_is_sent_to_others(make, parts):
    """With three ranks: the whole vector to two, or their parts and twice the own one."""
    found = traffic(one_rank(make, 1, 3, 576, FLOAT32, CODEC))
    assert found == (4 * sum(parts), sum(CODEC.encoded_nbytes(part, FLOAT32) for part in parts))


def test_only_programs_with_calls_have_a_row():
    def run(t):
        caller = Caller(t)
        tallies = Tallies(are_timed=True)
        programs = [tallies.counted("allreduce", codec, 100) for codec in ("none", "minmax8", "minmax8")]
        assert programs[1].tally is programs[2].tally is not programs[0].tally and [*tallies] == []
        program = caller.engine.compile(one_rank(one_shot, t.rank, 2, 100, FLOAT32, CODEC), programs[1])
        x = ramp(t.rank, 100)
        for _ in range(3):
            caller.start(program, x, x.copy()).run()
        caller.close()
        return [*tallies]

    for rows in outcomes(2, run):
        (row,) = rows
        assert (row.collective, row.codec, row.calls, row.elements) == ("allreduce", "minmax8", 3, 300)
        assert row.raw_nbytes == 1200 and row.ratio == 1200 / row.sent_nbytes and row.seconds > 0
    assert CallStats("allreduce", "none").ratio is None
