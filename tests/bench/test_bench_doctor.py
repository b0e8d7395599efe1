"""qccl-bench doctor: the arithmetic of a step, the recommendation, and the command's options."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bench_runs import LAUNCHERS
from click.testing import CliRunner, Result

from qccl import codecs
from qccl.bench import costs, quality
from qccl.bench.cli import main
from qccl.bench.costs import Cost, cost_of
from qccl.bench.doctor import measure_speed, parse_count, parse_sizes, recommendation
from qccl.bench.mpiexec import StartError, find_mpiexec
from qccl.bench.sizes import parse_link
from qccl.bench.tcp import congestion_control
from qccl.costs import step
from qccl.costs.profile import Gradient, Profile
from qccl.costs.step import Speed, Step
from qccl.costs.timeline import Call, Rank, Segment, step_seconds

ROOT = Path(__file__).parents[2]
#: seconds per element on one quiet core of the machine of docs/results, with values that no cache holds
SPEEDS = {
    "fp32": Speed(0, 0, 0),
    "fp16": Speed(0, 0, 0),
    "minmax8": Speed(0.14e-9, 0.15e-9, 0),
    "minmax4+ef": Speed(0.65e-9, 0.17e-9, 0),
    "trellis2+ef": Speed(2.8e-9, 0.37e-9, 0),
    "topk:k=0.01+ef": Speed(1.6e-9, 0.29e-9, 0),
    "onebit:reconstruct=mean+ef": Speed(0.84e-9, 0.1e-9, 0),
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
    profile = Profile(GRADIENTS, 0.08, 0.2, 0.02, powersgd={4: 0.03})
    return Step(profile, ranks, rate, **given)


def test_the_link_limits_a_step() -> None:
    """1 million elements in 8 bits behind 100 Mbit/s, on 4 ranks."""
    cost = cost_of(a_step(), "minmax8", Speed(1e-9, 1e-9, 0.01))
    encoded = sum(codecs.get("minmax8").encoded_nbytes(each, "float32") for each in (600_000, 400_000)) + 400
    assert cost.sent == pytest.approx(1.5 * encoded)
    assert cost.link == pytest.approx(cost.sent / 12.5e6) == pytest.approx(0.121, rel=0.01)
    assert cost.processor == pytest.approx(1e-3 + 1.75e-3, rel=1e-3)
    assert cost.alone >= 0.3 + cost.link  # nothing is faster than the bytes and the computation
    late = 1.5 * codecs.get("minmax8").encoded_nbytes(400_000, "float32") / 12.5e6
    assert 0.3 + late < cost.overlapped < 0.3 + late + 0.01  # calls and messages take less than 10 ms


def test_the_processor_limits_a_step() -> None:
    step = a_step(ranks=2, rate=1e9)
    fast, slow = (cost_of(step, "minmax8", Speed(each, each, 0.01)) for each in (1e-9, 200e-9))
    assert slow.processor == pytest.approx(200e-3 + 300e-3, rel=1e-3) and slow.link < 0.01
    assert slow.alone == pytest.approx(0.3 + slow.processor, rel=0.02)
    assert fast.overlapped < 0.31 < 0.3 + 0.4 * slow.processor < slow.overlapped <= slow.alone * (1 + 1e-9)


def test_ranks_that_share_a_processor_take_longer() -> None:
    """Two ranks on one processor compute, encode and decode half as fast; the link does not change."""
    speed = Speed(20e-9, 20e-9, 0.01)
    own, shared = (cost_of(a_step(rate=1e12, processors=each), "minmax8", speed) for each in (2.0, 0.5))
    assert shared.overlapped == pytest.approx(2 * (0.3 + own.processor), rel=0.03) and own.overlapped < shared.alone / 2
    behind = [cost_of(a_step(rate=1e5, processors=each), "minmax8", speed) for each in (2.0, 0.5)]
    assert behind[1].link == behind[0].link > 10 and behind[1].overlapped < 1.1 * behind[0].overlapped


def test_a_gradient_that_is_complete_last_cannot_overlap() -> None:
    """A tied embedding: its bytes pass the link after the backward pass, though it is the first parameter."""
    shapes = ((600, 1000), (400, 1000))
    tied = Profile((Gradient(shapes[0], 0.2, 1), Gradient(shapes[1], 0.01, 0)), 0.08, 0.2, 0.02)
    early = Profile((Gradient(shapes[0], 0.01, 0), Gradient(shapes[1], 0.2, 1)), 0.08, 0.2, 0.02)
    costs = [cost_of(Step(each, 2, 12.5e6), "none", Speed(0, 0, 0)) for each in (tied, early)]
    assert costs[0].overlapped - 0.3 == pytest.approx(600_000 * 4 / 12.5e6, rel=0.1)
    assert costs[1].overlapped - 0.3 == pytest.approx(400_000 * 4 / 12.5e6, rel=0.1)


def test_powersgd_sends_the_factors_of_matrices() -> None:
    cost = cost_of(a_step(), "powersgd:4", None)
    assert cost.sent == pytest.approx(1.5 * 4 * (4 * (1000 + 400) + 100 + 4 * (600 + 1000)))
    assert cost.processor == 0.03 and cost.error is None
    assert 0.3 + 0.03 + cost.link < cost.overlapped < 0.3 + 0.03 + cost.link + 0.02


def test_a_timeline_of_one_call() -> None:
    """By hand: two chunks of 1 s on the link a round, 2 s between the rounds; then the link's queue empties."""
    call = Call(encode=0.2, reduce=0.4, decode=0.2, link=2.0, chunks=2)
    segments = [Segment(1.0, [call]), Segment(0.5, waits=True)]
    assert step_seconds(segments, Rank(2.0, 0.0)) == pytest.approx(1 + 0.1 + 4.0 + 0.1 + 0.5)
    assert step_seconds(segments, Rank(2.0, 0.25)) == pytest.approx(1 + 0.1 + 4.0 + 0.1 + 0.5 + 0.25)
    assert step_seconds([Segment(1.0), Segment(0.0, [call]), Segment(0.5)], Rank(2.0, 0.0)) == pytest.approx(5.2)
    beside = [Segment(0.0, [Call(2.0, 0.0, 0.0, 0.0)]), Segment(2.0)]
    found = [step_seconds(beside, Rank(processors, 0.0)) for processors in (2.0, 1.0, 0.5)]
    assert found == pytest.approx([2.0, 4.0, 8.0])


