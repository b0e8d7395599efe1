"""scripts/gpu-check without a GPU: its arguments, its results file, its sections on a fake GPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import fake_cuda
import fake_frameworks
import fake_kernels
import numpy as np
import pytest
from codec_table import TABLE
from nvrtc import Nvrtc, Program

import qccl
from qccl import codecs, measuring
from qccl.cuda import libraries
from qccl.cuda.libraries import cuda_libraries
from qccl.schedule import Reduce

pytestmark = pytest.mark.starts_first

ROOT = Path(__file__).resolve().parents[2]
PLACES = [str(ROOT / "tests" / "gpu")]


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """The modules of tests/gpu, imported for this test only."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", PLACES + sys.path)
    yield
    for name in {
        "bandwidth",
        "build",
        "calls",
        "check",
        "choices",
        "codec_kernels",
        "device",
        "frameworks",
        "large",
        "queues",
        "ranks",
        "reports",
        "sanitizer",
        "staged",
        "triage",
    } - before:
        sys.modules.pop(name, None)


@pytest.fixture
def world():
    world = fake_cuda.World(1)
    with fake_cuda.installed(world, fake_kernels.work):
        yield world


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


#: lets each Python process of a check begin with a fake GPU
_SITE = """import sys
sys.path[:0] = {places!r}
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
    site = _SITE.format(places=[str(ROOT), str(ROOT / "tests" / "support")]) + _SLOW_START
    (tmp_path / "sitecustomize.py").write_text(site)
    path = tmp_path / "results.json"
    command = [str(ROOT / "scripts" / "gpu-check"), "graphs", "kernels", "-o", str(path)]
    given = {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": "", "QCCL_COMMIT": "a1"}
    with subprocess.Popen(command, env=os.environ | given, stdout=subprocess.PIPE, text=True) as process:
        limit = threading.Timer(90, process.terminate)
        limit.start()
        lines = [process.stdout.readline() for _ in range(2)]
        assert lines[0].startswith("graphs     passed") and "stochastic_replays_differ" in lines[1]
        deadline = time.monotonic() + 30
        while not (children := _children(process.pid)):
            assert time.monotonic() < deadline, "the next section does not begin"
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
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.05)


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


def test_a_section_in_a_process_of_its_own(tmp_path):
    import check

    found = check.run_apart("streams", tmp_path)  # this process sees a GPU only if there is one
    assert found["status"] in ("failed", "passed")
    if libraries.missing():
        assert "cannot be used here" in found["reason"]


def test_kernels_on_a_fake_gpu(world):
    """The comparison finds a wrong byte and names the operation that wrote it."""
    import codec_kernels

    chosen = list(codec_kernels.cases())
    assert len(chosen) > 100
    compared, differences = codec_kernels.check(list(enumerate(chosen))[::17])
    assert compared > 200 and differences == []
    schedule, arrays = codec_kernels.build(chosen[5], 3)
    right = codec_kernels.on_host(schedule, arrays, 3)
    wrong = {name: array.copy() for name, array in right.items()}
    place = next(op.out for op in schedule.ops if isinstance(op, Reduce) and op.out is not None and len(op.out) > 9)
    wrong["sums"].view(np.uint32)[place.start + 7] ^= 1
    found = codec_kernels.difference(chosen[5], schedule, wrong, right)
    assert f"sums[{place.start + 7}]" in found and "Reduce" in found
    every = {type(op).__name__ for op in schedule.ops}
    assert every == {"Encode", "Decode", "Reduce"}


def test_streams_and_graphs_on_a_fake_gpu(world):
    import calls

    assert calls.stream_order(60.0)["asynchronous"]
    assert calls.graphs() == {"stochastic_replays_differ": True}


def test_costs_and_overlap_on_a_fake_gpu(world, monkeypatch):
    """They run; the fake GPU's times mean nothing."""
    import calls

    monkeypatch.setattr(calls, "_host_seconds", lambda *arguments: 14e-6)
    assert calls.dispatch(calls=2, burst=1)["replay_us one_shot"] == pytest.approx(14)
    monkeypatch.setattr(calls, "_host_seconds", lambda *arguments: 151e-6)
    with pytest.raises(AssertionError, match="a dispatch takes 151 us"):
        calls.dispatch(calls=2, burst=1)
    with pytest.raises(AssertionError, match="pipelined"):
        calls.overlap(1 << 14, repeats=1)


