"""codec="auto" on the fake GPUs: what ranks choose, what measuring leaves behind, and where it is not possible."""

from __future__ import annotations

import importlib
import threading

import fake_cuda
import numpy as np
import patience
import pytest
from cuda_ranks import captured, on_gpus, returned, values
from profiles import profile

import qccl
from qccl.base.errors import ArgumentError
from qccl.communicator import measuring, programs
from qccl.communicator.profile import CallKind, GroupProfile

COLLECTIVES = ["allreduce", "reduce_scatter", "all_gather", "broadcast", "reduce"]
KIND = CallKind("allreduce", "float32", "minmax8")
COUNT = 996


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch, world, cupy):
    """Enough for a choice, in little memory; a good one is not needed here."""
    world.elapses = None
    monkeypatch.setattr(measuring, "_LIMIT", 0.05)
    monkeypatch.setattr(measuring, "_SLICE", 0.005)
    monkeypatch.setattr(measuring, "_OF_TIMEOUT", 1e6)  # fake GPUs on a busy machine are slow
    monkeypatch.setattr(importlib.import_module("qccl.engine.cuda.rig"), "_NBYTES", (1 << 20, 1 << 18))


def allocated(world):
    """Addresses of the driver's memory that measurements have, and the sizes of what they have taken."""
    taken = {call[1]: call[2] for call in world.calls if call[0] == "malloc"}
    freed = {call[1] for call in world.calls if call[0] == "free"}
    return taken.keys() - freed, list(taken.values())


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_choose_alike_and_have_the_hosts_bytes_of_the_chosen_call(collective, size, world, cupy):
    def calls(comm, plan, array, read):
        x = values(comm.rank, COUNT)
        if collective == "all_gather":
            part, out = array(x[: COUNT // size]), array(np.empty_like(x))
            plan(part, out)
        else:
            plan(out := array(x))
        comm.check()
        return None if collective == "reduce" and comm.rank else read(out)

    def on_gpu(comm):
        plan = comm.plan(collective, COUNT, codec="auto")
        assert comm.calls == 0, "measured calls have no numbers"
        assert not comm.state_dict()["keys"] and not comm.stats().calls
        found = calls(comm, plan, lambda x: fake_cuda.array(x, comm.rank), lambda x: x.get().tobytes())
        return found, plan.codec, getattr(plan.spec, "algorithm", None), plan.explain()

    found = returned(size, on_gpu)
    assert len({each[1:3] for each in found}) == 1
    _, codec, algorithm, text = found[0]
    assert codec in ("none", "minmax8") and "by the times of the group's profile" in text

    def on_host(comm):
        named = {} if algorithm is None else {"algorithm": algorithm}
        plan = comm.plan(collective, COUNT, codec=codec, **named)
        return calls(comm, plan, lambda x: x.copy(), lambda x: x.tobytes())

    assert [each[0] for each in found] == qccl.run_ranks(size, on_host)


@pytest.mark.parametrize("codec", ["auto", "auto:minmax4+ef"])
def test_a_measurement_leaves_neither_memory_nor_state_nor_records(codec, world, cupy):
    def run(comm):
        blocks = len(comm._session.engine._workspace._blocks)
        x = fake_cuda.array(values(comm.rank, COUNT), comm.rank)
        comm.quantized_allreduce(x, codec="none", algorithm="one_shot")
        comm.quantized_allreduce(x, codec=codec, key="x")
        comm.check()
        assert len(comm._session.engine._workspace._blocks) == blocks, "the workspace has not grown"
        assert comm.calls == 2 and sum(each.calls for each in comm.stats().calls) == 2
        assert set(comm.state_dict()["keys"]) <= {"x"}
        texts = [call.text for call in comm.record().calls]
        assert [text.split("(")[0].split(" ")[0] for text in texts] == ["allreduce", "measure", "allreduce"]
        comm.barrier()

    returned(2, run)
    # garbage of runs is dropped on a thread of its own
    patience.wait_until(lambda: not allocated(world)[0], what="the driver's memory is freed")
    assert allocated(world)[1] == [1 << 20, 1 << 20]


def test_the_calls_are_measured_on_a_stream_of_their_own(world, cupy):
    def run(comm):
        x = fake_cuda.array(values(comm.rank, COUNT), comm.rank)
        with fake_device(comm.rank):
            stream = cupy.cuda.Stream(non_blocking=True)
            world.put(stream.ptr, "the caller's work")
            comm.quantized_allreduce(x, codec="auto", stream=stream)
        left = [node.what for node in world.pending if node.stream == stream.ptr]
        both_measured.wait(20)
        released.append(None)
        comm.check()
        return left[0], x.get().tobytes()

    def fake_device(number):
        world.local.device = number
        return importlib.import_module("qccl.engine.cuda.libraries").on_device(number)

    released, both_measured = [], threading.Barrier(2)
    world.holds = lambda node: node.what == "the caller's work" and len(released) < 2
    first, second = returned(2, run)
    assert first[0] == second[0] == "the caller's work" and first[1] == second[1]


# -- memory ----------------------------------------------------------------------------------------------------------


def test_where_there_is_less_memory_smaller_calls_are_measured(world, cupy):
    world.free_memory = 1 << 19

    def run(comm):
        comm.plan("allreduce", COUNT, codec="auto")
        return max(count for curve in comm.profile().times[KIND].values() for count, _ in curve.points)

    assert max(returned(2, run)) <= (1 << 18) / 8
    assert allocated(world)[1] == [1 << 18, 1 << 18]


def test_a_rank_without_memory_is_not_waited_for(world, cupy):
    world.full.add(1)

    def run(comm):
        x = fake_cuda.array(values(comm.rank, COUNT), comm.rank)
        comm.quantized_allreduce(x, codec="auto")
        plan = comm.plan("allreduce", COUNT, codec="auto")
        assert plan.codec == "none"
        with pytest.raises(ArgumentError, match=r"there is no profile, because calls were not measured: .*no room"):
            comm.profile()
        world.full.clear()
        assert comm.plan("allreduce", COUNT, codec="auto").codec == "none", "the choice of a call never changes"
        comm.check()
        return plan.explain(), x.get().tobytes()

    (first, x), (second, y) = returned(2, run)
    assert x == y
    own = "GPU 1 has no room for the arrays of measured calls: 262144 bytes were asked for"
    assert f"without a codec, because calls were not measured: {own}" in second
    assert f"rank 1 cannot make this call, so no rank makes it: {own}" in first
    assert "smaller chunks" not in second and not allocated(world)[0]


def test_a_rank_without_memory_for_a_plan_ends_the_measurement(world, cupy, monkeypatch):
    """On rank 1 the third plan fails: too early for a profile."""
    compiled, usual = [], programs.Compiled

    def fail(engine, spec, *, is_counted, **options):
        if not is_counted:
            compiled.append(engine.rank)
            if engine.rank == 1 and compiled.count(1) > 3:
                raise qccl.EngineError("there is no room")
        return usual(engine, spec, is_counted=is_counted, **options)

    monkeypatch.setattr(programs, "Compiled", fail)

    def run(comm):
        plan = comm.plan("allreduce", COUNT, codec="auto")
        plan(fake_cuda.array(values(comm.rank, COUNT), comm.rank))
        comm.check()
        return plan.codec, plan.explain()

    found = returned(2, run)
    assert [codec for codec, _ in found] == ["none", "none"]
    assert all("calls were not measured" in text and "there is no room" in text for _, text in found)


# -- captures --------------------------------------------------------------------------------------------------------


def test_a_capture_measures_nothing(world, cupy):
    def run(comm):
        world.local.device = comm.rank
        x = fake_cuda.array(values(comm.rank, COUNT), comm.rank)
        stream = cupy.cuda.Stream(non_blocking=True)
        both.wait(60)  # the fake refuses what a capture in any thread forbids, such as to allocate
        for current, call in (
            (False, lambda: comm.quantized_allreduce(x, codec="auto", stream=stream)),
            (True, lambda: comm.quantized_allreduce(x, codec="auto")),
            (True, lambda: comm.plan("allreduce", COUNT, codec="auto")),
            (True, comm.profile),
        ):
            with one_at_a_time:
                stream.begin_capture()
                try:
                    with pytest.raises(ArgumentError, match=r"part of a CUDA graph; make such a call.* before the cap"):
                        if current:
                            with stream:
                                call()
                        else:
                            call()
                finally:
                    stream.end_capture()
        both.wait(60)
        comm.quantized_allreduce(x, codec="auto", stream=stream)
        comm.check()
        before = x.get()
        both.wait(60)
        with one_at_a_time:
            stream, graph = captured(cupy, comm, lambda s: comm.quantized_allreduce(x, codec="auto", stream=s))
        both.wait(60)
        graph.launch(stream)
        comm.check(stream.ptr)
        assert np.isfinite(before).all() and not np.array_equal(before, x.get())
        return x.get().tobytes()

    one_at_a_time, both = threading.Lock(), threading.Barrier(2)
    first, second = returned(2, run)
    assert first == second


# -- profiles, and the end -------------------------------------------------------------------------------------------


@on_gpus(2)
def test_a_loaded_profile_of_the_same_hardware_decides(comm, world, cupy, tmp_path):
    """tests/communicator/test_choosing.py has what it decides."""
    assert comm.transport.hardware == "2 x Fake 100, NCCL 2.28.0"
    path = tmp_path / f"{comm.rank}.json"
    profile(comm, ("minmax8", "two_round")).save(path)
    comm._adopt(GroupProfile.load(path))
    plan = comm.plan("allreduce", COUNT, codec="auto")
    assert (plan.codec, plan.spec.algorithm) == ("minmax8", "two_round")
    assert comm.profile().hardware == comm.transport.hardware and not allocated(world)[1]
    other = GroupProfile(comm.nodes, "nccl", hardware="2 x Fake 100, NCCL 2.29.0")
    with pytest.raises(ArgumentError, match=r"over nccl \(2 x Fake 100, NCCL 2.29.0\), and this group has .*2.28.0"):
        comm._adopt(other)
    with pytest.raises(ArgumentError, match="over ucx, and this group has"):
        comm._adopt(GroupProfile(comm.nodes, "ucx"))
