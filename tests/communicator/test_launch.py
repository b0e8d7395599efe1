"""How ranks find each other, and that no rank is alone by mistake: launchers, MPI under another mpiexec."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from plain_ranks import free_ports
from rank_forks import outputs

import qccl
from qccl.base.errors import ArgumentError
from qccl.communicator import launch
from qccl.communicator.launch import _profile
from qccl.communicator.profile import GroupProfile
from qccl.meeting import launchers
from qccl.transports.choice import refusal_of_mpi
from qccl.transports.loopback import LoopbackGroup

pytestmark = pytest.mark.starts_first

ROOT = Path(__file__).resolve().parents[2]

MPICH_4 = {"PMI_RANK": "0", "PMI_SIZE": "4"}
TORCHRUN_1 = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
TORCHRUN_4 = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SBATCH_4 = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}

#: this environment without the variables of launchers
CLEAN = launchers.without_launchers(os.environ)


@pytest.fixture
def environ(monkeypatch):
    """The variables of this process, which knows of no launcher and has no MPI."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with patch.dict(os.environ):
        for name in os.environ.keys() - CLEAN.keys():
            del os.environ[name]
        yield os.environ


INIT = """
try:
    comm = qccl.init(backend="host")
    print(f"rank {comm.rank} of {comm.size}")
except qccl.QcclError as error:
    print(f"{type(error).__name__}: {error}")
"""


def needs(*modules):
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


@pytest.mark.mpi
@needs("mpi4py")
def test_mpi_knows_nothing_of_the_launcher():
    """As under another library's mpiexec: MPI.COMM_WORLD is a mistake, MPI.COMM_SELF is not."""
    program = f"""
from mpi4py import MPI
for group in MPI.COMM_WORLD, MPI.COMM_SELF:
    try:
        comm = qccl.Communicator.from_mpi(group)
        print(f"rank {{comm.rank}} of {{comm.size}}")
    except qccl.QcclError as error:
        print(f"{{type(error).__name__}}: {{error}}")
{INIT}
"""
    (out,) = outputs(program, **TORCHRUN_4)
    world, itself, init = out.splitlines()
    assert world.startswith("ArgumentError: torchrun started 4 ranks, but MPI sees 1")
    assert init.startswith("ArgumentError: the ranks cannot find each other: MASTER_ADDR")
    assert itself == "rank 0 of 1"


@pytest.mark.processes
def test_ranks_of_a_launcher_find_each_other_without_mpi():
    names = ("torchrun", "MPICH", "Open MPI", "Kubernetes", "srun")
    programs = []
    for name, port in zip(names, free_ports(len(names)), strict=True):
        rank, size, *_ = launchers._VARIABLES[name]
        for number in range(2):
            variables = {rank: str(number), size: "2", "MASTER_PORT": str(port)}
            programs.append(f"import os, sys; sys.modules['mpi4py'] = None; os.environ |= {variables}\n{INIT}")
    found = outputs(*programs, MASTER_ADDR="127.0.0.1", QCCL_TRANSPORT="ucx")
    assert found == ["rank 0 of 2\n", "rank 1 of 2\n"] * len(names)


@pytest.mark.processes
@needs("mpi4py")
def test_ranks_of_srun_that_mpi_does_not_know_go_on_without_it():
    """As with srun --mpi=none, or with another kind than the library's; or where mpi4py finds no library."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_STEP_NODELIST": "no-such-host.invalid", "SLURM_STEP_NUM_NODES": "1"}
    # without close() the UCX of MPICH's wheel may print an error at the end, where the other rank has left before
    programs = (f"import os; os.environ['SLURM_PROCID'] = '{rank}'\n{INIT}comm.close()\n" for rank in range(2))
    assert outputs(*programs, **step) == [f"rank {rank} of 2\n" for rank in range(2)]


@needs("mpi4py")
@pytest.mark.parametrize(
    ("has_token", "insecure", "wanted", "uses"),
    [(False, "", None, True), (True, "", None, False), (True, "1", None, True), (True, "", "mpi", True)],
)
def test_a_token_asks_for_encryption_which_mpi_has_not(has_token, insecure, wanted, uses, monkeypatch):
    monkeypatch.setenv("QCCL_TOKEN", "a token for tests only" * has_token)
    monkeypatch.setenv("QCCL_INSECURE", insecure)
    assert (refusal_of_mpi(launchers.detect(MPICH_4), wanted) == "") is uses


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_an_mpi4py_without_a_library(port, tmp_path, transport):
    """The ranks go on over UCX, and say it; if the program allows MPI alone, the error says what to do."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc:\n    finalize = initialize = None\n")
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library\\nlibmpi.so.12: none')")
    start = "import logging, os, sys; logging.basicConfig(stream=sys.stdout); os.environ['PMI_RANK'] = '{}'\n"
    start += f"sys.path.insert(0, {str(tmp_path)!r})\n{INIT}"
    programs = (start.replace("{}", str(rank), 1) for rank in range(2))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PMI_SIZE": "2", "QCCL_TRANSPORT": transport}
    for rank, out in enumerate(outputs(*programs, **place)):
        why = "mpi4py cannot be used (cannot load MPI library); install qccl[mpi]"
        said = f"WARNING:qccl:rank {rank} of 2 goes on without MPI: " if transport == "auto" else "EngineError: "
        assert out.startswith(said + why)
        assert out.endswith(f"\nrank {rank} of 2\n") is (transport == "auto")


