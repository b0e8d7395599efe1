"""Which launcher started a process, by all rules of launchers.py, and errors in place of a group of one rank."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest

import qccl
from qccl.base.scalars import MOST_RANKS
from qccl.meeting import launchers


def numbers(rank: int, size: int, *names: str) -> dict[str, str]:
    return dict(zip(names, (str(rank), str(size)), strict=True))


def mpich(rank: int, size: int) -> dict[str, str]:
    return numbers(rank, size, "PMI_RANK", "PMI_SIZE")


def by_hand(rank: int, size: int) -> dict[str, str]:
    return numbers(rank, size, "RANK", "WORLD_SIZE")


def torchrun(rank: int, size: int) -> dict[str, str]:
    return by_hand(rank, size) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}


def srun(rank: int, size: int) -> dict[str, str]:
    return {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": str(size), "SLURM_LOCALID": "0"}


OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": number for name, number in (("RANK", "0"), ("SIZE", "1"))}
MVAPICH = {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "1"}
HOROVOD = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}
PODS = {"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "4"}
SALLOC = {"SLURM_NTASKS": "4"}
SBATCH = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
MASTER = {"MASTER_ADDR": "sum-0.sum", "MASTER_PORT": "29500", "QCCL_PORT": "29600"}

#: the environments that the process, its parent and so on were started with, the process first. An inner launcher's
#: variables are in fewer of them. Without ancestors a process has set all variables itself
Lineage = list[dict[str, str]]


def below(*levels: dict[str, str]) -> Lineage:
    """A process below launchers, the outermost first, each with a shell between it and its child."""
    found: Lineage = [{}]
    for level in levels:
        found = [found[0] | level] * 2 + found
    return found


def innermost(*levels: dict[str, str], by: Lineage | None = None) -> launchers.Launcher | None:
    """What detect() says of a process below launchers, the outermost first; ``by``: where its ancestors hide it."""
    environ = {name: text for level in levels for name, text in level.items()}
    return launchers.detect(environ, lineage=lambda: below(*levels) if by is None else by)


@pytest.mark.parametrize(
    ("levels", "name", "rank", "size"),
    [
        ([by_hand(1, 4)], "torchrun", 1, 4),
        ([srun(2, 4)], "srun", 2, 4),
        ([MVAPICH], "MVAPICH", 1, 2),
        ([HOROVOD], "Horovod", 1, 2),
        ([PODS | MASTER], "Kubernetes", 3, 4),
        ([PODS | MASTER, by_hand(1, 8)], "torchrun", 1, 8),
        # one torchrun on each node, below srun or mpiexec, also with one rank on each
        ([srun(1, 2) | mpich(1, 2), torchrun(2, 4)], "torchrun", 2, 4),
        ([mpich(1, 2), torchrun(1, 2)], "torchrun", 1, 2),
        ([srun(1, 2), torchrun(1, 2)], "torchrun", 1, 2),
        # several jobs in a step
        ([srun(2, 4), torchrun(0, 1)], "torchrun", 0, 1),
        ([srun(2, 4), mpich(0, 1)], "MPICH", 0, 1),
        ([srun(2, 4) | {"PMIX_RANK": "2"}, torchrun(0, 1)], "torchrun", 0, 1),
        # launchers of one task
        ([srun(0, 1), torchrun(1, 4)], "torchrun", 1, 4),
        ([srun(0, 1) | mpich(0, 1), by_hand(1, 4)], "torchrun", 1, 4),
        ([mpich(0, 1), by_hand(1, 4)], "torchrun", 1, 4),
        # in a rank of torchrun
        ([torchrun(0, 1), mpich(1, 2)], "MPICH", 1, 2),
        ([torchrun(0, 2), mpich(1, 2)], "MPICH", 1, 2),
        ([torchrun(0, 1), srun(2, 4)], "srun", 2, 4),
        ([torchrun(1, 2), mpich(0, 1)], "MPICH", 0, 1),
        # the daemons of mpiexec are a step of Slurm, and a script passes the numbers on
        ([srun(1, 2), mpich(3, 4)], "MPICH", 3, 4),
        ([mpich(3, 4), by_hand(3, 4)], "MPICH", 3, 4),
        ([srun(3, 4), by_hand(3, 4)], "torchrun", 3, 4),
        ([srun(0, 1), mpich(1, 4)], "MPICH", 1, 4),
        ([SBATCH, mpich(0, 1)], "MPICH", 0, 1),
        ([SBATCH], "sbatch", 0, 4),
    ],
)
def test_the_innermost_launcher_decides(levels, name, rank, size):
    found = innermost(*levels)
    assert found is not None and (found.name, found.rank, found.size) == (name, rank, size)


@pytest.mark.parametrize(
    ("levels", "name"),
    [([srun(1, 2), mpich(3, 4)], "MPICH"), ([srun(1, 2), torchrun(3, 4)], "torchrun"), ([srun(3, 4)] * 2, "srun")],
)
def test_launchers_that_come_before_slurm_where_the_ancestors_are_hidden(levels, name):
    found = innermost(*levels, by=[])
    assert found is not None and found.name == name


@pytest.mark.parametrize(
    ("levels", "by"),
    [
        ([mpich(1, 2), torchrun(2, 4)], []),
        ([mpich(1, 4), torchrun(0, 1)], []),
        ([srun(1, 4), torchrun(0, 1)], []),
        ([srun(1, 4), mpich(0, 1)], []),
        ([mpich(1, 4), by_hand(0, 1)], None),
        ([srun(1, 4), by_hand(0, 1)], None),
    ],
)
def test_launchers_that_contradict_each_other(levels, by):
    """The error names both, and its advice helps."""
    with pytest.raises(qccl.ArgumentError, match="different numbers, and does not tell") as caught:
        innermost(*levels, by=by)
    text = str(caught.value)
    environ = {name: value for level in levels for name, value in level.items()}
    for name in environ.keys() & {"PMI_RANK", "SLURM_PROCID", "RANK"}:
        assert f"{name}={environ[name]} " in text
    first, second = (re.findall(r"-u (\w+)", way) for way in text.partition("start the program with ")[2].split(" or "))
    sizes = []
    for unset in first, second:
        left = {name: value for name, value in environ.items() if name not in unset}
        found = launchers.detect(left)
        assert found is not None
        sizes.append(found.size)
    assert sizes[0] != sizes[1]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        SALLOC,
        MASTER,
        OPEN_MPI,
        OPEN_MPI | {"PMIX_RANK": "0"},
        mpich(0, 1),
        by_hand(0, 1),
        by_hand(0, 1) | {"JOB_COMPLETION_INDEX": "3", "MASTER_ADDR": "127.0.0.1"},
        srun(0, 1),
        srun(0, 1) | {"PMIX_RANK": "0"},
        SBATCH | mpich(0, 1),
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {"JOB_COMPLETION_INDEX": "3"},
        {"WORLD_SIZE": "1"},
        {"LOCAL_RANK": "0"},
        {"RANK": "", "WORLD_SIZE": "", "JOB_COMPLETION_INDEX": "0"},
        {"RANK": " ", "WORLD_SIZE": "\n"},
        by_hand(0, 1) | {"WORLD_SIZE": "1\n"},
    ],
)
def test_one_rank_where_one_was_started(environ):
    launchers.check_alone(environ)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, "Open MPI started 4 ranks, but MPI sees 1.*mpiexec of that library"),
        (mpich(0, 4), "MPICH started 4 ranks, but MPI sees 1.*mpiexec of that library"),
        (by_hand(1, 4), r"torchrun started 4 ranks.*use qccl.init\(\)"),
        (PODS, "Kubernetes started 4 ranks"),
        (srun(2, 4), "srun started 4 ranks.*--mpi=pmi2"),
        (SBATCH, "sbatch asked for 4 ranks.*with srun"),
    ],
)
def test_one_rank_where_more_were_started(environ, message):
    with pytest.raises(qccl.ArgumentError, match=message):
        launchers.check_alone(environ)


@pytest.mark.parametrize(
    ("environ", "variable", "missing"),
    [
        ({"RANK": "0"}, "RANK=0", "WORLD_SIZE is not set"),
        ({"RANK": "1", "MASTER_ADDR": "n0"}, "RANK=1", "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"} | MASTER, "WORLD_SIZE=2", "RANK .nor Kubernetes' .*completionMode: Indexed. is not set"),
        ({"JOB_COMPLETION_INDEX": "0"} | MASTER, "JOB_COMPLETION_INDEX=0", "WORLD_SIZE is not set"),
        ({"MV2_COMM_WORLD_RANK": "0"}, "MV2_COMM_WORLD_RANK=0", "MV2_COMM_WORLD_SIZE is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK is not set"),
        ({"PMI_RANK": "1"}, "PMI_RANK=1", "PMI_SIZE is not set"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE=2", "PMI_RANK is not set"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0", "the number of ranks is not set"),
        ({"HOROVOD_SIZE": "2"}, "HOROVOD_SIZE=2", "HOROVOD_RANK is not set"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1", "RANK"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2", "RANK"),
        ({"MPI_LOCALNRANKS": "2"}, "MPI_LOCALNRANKS=2", "PMI_RANK is not set"),
        ({"SLURM_PROCID": "2"}, "SLURM_PROCID=2", "SLURM_STEP_NUM_TASKS is not set"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS=2", "SLURM_PROCID is not set"),
        (srun(0, 1) | {"WORLD_SIZE": "4"}, "WORLD_SIZE=4", "RANK"),
        (mpich(0, 1) | {"PMIX_RANK": "1"}, "PMIX_RANK=1", "the number of ranks is not set"),
    ],
)
def test_half_a_set_of_variables_is_a_sign_of_a_larger_job(environ, variable, missing):
    with pytest.raises(
        qccl.ArgumentError, match=f"^{variable} says .* larger job, but {missing}.*alone unset"
    ) as found:
        launchers.detect(environ)
    unset = str(found.value).rpartition(" ")[2]
    launchers.check_alone({name: value for name, value in environ.items() if name != unset})
    assert innermost(environ, by_hand(1, 4)).size == 4
    launchers.detect(environ, allows_halves=True)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (by_hand(-1, 2), "RANK='-1' is not readable as a number of 0 to"),
        (by_hand(2, 2), "RANK=2 is out of range: WORLD_SIZE=2 allows 0 to 1"),
        (by_hand(1, 1), "RANK=1 is out of range"),
        (by_hand(0, 0), "RANK=0 is out of range: WORLD_SIZE=0"),
        (by_hand(0, 9999999999), "WORLD_SIZE='9999999999' is not readable as a number of 0 to"),
        (by_hand(0, MOST_RANKS + 1), f"WORLD_SIZE='{MOST_RANKS + 1}' is not readable as a number of 0 to {MOST_RANKS}"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK='x' is not readable"),
        ({"RANK": "٣", "WORLD_SIZE": "4"}, "RANK='٣' is not readable"),
        ({"RANK": "1_0", "WORLD_SIZE": "40"}, "RANK='1_0' is not readable"),
        ({"RANK": "2" * 5000, "WORLD_SIZE": "4"}, "RANK='222.* is not readable"),
        ({"RANK": "x"}, "RANK='x' is not readable"),
        ({"PMIX_RANK": "x"}, "PMIX_RANK='x' is not readable"),
        (
            by_hand(0, 1) | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"},
            "LOCAL_RANK=3 LOCAL_WORLD_SIZE=8: LOCAL_RANK co",
        ),
        (by_hand(0, 2) | {"LOCAL_RANK": "2"}, "LOCAL_RANK contradicts"),
        (by_hand(0, 4) | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK contradicts"),
        (mpich(0, 2) | {"MPI_LOCALNRANKS": "4"}, "MPI_LOCALNRANKS contradicts"),
    ],
)
def test_numbers_are_checked_where_they_are_read(environ, message):
    with pytest.raises(qccl.ArgumentError, match=message):
        launchers.detect(environ)
    with pytest.raises(qccl.ArgumentError, match=message):
        launchers.detect(environ, allows_halves=True) or launchers.check_alone(environ)


def test_numbers_that_the_program_gives():
    for rank, size in ((0, MOST_RANKS + 1), (0, 0), (2, 2), (-1, 2)):
        with pytest.raises(qccl.ArgumentError, match=r"is not possible|does not exist"):
            qccl.init("host", rank=rank, size=size, address="127.0.0.1:9")


def test_mpi_has_another_size_than_the_launcher():
    with pytest.raises(qccl.ArgumentError, match="4 ranks, but MPI sees 2"):
        launchers.check_size(launchers.detect(mpich(0, 4)), 2)


@pytest.mark.parametrize(
    ("library", "advice"),
    [("MPICH", "srun --mpi=pmi2 (srun"), ("Open MPI", "srun --mpi=pmix (srun"), (None, "--mpi=pmi2 for MPICH")],
)
@pytest.mark.parametrize("environ", [srun(2, 4), srun(2, 4) | mpich(2, 4) | {"PMI_JOBID": "7.0"}])
def test_srun_is_told_what_the_library_needs(library, advice, environ, monkeypatch):
    module = library and SimpleNamespace(get_vendor=lambda: (library, (5, 0, 0)))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    launcher = launchers.detect(environ)
    assert launchers.is_of_srun(launcher, environ) and advice in launchers.remedy(launcher, environ)


def test_mpiexec_in_an_allocation_of_slurm_is_not_srun():
    environ = srun(0, 1) | mpich(0, 4)
    assert not launchers.is_of_srun(launchers.detect(environ), environ)
