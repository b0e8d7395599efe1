"""qccl-bench: too many ranks, too large vectors, many descriptors, ends without survivors, nccl-tests' names."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import patience
import pytest
from bench_runs import LAUNCHERS, workers
from click.testing import CliRunner

from qccl.bench import capacity, collective, processes
from qccl.bench.cli import main
from qccl.bench.mpiexec import StartError
from qccl.bench.processes import LinePipe, Start, run_processes
from qccl.bench.start import Way

GIB = 1 << 30


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of ranks that would have been started."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    numbers: list[int] = []
    monkeypatch.setattr(collective, "run_ranks", lambda ranks, *args, **given: numbers.append(ranks) or 0)
    monkeypatch.setattr(collective, "choose_way", lambda *args: Way("ucx"))
    monkeypatch.setattr(capacity, "available_nbytes", lambda: 16 * GIB)
    return numbers


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--ranks=5000", "-b4K", "-e4K"], ("5000 ranks ", "16 GiB are available", "fewer ranks")),
        (["-b1T", "-e1T"], ("2 ranks with vectors of up to 1 TiB need about 5 TiB", "2.5 TiB each", "a smaller -e")),
        (["-b1", "-e1T"], ("vectors of up to 1 TiB",)),  # no list of its sizes is made
        (["-b3G", "-e3G", "--codec=minmax8,onebit+ef"], ("2 ranks with vectors of up to 3 GiB",)),  # its residuals
    ],
)
def test_what_does_not_fit_in_memory_is_refused(started: list[int], flags: list[str], parts: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, ["allreduce", *flags])
    output = " ".join(result.output.split())
    assert result.exit_code == 2 and all(part in output for part in parts), output
    assert started == []


def test_what_fits_is_started_with_a_remark_where_ranks_crowd(started: list[int]) -> None:
    few = CliRunner().invoke(main, ["allreduce", "-b3G", "-e3G"])
    assert few.exit_code == 0 and few.output == "", few.output
    ranks = 8 * len(os.sched_getaffinity(0)) + 1
    many = CliRunner().invoke(main, ["allreduce", f"--ranks={ranks}", "-b4K", "-e4K"])
    assert f"{ranks} ranks share " in many.stderr and started == [2, ranks]


def test_the_least_limit_of_the_control_groups_counts(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    for name, limit in (("a", str(3 * GIB)), ("a/b", "max")):
        folder = tmp_path / "groups" / name
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{2 * GIB}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n")
    assert list(capacity._left_in_control_groups(tmp_path / "proc", tmp_path / "groups")) == [2 * GIB]
    assert list(capacity._left_in_control_groups(tmp_path / "no", tmp_path / "groups")) == []


# -- descriptors and ends ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def descriptors_allowed(number: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if number > before[1] >= 0:
        pytest.skip(f"this machine allows {before[1]} descriptors, and the test needs {number}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_descriptors_above_those_of_select() -> None:
    lines: list[str] = []
    with descriptors_allowed(1100), LinePipe(lines.append) as pipe:
        low, pipe.reader = pipe.reader, fcntl.fcntl(pipe.reader, fcntl.F_DUPFD_CLOEXEC, 1024)
        os.close(low)
        assert run_processes([Start(["echo", "a"], os.environ, pipe)], [pipe], silence=30) == 0
    assert lines == ["a"]


def test_the_limit_of_descriptors_is_raised_or_reported() -> None:
    with descriptors_allowed(100):
        processes.allow_descriptors(120)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == 120
        if hard != resource.RLIM_INFINITY:
            with pytest.raises(StartError, match=f"needs {hard + 1} open files, and {hard} are allowed"):
                processes.allow_descriptors(hard + 1)


def none_is_left(pid: int) -> bool:
    limit = patience.Limit(30)
    while (left := workers(pid)) and limit.left():
        time.sleep(0.05)
    return not left


def test_ranks_that_ignore_the_request_to_end_are_killed_even_when_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with hundreds of ranks, of which the first ones took all the time that there was."""
    monkeypatch.setattr(processes, "_GRACE_SECONDS", 0.0)
    stubborn = ["sh", "-c", f"trap '' TERM; echo up; touch {tmp_path}/$$; sleep 60 & sleep 60"]
    ends = ["sh", "-c", f"until [ $(ls {tmp_path} | wc -l) = 3 ]; do sleep 0.05; done; exit 3"]
    up: list[str] = []
    with LinePipe(up.append) as pipe:
        starts = [Start(stubborn, os.environ, pipe)] * 3 + [Start(ends, os.environ, pipe)]
        assert run_processes(starts, [pipe], silence=30) == 3
    assert up == ["up"] * 3 and none_is_left(os.getpid())


STARTER = """
import os
from qccl.bench.processes import Start, run_processes, stoppable

with stoppable():
    run_processes([Start(["sleep", "60"], os.environ)] * 40, [], silence=None)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_while_ranks_start_leaves_none(number: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHERS}
    process = subprocess.Popen([sys.executable, "-c", STARTER], env=environment, stdin=subprocess.DEVNULL)
    try:
        limit = patience.Limit(60)
        while not workers(process.pid) and limit.left():
            time.sleep(0.002)
        process.send_signal(number)
        assert process.wait(40) == (-9 if number == signal.SIGKILL else 128 + number)
    finally:
        process.kill()
        process.wait(10)
    assert none_is_left(process.pid)


# -- nccl-tests' names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        *(("alltoall", "all_to_all"), ("alltoall_perf", "all_to_all"), ("all_reduce", "allreduce")),
        *(("all_reduce_perf", "allreduce"), ("all_gather_perf", "all_gather"), ("reduce_perf", "reduce")),
        *(("reduce_scatter_perf", "reduce_scatter"), ("broadcast_perf", "broadcast")),
    ],
)
def test_names_of_nccl_tests(theirs: str, ours: str) -> None:
    shown, usual = (CliRunner().invoke(main, [name, "--help"]) for name in (theirs, ours))
    assert shown.exit_code == 0 and shown.output.split("\n", 1)[1] == usual.output.split("\n", 1)[1]


def test_collectives_that_only_nccl_tests_has() -> None:
    for name in ("sendrecv", "sendrecv_perf", "gather_perf"):
        result = CliRunner().invoke(main, [name])
        assert result.exit_code == 2 and f"there is no {name}, as nccl-tests has" in result.output
    assert "No such command 'allreduce_fast'" in CliRunner().invoke(main, ["allreduce_fast"]).output
