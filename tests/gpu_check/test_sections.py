"""Each section of gpu-check on a fake GPU: it passes, and finds what is planted."""

from __future__ import annotations

import importlib
import re
import sys
import time
from types import SimpleNamespace

import fake_cuda
import fake_frameworks
import numpy as np
import patience
import pytest
from codec_table import TABLE
from nvrtc import Nvrtc, Program

import qccl
from qccl import codecs
from qccl.cuda.libraries import cuda_libraries
from qccl.schedule import Reduce

pytestmark = pytest.mark.starts_first


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
    """The fake's slow kernels take a second each, and those that hang take four: the deadline must pass before that."""
    import queues

    begun: dict[fake_cuda.Node, float] = {}
    takes = delay = patience.factor()  # seconds
    world.patience *= delay
    world.holds = lambda node: (
        node.what == "spin" and time.monotonic() < takes + begun.setdefault(node, time.monotonic())
    )
    assert queues.late_start(delay=delay, timeout=0.2)["seconds"] >= delay
    assert 10 < queues.many_calls(calls=300, delay=delay)["calls_before_the_host_waited"] < 300
    world.queue_entries, takes = 200, 4 * delay
    assert queues.full_queue(hang=takes, timeout=0.2, launches=300)["failed_after_seconds"] >= 0.2
    monkeypatch.setattr(importlib.import_module("qccl.cuda.flags").RunFlags, "set_failed", lambda self: None)
    with pytest.raises(AssertionError, match="no NaN"):
        queues.full_queue(hang=takes, timeout=0.2, launches=300)


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


@pytest.mark.parametrize("cuda", [12, 13])
def test_the_planted_race_is_compiled(cuda):
    """The compiler keeps the store to shared memory, and the load after it."""
    import device

    program = Program(Nvrtc(cuda), device.SOURCE, [], ["--gpu-architecture=compute_90", "-std=c++17"])
    assert not program.failed, program.log
    race = program.ptx().split(".entry race")[1].split(".entry")[0]
    assert re.search(r"st\.volatile\.shared\.\w+ .*ld\.volatile\.shared\.\w+ .*st\.global", race, re.DOTALL), race


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