def test_queues_on_a_fake_gpu(world, monkeypatch):
    """The fake's slow kernels take a second each, and those that hang take four: the deadline must pass long before."""
    import queues

    begun: dict[fake_cuda.Node, float] = {}
    takes = 1.0  # seconds
    world.holds = lambda node: (
        node.what == "spin" and time.monotonic() < takes + begun.setdefault(node, time.monotonic())
    )
    assert queues.late_start(delay=1.0, timeout=0.2)["seconds"] >= 1
    assert 10 < queues.many_calls(calls=300, delay=1.0)["calls_before_the_host_waited"] < 300
    world.queue_entries, takes = 200, 4.0
    figures = queues.full_queue(hang=4.0, timeout=0.2, launches=300)
    assert 0.2 <= figures["failed_after_seconds"] < 1
    monkeypatch.setattr(importlib.import_module("qccl.cuda.flags").RunFlags, "set_failed", lambda self: None)
    with pytest.raises(AssertionError, match="no NaN"):
        queues.full_queue(hang=1.0, timeout=0.2, launches=300)


def test_torch_on_a_fake_gpu(world, monkeypatch):
    """The section "torch" with a stand-in for PyTorch; it finds a call on another stream than torch's."""
    import frameworks

    stand_in = fake_frameworks.Torch(world, cuda_libraries().cupy)
    for name, module in (("torch", stand_in), ("torch.distributed", stand_in.distributed)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(
        qccl.Communicator, "from_torch", lambda: qccl.Communicator(qccl.get_unique_id(), 0, 1, device=0, timeout=10.0)
    )
    monkeypatch.setattr(frameworks, "_current_stream", lambda torch, ask=frameworks._current_stream: ask(torch, 60.0))
    found = frameworks.torch_checks()
    assert found["replays"] == 3 and found["from_torch"] == "one rank"
    monkeypatch.setattr(importlib.import_module("qccl.cuda.memory"), "_current_stream", lambda array, device: 0)
    with pytest.raises(AssertionError, match=r"on torch's current stream: .* differ"):
        frameworks.torch_checks()


def test_jax_on_a_fake_gpu(world, monkeypatch):
    """The section "jax" with a stand-in for JAX; it finds a call that does not wait for JAX."""
    import frameworks

    monkeypatch.setitem(sys.modules, "jax", fake_frameworks.jax())
    assert frameworks.jax_checks()["types"] == ["float32", "float16"]
    memory = importlib.import_module("qccl.cuda.memory")
    export = memory._export
    monkeypatch.setattr(memory, "_export", lambda array, stream: export(getattr(array, "_array", array), -1))
    with pytest.raises(AssertionError, match=r"that JAX still computes: .* differ"):
        frameworks.jax_checks()
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(importlib.import_module("reports").Missing, match="jax cannot be imported"):
        frameworks.jax_checks()


def test_large_arrays_on_a_fake_gpu(world, monkeypatch):
    import large

    assert large.check(30_011, 8192)["elements"] == 30_011
    monkeypatch.setattr(
        large, "_fill", lambda address, values, count, fill=large._fill: fill(address, values[::-1].copy(), count)
    )
    with pytest.raises(AssertionError, match="of 30011 differs from the host's"):
        large.check(30_011, 8192)
    world.free_memory = 1 << 16
    with pytest.raises(importlib.import_module("reports").Missing, match="30011 elements need 0 MiB"):
        large.check(30_011, 8192)


def test_staging_on_a_fake_gpu(world, monkeypatch):
    """The section "staged", with shorter waits; it finds wrong bytes and streams that hang."""
    import staged

    from qccl.cuda.proxy import TransferBatch
    from qccl.cuda.staging import Staging

    monkeypatch.setattr(staged, "CALLS", tuple((c, a, min(n, 5000), k and 1024) for c, a, n, k in staged.CALLS))
    assert set(staged.check(3)) == {"enqueue_ms", "done_ms"}
    assert set(staged.check_order(60.0))  # nothing waits so long == {"host_seconds rank 0", "host_seconds rank 1"}
    assert 0.2 <= staged.check_away(0.2, 1.0)["seconds"] < 1.0
    assert staged.measure(1)["gb_per_s_sent_by_each"] > 0
    with monkeypatch.context() as without:
        without.setattr(TransferBatch, "release", lambda batch: None)
        without.setattr(world, "patience", 0.4)
        with pytest.raises(AssertionError, match="the device hangs"):
            staged.check_away(0.2, 1.0)
    with world.lock:
        world.pending.clear()
    monkeypatch.setattr(Staging, "_wait", lambda *arguments: None)
    with pytest.raises(AssertionError, match="differs from the host's bytes"):
        staged.check(2)


def test_bandwidth_on_a_fake_gpu(world, monkeypatch):
    """Also with predictions of a stand-in for bench/sass.py; without them the figures stay."""
    import bandwidth

    gpu, asked = SimpleNamespace(name="Fake 100", arch=90), []

    def kernel(kind, codec, *where):
        asked.append((kind, codec.spec(), *map(str, where[:2])))
        return None if codec.spec() == "none" else SimpleNamespace(share=lambda gpu: (0.9, "bytes"))

    monkeypatch.setitem(
        sys.modules, "sass", SimpleNamespace(GPUS=[gpu], kernel=kernel, common_case=lambda folder: folder)
    )
    specs = {**dict.fromkeys(("minmax8", "minmax4", "none"), ("encode", "decode", "reduce")), "trellis4": ("decode",)}
    monkeypatch.setattr(bandwidth, "_SPECS", specs)
    figures = bandwidth.measure(mebibytes=1, jobs=2, repeats=1)
    assert figures["nccl_allreduce_of_one_rank_gb_per_s"] == figures["copy_gb_per_s"] and figures["peers"] == 7
    assert len(asked) == 20 and asked[0] == ("encode", codecs.get("minmax8").spec(), "float32", "90")
    assert figures["reduce minmax4 bfloat16"].items() >= {"predicted_share": 0.9, "predicted_limit": "bytes"}.items()
    assert "predicted_share" in figures["decode trellis4 float32"] and "encode trellis4 float32" not in figures
    assert "predicted_share" not in figures["decode none float32"] and "predictions" not in figures
    gpu.name = "another"
    bandwidth._add_predictions(figures, "Fake 100", ())
    assert figures["predictions"] == "none: it knows another, but not Fake 100"
    moved = (1 << 20) + qccl.codecs.get("minmax8").encoded_nbytes(1 << 18, "float32")
    assert figures["encode minmax8 float32"]["gb_per_s"] == pytest.approx(2 * moved / 1e-3 / 1e9)
    assert figures["copy_gb_per_s"] == pytest.approx(4 * (1 << 20) / 1e-3 / 1e9)
    assert set(figures["slower_than_limit"]) > {"encode minmax4 bfloat16 75%"} or figures["slower_than_limit"]


def reports_of_threads(monkeypatch, work):
    """What ``work()`` reported on two ranks that are threads; the section takes it for that of its processes."""
    import ranks

    unique_id, local, reports = qccl.get_unique_id(), threading.local(), dict[int, dict]()
    monkeypatch.setattr(
        qccl, "init",
        lambda **arguments: qccl.Communicator(unique_id, local.rank, 2, device=local.rank, timeout=10.0),
    )  # fmt: skip

    def run(rank):
        local.rank = rank
        with libraries.on_device(rank):
            reports[rank] = work()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    monkeypatch.setattr(ranks, "_start", lambda size, what, **variables: ([reports[0], reports[1]], [0, 0]))
    return reports


def test_what_an_nccl_rank_does_on_a_fake_gpu(world, monkeypatch):
    """The work of the ranks' processes, on threads: the digests are the host's."""
    import ranks

    monkeypatch.setattr(ranks, "CALLS", tuple((a, d, min(n, 5000)) for a, d, n in ranks.CALLS))
    monkeypatch.setattr(ranks, "RATE_NBYTES", 20_000)
    one_at_a_time = threading.Lock()
    import calls

    captured = calls._captured

    def alone(stream, comm, call):
        call()
        comm.check()
        comm.barrier()
        with one_at_a_time:
            graph = captured(stream, _Quiet(), call)
        comm.barrier()
        return graph

    class _Quiet:
        def check(self):
            pass

    monkeypatch.setattr(calls, "_captured", lambda stream, comm, call: alone(stream, comm, call))
    reports = reports_of_threads(monkeypatch, ranks._calls)
    found = ranks.check(2)
    assert set(found) == {"gpu", "registered", "gb_per_s", "dispatch_us", "replay_us"}
    assert found["registered"] == [True, True] and min(found["gb_per_s"]) > 0 and found["gpu"] == [0, 1]
    reports[1]["digests"][3] = "0"
    with pytest.raises(AssertionError, match=r"rank 1 of 2: .*stochastic"):
        ranks.check(2)


def test_the_section_auto(world, monkeypatch):
    """Its ranks on threads: fast and slow choices, and ranks that choose differently."""
    import choices

    world.elapses = None
    rig = importlib.import_module("qccl.cuda.rig")
    monkeypatch.setattr(rig, "_NBYTES", (1 << 20,))
    monkeypatch.setattr(measuring, "_LIMIT", 0.05)
    monkeypatch.setattr(measuring, "_OF_TIMEOUT", 1e6)  # fake GPUs on a busy machine are slow
    monkeypatch.setattr(choices, "SIZES", (400, 4000))
    monkeypatch.setattr(choices, "_ROUNDS", 1)
    monkeypatch.setattr(choices, "MOST", 1e9)
    reports = reports_of_threads(monkeypatch, choices.one_rank)
    found = choices.check()
    assert found["hardware"] == "2 x Fake 100, NCCL 2.28.0" and found["measured_s"] > 0
    for size in ("400", "4000"):
        row = found[size]
        assert row["beside_best"] >= 1 and row["chosen"] in row["ms"] and "of the group's profile" in row["why"]
    monkeypatch.setattr(choices, "MOST", 0.5)
    with pytest.raises(AssertionError, match="a fixed choice is much faster than auto's at"):
        choices.check()
    monkeypatch.setattr(libraries, "device_count", lambda: 1)
    assert choices.check() == found, "ranks that take turns on one GPU have no rates"
    reports[1]["sizes"]["400"]["chosen"] = "none chain"
    with pytest.raises(AssertionError, match="the ranks choose differently"):
        choices.check()


def test_ranks_with_and_without_registered_memory(world, monkeypatch):
    """The section "ranks" starts its ranks four times, the last time with NCCL's registration switched off."""
    import check
    import ranks

    asked = []
    monkeypatch.setattr(ranks, "check", lambda size, **variables: asked.append((size, variables)) or {"ranks": size})
    assert set(check.SECTIONS["ranks"][0]()) == {"2 ranks", "3 ranks", "4 ranks", "2 ranks, unregistered"}
    assert asked == [(2, {}), (3, {}), (4, {}), (2, {"NCCL_LOCAL_REGISTER": "0"})]
    assert len(asked) * ranks._SECONDS <= check.SECTIONS["ranks"][1]


def test_ranks_share_a_gpu_only_where_there_are_too_few(world, monkeypatch):
    import ranks

    started = []

    class Process:
        returncode = 0

        def __init__(self, command, *, env, **options):
            started.append(env)

        def communicate(self, timeout):
            return "{}", ""

    monkeypatch.setattr(ranks.subprocess, "Popen", Process)
    runtime = cuda_libraries().runtime
    for count, shared in ((fake_cuda.DEVICES, False), (1, True)):
        monkeypatch.setattr(runtime, "getDeviceCount", lambda count=count: count)
        ranks._start(2, "calls", NCCL_LOCAL_REGISTER="0")
        assert all(("NCCL_SHM_DISABLE" in env) == ("NCCL_HOSTID" in env) == shared for env in started[-2:])
        assert started[-1]["NCCL_LOCAL_REGISTER"] == "0"
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, started[-1][name])
        with libraries.on_device(5):
            ranks._use_device()
            assert runtime.getDevice() == (0 if shared else 1)


