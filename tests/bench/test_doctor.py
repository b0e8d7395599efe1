"""qccl-bench doctor: the arithmetic of a step, the recommendation, and the command's options."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_runs import LAUNCHERS
from click.testing import CliRunner, Result

from qccl import codecs
from qccl.bench.cli import main
from qccl.bench.doctor import speed, steps
from qccl.bench.doctor.doctor import SHOWN, parse_count, recommendation
from qccl.bench.doctor.speed import CodecSpeed, measure_speed
from qccl.bench.doctor.steps import Step, StepCall, StepCost, call_of, cost_of, step_seconds
from qccl.bench.doctor.training import Gradient, StepComputation
from qccl.bench.lab import lab
from qccl.bench.params import parse_link
from qccl.bench.start.mpiexec import StartError, find_mpiexec

ROOT = Path(__file__).parents[2]
#: seconds per element on one quiet core of the machine of docs/results, with values that no cache holds
SPEEDS = {
    "fp32": CodecSpeed(0, 0, 0),
    "fp16": CodecSpeed(0, 0, 0),
    "minmax8": CodecSpeed(0.14e-9, 0.15e-9, 0),
    "minmax4+ef": CodecSpeed(0.65e-9, 0.17e-9, 0),
    "trellis2+ef": CodecSpeed(2.8e-9, 0.37e-9, 0),
    "topk:k=0.01+ef": CodecSpeed(1.6e-9, 0.29e-9, 0),
    "onebit:reconstruct=mean+ef": CodecSpeed(0.84e-9, 0.1e-9, 0),
}
FLAGS = ["--ranks=4", "--link=100mbit", "--step=250ms"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def doctor(*flags: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *flags])


# -- the arithmetic ----------------------------------------------------------------------------------------------------

#: a large layer that is complete first, a small one, and an embedding that is the output layer, too: complete last
GRADIENTS = (Gradient((1000, 400), 0.2, 1), Gradient((100,), 0.1, 0), Gradient((600, 1000), 0.05, 0))


def a_step(ranks: int = 4, rate: float = 12.5e6, **given: Any) -> Step:
    return Step(StepComputation(GRADIENTS, 0.08, 0.2, 0.02), ranks, rate, **given)


def test_the_link_limits_a_step() -> None:
    """1 million elements in 8 bits behind 100 Mbit/s, on 4 ranks."""
    cost = cost_of(a_step(), "minmax8", CodecSpeed(1e-9, 1e-9, 0.01))
    encoded = sum(codecs.get("minmax8").encoded_nbytes(each, "float32") for each in (600_000, 400_000)) + 400
    assert cost.sent == pytest.approx(1.5 * encoded, rel=2e-3)  # the largest shard counts, in whole buckets
    assert cost.link == pytest.approx(1.012 * cost.sent / 12.5e6) == pytest.approx(0.123, rel=0.01)
    assert 1e-3 + 1.75e-3 < cost.processor < 10e-3  # messages take time, too
    assert cost.alone >= 0.3 + cost.link  # nothing is faster than the bytes and the computation
    late = 1.5 * codecs.get("minmax8").encoded_nbytes(400_000, "float32") / 12.5e6
    assert 0.3 + late < cost.overlapped < 0.3 + late + 0.01  # calls and messages take less than 10 ms


def test_the_processor_limits_a_step() -> None:
    step = a_step(ranks=2, rate=1e9)
    fast, slow = (cost_of(step, "minmax8", CodecSpeed(each, each, 0.01)) for each in (1e-9, 200e-9))
    assert slow.processor == pytest.approx(200e-3 + 300e-3, rel=0.02) and slow.link < 0.01
    assert slow.alone == pytest.approx(0.3 + slow.processor, rel=0.02)
    assert fast.overlapped < 0.31 < 0.3 + 0.4 * slow.processor < slow.overlapped <= slow.alone * (1 + 1e-9)


def test_ranks_that_share_a_processor_take_longer() -> None:
    """Two ranks on one processor compute, encode and decode half as fast; the link does not change."""
    speed = CodecSpeed(20e-9, 20e-9, 0.01)
    own, shared = (cost_of(a_step(rate=1e12, processors=each), "minmax8", speed) for each in (2.0, 0.5))
    assert shared.overlapped == pytest.approx(2 * (0.3 + own.processor), rel=0.03) and own.overlapped < shared.alone / 2
    behind = [cost_of(a_step(rate=1e5, processors=each), "minmax8", speed) for each in (2.0, 0.5)]
    assert behind[1].link == behind[0].link > 10 and behind[1].overlapped < 1.1 * behind[0].overlapped


def test_a_gradient_that_is_complete_last_cannot_overlap() -> None:
    """A tied embedding: its bytes pass the link after the backward pass, though it is the first parameter."""
    shapes = ((600, 1000), (400, 1000))
    tied = StepComputation((Gradient(shapes[0], 0.2, 1), Gradient(shapes[1], 0.01, 0)), 0.08, 0.2, 0.02)
    early = StepComputation((Gradient(shapes[0], 0.01, 0), Gradient(shapes[1], 0.2, 1)), 0.08, 0.2, 0.02)
    costs = [cost_of(Step(each, 2, 12.5e6), "none", CodecSpeed(0, 0, 0)) for each in (tied, early)]
    assert costs[0].overlapped - 0.3 == pytest.approx(600_000 * 4 / 12.5e6, rel=0.1)
    assert costs[1].overlapped - 0.3 == pytest.approx(400_000 * 4 / 12.5e6, rel=0.1)


def test_calls_follow_each_other() -> None:
    """By hand: two calls that take 2 s each on the link, and 0.5 s beyond that, in a step of 1 + 3 + 0.5 s."""
    call = StepCall(2.5, 2.0, 0.25, 1e6)
    own = StepComputation((), 1.0, 3.0, 0.5)
    own_costs = steps._STEP + 2 * steps._CALL

    def seconds(processors: float, *ready: float) -> float:
        return step_seconds(Step(own, 2, 1e9, processors), [(each, call) for each in ready])

    half = 0.125  # a call takes one of the trainer's two processors
    assert seconds(2, 0.0, 3.0) == pytest.approx(1 + 3 + half + 2.5 + 0.5 + own_costs)  # the second one begins last
    assert seconds(2, 0.0, 0.0) == pytest.approx(1 + 2 + 2.5 + 0.5 + own_costs - steps._CALL, rel=1e-3)
    hidden = 1 + 3 + 0.5 + own_costs - steps._CALL
    assert seconds(2, 0.0) == pytest.approx(hidden + half)
    assert seconds(1, 0.0) == pytest.approx(hidden + 0.25)  # the processor is that of the trainer
    assert seconds(0.5, 0.0) == pytest.approx(2 * (4.5 + own_costs - steps._CALL) + 0.25)


def with_steps() -> list[Path]:
    """The results files that have times of steps behind links without delay: only those are predicted."""
    paths = sorted((ROOT / "docs" / "results").glob("training-*.json"))
    return [path for path in paths if rows_without_delay(json.loads(path.read_text()))]


def rows_without_delay(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of SPEEDS' codecs whose link is a rate alone ("100mbit", not "100mbit 25ms 0.1% bbr")."""
    rows = [row for row in document.get("steps") or [] if row["link"] and row["method"] in SPEEDS]
    return [row for row in rows if len(row["link"].split()) == 1]


