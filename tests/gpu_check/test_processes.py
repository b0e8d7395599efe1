"""gpu-check's processes: a section, a case or a tool in one of its own, which may hang, die or be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import patience
import pytest

from qccl.cuda import libraries

pytestmark = pytest.mark.starts_first

ROOT = Path(__file__).resolve().parents[2]
PLACES = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "gpu")]

#: lets each Python process of a check begin with a fake GPU
_SITE = f"""import sys
sys.path[:0] = {PLACES!r}
import fake_cuda, fake_kernels
installed = fake_cuda.installed(fake_cuda.World(), fake_kernels.work)
installed.__enter__()
"""


#: lets a process be killed while it starts another
_SLOW_START = """import subprocess, time
start = subprocess.Popen.__init__
def start_slowly(self, *given, **options):
    start(self, *given, **options)
    time.sleep(0.5)
subprocess.Popen.__init__ = start_slowly
"""


def test_a_run_that_is_killed_leaves_what_it_has_found(tmp_path):
    site = _SITE + _SLOW_START
    (tmp_path / "sitecustomize.py").write_text(site)
    path = tmp_path / "results.json"
    command = [str(ROOT / "scripts" / "gpu-check"), "graphs", "kernels", "-o", str(path)]
    given = {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": "", "QCCL_COMMIT": "a1"}
    with subprocess.Popen(command, env=os.environ | given, stdout=subprocess.PIPE, text=True) as process:
        limit = threading.Timer(90 * patience.factor(), process.terminate)
        limit.start()
        lines = [process.stdout.readline() for _ in range(2)]
        assert lines[0].startswith("graphs     passed") and "stochastic_replays_differ" in lines[1]
        begins = patience.Limit(30)
        while not (children := _children(process.pid)):
            assert begins.left(), "the next section does not begin"
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 128 + 15
        limit.cancel()
    assert json.loads(path.read_text())["sections"]["graphs"]["status"] == "passed"
    for child in children:
        _wait_for_end(child)


def _children(parent: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def _wait_for_end(child: int) -> None:
    """Also a zombie has ended; the process that inherits it may not look."""
    limit = patience.Limit(30)
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert limit.left(), "it goes on"
        time.sleep(0.05)


def test_a_section_in_a_process_of_its_own(tmp_path):
    import check

    found = check.run_apart("streams", tmp_path)  # this process sees a GPU only if there is one
    assert found["status"] in ("failed", "passed")
    if libraries.missing():
        assert "cannot be used here" in found["reason"]


def test_a_section_that_takes_too_long_ends_with_all_that_it_started(monkeypatch, tmp_path):
    import check

    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nsleep 60 &\necho $! >{tmp_path}/child\necho half done >&2\nwait\n")
    program.chmod(0o755)
    monkeypatch.setattr(check.sys, "executable", str(program))
    monkeypatch.setattr(check, "SECTIONS", {"slow": (dict, 1.0)})
    found = check.run_apart("slow", tmp_path / "logs")
    assert found["status"] == "failed" and "not done after 1 s" in found["reason"] and "half done" in found["reason"]
    assert "half done" in (tmp_path / "logs" / "slow.txt").read_text()
    _wait_for_end(int((tmp_path / "child").read_text()))


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_section_whose_process_cannot_be_killed(monkeypatch, tmp_path):
    """A driver may keep it from ending. The next sections still run."""
    import check

    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(check.sys, "executable", str(program))
    monkeypatch.setattr(check, "SECTIONS", {"slow": (dict, 0.5)})
    monkeypatch.setattr(check, "_KILL_SECONDS", 0.5)
    leaders = []
    monkeypatch.setattr(check, "_kill_group", leaders.append)
    try:
        found = check.run_apart("slow", tmp_path / "logs")
        assert "not done after 0 s, and its process" in found["reason"] and "did not end" in found["reason"]
    finally:
        for leader in leaders:
            os.killpg(leader, signal.SIGKILL)
            os.waitpid(leader, 0)


#: stands for compute-sanitizer: runs the program on the fake GPU, and finds what is planted, or what it is told to
_SANITIZER = """#!/bin/sh
echo "$@" >>{folder}/calls
if [ "$1" != --tool ]; then exit 2; fi
tool=$2
while [ "$1" != {python} ]; do shift; done
shift
{python} {folder}/on_fake.py "$@" || exit $?
case "$2" in overrun | race) echo "========= ERROR SUMMARY: 1 error"; exit {status} ;; esac
echo "========= ERROR SUMMARY: 0 errors"
exit {end}
"""
_ON_FAKE = f"""import runpy, sys
sys.path[:0] = {PLACES!r}
import fake_cuda, fake_kernels
sys.argv = sys.argv[1:]
with fake_cuda.installed(fake_cuda.World(), fake_kernels.work):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(("status", "end", "outcome"), [(99, 0, "passed"), (0, 0, "not run"), (99, 99, "failed")])
def test_the_sanitizers(monkeypatch, tmp_path, status, end, outcome):
    """The kernels run under the tool. A tool that misses a planted error counts as not run."""
    import check

    program = tmp_path / "compute-sanitizer"
    program.write_text(_SANITIZER.format(folder=tmp_path, python=sys.executable, status=status, end=end))
    program.chmod(0o755)
    (tmp_path / "on_fake.py").write_text(_ON_FAKE)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(
        check, "SECTIONS", {name: check.SECTIONS[name] for name in ("memcheck", "racecheck", "sanitizer")}
    )
    for name, mistake in (("memcheck", "overrun"), ("racecheck", "race")):
        found = check.run_section(name)
        assert found["status"] == outcome, found
        if outcome == "passed":
            assert found["figures"]["operations"] > 100 and found["figures"]["finds_a_planted"] == mistake
        elif outcome == "not run":
            assert "planted" in found["reason"]
    assert (found := check.run_section("sanitizer"))["status"] == outcome
    if outcome == "passed":
        assert all(found["figures"][tool]["operations"] > 0 for tool in ("memcheck", "racecheck"))
    calls = (tmp_path / "calls").read_text().splitlines()
    assert all(line.startswith(("--tool memcheck --error-exitcode 99", "--tool racecheck ")) for line in calls)
    assert all("--report-api-errors no" in line for line in calls)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "there is no compute-sanitizer" in check.run_section("memcheck")["reason"]