def test_what_ranks_do_when_one_stays_away(world, monkeypatch):
    """The section "faults", on threads and with shorter waits."""
    import ranks

    monkeypatch.setattr(ranks, "TIMEOUT", 0.3)
    monkeypatch.setattr(ranks, "AWAY", 1.0)
    reports = reports_of_threads(monkeypatch, ranks._faults)
    assert ranks.check_faults().items() >= {"synchronize": "CollectiveTimeout", "mismatch": "MismatchError"}.items()
    monkeypatch.setattr(ranks, "_start", lambda size, what: ([reports[0], {"stderr": "a bug"}], [0, 1]))
    with pytest.raises(AssertionError, match="a bug"):
        ranks.check_faults()


#: stands for Python in a rank's process: sends a report, dies, or hangs, by the rank's number
_RANK = """#!/bin/sh
echo "some library greets"
case $RANK in
0) echo '{"what": "'$2'", "host": "'$NCCL_HOSTID'", "port": "'$QCCL_PORT'", "size": "'$WORLD_SIZE'"}' ;;
1) head -c 300000 /dev/zero | tr '\\0' x >&2; echo "it broke" >&2; exit 3 ;;
2) exec sleep 60 ;;
esac
"""


def test_the_processes_of_ranks(monkeypatch, tmp_path):
    import ranks

    program = tmp_path / "python"
    program.write_text(_RANK)
    program.chmod(0o755)
    monkeypatch.setattr(ranks.sys, "executable", str(program))
    monkeypatch.setattr(ranks, "_SECONDS", 1.5)
    monkeypatch.setattr(libraries, "device_count", lambda: 1)
    begin = time.monotonic()
    reports, status = ranks._start(3, "calls")
    assert time.monotonic() - begin < 20
    assert status == [0, 3, -9]
    assert reports[0].items() >= {"what": "calls", "host": "rank0", "size": "3"}.items() and reports[0]["port"]
    assert reports[1]["stderr"].endswith("it broke\n") and reports[2] == {"stderr": ""}


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
_ON_FAKE = """import runpy, sys
sys.path[:0] = {places!r}
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
    places = [str(ROOT), str(ROOT / "tests" / "support"), *PLACES]
    (tmp_path / "on_fake.py").write_text(_ON_FAKE.format(places=places))
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

    places = [str(ROOT), str(ROOT / "tests" / "support"), *PLACES]
    program = tmp_path / "python"
    (tmp_path / "main.py").write_text(
        _SITE.format(places=places) + _DEADLY.format(deadly=deadly, wrong=5) + "sys.argv = sys.argv[1:]\n"
        "sys.exit(codec_kernels.main())\n"
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


def test_a_section_that_hangs_says_where_and_what_it_has_found(monkeypatch, tmp_path):
    """The stacks are printed before its limit; the parts of its figures are kept, and all that it has said."""
    import check

    site = _SITE.format(places=[str(ROOT), str(ROOT / "tests" / "support"), *PLACES])
    site += """