@pytest.mark.parametrize("path", with_steps(), ids=lambda path: path.stem)
def test_the_steps_that_were_measured_are_predicted(path: Path) -> None:
    """Within 20%, a part of which is that SPEEDS were measured another day: fp32, fp16 and codecs behind links.

    The computation of those runs slept, so that ranks that shared a processor did not slow it down.
    """
    document = json.loads(path.read_text())
    ready = [(_shape(what), at) for what, at in document["compute"]["ready"]]
    for row in rows_without_delay(document):
        rate = parse_link(row["link"]).rate
        processors = 2 / row["ranks"]
        own = replayed(document["compute"], ready, processors)
        replay = Step(own, row["ranks"], rate, processors)
        method = {"fp32": "none", "fp16": "cast"}.get(row["method"], row["method"])
        cost = cost_of(replay, method, SPEEDS[row["method"]])
        assert cost.overlapped == pytest.approx(row["seconds"], rel=0.2), (row["method"], row["link"], cost)


def _shape(what: int | list[int]) -> tuple[int, ...]:
    """Of a gradient in a results file, which has its shape or its size; large arrays are matrices then."""
    if isinstance(what, list):
        return tuple(what)
    return (1, what) if what >= 1 << 14 else (what,)


def replayed(compute: dict[str, Any], ready: list[tuple[tuple[int, ...], float]], factor: float) -> StepComputation:
    """The computation of a results file, in DDP's buckets of half a megabyte; all times times ``factor``."""
    gradients, bucket, waiting, filled = [], 0, [], 0
    for shape, at in ready:
        waiting.append(shape)
        filled += 4 * math.prod(shape)
        if filled >= 1 << 19 or (shape, at) == ready[-1]:
            gradients += [Gradient(each, factor * at, bucket) for each in waiting]
            bucket, waiting, filled = bucket + 1, [], 0
    parts = (factor * each for each in (compute["forward"], ready[-1][1], compute["optimiser"]))
    return StepComputation(tuple(reversed(gradients)), *parts)


