"""Ways to make a communicator on fake GPUs, and what is said without CUDA."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import fake_cuda
import fake_kernels
import numpy as np
import pytest
from cuda_ranks import on_gpus, one, ranks, values
from stub_libraries import Refused

import qccl
from qccl.communicator import launch
from qccl.engine.control import ControlKind, Header
from qccl.engine.cuda import libraries
from qccl.engine.cuda import run as run_module
from qccl.engine.end import End
from qccl.meeting import meetings, rendezvous

# -- groups and ways to make one -------------------------------------------------------------------------------------


@on_gpus(3)
def test_split(comm, cupy):
    group = comm.split(comm.rank % 2, key=-comm.rank)
    x = fake_cuda.array(np.full(100, 10.0**comm.rank, np.float32), comm.rank)
    group.quantized_allreduce(x)
    group.check()
    none = comm.split(None if comm.rank else 0)
    assert (none is None) == bool(comm.rank)
    comm.quantized_allreduce(fake_cuda.array(np.zeros(5, np.float32), comm.rank))
    comm.check()
    expected = [(1, 2, 101.0), (0, 1, 10.0), (0, 2, 101.0)][comm.rank]
    assert (group.rank, group.size, float(x.get()[0])) == expected and group.backend == "cuda"


@pytest.mark.parametrize("bare", [False, True])
def test_adopting_a_communicator(bare, world, cupy):
    """CuPy's, or an ncclComm_t."""
    unique_id = qccl.get_unique_id()

    def run(rank):
        cupy.cuda.runtime.setDevice(rank)
        given = cupy.cuda.nccl.NcclCommunicator(2, unique_id, rank)
        adopted = given.comm if bare else given
        with pytest.raises(qccl.ArgumentError, match=f"rank {rank} of 2"):
            qccl.Communicator.from_nccl(adopted, rank, 3)
        with qccl.Communicator.from_nccl(adopted, rank, 2) as comm:
            x = fake_cuda.array(np.full(10, 1.0 + rank, np.float32), rank)
            comm.quantized_allreduce(x)
            comm.check()
        assert given.comm  # left as it was
        return float(x.get()[3]), comm.backend

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [(3.0, "cuda")] * 2


def test_over_a_host_group(cupy, monkeypatch):
    """What MPI does under mpiexec, with threads: the id comes from rank 0, and one rank's trouble is everyone's."""
    from qccl.engine.cuda.nccl import NcclTransport
    from qccl.transports.loopback import LoopbackGroup

    def make(n, device):
        group = LoopbackGroup(n)

        def run(rank):
            try:
                host = group.transport(rank)
                transport = NcclTransport.from_group(host, device(rank), 10.0)
                assert transport.host is host
                return transport.rank, transport.size, transport.device
            except qccl.QcclError as error:
                return type(error), str(error)

        with ThreadPoolExecutor(n) as pool:
            return list(pool.map(run, range(n)))

    assert make(2, lambda rank: None) == [(0, 2, 0), (1, 2, 1)]
    assert make(2, lambda rank: 5 + rank) == [(0, 2, 5), (1, 2, 6)]
    for kind, text in make(2, lambda rank: 99 if rank else 0):
        assert kind is qccl.EngineError and text.startswith("rank 1: device=99")


@pytest.mark.parametrize("launcher", ["none", "torchrun"])
def test_init(launcher, cupy, monkeypatch):
    if launcher == "torchrun":
        for key, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(key, str(value))
        monkeypatch.setenv("MASTER_PORT", "29511")
    for arguments in ({"backend": "cuda"}, {"backend": "auto"}, {"device": 3}, {"backend": "auto", "device": 0}):
        with qccl.init(**arguments) as comm:
            assert (comm.backend, comm.transport.device) == ("cuda", arguments.get("device", 0))
    with qccl.init(backend="host") as comm:
        assert comm.backend == "host"
    with pytest.raises(qccl.ArgumentError, match="no devices"):
        qccl.init(backend="host", device=0)
    with pytest.raises(qccl.ArgumentError, match="GPUs 0 to 7"):
        qccl.init(backend="cuda", device=8)


