"""qccl-bench with PyTorch: gloo, models for the doctor, and a training that is replayed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import peers
import pytest
import torch
from bench_runs import LAUNCHERS, bench, codecs_of, peer_ranks, under_torchrun
from click.testing import CliRunner, Result
from torch import nn

from qccl import codecs
from qccl.bench.cli import main
from qccl.bench.doctor import steps
from qccl.bench.doctor.speed import CodecSpeed
from qccl.bench.doctor.training import Gradient, StepComputation
from qccl.bench.lab import lab
from qccl.torch.groups import Policy, form_groups

LAB = [pytest.mark.lab, pytest.mark.skipif(bool(lab.obstacle()), reason=str(lab.obstacle()))]

# -- gloo --------------------------------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize("links", [[], pytest.param(["--link=1gbit"], marks=LAB)], ids=["", "behind links"])
def test_gloos_all_reduce_is_the_baseline(links: list[str], tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    flags = ["--transport=gloo", *links, f"--json={path}"]
    done = bench("allreduce", "--ranks=2", "-b256K", "-e256K", "-n2", *flags)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert codecs_of(done.stdout) == ["gloo", "minmax8"] and "over gloo of PyTorch " in done.stdout.splitlines()[0]
    assert "# Out of bounds values : 0 OK" in done.stdout
    assert ("# Crossed the link     : at least 1" in done.stdout) == bool(links)
    assert json.loads(path.read_text())["complete"]


@pytest.mark.processes
def test_under_torchrun_gloo_is_used_if_it_is_asked_for() -> None:
    flags = ("-b4K", "-e4K", "-n2", "--codec=minmax8", "-T30", "--transport=gloo")
    (first, _), (second, _) = under_torchrun("allreduce", *flags)
    head = first.splitlines()[0]
    assert codecs_of(first) == ["gloo", "minmax8"] and second == ""
    assert "allreduce over gloo of PyTorch " in head and "plain: gloo" in head


@pytest.mark.processes
def test_ranks_find_the_error_of_gloo_with_bfloat16(tmp_path: Path) -> None:
    (first,), (second,) = peer_ranks("gloo bf16", tmp_path)
    row = peers._row((first, second), 2)
    assert row["equal"] and row["count"] == 5000 and 1e-3 < row["error"] < 1e-2 and abs(row["bias"]) < 1e-2


# -- the doctor --------------------------------------------------------------------------------------------------------

MODELS = """
import torch
from torch import nn

def make():
    model = nn.Linear(30, 20)
    model.bias.requires_grad_(False)
    return model

def with_loss():
    return make(), lambda: torch.zeros(())

number = 5
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with models in the current folder; its name."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    name = f"models_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def doctor(model: str, *flags: str) -> Result:
    return CliRunner().invoke(main, ["doctor", f"--model={model}", "--ranks=4", "--link=100mbit", *flags])


def test_the_groups_are_those_of_compress(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(256, 64), (1024, 1024), (1024,), (768, 1024), (300, 3000), (12,), (90, 90), (90,), (4, 5)]
    named = [(f"{i}", nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)]
    theirs = form_groups(named, Policy("minmax8", min_elements=4096), 4 << 20)
    own = StepComputation(tuple(Gradient(shape, 0.0, 0) for shape in shapes), 0.0, 0.0, 0.0)
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(steps, "call_of", lambda step, codec, count, speed: asked.append((codec.spec(), count)))
    ours = [*steps._of_groups(steps.Step(own, 2, 1e9), codecs.get("minmax8"), CodecSpeed(0, 0, 0))]
    assert len(ours) == len(theirs)
    assert asked == [*dict.fromkeys((group.codec_spec, sum(group.counts)) for group in theirs)]


def test_a_model_of_pytorch(models: str) -> None:
    result = doctor(f"{models}:make", "--step=250ms", "--codec=none")
    assert "600 gradients in 1 array " in result.output, result.output
    assert "# computation of a step: 250.0 ms: forward " in result.output


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "gives no PyTorch module; write module:function"),
        ("{}:number", "cannot be called"),
        ("{}:missing", "cannot be imported"),
        ("no_such_module:make", "cannot be imported"),
        ("{}:with_loss", "let it return the module alone. Steps are not run any more: time one"),
    ],
)
def test_what_is_no_model_is_refused(models: str, text: str, reason: str) -> None:
    result = doctor(text.format(models), "--step=250ms")
    assert result.exit_code == 2 and reason in " ".join(result.output.split()), result.output


# -- the training that is replayed -------------------------------------------------------------------------------------


def test_replayed_gradients_have_the_shapes_of_the_model() -> None:
    """Otherwise PowerSGD, whose matrices follow the shapes, sends and computes something else."""
    import training_rank

    ready = [([1024, 1024], 0.0), ([64], 0.001), ([256, 768], 0.002)]
    module = training_rank._replay(ready)
    module(torch.zeros(1, requires_grad=True)).backward()
    assert [list(p.grad.shape) for p in module.parameters()] == [shape for shape, _ in reversed(ready)]