#: of a call of minmax8 over wan behind 100 Mbit/s, without loss: delay in ms, ranks, elements, and ms
DELAYED = [(25, 2, 1 << 20, 126), (50, 2, 1 << 20, 193), (100, 2, 1 << 20, 340), (50, 4, 1 << 20, 210)]
#: the same for a float32 all-reduce of gloo
GLOO = [(100, 2, 1 << 18, 489), (25, 2, 1 << 20, 466), (50, 4, 1 << 18, 695)]


@pytest.mark.parametrize(("delay", "ranks", "count", "ms"), DELAYED)
def test_calls_with_delays_are_predicted(delay: float, ranks: int, count: int, ms: float) -> None:
    step = Step(StepComputation((), 0, 0, 0), ranks, 12.5e6, delay=delay / 1e3)
    found = call_of(step, codecs.get("minmax8"), count, SPEEDS["minmax8"])
    assert found.seconds * 1e3 == pytest.approx(ms, rel=0.12)


@pytest.mark.parametrize(("delay", "ranks", "count", "ms"), GLOO)
def test_calls_of_gloo_with_delays_are_predicted(delay: float, ranks: int, count: int, ms: float) -> None:
    own = StepComputation((Gradient((count,), 0.0, 0),), 0, 0, 0)
    ((_, found),) = steps._of_gloo(Step(own, ranks, 12.5e6, delay=delay / 1e3), "none")
    assert found.seconds * 1e3 == pytest.approx(ms, rel=0.15)


def test_the_command_prints_the_figures_that_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    flags = (*FLAGS, "--processors=1.5", "--delay=1ms", "--codec=minmax4+ef", f"--json={path}")
    result = doctor("--parameters=1.1M", *flags)
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    own = found["step"].pop("computation")
    assert [gradient["shape"] for gradient in own["gradients"]] == [[1, 1 << 20], [1, 1_100_000 - (1 << 20)]]
    assert own["forward"] + own["backward"] + own["optimiser"] == pytest.approx(0.25)
    assert found["step"] == {"ranks": 4, "rate": 12.5e6, "processors": 1.5, "delay": 1e-3}
    assert [cost["codec"] for cost in found["costs"]] == ["none", "cast", "minmax4+ef"]
    rows = [line.split() for line in result.output.splitlines() if not line.startswith("#")]
    assert [row[-1] for row in rows] == ["(fp32)", "(fp16)", "minmax4+ef"]
    fp32, fp16, ours = found["costs"]
    for row, cost in zip(rows, found["costs"], strict=True):
        assert row[0] == f"{cost['sent'] / 1e6:.3f}" and row[1] == f"{cost['link'] * 1e3:.1f}"
        assert row[3:6] == [
            f"{cost['alone'] * 1e3:.1f}",
            f"{fp32['alone'] / cost['alone']:.2f}",
            f"{fp16['alone'] / cost['alone']:.2f}",
        ]
    assert fp32["error"] == 0 < fp16["error"] < ours["error"] and ours["processor"] > 0
    assert f"# Recommendation: {found['recommendation']}" in result.output.splitlines()
    assert "# measured: " in result.output and "# computed: " in result.output


