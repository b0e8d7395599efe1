"""scripts/gpu-check without a GPU: its arguments, its results file, its verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import fake_cuda
import pytest

import qccl
from qccl.cuda import libraries

pytestmark = pytest.mark.starts_first

ROOT = Path(__file__).resolve().parents[2]


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / "gpu-check"), *arguments],
        env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip


def test_without_a_gpu_it_fails_and_says_why(tmp_path):
    if not libraries.missing():
        pytest.skip("this machine has CUDA")
    done = gpu_check("-o", str(tmp_path / "r.json"))
    assert done.returncode == 1
    assert f"nothing can be checked here: {libraries.missing()[0]}" in done.stderr
    assert not (tmp_path / "r.json").exists()


def test_a_section_that_does_not_exist():
    done = gpu_check("kernles")
    assert done.returncode == 2
    assert "there is no section kernles; the sections are kernels, streams" in done.stderr


def test_the_file(world, tmp_path, monkeypatch, capsys):
    import check

    ran = []

    def apart(name, logs):
        ran.append(name)
        return {"status": "not run" if name == "memcheck" else "passed", "seconds": 1.0, "reason": "no sanitizer"}

    monkeypatch.setattr(check, "run_apart", apart)
    path = tmp_path / "new" / "results.json"
    assert check.main(["streams", "graphs", "-o", str(path)]) == 0
    assert ran == ["streams", "graphs"]
    content = json.loads(path.read_text())
    assert set(content["sections"]) == {"streams", "graphs"}
    assert not content["passed"] and content["not_run"] == [s for s in check.REQUIRED if s not in ran]
    assert content["machine"]["gpus"] == ["Fake 100"] * fake_cuda.DEVICES
    assert content["machine"]["nccl"] == "2.28.0"
    assert content["qccl"] == qccl.__version__ and content["commit"]
    assert content["sections"]["streams"]["date"]
    assert check.main(["memcheck", "-o", str(path)]) == 1  # a section that did not run counts as a failure
    assert "no sanitizer" in capsys.readouterr().out
    assert check.main(["-o", str(path)]) == 1
    assert ran[-len(check.REQUIRED) :] == check.REQUIRED
    assert not json.loads(path.read_text())["passed"]


def test_three_runs_fill_one_file(world, tmp_path, monkeypatch):
    """A section that runs again replaces its own result; another commit or GPU begins anew."""
    import check

    numbers = iter(range(1000))
    monkeypatch.setattr(
        check,
        "run_apart",
        lambda name, logs: {"status": "passed", "seconds": 1.0, "figures": {"number": next(numbers)}},
    )
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setenv("QCCL_COMMIT", "a1")
    for run in check.RUNS:
        assert check.main(["--run", str(run)]) == 0
    [path] = (tmp_path / "docs" / "results").iterdir()
    content = json.loads(path.read_text())
    assert content["passed"] and content["not_run"] == [] and content["commit"] == "a1"
    assert [each["figures"]["number"] for each in content["sections"].values()] == list(range(len(check.SECTIONS)))

    yesterday = path.with_name("fake-100-2026-01-01.json")
    path.rename(yesterday)
    assert check.main(["graphs"]) == 0
    assert not path.exists() and len(json.loads(yesterday.read_text())["sections"]) == len(check.SECTIONS)
    assert json.loads(yesterday.read_text())["sections"]["graphs"]["figures"]["number"] == len(check.SECTIONS)
    elsewhere = tmp_path / "elsewhere.json"
    assert check.main(["graphs", "-o", str(elsewhere)]) == 0
    assert json.loads(elsewhere.read_text())["not_run"] == []

    monkeypatch.setenv("QCCL_COMMIT", "b2")
    assert check.main(["graphs", "-o", str(elsewhere)]) == 0
    assert set(json.loads(elsewhere.read_text())["sections"]) == {"graphs"}
    monkeypatch.setattr(libraries, "device_names", lambda: ["Fake 200"])
    assert check.main(["streams", "-o", str(elsewhere)]) == 0
    assert set(json.loads(elsewhere.read_text())["sections"]) == {"streams"}


def test_without_a_repository_the_caller_names_the_commit(world, tmp_path, monkeypatch, capsys):
    import check

    assert len(check.commit().removesuffix("-dirty")) == 40
    monkeypatch.setattr(check, "ROOT", ROOT / "tests")  # in a repository, but not its root
    monkeypatch.delenv("QCCL_COMMIT", raising=False)
    with pytest.raises(SystemExit):
        check.main(["graphs", "-o", str(tmp_path / "r.json")])
    assert "set QCCL_COMMIT" in capsys.readouterr().err


def test_long_errors_do_not_fill_the_output(world, tmp_path, monkeypatch, capsys):
    import check

    result = {"status": "failed", "seconds": 1.0, "reason": "below the limit" + 5000 * "x"}
    monkeypatch.setattr(check, "run_apart", lambda name, logs: dict(result))
    path = tmp_path / "r.json"
    assert check.main(["graphs", "-o", str(path)]) == 1
    assert "below the limit" in (out := capsys.readouterr().out) and len(out) < 2000
    assert json.loads(path.read_text())["sections"]["graphs"]["reason"] == result["reason"]


def test_the_files_name():
    import check

    now = datetime(2026, 11, 21, tzinfo=UTC)
    path = check.default_output(["NVIDIA H100 80GB HBM3"], now)
    assert path == ROOT / "docs" / "results" / "nvidia-h100-80gb-hbm3-2026-11-21.json"


def test_sections_fail_by_name(monkeypatch):
    import check

    def fails():
        raise AssertionError("below 85%", {"copy_gb_per_s": 3000})

    def missing():
        raise check.Missing("there is no compute-sanitizer")

    def no_file():
        os.stat("/nonexistent")

    sections = {"a": (fails, 1), "b": (missing, 1), "c": (lambda: {"x": 1}, 1), "d": (no_file, 1)}
    monkeypatch.setattr(check, "SECTIONS", sections)
    found = {name: check.run_section(name) for name in sections}
    assert found["a"]["status"] == "failed" and found["a"]["figures"] == {"copy_gb_per_s": 3000}
    assert "AssertionError: below 85%" in found["a"]["reason"]
    assert found["b"]["status"] == "not run" and "compute-sanitizer" in found["b"]["reason"]
    assert found["c"]["figures"] == {"x": 1} and found["c"]["status"] == "passed"
    assert "No such file or directory: '/nonexistent'" in found["d"]["reason"] and "figures" not in found["d"]


def test_a_failure_counts_beside_a_check_that_cannot_run():
    from reports import Missing, each_of

    def fails():
        raise AssertionError("a race")

    def missing():
        raise Missing("no tool")

    checks = {"first": fails, "second": missing, "third": lambda: 3}
    with pytest.raises(AssertionError, match="first: AssertionError: a race") as failed:
        each_of(checks)
    assert failed.value.args[1] == {"third": 3}
    with pytest.raises(Missing, match="second: no tool"):
        each_of({name: checks[name] for name in ("second", "third")})


def test_results_behind_the_words_of_a_library(tmp_path):
    """What it wrote without the end of a line stands before the result, in the same line."""
    import check

    log = tmp_path / "log"
    log.write_text(f'x{check.PART}{{"a": 1}}\n{check.PART}{{"b": \nw{check._RESULT}{{"status": "passed"}}\nend\n')
    assert check._read(log) == ({"status": "passed"}, {"a": 1}, f'x\n{check.PART}{{"b": \nw\nend')


def test_each_part_of_a_section_is_told(capsys):
    import reports

    def fails():
        raise ValueError("a bug")

    with pytest.raises(AssertionError) as caught:
        reports.each_of({"a": lambda: 1, "b": fails, "c": lambda: 3})
    assert caught.value.args == ("b: ValueError: a bug", {"a": 1, "c": 3})
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line.removeprefix(reports.PART)) for line in lines] == [
        {"a": 1},
        {"b": "failed: a bug"},
        {"c": 3},
    ]


def test_help_comes_at_once(tmp_path):
    """Also where nothing is built, and nothing can be."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    for argument, text in (("--help", "--run {"), ("--list", "--run triage: driver (30 s), codecs")):
        command = [str(ROOT / "scripts" / "gpu-check"), argument]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0 and text in done.stdout and "build" not in done.stderr


def test_missing_tools_of_the_build_are_named(monkeypatch, tmp_path):
    import building

    assert building.build(ROOT) == ""  # it is there
    monkeypatch.setattr(building, "_is_built", lambda root: False)
    monkeypatch.setattr(building.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(building, "_path", lambda: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    text = building.build(tmp_path)
    assert text.startswith(
        "qccl's extension must be built, and there is no nanobind, no CMake, no ninja or make, no C++ compiler"
    )
    assert "pip install nanobind cmake ninja" in text and "\n" not in text
    assert not list(tmp_path.iterdir())


def test_the_verdict_of_the_triage(world, tmp_path, monkeypatch, capsys):
    """The first section that did not pass; a machine without a profiler is usable, and each result is kept."""
    import check

    status = {}
    monkeypatch.setattr(
        check, "run_apart", lambda name, logs: {"seconds": 1.0, "status": status[name], "reason": f"as {name}"}
    )
    path = tmp_path / "r.json"
    status |= dict.fromkeys(check.RUNS["triage"], "passed") | dict.fromkeys(check.OPTIONAL, "not run")
    assert check.main(["--run", "triage", "-o", str(path)]) == 0
    assert "verdict: usable" in capsys.readouterr().out
    assert list(json.loads(path.read_text())["sections"]) == list(check.RUNS["triage"])
    status |= {"nccl": "failed", "rates": "failed"}
    assert check.main(["--run", "triage", "-o", str(path)]) == 1
    assert "verdict: not usable yet: nccl: as nccl" in capsys.readouterr().out
    assert not json.loads(path.read_text())["passed"]
    status |= {"nccl": "passed", "rates": "passed", "sanitizer": "failed"}
    assert check.main(["--run", "triage", "-o", str(path)]) == 1
    assert "verdict: not usable yet: sanitizer" in capsys.readouterr().out


def test_the_limits_of_the_runs():
    """Each run takes at most eight minutes with the build, the triage five without; the bytes are compared first."""
    import building
    import check

    assert check.RUN_SECONDS + building.SECONDS <= 480 and check.TRIAGE_SECONDS <= 300
    for run, sections in check.RUNS.items():
        limit = check.TRIAGE_SECONDS if run == "triage" else check.RUN_SECONDS
        assert sum(check.SECTIONS[name][1] for name in sections) <= limit
    assert [name for sections in check.RUNS.values() for name in sections] == list(check.SECTIONS)
    assert next(iter(check.SECTIONS)) == "kernels"
    assert set(check.OPTIONAL) < set(check.RUNS["triage"]) and not set(check.RUNS["triage"]) & set(check.REQUIRED)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "section",
    [
        "kernels",
        "streams",
        "graphs",
        "dispatch",
        "overlap",
        "staged",
        "ranks",
        "faults",
        "torch",
        "jax",
        "large",
        "auto",
        "driver",
        "codecs",
        "nccl",
        "rates",
        "sanitizer",
    ],
)
def test_a_section(section, tmp_path):
    if lacking := libraries.missing():
        pytest.skip("; ".join(lacking))
    import check

    found = check.run_apart(section, tmp_path)
    if found["status"] == "not run":
        pytest.skip(found["reason"])
    assert found["status"] == "passed", found["reason"]