def test_ranks_without_mpi_decide_together(cupy, monkeypatch):
    """One machine has too few GPUs: all ranks go to the host, or all say whose fault it is."""
    of_thread = threading.local()

    def inits(*arguments):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            place = probe.getsockname()

        def run(rank):
            must, device, of_thread.reason = arguments[rank]
            meeting = meetings.of_address("torchrun", rank, len(arguments), place)
            try:
                with contextlib.closing(meeting):
                    offers = launch._offers(meeting, "cuda" if must else "auto", None, 10.0)
                    comm = launch._on_gpus(meeting, offers, device, 10.0)
            except qccl.QcclError as error:
                return type(error), str(error)
            if comm is None:
                return "host"
            with comm:
                return comm.backend, comm.rank, comm.transport.device

        with ThreadPoolExecutor(len(arguments)) as pool:
            return list(pool.map(run, range(len(arguments))))

    # ranks are processes, which number their own meetings; here they are threads of one
    monkeypatch.setattr(rendezvous, "_number", lambda place, size, job: 1)
    monkeypatch.setattr(launch, "_too_few", lambda ranks: of_thread.reason)
    assert inits((False, None, ""), (False, None, "")) == [("cuda", 0, 0), ("cuda", 1, 1)]
    assert inits((True, 4, ""), (True, 7, "")) == [("cuda", 0, 4), ("cuda", 1, 7)]
    assert inits((False, None, ""), (False, None, "too few"), (False, None, "")) == ["host"] * 3
    for kind, text in inits((True, None, ""), (True, None, ""), (True, 99, "")):
        assert kind is qccl.EngineError and text.startswith("rank 2: device=99")
    for kind, text in inits((False, None, ""), (True, None, "")):
        assert kind is qccl.MismatchError and "rank 1 called" in text and "rank 0 with" in text


def _by_address(rank, size, place):
    meeting = meetings.of_address("torchrun", rank, size, place)
    with contextlib.closing(meeting):
        offers = launch._offers(meeting, "cuda", None, 10.0)
        return launch._on_gpus(meeting, offers, None, 10.0)


@pytest.mark.parametrize("way", ["address", "host group", "NCCL"])
def test_no_rank_waits_where_rank_0_can_make_no_id(way, cupy, monkeypatch):
    """Each raises rank 0's reason long before the set-up's time is over."""
    from qccl.transports.loopback import LoopbackGroup

    nccl = cupy.cuda.nccl
    given, host, place = nccl.get_unique_id(), LoopbackGroup(2), None
    if way == "address":
        monkeypatch.setattr(rendezvous, "_number", lambda place, size, job: 1)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            place = probe.getsockname()

    def refuse():
        raise nccl.NcclError(2)

    ways = {
        "address": lambda rank: _by_address(rank, 2, place),
        "host group": lambda rank: importlib.import_module("qccl.engine.cuda.nccl").NcclTransport.from_group(
            host.transport(rank), None, 10.0
        ),
        "NCCL": lambda rank: qccl.Communicator.from_nccl(nccl.NcclCommunicator(2, given, rank), rank, 2, 10.0),
    }

    def run(rank):
        with pytest.raises(qccl.EngineError) as caught:
            ways[way](rank)
        return str(caught.value), caught.value.code

    monkeypatch.setattr(nccl, "get_unique_id", refuse)
    with ThreadPoolExecutor(2) as pool:
        (first, code), (second, _) = pool.map(run, range(2))
    assert "fake error 2" in first and code == 2
    assert second.startswith("rank 0: ") and "fake error 2" in second


def test_no_rank_waits_for_a_reason_that_is_not_utf_8(monkeypatch):
    """It may contain the name of a file. A rank that could not send it would leave the others waiting."""
    from qccl.engine.cuda.consistency import Consistency
    from qccl.engine.cuda.nccl import agreed_id

    reason, shown = "no library in caf\udce9", r"no library in caf\udce9"
    with pytest.raises(qccl.EngineError) as caught:
        agreed_id(0, lambda note: [note], reason)
    assert str(caught.value) == f"rank 0: {shown}"
    group = SimpleNamespace(rank=0, size=2, allgather=lambda note, timeout: [note, note])
    assert Consistency(group).compare(Header(ControlKind.CALL, 0, "barrier"), 1.0, reason).endswith(shown)
    sent = []
    meeting = SimpleNamespace(rank=0, size=2, name="", gather=lambda note, timeout: sent.append(note) or [note, b""])
    offer = SimpleNamespace(host="here", backend="auto", no_gpu="")
    monkeypatch.setattr(launch, "_too_few", lambda ranks: reason)
    assert launch._on_gpus(meeting, [offer, offer], None, 1.0) is None
    assert sent == [shown.encode()]