def test_encoders_with_state_are_timed_with_their_state() -> None:
    """Also of a length that is no multiple of anything."""
    for spec in ("minmax4+ef", "minmax4+nesterov", "topk:k=0.01+ef+nesterov:mu=0.5", "none"):
        speed = measure_speed(codecs.get(spec), 12_345)
        assert speed.encode > 0 and speed.decode > 0 and 0 <= speed.error < 1


# -- the recommendation ------------------------------------------------------------------------------------------------


def cost(codec: str, overlapped: float, error: float) -> StepCost:
    return StepCost(codec, 0, 0, 0, overlapped, overlapped, error)


def test_nothing_is_done_where_nothing_is_gained() -> None:
    text = recommendation([cost("none", 1.03, 0), cost("cast", 1.02, 1e-4), cost("minmax8", 1.0, 0.6)])
    assert text.startswith("do nothing, because compression does not pay here: ")
    assert text.endswith("no codec would save more than 3% of it")


def test_what_is_recommended_is_worth_it() -> None:
    """The one with the least error among those about as fast as the fastest may be hardly faster than fp32."""
    text = recommendation([cost("none", 1.06, 0), cost("cast", 1.045, 1e-4), cost("minmax8", 1.0, 0.007)])
    assert text.startswith("minmax8, because") and "(1.1 times as fast)" in text


def test_of_several_measurements_the_least_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a busy machine all but one in ten may be ten times as long."""
    now, calls = [0.0], [0]

    def run() -> None:
        calls[0] += 1
        now[0] += 1e-4 if calls[0] % 10 == 0 else 1e-3

    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])
    times = speed._times(run)
    assert min(times) == pytest.approx(1e-4) and statistics.median(times) == pytest.approx(1e-3)


def test_doubts_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flags = tmp_path / "x.json", ("--parameters=16K", *FLAGS, "--codec=minmax8")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for load, spread, wanted in (
        (0.4, 1.1, []),
        (7.0, 1.1, ["a load of 7.0 on 2 processors before the measurements"]),
        (0.4, 4.0, ["the measurements of minmax8 have a median of 4.0 times the least"]),
    ):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        monkeypatch.setattr(
            "qccl.bench.doctor.doctor.measure_speed",
            lambda codec, _, spread=spread: CodecSpeed(1e-9, 1e-9, 0.0, spread if codec.name == "minmax" else 1.0),
        )
        result = doctor(*flags, f"--json={path}")
        doubts = [line.removeprefix("# Doubtful: ") for line in result.output.splitlines() if "# Doubtful: " in line]
        assert doubts == json.loads(path.read_text())["doubts"], result.output
        assert len(doubts) == len(wanted) and all(map(str.startswith, doubts, wanted)), doubts


def test_the_least_error_is_taken_among_the_fast_ones() -> None:
    costs = [cost("none", 4, 0), cost("cast", 2, 1e-4), cost("minmax8", 1.04, 0.007), cost("minmax4+ef", 1, 0.1)]
    text = recommendation(costs)
    assert text.startswith("minmax8, because") and "1040.0 ms instead of 4000.0 with fp32 (3.8 times as fast)" in text
    assert text.endswith("minmax4+ef, the fastest, takes 1000.0 ms and has a larger error")
    assert recommendation([*costs[:2], costs[3]]).startswith("minmax4+ef, because")
    assert recommendation(costs[:2]).startswith("cast (fp16), because")


def test_only_codecs_whose_quality_was_shown_are_recommended() -> None:
    costs = [cost("none", 4, 0), cost("cast", 2, 1e-4), cost("minmax4+ef", 1, 0.1)]
    for codec in ("onebit:reconstruct=mean+ef", "trellis2+ef", "minmax3"):
        text = recommendation([*costs, cost(codec, 0.1, 0.2)])
        assert text.startswith("minmax4+ef, because") and f"{codec} would take 100.0 ms" in text, text
        assert "docs/results.md does not show that it trains as well as fp32" in text


def test_the_codecs_that_are_recommended_are_those_of_the_results() -> None:
    """In each training that has them, most seeds reach fp32's quality in at most 1.1 times its steps."""
    found: dict[str, list[float]] = {}
    documents = [json.loads(path.read_text()) for path in (ROOT / "docs" / "results").glob("training-*.json")]
    for document in (each for each in documents if each.get("curves")):
        plain = [dict(row["curve"]) for row in document["curves"] if row["method"] == "fp32"]
        reached = [curve[document["budget"]] for curve in plain]
        target = statistics.fmean(reached) + (statistics.stdev(reached) if len(reached) > 1 else 0.0)
        steps_of: dict[str, list[float]] = {}
        for row in document["curves"]:
            at = next((step for step, quality in row["curve"] if quality <= target), math.inf)
            steps_of.setdefault(row["method"], []).append(at)
        for method, each in steps_of.items():
            known = [step for step in each if step < math.inf]
            relative = statistics.median(known if 2 * len(known) > len(each) else each)
            found.setdefault({"fp32": "none", "fp16": "cast"}.get(method, method), []).append(
                relative / statistics.median(steps_of["fp32"])
            )
    assert {method for method in SHOWN if max(found[method]) > 1.1} == set()
    assert max(found["onebit:reconstruct=mean+ef"]) > 1.1 < max(found["trellis2+ef"])