def test_a_launcher_of_one_rank_without_mpi(environ):
    environ |= TORCHRUN_1
    with qccl.init("host") as comm:
        assert (comm.rank, comm.size) == (0, 1)


@pytest.mark.processes
def test_ranks_that_allow_different_transports(port):
    """Both ranks say why there is none for them."""
    start = "import os; os.environ['RANK'] = '{}'\n"
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    other = INIT.replace('"host"', '"host", transport="gloo"')
    outs = outputs(start.format(0) + INIT, start.format(1) + other, QCCL_TRANSPORT="ucx", **place)
    for out in outs:
        assert out.startswith(
            "EngineError: the 2 ranks of torchrun have no transport in common. ucx: rank 1: the rank allows only gloo; "
            "mpi: rank 0: the rank allows only ucx; gloo: rank 0: the rank allows only ucx"
        )


def test_transports_that_do_not_exist(environ):
    environ |= TORCHRUN_4 | {"MASTER_PORT": "1", "QCCL_TRANSPORT": "tcp"}
    with pytest.raises(qccl.ArgumentError, match="QCCL_TRANSPORT='tcp' does not exist; there are auto, ucx, mpi, gloo"):
        qccl.init("host")
    with pytest.raises(qccl.ArgumentError, match="transport='MPI' does not exist; there are auto, ucx, mpi, gloo"):
        qccl.init(transport="MPI")


def test_ranks_that_are_asked_for_different_backends():
    launch._check_asked(["auto", "auto"])
    text = "rank 1 called init.. with backend='cuda' or a device, and rank 0 with backend='auto'; all ranks must"
    with pytest.raises(qccl.MismatchError, match=text):
        launch._check_asked(["auto", "cuda"])


def test_ranks_of_mpi_that_are_asked_for_different_backends(environ, monkeypatch):
    """Also if this rank was asked for the host: the others wait for its answer."""
    environ |= MPICH_4
    transport = LoopbackGroup(4).transport(0)
    monkeypatch.setattr(transport, "allgather", lambda note, timeout: [note, note, b"auto no GPU", note])
    world = SimpleNamespace(MpiTransport=SimpleNamespace(world=lambda timeout: transport))
    monkeypatch.setattr(launch, "_load_mpi", lambda: world)
    with pytest.raises(
        qccl.MismatchError, match=r"rank 2 called init.. with backend='auto', and rank 0 with backend='h"
    ):
        launch._by_mpi("host", None, 1.0)
    assert transport._gone


def test_a_batch_script_may_start_ranks_by_itself(environ, monkeypatch):
    """Slurm has started one process, whatever the script asked for."""
    environ |= SBATCH_4
    monkeypatch.setattr(launch, "frameworks", lambda: iter([("torch.distributed", 2, "")]))
    monkeypatch.setattr(launch, "of_torch", lambda: "torch's ranks")
    assert launch._find_meeting(None) == "torch's ranks"


def test_a_batch_script_is_not_a_rank(environ):
    environ |= SBATCH_4 | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(qccl.ArgumentError, match="sbatch asked for 4 ranks"):
        qccl.init("host")


AUTO = """
import numpy as np
try:
    comm = qccl.init("host", rank=int(sys.argv[1]), size=2, address=sys.argv[2], transport="ucx", timeout=30)
    plan = comm.plan("allreduce", 5000, codec="auto")
    print(plan.codec, plan.spec.algorithm, comm.profile().digest(), comm._session.numbers.sequence)
    if comm.rank == 0 and sys.argv[3:]:
        comm.profile().save(sys.argv[3])
    comm.close()
except qccl.QcclError as error:
    print(f"{type(error).__name__}: {error}")
"""


def auto_ranks(port, *more, **environment):
    programs = [f"import sys; sys.argv[1:] = {[str(rank), f'127.0.0.1:{port}', *more]!r}{AUTO}" for rank in range(2)]
    return [out.split(maxsplit=3) for out in outputs(*programs, **environment)]


@pytest.mark.processes
def test_a_saved_profile_is_loaded_instead_of_measured(port, tmp_path):
    path = tmp_path / "profile.json"
    measured, other = auto_ranks(port, str(path))
    assert measured == other, "both ranks have chosen alike, by the same profile"
    loaded, other = auto_ranks(port, QCCL_PROFILE=str(path))
    assert loaded == other
    assert loaded[:3] == measured[:3]
    assert int(loaded[3]) < int(measured[3]), "one agreement, and no measured call"


@pytest.mark.parametrize("text", ["{}", None], ids=["no profile", "no file"])
def test_a_profile_that_cannot_be_read_is_refused_before_ranks_meet(tmp_path, monkeypatch, text):
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(
        ArgumentError, match=r"profile\.json' (is not a group's profile|cannot be read).*comm\.profile\(\)\.save\(\)"
    ):
        qccl.init("host", profile=path)
    monkeypatch.setenv("QCCL_PROFILE", str(path))
    with pytest.raises(ArgumentError, match=r"profile\.json"):
        qccl.init("host")
    for wrong in (7, np.ones(2)):
        with pytest.raises(ArgumentError, match="profile must be a file's path"):
            qccl.init("host", profile=wrong)


def test_an_empty_variable_names_no_profile(monkeypatch):
    monkeypatch.setenv("QCCL_PROFILE", "")
    assert _profile(None) is None


def test_the_profile_of_another_group_is_refused(environ):
    with pytest.raises(ArgumentError, match="the profile is of a group with 2 ranks"):
        qccl.init("host", profile=GroupProfile((0, 0), "ucx"))