def test_bad_ids(cupy):
    for unique_id in (b"short", "x" * 128, None):
        with pytest.raises(qccl.ArgumentError, match="128 bytes"):
            qccl.Communicator(unique_id, 0, 1)
    with pytest.raises(qccl.ArgumentError, match="rank 2 of 2"):
        qccl.Communicator(qccl.get_unique_id(), 2, 2)


# -- without CUDA ----------------------------------------------------------------------------------------------------


_STATEMENTS = (
    "import qccl.engine.cuda.engine",
    "qccl.init(backend='cuda')",
    "qccl.init(device=0)",
    "qccl.get_unique_id()",
    "qccl.Communicator(b'x' * 128, 0, 1)",
    "qccl.Communicator.from_nccl(5, 0, 1)",
)
#: runs each statement in a fork, because a failed import may leave something behind
_WITHOUT_CUDA = """
import os, sys, qccl
for statement in sys.argv[1:]:
    if os.fork() == 0:
        try:
            exec(statement)
        except qccl.EngineError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.processes
def test_without_cuda_there_is_one_clear_error():
    if not libraries.missing():
        pytest.skip("this machine has CUDA")
    command = [sys.executable, "-c", _WITHOUT_CUDA, *_STATEMENTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(_STATEMENTS), done.stdout + done.stderr
    assert all(line.startswith("the CUDA backend cannot be used here: ") for line in lines), lines
    with qccl.init(backend="auto") as comm:
        assert comm.backend == "host"


@pytest.mark.cupy
def test_what_is_missing_is_named(world):
    with fake_cuda.installed(world, fake_kernels.work) as cupy, pytest.MonkeyPatch.context() as monkeypatch:
        assert libraries.missing() == []
        assert libraries.device_count() == fake_cuda.DEVICES
        assert libraries.nccl_version() == "2.28.0"
        monkeypatch.setattr(cupy, "__version__", "14.0.1")
        monkeypatch.setattr(cupy.cuda.nccl, "get_version", lambda: 21705)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)

        def no_driver():
            raise fake_cuda.CUDARuntimeError(35)

        monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", no_driver)
        lacking = " | ".join(libraries.missing())
        for part in (
            "CuPy is 14.0.1, and 14.1 or newer",
            "NCCL is 2.17",
            "cuda-python cannot be imported",
            "no CUDA driver",
        ):
            assert part in lacking
        monkeypatch.setattr(cupy.cuda.nccl, "available", False)
        monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", no_driver)
        assert any("cannot load NVRTC" in each for each in libraries.missing())
        assert any("finds no NCCL" in each for each in libraries.missing())
        monkeypatch.setitem(sys.modules, "cupy", None)
        assert libraries.device_count() == 0
        assert len(libraries.missing()) == 1


def test_the_reason_of_a_cupy_that_cannot_be_imported_is_one_line(monkeypatch, tmp_path):
    page = f"\n{'=' * 64}\nFailed to import CuPy.\n\nOriginal error:\n  ImportError: numpy is too old\n{'=' * 64}\n"
    (tmp_path / "cupy.py").write_text(f"raise ImportError({page!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert libraries.missing() == [
        "CuPy cannot be imported (ImportError: numpy is too old); install qccl[cuda12] or qccl[cuda13]"
    ]
    assert libraries.part_versions() == {"CuPy": "none (ImportError: numpy is too old)"}


def test_the_version_of_each_part_is_told(cupy, monkeypatch):
    found = libraries.part_versions()
    assert {"CuPy": "14.1.0", "NCCL": "2.28.0", "NVRTC": "12.9", "driver for CUDA": "13.0"}.items() <= found.items()

    def is_missing():
        raise RuntimeError("no such file")

    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", is_missing)
    assert libraries.part_versions()["NVRTC"] == "none (no such file)"
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert libraries.part_versions()["CuPy"].startswith("none (")


@pytest.mark.parametrize(("given", "beside", "expected"), [(None, "torch", "1"), ("0", "torch", "0"), (None, "", None)])
def test_nccl_is_told_to_keep_the_order_of_communicators_beside_torch(given, beside, expected, cupy, monkeypatch):
    """Elsewhere it would refuse launches by two threads at once."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    if beside:
        monkeypatch.setitem(sys.modules, beside, SimpleNamespace())
    monkeypatch.setenv(libraries.LAUNCH_ORDER, given or "")
    if given is None:
        monkeypatch.delenv(libraries.LAUNCH_ORDER)
    seen = []
    make = libraries.cuda_libraries().nccl.NcclCommunicator
    monkeypatch.setattr(
        libraries.cuda_libraries().nccl,
        "NcclCommunicator",
        lambda *arguments: seen.append(os.environ.get(libraries.LAUNCH_ORDER)) or make(*arguments),
    )
    one(lambda comm: None)
    assert seen == [expected]


