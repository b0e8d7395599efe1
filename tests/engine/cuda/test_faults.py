"""Failures on fake GPUs: mismatches, errors of the libraries, and the end of communicators."""

from __future__ import annotations

import gc
import importlib
import threading
import time
import weakref
from types import SimpleNamespace

import fake_cuda
import fake_nccl
import numpy as np
import patience
import pytest
from cuda_ranks import called, captured, on_gpus, one, pair, ranks, summed, values
from stub_libraries import Refused

import qccl
from qccl.engine.cuda import libraries


@on_gpus(2)
def test_ranks_that_disagree(comm, cupy):
    x = fake_cuda.array(values(comm.rank, 100 + comm.rank), comm.rank)
    with pytest.raises(qccl.MismatchError, match=r"rank 0 called .*count=100.*rank 1 called .*count=101|count=101"):
        comm.quantized_allreduce(x)
    with pytest.raises(qccl.MismatchError, match="earlier"):
        comm.quantized_allreduce(x)
    assert x.get().tobytes() == values(comm.rank, 100 + comm.rank).tobytes()


@on_gpus(1)
def test_a_call_that_ends_a_capture_says_so(comm, cupy):
    """Also to the thread that captures. CuPy raises RuntimeError there, which is none of CUDA's errors."""
    x, out = called(comm)
    stream = cupy.cuda.Stream(non_blocking=True)
    for given in (stream, stream.ptr):
        stream.begin_capture(0)
        with pytest.raises(qccl.EngineError, match=r"CUDA: .*Error906.* legacy default stream .*capture again"):
            comm.quantized_allreduce(x, out)
        with pytest.raises(qccl.EngineError, match=r"invalidated the capture sequence.* legacy default stream"):
            comm.quantized_allreduce(x, out, stream=given)
        with pytest.raises(fake_cuda.CUDARuntimeError, match="901"):
            stream.end_capture()
    comm.quantized_allreduce(x, out)  # the group is unharmed
    comm.check()


@on_gpus(2)
def test_the_agreement_is_asked_for_once(comm, cupy):
    asked = []
    allgather = comm.transport.allgather
    comm.transport.allgather = lambda *arguments: asked.append(1) or allgather(*arguments)
    x = fake_cuda.array(values(comm.rank, 100), comm.rank)
    for _ in range(3):
        comm.quantized_allreduce(x)
    comm._session.programs.clear()
    comm.quantized_allreduce(x)  # another program, but what it is has been agreed on
    assert len(asked) == 1


@pytest.mark.parametrize(("code", "kind"), [(2, qccl.EngineError), (6, qccl.PeerLost)])
@on_gpus(1)
def test_an_error_in_the_background(comm, code, kind, world, cupy):
    x, out = called(comm)
    fake = world.communicators[comm.transport.comm.comm]
    fake.asynchronous_error = 7  # in progress: no error
    comm.check()
    world.frozen = True
    work = comm.quantized_allreduce(x, out, async_op=True)
    fake.asynchronous_error = code
    with pytest.raises(kind, match=f"fake error {code}"):
        work.synchronize()
    with pytest.raises(kind, match="earlier"):
        comm.quantized_allreduce(x)


@on_gpus(1)
def test_an_error_of_a_kernel(comm, world, cupy):
    x, out = called(comm)
    world.frozen, world.error = True, 700
    with pytest.raises(qccl.EngineError, match="700") as caught:
        comm.quantized_allreduce(x, out, async_op=True).synchronize()
    assert caught.value.code == 700