#: a fake GPU on which some cases end their process
_DEADLY = """
import os
import codec_kernels
usual = codec_kernels.on_gpu
def on_gpu(engine, schedule, arrays, call):
    if call in {deadly}:
        os._exit(7)
    found = usual(engine, schedule, arrays, call)
    if call == {wrong}:
        found["wires"][100] ^= 1
    return found
codec_kernels.on_gpu = on_gpu
"""


@pytest.mark.parametrize(("deadly", "outcome"), [([3], "all others"), ([0, 1, 2, 3, 4], "gives up")])
def test_a_case_that_ends_its_process_ends_no_other(monkeypatch, tmp_path, deadly, outcome):
    """The next process goes on behind it, and compute-sanitizer looks at the first that failed."""
    import codec_kernels

    program = tmp_path / "python"
    (tmp_path / "main.py").write_text(
        _SITE + _DEADLY.format(deadly=deadly, wrong=5) + "sys.argv = sys.argv[1:]\nsys.exit(codec_kernels.main())\n"
    )
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/main.py "$@"\n')
    program.chmod(0o755)
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\necho "========= Invalid read"\nexit 99\n')
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(codec_kernels.sys, "executable", str(program))
    told = []
    monkeypatch.setattr(codec_kernels, "report", lambda name, figures: told.append((name, figures)))
    with pytest.raises(AssertionError) as caught:
        codec_kernels.check_apart(range(7))
    text, figures = caught.value.args
    every = list(codec_kernels.cases())
    assert f"{every[deadly[0]]}: its process ended with status 7" in text
    assert "exit status 99" in figures["compute-sanitizer"] and "Invalid read" in figures["compute-sanitizer"]
    assert (tmp_path / "calls").read_text().endswith(f"codec_kernels.py only {deadly[0]}\n")
    if outcome == "all others":
        assert f"{every[5]}: wires[100] is" in text and "(2 of 7 cases" in text and figures["cases"] == 7
        assert ("operations", figures["operations"]) in told and figures["operations"] > 100
        assert [each for name, each in told if name == "kernels"][-1] == "failed: " + text.rpartition(" (2 of 7")[0]
    else:
        assert figures["cases"] == codec_kernels._DEATHS == 4


#: a section that hangs
_HANGS = """
import time
import calls, reports
def hangs_here():
    print("so far, so good", flush=True)
    reports.report("first", {"us": 12.3456789})
    reports.report("second", "failed: a wrong byte")
    time.sleep(600)
calls.dispatch = hangs_here
"""


def test_a_section_that_hangs_says_where_and_what_it_has_found(monkeypatch, tmp_path):
    """The stacks are printed before its limit; the parts of its figures are kept, and all that it has said."""
    import check

    (tmp_path / "sitecustomize.py").write_text(_SITE + _HANGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("QCCL_TEST_PATIENCE", f"{max(2, patience.factor() / 2):.1f}")
    monkeypatch.setattr(check, "SECTIONS", {"dispatch": (dict, 4.0)})
    found = check.run_apart("dispatch", tmp_path / "logs")
    assert found["status"] == "failed"
    assert found["reason"].startswith("second failed: a wrong byte; then not done after 4 s: ")
    assert found["figures"] == {"first": {"us": 12.35}, "second": "failed: a wrong byte"}
    for text in (found["reason"], (tmp_path / "logs" / "dispatch.txt").read_text()):
        assert "so far, so good" in text and "in hangs_here" in text


#: stands for ncu: it prints as Nsight Compute's --csv does, or that counters may not be read
_NCU = """#!/bin/sh
echo "==PROF== Connected to process 1"
if [ "$2" != --metrics ]; then exit 2; fi
{print}
"""
_NCU_TABLE = """cat <<'END'
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","1","encode<qccl::MinMaxTile<4, 0>>","Command line profiler metrics","gpu__time_duration.sum","us","1,234.5"
"0","1","encode<qccl::MinMaxTile<4, 0>>","Command line profiler metrics","launch__registers_per_thread","","48"
"1","1","reduce<qccl::MinMaxTile<8, 0>>","Command line profiler metrics","gpu__time_duration.sum","us","n/a"
END"""


def test_the_profile(monkeypatch, tmp_path):
    import triage

    program = tmp_path / "ncu"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    program.write_text(_NCU.format(print=_NCU_TABLE))
    program.chmod(0o755)
    assert triage.profile() == {"0 encode": {"time us": 1234.5, "registers": 48.0}}
    program.write_text(_NCU.format(print="echo ERR_NVGPUCTRPERM; exit 1"))
    with pytest.raises(triage.Missing, match=r"(?s)exit status 1.*ERR_NVGPUCTRPERM"):
        triage.profile()
