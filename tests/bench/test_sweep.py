"""A sweep over sizes, codecs and collectives on threads: its rows, its checks, and its files also after an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import qccl
from qccl.bench.options import KINDS, SweepOptions
from qccl.bench.sweep import sweep
from qccl.bench.sweep.sweep import Sweep


def swept(ranks: int, options: SweepOptions) -> tuple[list[bool], list[str]]:
    lines: list[str] = []
    return qccl.run_ranks(ranks, lambda comm: Sweep(comm, options, emit=lines.append).run()), lines


@pytest.mark.parametrize("name", KINDS)
def test_every_collective_is_timed_and_checked(name: str, tmp_path: Path) -> None:
    """Results are right, and busbw is algbw times the collective's factor."""
    path, codecs = tmp_path / "x.json", ("minmax4:rounding=stochastic", "none")
    options = SweepOptions(102_400, 102_400, iters=2, codecs=codecs, collective=name, json=str(path))
    assert all(swept(3, options)[0])
    found = json.loads(path.read_text())
    assert found["out_of_bounds"] == {"count": 0, "okay": "true"}
    for result in found["results"]:
        side = result["out_of_place"]
        assert side["alg_bw"] == pytest.approx(result["size"] / side["time"] / 1e3)
        assert side["bus_bw"] == pytest.approx(side["alg_bw"] * KINDS[name].factor(3))
        assert (result["in_place"] is None) == (not KINDS[name].is_allreduce)
        assert (side["relative_l2_error"] > 1e-3) == (result["codec"] != "none" and name != "hierarchical_allreduce")


@pytest.mark.parametrize("error", [qccl.EngineError("the link is cut"), KeyboardInterrupt()])
def test_what_was_measured_before_an_error_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path, found = tmp_path / "x.json", []
    measure = sweep.measure

    def failing(comm, calls, *args, **kwargs):
        if calls[0].case.nbytes == 65536:
            found.append(json.loads(path.read_text()))
            raise error
        return measure(comm, calls, *args, **kwargs)

    monkeypatch.setattr(sweep, "measure", failing)
    options = SweepOptions(4096, 65536, stepfactor=16, iters=1, codecs=("minmax8", "minmax4"), json=str(path))
    with pytest.raises(type(error)):
        swept(1, options)
    (before,), after = found, json.loads(path.read_text())
    assert [row["codec"] for row in before["results"]] == ["minmax8", "minmax4"]
    assert not before["complete"] and not after["complete"] and after["results"] == before["results"]
    assert after["errors"] == (["EngineError: the link is cut"] if isinstance(error, qccl.EngineError) else [])


def test_a_sweep_writes_its_table_and_files(tmp_path) -> None:
    names = {key: str(tmp_path / f"run.{key}") for key in ("json", "trace")}
    options = SweepOptions(
        minbytes=4096,
        maxbytes=65536,
        stepfactor=16,
        iters=2,
        codecs=("minmax8", "none"),
        dtypes=("float", "bfloat16"),
        **names,
    )
    lines: list[str] = []

    def run(comm: qccl.Communicator) -> bool:
        return Sweep(comm, options, emit=lines.append).run()

    assert qccl.run_ranks(2, run) == [True, True]
    rows = [line for line in lines if not line.startswith("#")]
    assert [line.split()[-1] for line in rows] == ["minmax8", "none"] * 4
    assert any(line.startswith("# Out of bounds values : 0 OK") for line in lines)
    assert "# timed: the communicator's method, as programs call it" in lines
    assert f"# Wrote {names['trace']}" in lines and Path(names["trace"]).exists()
    found = json.loads(Path(names["json"]).read_text())
    assert found["complete"] and found["errors"] == [] and len(found["results"]) == 8


@pytest.mark.parametrize(("plan", "expected"), [(False, 4), (True, 0)])
def test_the_flag_plan_times_a_bound_plan_and_the_head_says_so(plan: bool, expected: int) -> None:
    options = SweepOptions(minbytes=4096, maxbytes=4096, iters=1, warmup_iters=0, check=0, plan=plan)
    lines: list[str] = []

    def run(comm: qccl.Communicator) -> int:
        seen = []
        real = comm.quantized_allreduce
        comm.quantized_allreduce = lambda *given, **more: (seen.append(given), real(*given, **more))
        Sweep(comm, options, emit=lines.append).run()
        return len(seen)

    assert qccl.run_ranks(2, run) == [expected, expected]
    assert ("# timed: start and wait of a plan that was bound once" in lines) == plan
