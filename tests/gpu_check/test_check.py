"""scripts/gpu-check without a GPU: its arguments, its results file, its two calls on the fake, and what hangs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import patience
import pytest

from qccl import _host
from qccl.engine.cuda import libraries

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.processes
def test_without_a_gpu_it_fails_and_says_why(tmp_path):
    if not libraries.missing():
        pytest.skip("this machine has CUDA")
    command = [str(ROOT / "scripts" / "gpu-check"), "-o", str(tmp_path / "results")]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and not (tmp_path / "results").exists()
    assert f"nothing can be checked here: {libraries.missing()[0]}" in done.stderr


@pytest.fixture
def outcomes(cupy, monkeypatch):
    """The statuses of sections that do not run, and the names and limits of those that would have."""
    import check

    status, ran = dict.fromkeys(check.SECTIONS, "passed") | dict.fromkeys(check.OPTIONAL, "not run"), []

    def outcome(name, logs, limit, keep):
        ran.append((name, limit))
        return {"seconds": 1.0, "status": status[name], "reason": f"as {name}"}

    monkeypatch.setattr(check, "run_apart", outcome)
    return status, ran


def names(ran):
    found = [name for name, _ in ran]
    ran.clear()
    return found


def test_what_each_call_runs(outcomes, tmp_path, monkeypatch, capsys):
    """The second call has first what has failed, also for the commit that mends it, and sanitizer if nothing has.

    A decisive failure ends a call. Both calls for one commit fill one file, named by GPU, date and commit.
    """
    import check

    status, ran = outcomes
    for commit, run, failed, expected in (
        ("a1", "first", ["nccl", "rates"], check.FIRST),
        ("b2", "second", ["bandwidth"], ["nccl", "rates", *check.SECOND]),
        ("c3", "first", ["driver"], ["probe", "driver"]),
        ("d4", "second", [], [*check.FIRST[1:], *check.SECOND]),
        ("e5", "first", [], check.FIRST),
        ("e5", "second", [], ["sanitizer", *(name for name in check.SECOND if name != "sanitizer")]),
    ):
        monkeypatch.setenv("QCCL_COMMIT", commit)
        status |= dict.fromkeys(check.REQUIRED, "passed") | dict.fromkeys(failed, "failed")
        assert check.main(["--run", run, "-o", str(tmp_path)]) == bool(failed)
        assert f"to mend: {', '.join(failed) or 'nothing'}; not started: none" in capsys.readouterr().out or failed
        found = names(ran)
        assert found == expected
        [path] = tmp_path.glob(f"fake-100-*-{commit}.json")
        content = json.loads(path.read_text())
        assert path.name.startswith(f"fake-100-{content['date'][:10]}-")
        if (commit, run) == ("e5", "second"):
            assert content["passed"] and list(content["sections"]) == list(check.SECTIONS)
        else:
            assert not content["passed"] and content["sections"].keys() == set(found)
        path.write_text(json.dumps(content | {"date": f"2026-01-0{commit[1]}"}))  # later files of the same second
    assert content["machine"]["gpus"][0] == "Fake 100" and content["machine"]["libraries"]["NCCL"] == "2.28.0"
    assert content["packages"]["numpy"] == numpy.__version__ and content["sections"]["streams"]["date"]


def test_arguments_that_are_refused(outcomes, tmp_path, monkeypatch, capsys):
    """Unknown sections, and a folder that is in a repository but not its root."""
    import check

    with pytest.raises(SystemExit):
        check.main(["kernles"])
    assert "there is no section kernles; the sections are probe, driver" in capsys.readouterr().err
    monkeypatch.setattr(check, "ROOT", ROOT / "tests")
    with pytest.raises(SystemExit):
        check.main(["graphs", "-o", str(tmp_path)])


def test_a_call_fits_its_limit(outcomes, tmp_path, capsys):
    """Sections have no more time than is left, and start only with half of their limit."""
    import check

    _, ran = outcomes
    assert sum(check.SECTIONS[name][1] for name in check.FIRST) <= 500 and check.CALL_SECONDS["first"] == 420
    assert check.main(["--run", "first", "--limit", "30", "-o", str(tmp_path)]) == 1
    assert all(check.SECTIONS[name][1] / 2 < limit <= 30 for name, limit in ran)
    assert "kernels" not in names(ran) and "not started: codecs, streams, kernels" in capsys.readouterr().out


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


@pytest.fixture
def carried(tmp_path):
    """A copy of the tree without .git, with an extension beside qccl's Python files and no installation.

    Returns a function that starts gpu-check there on fake GPUs.
    """
    tree = tmp_path / "copy of the tree"
    for part in (
        "kernels",
        "qccl",
        "scripts",
        *(f"tests/{name}" for name in ("engine/cuda", "gpu", "gpu_check", "support")),
    ):
        shutil.copytree(ROOT / part, tree / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(_host.__file__, tree / "qccl" / "_host.abi3.so")
    places = [tree, *(tree / "tests" / name for name in ("support", "engine/cuda", "gpu"))]
    places.append(
        Path(numpy.__file__).parents[1]
    )  # packages; on this path the file of an editable install does nothing
    path = os.pathsep.join(map(str, places))
    python = Path(sys.executable).resolve()  # outside of a virtual environment

    def start(*arguments, **variables):
        command = [str(python), str(tree / "tests/gpu_check/fake_gpu_check.py"), *arguments]
        environment = os.environ | {"PYTHONPATH": path, "QCCL_COMMIT": "a1"} | variables
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    start.results = tree / "docs/results"
    return start


@pytest.mark.processes
@pytest.mark.quick
@pytest.mark.cupy
def test_a_call_that_is_killed_keeps_its_figures(carried):
    """A section has told a part and hangs; timeout(1) ends the call, and with it the section's process."""
    run = carried("--run", "first", QCCL_FAKE_HANGS="probe")

    def kept():
        return [text for path in carried.results.glob("*.json") if "first part" in (text := path.read_text())]

    patience.wait_until(lambda: kept() or run.poll() is not None)
    [content] = map(json.loads, kept())
    assert content["sections"]["probe"].items() >= {"status": "unfinished", "figures": {"first part": 1.5}}.items()
    [child] = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    run.send_signal(signal.SIGTERM)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM
    assert json.loads(output.splitlines()[0])["extension"].endswith("/qccl/_host.abi3.so")
    patience.wait_until(lambda: not Path(f"/proc/{child}").exists(), what="the section's process has ended")
    assert len(kept()) == 1