def test_the_timeout_of_calls_that_nobody_chose(cupy):
    """On CUDA as PyTorch's for NCCL; on the host, where the host waits, one minute."""
    with qccl.Communicator(qccl.get_unique_id(), 0, 1, device=0) as comm:
        assert comm.timeout == 600
    with qccl.init(backend="host") as comm:
        assert comm.timeout == 60
    with qccl.init(backend="cuda", timeout=500) as comm:
        assert comm.timeout == 500


@on_gpus(1)
def test_streams_go_before_those_of_a_backward_pass_and_transfers_before_computation(comm, world, cupy):
    device = comm._session.engine.device
    for queues in (device.queues, device.capture_queues):
        assert {q.value: world.priorities[s] for q, s in queues.items()} == {"compute": -1, "comm": -2}


def test_which_gpu_a_rank_takes(cupy, monkeypatch):
    assert libraries.pick_device(3, 0) == 3
    assert libraries.pick_device(None, 5) == 5
    assert libraries.pick_device(None, None) == 0
    with pytest.raises(qccl.EngineError, match="rank 8"):
        libraries.pick_device(None, 8)
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 1)
    assert libraries.pick_device(None, 3) == 0  # the launcher shows each rank its own


@pytest.mark.parametrize("before", [None, 1, 3])
def test_no_other_gpu_gets_a_context(before, world, cupy):
    """A context takes 534 MiB on an H100. The thread keeps the device that it had."""
    device = cupy.cuda.runtime.getDevice()
    if before is not None:
        cupy.cuda.runtime.setDevice(device := before)
    with qccl.Communicator(qccl.get_unique_id(), 0, 1, device=3) as comm:
        with libraries.on_device(3):
            x, out = (fake_cuda.array(values(0, 1000), 3) for _ in range(2))
            stream = cupy.cuda.Stream(non_blocking=True)
        for arguments in ({}, {"stream": stream.ptr}, {"nonfinite": "error"}, {"codec": "minmax8+ef", "key": "k"}):
            comm.quantized_allreduce(x, out, **arguments)
            comm.quantized_allreduce(x, out, **arguments)
        for at in (0, stream.ptr):
            qccl.quantized_allreduce(x.data.ptr, out.data.ptr, 1000, "float32", "sum", comm, at)
        comm.check(stream.ptr)
        comm.state_dict()
        comm.split(0).close()
        assert cupy.cuda.runtime.getDevice() == device
    assert world.contexts == {3, before} - {None}


