"""qccl-bench doctor: the arithmetic of a step, the recommendation, and the command's options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from test_bench import LAUNCHERS

from qccl import codecs
from qccl.bench.cli import main
from qccl.bench.doctor import Cost, Speed, Step, cost_of, measure_speed, parse_count, parse_sizes, recommendation
from qccl.bench.mpiexec import StartError, find_mpiexec

ROOT = Path(__file__).parent.parent
FLAGS = ["--ranks=4", "--link=100mbit", "--step=250ms"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def doctor(*flags: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *flags])


# -- the arithmetic ----------------------------------------------------------------------------------------------------


def test_the_link_limits_a_step() -> None:
    """1 million elements in 8 bits behind 100 Mbit/s, on 4 ranks."""
    step = Step(counts=(600_000, 400_000), ranks=4, rate=12.5e6, computation=0.3)
    cost = cost_of(step, "minmax8", Speed(1e-9, 1e-9, 0.01))
    encoded = sum(codecs.get("minmax8").encoded_nbytes(count, "float32") for count in step.counts)
    assert cost.sent == pytest.approx(1.5 * encoded)
    assert cost.link == pytest.approx(cost.sent / 12.5e6) == pytest.approx(0.121, rel=0.01)
    assert cost.processor == pytest.approx(1e-3 + 1.75e-3)
    assert cost.alone == pytest.approx(0.3 + cost.link)
    assert cost.overlapped == pytest.approx(0.3)  # it is shorter than the backward pass of 0.2 s


def test_the_processor_limits_a_step() -> None:
    step = Step(counts=(1_000_000,), ranks=2, rate=1e9, computation=0.03)
    cost = cost_of(step, "minmax8", Speed(20e-9, 10e-9, 0.01))
    assert cost.processor == pytest.approx(0.02 + 0.015) and cost.link < 0.01
    assert cost.alone == pytest.approx(0.03 + 0.035)
    assert cost.overlapped == pytest.approx(0.03 + 0.035 - 0.02)


def test_the_command_prints_the_figures_that_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    result = doctor("--sizes=2M,64K", *FLAGS, "--codec=minmax4+ef", f"--json={path}")
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert found["step"] == {"counts": [1 << 19, 1 << 14], "ranks": 4, "rate": 12.5e6, "computation": 0.25}
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


def cost(codec: str, overlapped: float, error: float) -> Cost:
    return Cost(codec, 0, 0, 0, overlapped, overlapped, error)


def test_nothing_is_done_where_nothing_is_gained() -> None:
    text = recommendation([cost("none", 1.03, 0), cost("cast", 1.02, 1e-4), cost("onebit+ef", 1.0, 0.6)])
    assert text.startswith("do nothing, ") and text.endswith("no codec would save more than 3% of it")


def test_the_least_error_is_taken_among_the_fast_ones() -> None:
    costs = [cost("none", 4, 0), cost("cast", 2, 1e-4), cost("minmax8", 1.04, 0.007), cost("minmax4+ef", 1, 0.1)]
    text = recommendation(costs)
    assert text.startswith("minmax8, because") and "1040.0 ms instead of 4000.0 with fp32 (3.8 times as fast)" in text
    assert text.endswith("minmax4+ef, the fastest, takes 1000.0 ms and has a larger error")
    assert recommendation([*costs[:2], costs[3]]).startswith("minmax4+ef, because")
    assert recommendation(costs[:2]).startswith("cast (fp16), because")


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
    for text, reason in (
        ("users_model", "gives no PyTorch module; write module:function"),
        ("users_model:number", "cannot be called"),
        ("users_model:missing", "cannot be imported"),
        ("no_such_module:make", "cannot be imported"),
    ):
        result = doctor(f"--model={text}", *FLAGS)
        assert result.exit_code == 2 and reason in " ".join(result.output.split()), result.output


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