@pytest.mark.processes
@pytest.mark.slow
def test_both_calls_on_the_fake(carried):
    """Every section runs in its process; one fails in the first call, and passes for the commit that mends it."""
    import check

    first = carried("--run", "first", QCCL_FAKE_FAILS="dispatch")
    output, _ = first.communicate(timeout=300)
    assert first.returncode == 1 and "to mend: dispatch; not started: none" in output, output
    second = carried("--run", "second", QCCL_COMMIT="b2")
    output, _ = second.communicate(timeout=300)
    assert second.returncode == 0 and "to mend: nothing; not started: none" in output, output
    old, new = (json.loads(path.read_text())["sections"] for path in sorted(carried.results.glob("*.json")))
    assert list(old) == check.FIRST and set(new) == {"dispatch", *check.SECOND}
    assert {name for name, each in (old | new).items() if each["status"] != "passed"} <= {"sanitizer"}
    assert old["probe"]["figures"]["edges"] and new["dispatch"]["figures"]["replay_us one_shot"]
    assert new["ranks"]["figures"].keys() == {"2 ranks", "3 ranks", "4 ranks"}


@pytest.mark.processes
def test_a_section_that_hangs_is_ended_and_its_figures_are_kept(monkeypatch, tmp_path):
    import check

    script = f"""#!/bin/sh\necho '{check.PART}{{"first": 12.3456789}}'\necho half done >&2\nsleep 60"""
    program = tmp_path / "python"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setattr(check.sys, "executable", str(program))
    found = check.run_apart("slow", tmp_path / "logs", 1.0)
    assert found["status"] == "failed" and found["figures"] == {"first": 12.35}
    assert found["reason"] == "not done after 1 s: half done"


def test_without_an_extension_it_says_what_to_do(cupy, monkeypatch, capsys):
    import check

    monkeypatch.setenv("QCCL_COMMIT", "a1")
    monkeypatch.setitem(sys.modules, "qccl._host", None)
    assert check.main(["graphs"]) == 1 and "carry a built extension" in capsys.readouterr().err


SECTIONS = ["driver", "codecs", "nccl", "dispatch", "graphs", "streams", "rates", "kernels", "faults", "torch", "ranks"]
SECTIONS += ["probe", "sanitizer", "staged", "jax"]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_a_section(section, tmp_path):
    if lacking := libraries.missing():
        pytest.skip("; ".join(lacking))
    import check

    found = check.run_apart(section, tmp_path, check.SECTIONS[section][1])
    if found["status"] == "not run":
        pytest.skip(found["reason"])
    assert found["status"] == "passed", found["reason"]


@pytest.mark.processes
@pytest.mark.slow
def test_a_wrong_bit_is_found(carried):
    """Every section that looks at results fails if one bit of them is wrong."""
    sections = ("driver", "codecs", "nccl", "graphs", "kernels", "ranks", "staged")
    output, _ = carried(*sections, QCCL_FAKE_WRONG="1").communicate(timeout=300)
    assert f"to mend: {', '.join(sections)}; not started: none" in output, output
    assert "rank 0 of 2" in output and "reduce: 1 bytes of buffer" in output and "staged" in output, output