import time
import calls, reports
def hangs_here():
    print("so far, so good", flush=True)
    reports.report("first", {"us": 12.3456789})
    reports.report("second", "failed: a wrong byte")
    time.sleep(600)
calls.dispatch = hangs_here
"""
    (tmp_path / "sitecustomize.py").write_text(site)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("QCCL_TEST_PATIENCE", "2")
    monkeypatch.setattr(check, "SECTIONS", {"dispatch": (dict, 4.0)})
    found = check.run_apart("dispatch", tmp_path / "logs")
    assert found["status"] == "failed"
    assert found["reason"].startswith("second failed: a wrong byte; then not done after 4 s: ")
    assert found["figures"] == {"first": {"us": 12.35}, "second": "failed: a wrong byte"}
    for text in (found["reason"], (tmp_path / "logs" / "dispatch.txt").read_text()):
        assert "so far, so good" in text and "in hangs_here" in text


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


@pytest.mark.parametrize("cuda", [12, 13])
def test_the_planted_race_is_compiled(cuda):
    """The compiler keeps the store to shared memory, and the load after it."""
    import device

    program = Program(Nvrtc(cuda), device.SOURCE, [], ["--gpu-architecture=compute_90", "-std=c++17"])
    assert not program.failed, program.log
    race = program.ptx().split(".entry race")[1].split(".entry")[0]
    assert re.search(r"st\.volatile\.shared\.\w+ .*ld\.volatile\.shared\.\w+ .*st\.global", race, re.DOTALL), race


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


def test_the_triage_on_a_fake_gpu(world, monkeypatch):
    """Its sections, except two ranks in processes; wrong bytes are found."""
    import bandwidth
    import codec_kernels
    import ranks
    import triage

    found = triage.driver()
    assert found["gpu"] == "Fake 100" and found["compute_capability"] == "9.0" and found["NVRTC"] == "12.9"
    monkeypatch.setattr(codec_kernels, "check_apart", lambda numbers: {"numbers": numbers})
    every, numbers = list(codec_kernels.cases()), triage.codecs()["numbers"]
    assert {every[number].codec.name for number in numbers} == {"none", "minmax", *TABLE}
    monkeypatch.setattr(ranks, "check", lambda size: {"ranks": size})
    assert triage.nccl()["two ranks"] == {"ranks": 2}
    monkeypatch.setattr(bandwidth, "_add_predictions", lambda *given: None)
    figures = bandwidth.first_figures(mebibytes=1, jobs=2, repeats=1)
    assert set(figures) == {"copy_gb_per_s", "encode minmax4 bfloat16", "reduce minmax8 bfloat16"}
    bandwidth.run_once()


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