def test_the_groups_are_those_of_compress() -> None:
    torch = pytest.importorskip("torch")
    from qccl.torch.groups import Policy, form_groups

    shapes = [(256, 64), (1024, 1024), (1024,), (768, 1024), (300, 3000), (12,), (90, 90), (90,), (4, 5)]
    named = [(f"{i}", torch.nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)]
    theirs = form_groups(named, Policy("minmax8", min_elements=4096), 4 << 20)
    ours = costs._groups([Gradient(shape, 0.0, 0) for shape in shapes])
    assert [[g.count for g in group] for _, group in ours] == [group.counts for group in theirs]
    assert ["minmax8" if is_encoded else "none" for is_encoded, _ in ours] == [group.codec_spec for group in theirs]


def with_steps() -> list[Path]:
    """The results files that have times of steps behind links without delay: only those are predicted."""
    paths = sorted((ROOT / "docs" / "results").glob("training-*.json"))
    return [path for path in paths if rows_without_delay(json.loads(path.read_text()))]


def rows_without_delay(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of SPEEDS' codecs whose link is a rate alone ("100mbit", not "100mbit 25ms 0.1% bbr")."""
    rows = [row for row in document.get("steps") or [] if row["link"] and row["method"] in SPEEDS]
    return [row for row in rows if len(row["link"].split()) == 1]


@pytest.mark.parametrize("path", with_steps(), ids=lambda path: path.stem)
def test_the_steps_that_were_measured_are_predicted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 20%, a part of which is that SPEEDS were measured another day: fp32, fp16 and codecs behind links."""
    document = json.loads(path.read_text())
    monkeypatch.setattr(step, "Segment", sleeping)
    ready = [(_shape(what), at) for what, at in document["compute"]["ready"]]
    for row in rows_without_delay(document):
        rate = parse_link(row["link"]).rate
        replay = Step(replayed(document["compute"], ready), row["ranks"], rate, 2 / row["ranks"])
        method = {"fp32": "none", "fp16": "cast"}.get(row["method"], row["method"])
        cost = cost_of(replay, method, SPEEDS[row["method"]])
        assert cost.overlapped == pytest.approx(row["seconds"], rel=0.2), (row["method"], row["link"], cost)


def _shape(what: int | list[int]) -> tuple[int, ...]:
    """Of a gradient in a results file, which has its shape or its size; large arrays are matrices then."""
    if isinstance(what, list):
        return tuple(what)
    return (1, what) if what >= 1 << 14 else (what,)


def replayed(compute: dict[str, Any], ready: list[tuple[tuple[int, ...], float]]) -> Profile:
    """The computation of a results file, in DDP's buckets of half a megabyte."""
    gradients, bucket, waiting, filled = [], 0, [], 0
    for shape, at in ready:
        waiting.append(shape)
        filled += 4 * math.prod(shape)
        if filled >= 1 << 19 or (shape, at) == ready[-1]:
            gradients += [Gradient(each, at, bucket) for each in waiting]
            bucket, waiting, filled = bucket + 1, [], 0
    return Profile(tuple(reversed(gradients)), compute["forward"], ready[-1][1], compute["optimiser"])


def sleeping(seconds: float, starts: Sequence[Call] = (), *, waits: bool = False) -> Segment:
    """The computation of those runs slept; calls and the step's own time did not."""
    return Segment(seconds, starts, waits, sleeps=not starts and seconds != costs._STEP)


def test_the_command_prints_the_figures_that_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    result = doctor("--sizes=2M,64K", *FLAGS, "--processors=1.5", "--codec=minmax4+ef", f"--json={path}")
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    profile = found["step"].pop("profile")
    assert [gradient["shape"] for gradient in profile["gradients"]] == [[1, 1 << 19], [1, 1 << 14]]
    assert profile["forward"] + profile["backward"] + profile["optimiser"] == pytest.approx(0.25)
    one = {"congestion": congestion_control(), "connections": 1}
    near = {"delay": 0.0, "loss": 0.0, "tcp": one, "gloo": one}
    assert found["step"] == {"ranks": 4, "rate": 12.5e6, "processors": 1.5} | near
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


def cost(codec: str, overlapped: float, error: float | None) -> Cost:
    return Cost(codec, 0, 0, 0, overlapped, overlapped, error)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of two trainings."""
    steps = {
        "minmax8": {"a": 1.0, "b": 1.05},
        "minmax4+ef": {"a": 1.08},
        "onebit+ef": {"a": 1.0, "b": None},
        "topk:k=0.01+ef": {"a": 1.2},
    }
    monkeypatch.setattr(quality, "STEPS", steps)


@pytest.mark.usefixtures("shown")
def test_nothing_is_done_where_nothing_is_gained() -> None:
    text = recommendation([cost("none", 1.03, 0), cost("cast", 1.02, 1e-4), cost("minmax8", 1.0, 0.6)])
    assert text.startswith("do nothing, ") and text.endswith("no codec would save more than 3% of it")


@pytest.mark.usefixtures("shown")
def test_the_least_error_is_taken_among_the_fast_ones() -> None:
    costs = [cost("none", 4, 0), cost("cast", 2, 1e-4), cost("minmax8", 1.04, 0.007), cost("minmax4+ef", 1, 0.1)]
    text = recommendation(costs)
    assert text.startswith("minmax8, because") and "1040.0 ms instead of 4000.0 with fp32 (3.8 times as fast)" in text
    assert text.endswith("minmax4+ef, the fastest, takes 1000.0 ms and has a larger error")
    assert recommendation([*costs[:2], costs[3]]).startswith("minmax4+ef, because")
    assert recommendation(costs[:2]).startswith("cast (fp16), because")


@pytest.mark.usefixtures("shown")
def test_only_codecs_whose_quality_was_shown_are_recommended() -> None:
    """One bit is not, however fast it is; nor is a codec that no training had, nor PowerSGD."""
    costs = [cost("none", 4, 0), cost("cast", 2, 1e-4), cost("minmax4+ef", 1, 0.1)]
    for codec, remark in (
        ("onebit+ef", "a 1.00x, b not reached"),
        ("topk:k=0.01+ef", "a 1.20x"),
        ("minmax2+ef", "not shown"),
        ("powersgd:4", "not shown"),
    ):
        text = recommendation([*costs, cost(codec, 0.1, None)])
        assert text.startswith("minmax4+ef, because") and f"{codec} would take 100.0 ms" in text, text
        assert f"it was not shown to train as well as fp32 ({remark})" in text


def test_the_table_of_shown_codecs_is_that_of_the_results() -> None:
    """After a change of docs/results: python bench/quality.py"""
    import quality as program

    assert program.found() == quality.STEPS
    assert not quality.is_shown("onebit:reconstruct=mean+ef") and quality.is_shown("minmax8")


# -- the options -------------------------------------------------------------------------------------------------------


def test_counts_and_sizes() -> None:
    assert [parse_count(text) for text in ("124M", "7b", "1.5K", "9")] == [124_000_000, 7_000_000_000, 1500, 9]
    assert parse_sizes("4M,64K,4") == (1 << 20, 1 << 14, 1)
    for text in ("", "0", "-1", "12Q"):
        with pytest.raises(ValueError, match="is not a number of parameters"):
            parse_count(text)


MODEL = """
import torch

def make():
    model = torch.nn.Linear(30, 20)
    model.bias.requires_grad_(False)
    return model

number = 5
"""


def test_a_model_of_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    (tmp_path / "users_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    result = doctor("--model=users_model:make", *FLAGS, "--codec=none")
    assert "600 gradients in 1 array " in result.output, result.output
    assert "powersgd:4" in result.output and "(--step; estimated: " in result.output
    for text, reason in (
        ("users_model", "gives no PyTorch module; write module:function"),
        ("users_model:number", "cannot be called"),
        ("users_model:missing", "cannot be imported"),
        ("no_such_module:make", "cannot be imported"),
    ):
        result = doctor(f"--model={text}", *FLAGS)
        assert result.exit_code == 2 and reason in " ".join(result.output.split()), result.output


TRAINING = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(500, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return nn.functional.linear(self.norm(self.embedding(x)), self.embedding.weight)

def training():
    model = Tied()
    model.steps = 0
    def loss():
        model.steps += 1
        return model(torch.arange(100)).square().mean()
    return model, loss, torch.optim.SGD(model.parameters(), lr=0.1)

def tied_last():
    model, loss, _ = training()
    return model, loss

def wrong():
    return Tied(), 5
"""


def test_a_real_backward_pass_tells_when_gradients_are_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied embedding is complete last, though the output layer is computed last; --step is not needed."""
    pytest.importorskip("torch")
    (tmp_path / "users_training.py").write_text(TRAINING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "x.json"
    flags = ["--ranks=2", "--link=100mbit", "--codec=minmax8", "--bucket=0.00001", f"--json={path}"]
    result = doctor("--model=users_training:training", *flags)
    assert result.exit_code == 0 and " ms (measured)" in result.output, result.output
    found = json.loads(path.read_text())
    embedding, *others = found["step"]["profile"]["gradients"]
    assert embedding["shape"] == [500, 16] and embedding["bucket"] > max(each["bucket"] for each in others)
    assert [each["codec"] for each in found["costs"]] == ["none", "cast", "minmax8", "powersgd:4", "powersgd:1"]
    scaled = doctor("--model=users_training:tied_last", *flags, "--step=1s")
    profile = json.loads(path.read_text())["step"]["profile"]
    assert scaled.exit_code == 0, scaled.output
    assert profile["forward"] + profile["backward"] + profile["optimiser"] == pytest.approx(1)
    assert 0 < max(each["ready"] for each in profile["gradients"]) <= profile["backward"] * (1 + 1e-9)
    result = doctor("--model=users_training:wrong", *flags)
    assert result.exit_code == 2 and "must return the module, or (module, loss)" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--link=1gbit", "--step=1s"], "give the gradients once: --sizes, --parameters or --model"),
        (["--parameters=1M", "--sizes=1M", *FLAGS], "give the gradients once"),
        (["--parameters=1M", "--link=1gbit"], "--step is missing"),
        (["--parameters=1M", "--step=1s"], "give the network once: --link RATE, or --measure"),
        (["--parameters=1M", "--measure", *FLAGS], "give the network once"),
        ([], "--parameters or --model; give the network once: --link RATE, or --measure under a launcher; --step is"),
        (["--parameters=1M", "--measure", "--step=1s"], "--measure needs several ranks: mpiexec -n 4"),
        (["--sizes=4M,2", *FLAGS], "has an array of less than 4 bytes"),
        (["--parameters=1M", "--ranks=1", "--link=1gbit", "--step=1s"], "1 is not in the range x>=2"),
        (["--parameters=1M", "--processors=nan", *FLAGS], "nan is not a finite number"),
    ],
)
def test_refused(flags: list[str], reason: str) -> None:
    result = doctor(*flags)
    assert result.exit_code == 2 and reason in " ".join(result.output.split()), result.output


@pytest.mark.mpi
def test_the_link_is_measured_among_the_ranks_of_a_launcher(tmp_path: Path) -> None:
    try:
        mpi = find_mpiexec()
    except StartError as error:
        pytest.skip(str(error))
    path = tmp_path / "x.json"
    command = [mpi.path, *mpi.options(None), "-n", "3", sys.executable, "-m", "qccl.bench", "doctor", "--measure"]
    done = subprocess.run(
        [*command, "--sizes=256K", "--step=1ms", "--codec=minmax8", f"--json={path}"],
        cwd=ROOT,
        env=mpi.environment(3, None, 0) | os.environ,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# Recommendation: ") == 1 and "(measured: a plain all-reduce" in done.stdout
    found = json.loads(path.read_text())["step"]
    assert found["ranks"] == 3 and found["rate"] > 0