@on_gpus(1)
def test_a_call_that_cannot_be_put_on_its_streams(comm, world, cupy, monkeypatch):
    x, out = called(comm)
    for _ in range(2):  # a stream that does not exist: nothing has happened
        with pytest.raises(qccl.EngineError, match="400"):
            comm.quantized_allreduce(x, out, stream=0x999)
    comm.quantized_allreduce(x, out)
    comm.check()
    assert (out.get() == x.get()).all()

    def fails(*arguments):
        raise cupy.cuda.driver.CUDADriverError(719)

    monkeypatch.setattr(libraries.cuda_libraries().driver, "launchKernel", fails)
    comm._session.programs.clear()  # those there are have the other one
    with pytest.raises(qccl.EngineError, match="719") as caught:
        comm.quantized_allreduce(x, out)
    assert caught.value.code == 719
    with pytest.raises(qccl.EngineError, match="earlier"):
        comm.quantized_allreduce(x, out)


@on_gpus(2)
def test_a_group_is_closed_when_a_transfer_fails(comm, failed: threading.Event, world, cupy):
    """A group of NCCL that stays open would swallow what the thread calls later, on any communicator."""
    x = summed(comm, 5000)
    if comm.rank == 0:
        assert failed.wait(60)
        return

    def fails(*arguments):
        raise Refused(4)

    world.communicators[comm.transport.comm.comm].send = fails
    comm._session.programs.clear()
    with pytest.raises(qccl.EngineError, match="fake error 4"):
        comm.quantized_allreduce(x)
    failed.set()
    assert world.local.group is None


def test_a_communicator_that_is_dropped_lives_until_its_calls_are_done(world, cupy):
    """The device still uses the workspace and the arrays, even if nobody holds the communicator or the Work."""
    comm = qccl.Communicator(qccl.get_unique_id(), 0, 1, device=0, timeout=60.0)
    x, out = called(comm)
    world.frozen = True
    comm.quantized_allreduce(x, out, async_op=True)
    engine, array = weakref.ref(comm._session.engine), weakref.ref(x)
    del comm, x
    gc.collect()
    time.sleep(0.1)
    assert engine() is not None and array() is not None
    world.frozen = False
    patience.wait_until(lambda: gc.collect() >= 0 and engine() is None and array() is None)


def test_what_a_failed_call_uses_stays_until_the_device_is_done(world, cupy):
    comm = qccl.Communicator(qccl.get_unique_id(), 0, 1, device=0, timeout=60.0)
    x, out = called(comm)
    world.ends = False
    with pytest.raises(qccl.CollectiveTimeout):
        comm.quantized_allreduce(x, out, async_op=True, timeout=0.1).synchronize()
    array = weakref.ref(x)
    del comm, x
    gc.collect()
    assert array() is not None
    world.ends = True

    def is_freed():
        one(lambda comm: None)  # the next communicator looks; the watchdog of the failed one may end after that
        gc.collect()
        return array() is None

    patience.wait_until(is_freed)


@on_gpus(1)
def test_a_call_can_be_asked_for_while_the_thread_captures(comm, world, cupy):
    x, out = called(comm)
    world.frozen = True
    work = comm.quantized_allreduce(x, out, async_op=True)
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    assert not work.is_completed()
    world.frozen = False
    assert work.synchronize() is out and work.exception() is None
    stream.end_capture()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@on_gpus(2)
def test_results_after_a_failure_are_nan(comm, dtype, missed: threading.Event, world, cupy):
    """What the caller's stream does next cannot take garbage for a result, although the host has not waited."""
    storage, code = {"float32": (np.float32, 2), "float16": (np.float16, 2), "bfloat16": (np.uint16, 4)}[dtype]
    x, out, seen = (fake_cuda.array(np.ones(3000, storage), comm.rank, code) for _ in range(3))
    comm.quantized_allreduce(x, out, dtype=dtype)
    comm.check()
    comm.barrier()
    if comm.rank == 1:
        assert missed.wait(60)
        return
    comm.quantized_allreduce(x, out, dtype=dtype, timeout=0.3)
    runtime = libraries.cuda_libraries().runtime
    runtime.memcpyAsync(seen.data.ptr, out.data.ptr, seen.values.nbytes, 3, 0)
    runtime.streamSynchronize(0)
    with pytest.raises(qccl.CollectiveTimeout):
        comm.check()
    missed.set()
    assert (x.values == 1).all()
    assert (seen.values == 0xFFFF).all() if dtype == "bfloat16" else np.isnan(seen.values).all()