# -- the network that is measured --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "rate", "delay"), [(2, 6.25e6, 0.02), (4, 1.25e8, 0.0), (20, 12.5e6, 0.1)])
def test_the_rate_of_a_call_is_found(ranks: int, rate: float, delay: float) -> None:
    step = Step(StepComputation((), 0, 0, 0), ranks, rate, 1.0, delay)
    call = call_of(step, codecs.get("none"), 1 << 20, CodecSpeed(0.17e-9, 0.17e-9, 0))
    assert steps.rate_of(call.seconds, 4 << 20, ranks, 1.0, delay) == pytest.approx(rate, rel=0.02)
    assert steps.rate_of(call.seconds, 4 << 20, ranks, 1.0, 10.0) < 1e9  # no call is so short


def measured(tmp_path: Path, *command: str) -> dict[str, Any]:
    path = tmp_path / "x.json"
    flags = ["--parameters=1M", "--step=100ms", "--codec=minmax8", f"--json={path}"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "qccl.bench", "doctor", "--measure", *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# Recommendation: ") == 1 and "(measured by calls of " in done.stdout
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["step"]["ranks"] == 2 and found["network"]["spread"] >= 1
    return found


@pytest.mark.mpi
def test_ranks_of_one_machine_measure_their_network(tmp_path: Path) -> None:
    try:
        mpi = find_mpiexec()
    except StartError as error:
        pytest.skip(str(error))
    found = measured(tmp_path, mpi.path, *mpi.options(None), "-n", "2")
    assert found["network"]["rate"] > 1e6


@pytest.mark.lab
@pytest.mark.skipif(lab.obstacle() is not None, reason=f"no lab here: {lab.obstacle()}")
def test_a_network_with_delay_is_measured(tmp_path: Path) -> None:
    network = ("--link", "50mbit", "--delay", "20ms")
    found = measured(tmp_path, sys.executable, "-m", "qccl.bench", "run", "--ranks", "2", *network, "--")
    assert found["network"]["delay"] == pytest.approx(0.02, rel=0.25)
    assert found["network"]["rate"] == pytest.approx(50e6 / 8, rel=0.25)


# -- the options -------------------------------------------------------------------------------------------------------


def test_counts() -> None:
    assert [parse_count(text) for text in ("124M", "7b", "1.5K", "9")] == [124_000_000, 7_000_000_000, 1500, 9]
    for text in ("", "0", "-1", "12Q"):
        with pytest.raises(ValueError, match="is not a number of parameters"):
            parse_count(text)
