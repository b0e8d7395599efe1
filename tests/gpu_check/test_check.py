"""scripts/gpu-check without a GPU: its arguments, its results file, its verdict, and a section that hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qccl.cuda import libraries

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.processes
def test_without_a_gpu_it_fails_and_says_why(tmp_path):
    if not libraries.missing():
        pytest.skip("this machine has CUDA")
    command = [str(ROOT / "scripts" / "gpu-check"), "-o", str(tmp_path / "r.json")]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and not (tmp_path / "r.json").exists()
    assert f"nothing can be checked here: {libraries.missing()[0]}" in done.stderr


def test_the_file_and_the_verdict(cupy, tmp_path, monkeypatch, capsys):
    """A run fills the file of earlier ones; the verdict names the first section that did not pass."""
    import check

    with pytest.raises(SystemExit):
        check.main(["kernles"])
    assert "there is no section kernles; the sections are kernels, streams" in capsys.readouterr().err
    status = dict.fromkeys(check.SECTIONS, "passed") | dict.fromkeys(check.OPTIONAL, "not run")
    outcome = lambda name, logs: {"seconds": 1.0, "status": status[name], "reason": f"as {name}"}  # noqa: E731
    monkeypatch.setattr(check, "run_apart", outcome)
    path = tmp_path / "new" / "results.json"
    assert check.main(["--run", "triage", "-o", str(path)]) == 0 and "verdict: usable" in capsys.readouterr().out
    for run in "123":
        assert not json.loads(path.read_text())["passed"]
        assert check.main(["--run", run, "-o", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content["passed"] and list(content["sections"]) == list(check.SECTIONS) and content["commit"]
    assert content["machine"]["gpus"][0] == "Fake 100" and content["sections"]["streams"]["date"]
    status |= {"nccl": "failed", "rates": "failed"}
    assert check.main(["--run", "triage", "-o", str(path)]) == 1
    assert "verdict: not usable yet: nccl: as nccl" in capsys.readouterr().out


def test_another_commit_begins_anew(cupy, tmp_path, monkeypatch, capsys):
    """Sections of other sources say nothing of these; without a repository the caller names the commit."""
    import check

    monkeypatch.setattr(check, "run_apart", lambda name, logs: {"seconds": 1.0, "status": "passed"})
    path = tmp_path / "r.json"
    for commit, section, kept in (
        ("a1", "graphs", {"graphs"}),
        ("a1", "streams", {"graphs", "streams"}),
        ("b2", "jax", {"jax"}),
    ):
        monkeypatch.setenv("QCCL_COMMIT", commit)
        assert check.main([section, "-o", str(path)]) == 0
        assert json.loads(path.read_text())["sections"].keys() == kept
    monkeypatch.delenv("QCCL_COMMIT")
    monkeypatch.setattr(check, "ROOT", ROOT / "tests")  # in a repository, but not its root
    with pytest.raises(SystemExit):
        check.main(["graphs", "-o", str(path)])
    monkeypatch.setenv("QCCL_COMMIT", "a1")
    monkeypatch.setitem(sys.modules, "qccl._host", None)
    assert check.main(["graphs", "-o", str(path)]) == 1 and "carry a built extension" in capsys.readouterr().err


def test_a_failure_is_never_a_success(monkeypatch, capsys, tmp_path):
    """With its figures, and those of the other parts; beside a part that cannot run; behind the words of a library."""
    import check
    import reports

    def fails():
        raise ValueError("a bug")

    def missing():
        raise reports.Missing("no tool")

    both = {"a": lambda: 1, "b": fails, "c": missing, "d": lambda: 4}
    monkeypatch.setattr(check, "SECTIONS", {"x": (lambda: reports.each_of(both), 1), "y": (missing, 1)})
    found = check.run_section("x")
    assert (found["status"], found["figures"]) == ("failed", {"a": 1, "d": 4}) and "b: ValueError" in found["reason"]
    assert check.run_section("y")["status"] == "not run"
    told = [line.removeprefix(reports.PART) for line in capsys.readouterr().out.splitlines()]
    assert json.loads(told[1]) == {"b": "failed: a bug"}
    (log := tmp_path / "log").write_text(f'x{check.PART}{{"a": 1}}\n{check.PART}{{"b": \nw{check._RESULT}{{"c": 2}}\n')
    assert check._read(log) == ({"c": 2}, {"a": 1}, f'x\n{check.PART}{{"b": \nw')


def test_the_runs_have_each_section_once_and_fit_their_limits():
    import check

    assert check.RUN_SECONDS <= 480 and check.TRIAGE_SECONDS <= 300
    assert [name for names in check.RUNS.values() for name in names] == list(check.SECTIONS)
    for run, names in check.RUNS.items():
        limit = check.TRIAGE_SECONDS if run == "triage" else check.RUN_SECONDS
        assert sum(check.SECTIONS[name][1] for name in names) <= limit


@pytest.mark.processes
def test_a_section_that_hangs_is_ended_and_its_figures_are_kept(monkeypatch, tmp_path):
    import check

    script = f"""#!/bin/sh\necho '{check.PART}{{"first": 12.3456789}}'\necho half done >&2\nsleep 60"""
    program = tmp_path / "python"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setattr(check.sys, "executable", str(program))
    monkeypatch.setattr(check, "SECTIONS", {"slow": (dict, 1.0)})
    found = check.run_apart("slow", tmp_path / "logs")
    assert found["status"] == "failed" and found["figures"] == {"first": 12.35}
    assert found["reason"] == "not done after 1 s: half done"


SECTIONS = ["kernels", "streams", "graphs", "dispatch", "overlap", "staged", "ranks", "faults", "torch", "jax", "large"]
SECTIONS += ["driver", "codecs", "nccl", "rates", "sanitizer"]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_a_section(section, tmp_path):
    if lacking := libraries.missing():
        pytest.skip("; ".join(lacking))
    import check

    found = check.run_apart(section, tmp_path)
    if found["status"] == "not run":
        pytest.skip(found["reason"])
    assert found["status"] == "passed", found["reason"]