@on_gpus(1)
def test_replays_after_a_failure_give_nan(comm, world, cupy):
    x, out = called(comm)
    stream, graph = captured(cupy, comm, lambda s: comm.quantized_allreduce(x, out, stream=s))
    graph.launch(stream)
    stream.synchronize()
    assert (out.get() == x.get()).all()
    comm.abort("on purpose")
    graph.launch(stream)
    stream.synchronize()
    assert np.isnan(out.get()).all()


@on_gpus(1)
def test_a_failure_while_a_call_is_being_started(comm, world, cupy, monkeypatch):
    """The call is not among those that the failure has ended, and must not seem to end well later."""
    x, out = called(comm)
    program = importlib.import_module("qccl.engine.cuda.program").CudaProgram
    wait_for_streams = program.wait_for_streams

    def fails_meanwhile(*arguments):
        wait_for_streams(*arguments)
        comm._session.engine.fail(qccl.PeerLost("lost meanwhile"))

    monkeypatch.setattr(program, "wait_for_streams", fails_meanwhile)
    with pytest.raises(qccl.PeerLost, match="lost meanwhile"):
        comm.quantized_allreduce(x, out, async_op=True).synchronize()


@on_gpus(1)
def test_a_call_that_has_ended_does_not_fail_although_nobody_has_noticed(comm, world, cupy, monkeypatch):
    x, out = called(comm)
    monkeypatch.setattr(comm._session.engine, "watch", lambda: True)
    work = comm.quantized_allreduce(x, out, async_op=True)
    world.finish(lambda: world.is_idle(0))
    comm.abort("on purpose")
    assert work.synchronize() is out and (out.get() == x.get()).all()


@on_gpus(1)
def test_an_abort_tells_the_other_ranks_before_nccl_frees_what_they_read(comm, world, cupy):
    """NCCL needs all ranks of a node to abort (NVIDIA/nccl issue 863); results are poisoned before that."""
    words, seen = comm._session.engine.device.flags._words, []

    def told(reason):
        seen.append(("on purpose" in reason, words[0], ("abort", 0) in world.calls))

    comm.transport.host = SimpleNamespace(abort=told)
    comm.abort("on purpose")
    assert seen == [(True, 1, False)] and ("abort", 0) in world.calls


def test_a_communicator_that_does_not_end(world, cupy, monkeypatch):
    """NCCL waits for graphs; it is told from where, and not aborted as well, which would free it twice."""
    release = threading.Event()
    monkeypatch.setattr(fake_nccl.Communicator, "destroy", lambda self: release.wait(60))
    monkeypatch.setattr(importlib.import_module("qccl.engine.cuda.nccl"), "_DESTROY_SECONDS", 0.2)
    comm = qccl.Communicator(qccl.get_unique_id(), 0, 1, device=0)
    with pytest.warns(RuntimeWarning, match="graphs"):
        comm.close()
    assert not any(call[0] == "abort" for call in world.calls)
    release.set()


def test_events_are_of_the_communicators_gpu(world, cupy):
    """Also where the thread's current one is another, and more calls are under way than there are events ready."""
    with qccl.Communicator(qccl.get_unique_id(), 0, 1, device=3, timeout=60.0) as comm:
        x, out = (fake_cuda.array(values(0, 100, seed), 3) for seed in range(2))
        comm.quantized_allreduce(x, out)
        comm.check()
        world.frozen = True
        works = [comm.quantized_allreduce(x, out, async_op=True) for _ in range(50)]
        world.frozen = False
        assert libraries.cuda_libraries().runtime.getDevice() == 0
        assert all(work.synchronize() is out for work in works)
        assert (out.get() == x.get()).all()


