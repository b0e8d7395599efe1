"""What started a process, and that no rank is alone by mistake: launchers, frameworks, MPI under another mpiexec."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import qccl
from qccl import launchers

ROOT = Path(__file__).resolve().parent.parent

OPEN_MPI_1 = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
OPEN_MPI_4 = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
MPICH_1 = {"PMI_RANK": "0", "PMI_SIZE": "1"}
MPICH_4 = {"PMI_RANK": "0", "PMI_SIZE": "4"}
TORCHRUN_1 = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
TORCHRUN_4 = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SALLOC_4 = {"SLURM_NTASKS": "4"}
SBATCH_4 = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
SRUN_1 = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
SRUN_4 = {"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}
#: the shell of salloc may be a step of one task, which keeps the allocation's number
SHELL_4 = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}


def test_what_started_this_process():
    assert launchers.detect({}) is None
    assert launchers.detect(SALLOC_4) is None
    assert launchers.detect(TORCHRUN_4) == launchers.Launcher("torchrun", 1, 4, 1, 2)
    assert launchers.detect(SRUN_4 | TORCHRUN_1 | MPICH_4).name == "MPICH"
    assert launchers.detect(SRUN_4) == launchers.Launcher("srun", 2, 4, 0, 0)
    assert launchers.detect(SHELL_4).size == 1
    with pytest.raises(qccl.ArgumentError, match="not readable"):
        launchers.detect({"RANK": "x", "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    "environ",
    [{}, OPEN_MPI_1, MPICH_1, TORCHRUN_1, SALLOC_4, SRUN_1, SHELL_4, SBATCH_4 | MPICH_1, SRUN_4 | TORCHRUN_1],
)
def test_one_rank_where_one_was_started(environ):
    launchers.check_alone(environ)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (OPEN_MPI_4, "Open MPI started 4 ranks, but MPI sees 1.*mpiexec of that library"),
        (MPICH_4, "MPICH started 4 ranks, but MPI sees 1.*mpiexec of that library"),
        (TORCHRUN_4, r"torchrun started 4 ranks.*init_process_group\(.*Communicator.from_torch\(\)"),
        (SRUN_4, "srun started 4 ranks.*--mpi=pmi2"),
        (SBATCH_4, "sbatch asked for 4 ranks.*with srun"),
        (MPICH_1 | TORCHRUN_4, "torchrun started 4 ranks"),
    ],
)
def test_one_rank_where_more_were_started(environ, message):
    with pytest.raises(qccl.ArgumentError, match=message):
        launchers.check_alone(environ)


def test_mpi_has_another_size_than_the_launcher():
    with pytest.raises(qccl.ArgumentError, match="4 ranks, but MPI sees 2"):
        launchers.check_size(launchers.detect(MPICH_4), 2)


# -- processes -------------------------------------------------------------------------------------------------------

INIT = """
try:
    comm = qccl.init(backend="host")
    print(f"rank {comm.rank} of {comm.size}")
except qccl.QcclError as error:
    print(f"{type(error).__name__}: {error}")
"""


def outputs(*programs: str, **environment: str) -> list[str]:
    """What Python programs print that run at the same time, and know of no launcher but that of ``environment``."""
    variables = {name for names in launchers._VARIABLES.values() for name in names}
    clean = {name: value for name, value in os.environ.items() if name not in variables}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"import qccl\n{program}"],
            env=clean | {"PYTHONPATH": str(ROOT)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for program in programs
    ]
    try:
        ended = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    assert all(process.returncode == 0 for process in processes), ended
    return [out for out, _ in ended]


@pytest.fixture
def port():
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def needs(*modules):
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


@needs("jax")
def test_ranks_of_jax_are_not_alone(port):
    """In processes that no launcher has started. MPI finds nothing of them."""
    start = "import jax; jax.distributed.initialize('127.0.0.1:{}', 2, {})\n{}\njax.distributed.shutdown()"
    for out in outputs(*(start.format(port, rank, INIT) for rank in range(2)), JAX_PLATFORMS="cpu"):
        assert out.startswith("ArgumentError: jax.distributed has 2 ranks") and "mpiexec" in out


@needs("torch")
def test_ranks_of_torch_are_not_alone(port):
    start = (
        "import torch.distributed as dist; "
        "dist.init_process_group('gloo', 'tcp://127.0.0.1:{}', world_size=2, rank={})\n{}\ndist.barrier()"
    )
    for out in outputs(*(start.format(port, rank, INIT) for rank in range(2)), GLOO_SOCKET_IFNAME="lo"):
        assert out.startswith("ArgumentError: torch.distributed has 2 ranks") and "from_torch()" in out


@needs("torch", "jax")
def test_frameworks_that_are_loaded_but_have_one_rank():
    (out,) = outputs(f"import jax, jax.distributed, torch.distributed\n{INIT}", JAX_PLATFORMS="cpu")
    assert out == "rank 0 of 1\n"


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
    assert world == init and world.startswith("ArgumentError: torchrun started 4 ranks, but MPI sees 1")
    assert itself == "rank 0 of 1"


def test_under_torchrun_without_mpi():
    without = f"import sys; sys.modules['mpi4py'] = None\n{INIT}"
    (out,) = outputs(without, **TORCHRUN_4)
    assert out.startswith("EngineError: torchrun started 4 ranks") and "from_torch()" in out and "qccl[mpi]" not in out
    (out,) = outputs(without, **TORCHRUN_1)
    assert out == "rank 0 of 1\n"