def test_the_benchmark_on_a_gpu(cupy):
    """qccl-bench's measure() on device arrays: right results, the plain all-reduce beside, a graph with -G."""
    from qccl.base import dtypes
    from qccl.bench.sweep.arrays import arrays_of
    from qccl.bench.sweep.calls import Case, PlainCall, QuantizedCall
    from qccl.bench.sweep.measure import Counts, measure

    case = Case(3000, dtypes.FLOAT32, "sum")
    counts = Counts(iters=10, warmups=1, checks=1)  # two calls in each of five rounds

    def run(comm):
        with libraries.on_device(comm.rank):
            found = []
            for call in (PlainCall(comm, case), QuantizedCall(comm, case, qccl.codecs.get("minmax8"), "auto", None)):
                assert call.name == "minmax8" or call.is_supported(arrays_of(comm))
                (row,) = measure(comm, [call], counts, meter=None, arrays=arrays_of(comm))
                found += [row.out_of_place.wrong, row.in_place.wrong, row.out_of_place.seconds]
            info, number, bus = arrays_of(comm).device()
            return found, info, number, bus

    one_call = 1e-3 / 2  # the fake's clock says 1 ms for two calls
    expected = [0, 0, one_call] * 2
    assert ranks(2, run) == [(expected, "cuda Fake 100", r, f"0000:{r:02d}:00.0") for r in range(2)]

    def graphs(comm):
        arrays = arrays_of(comm, graph_launches=3)
        x = arrays.empty(3000, dtypes.FLOAT32)
        arrays.put(x, values(0, 3000))
        given = (Case(3000, dtypes.FLOAT32, "avg"), qccl.codecs.get("none"), "auto", None)
        call = QuantizedCall(comm, *given, as_plan=True)
        run = call.bind(arrays, x, x)
        run()
        return arrays.calls_per_run, arrays.run(run, 2)

    assert one(graphs) == (3, 1e-3 / 3)


def test_a_gpu_that_is_too_new_for_nvrtc(cupy, monkeypatch):
    """As Blackwell for a compiler before CUDA 12.8."""
    names = {"name": b"B200", "major": 10, "minor": 0}
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda device: names)
    assert libraries.missing() == []
    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", lambda: (12, 6))
    monkeypatch.setattr(cupy.cuda.nvrtc, "getSupportedArchs", lambda: (75, 80, 86, 87, 89, 90))
    found = libraries.missing()
    assert found[0].startswith("GPU 0 (B200) has the compute capability 10.0, and NVRTC 12.6 compiles for 9.0 at most")
    assert "12.8 or newer" in found[0]


_NO_INTERFACE = "Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("refuses", "reason", "hint"),
    [
        ("init", "Error while creating shared memory segment /dev/shm/nccl-a (size 9637888)", "--shm-size=1g"),
        ("init", "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000", "CUDA_VISIBLE_DEVICES"),
        ("init", "something else", "something else"),
        *((function, *_NO_INTERFACE) for function in ("init", "get_unique_id", "broadcast")),
    ],
)
def test_nccl_s_reason_when_no_communicator_can_be_made(refuses, reason, hint, world, cupy, monkeypatch):
    """The id already needs a network interface, and its broadcast a communicator that works."""
    nccl = libraries.cuda_libraries().nccl
    given = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)

    def refuse(*arguments):
        raise Refused(2) if refuses == "broadcast" else nccl.NcclError(2)

    name = "NcclCommunicator" if refuses == "init" else refuses
    monkeypatch.setattr(world.communicators[given.comm] if refuses == "broadcast" else nccl, name, refuse)
    monkeypatch.setattr(importlib.import_module("qccl.engine.cuda.nccl_library"), "last_error", lambda: reason)
    with pytest.raises(qccl.EngineError) as found:
        if refuses == "broadcast":
            qccl.Communicator.from_nccl(given, 0, 1)
        qccl.Communicator(importlib.import_module("qccl.engine.cuda.nccl").get_unique_id(), 0, 1, device=0)
    assert reason in str(found.value) and hint in str(found.value) and found.value.code == 2


def test_a_short_wait_is_not_prolonged(monkeypatch):
    """Naps are a sixteenth of the wait so far, at most 0.5 ms."""
    clock, naps = [0.0], []
    monkeypatch.setattr(run_module.time, "monotonic", lambda: clock[0])

    def sleep(seconds):
        naps.append((clock[0], seconds))
        clock[0] += seconds

    monkeypatch.setattr(run_module.time, "sleep", sleep)
    nothing = SimpleNamespace(sweep=lambda: None, check_device=lambda: None, end=End(0))
    deadline = SimpleNamespace(is_over=False)
    run_module.PendingRuns.wait_until(nothing, lambda: clock[0] > 0.02, deadline, "")
    assert all(seconds <= max(10e-6, min(waited / 16, 500e-6)) for waited, seconds in naps)
    assert len(naps) < 200