def test_at_the_end_of_the_process(world, cupy):
    """Calls are waited for and the communicator is released, on a thread that the process need not wait for."""
    comm = qccl.Communicator(qccl.get_unique_id(), 0, 1, device=0, timeout=60.0)
    x, out = pair()
    comm.quantized_allreduce(x, out)
    importlib.import_module("qccl.engine.cuda.engine")._live.end()
    assert (out.get() == x.get()).all()
    assert ("destroy", 0) in world.calls


def test_no_more_threads(cupy, monkeypatch):
    """At its end the interpreter starts none."""

    def refuses(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    assert libraries.bounded(0, 1.0, "a test", threading.get_ident) == threading.get_ident()


def test_errors_of_the_libraries_are_ours(cupy):
    for error, kind, code in (
        (KeyError(8), qccl.EngineError, 8),
        (fake_cuda.CompileException("no sm_50"), qccl.EngineError, None),
        (fake_cuda.OutOfMemoryError("1 TB"), qccl.EngineError, None),
        (cupy.cuda.nccl.NcclError(6), qccl.PeerLost, None),
        (fake_cuda.CUDARuntimeError(2), qccl.EngineError, 2),
    ):
        found = libraries.as_qccl_error(error)
        assert type(found) is kind and getattr(found, "code", None) == code and str(error) in str(found)
    assert libraries.as_qccl_error(KeyError("x")) is None


def test_closing(world, cupy):
    def run(comm):
        x = fake_cuda.array(values(comm.rank, 5000), comm.rank)
        comm.quantized_allreduce(x)
        comm.close()  # waits for the call
        comm.close()
        for call in (lambda: comm.quantized_allreduce(x), comm.check, lambda: comm.split(0)):
            with pytest.raises(qccl.ArgumentError, match="closed"):
                call()
        return x.get().tobytes()

    def on_host(comm):
        return comm.quantized_allreduce(values(comm.rank, 5000)).tobytes()

    assert ranks(2, run) == qccl.run_ranks(2, on_host)
    assert {("destroy", 0), ("destroy", 1)} <= set(world.calls)
    assert not fake_cuda.remaining_threads(world)


@on_gpus(2)
def test_a_program_is_made_while_another_thread_ends_a_call(comm, ended: threading.Event, cupy):
    """To make one, a rank waits for the others, which here wait for the end of a call."""
    x, y = (fake_cuda.array(values(comm.rank, count), comm.rank) for count in (100, 256))
    work = comm.quantized_allreduce(x, async_op=True)
    if comm.rank == 0:
        work.add_done_callback(lambda work: ended.set())
    else:
        assert ended.wait(60)
    comm.quantized_allreduce(y)
    comm.check()


@on_gpus(1)
def test_a_call_that_cannot_be_captured_changes_nothing(comm, cupy):
    x, out = pair()
    comm.quantized_allreduce(x, out)
    calls = comm.calls

    def call(stream):
        with pytest.raises(qccl.ArgumentError, match=r'nonfinite="error" waits .* stream capture'):
            comm.quantized_allreduce(x, out, stream=stream, nonfinite="error")

    captured(cupy, comm, call)
    comm.check()
    assert comm.calls == calls
    comm.quantized_allreduce(x, out, nonfinite="error")
    comm.check()


@on_gpus(2, timeout=3600.0)
def test_close_leaves_a_destroy_that_waits_for_a_rank_to_a_thread(comm, leaving, world, cupy):
    """ncclCommDestroy waits for the other ranks of the machine."""
    summed(comm)
    if comm.rank == 1:
        assert leaving.wait(patience.Limit(30).left())
        return
    with pytest.warns(RuntimeWarning, match="has not ended a communicator .* close it on all ranks"):
        comm.close()
    leaving.set()


@pytest.fixture
def leaving(world, monkeypatch):
    """Set when rank 0 has closed; ncclCommDestroy is left to its thread after 0.2 s, which ends with the last rank."""
    world.destroy_waits, event = True, threading.Event()
    monkeypatch.setattr(importlib.import_module("qccl.engine.cuda.nccl"), "_DESTROY_SECONDS", 0.2)
    yield event
    assert not fake_cuda.remaining_threads(world)
