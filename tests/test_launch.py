"""What started a process, and that no rank is alone by mistake: launchers, frameworks, MPI under another mpiexec.

The commands of the documentation start the README's program.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import qccl
from qccl import launchers
from qccl.costs.group import GroupProfile
from qccl.errors import ArgumentError
from qccl.launch import _profile, has_mpi

pytestmark = pytest.mark.starts_first

ROOT = Path(__file__).resolve().parent.parent

OPEN_MPI_1 = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
OPEN_MPI_4 = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
MPICH_1 = {"PMI_RANK": "0", "PMI_SIZE": "1"}
MPICH_4 = {"PMI_RANK": "0", "PMI_SIZE": "4"}
TORCHRUN_1 = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
TORCHRUN_4 = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
KUBERNETES_4 = {"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "4"}
SALLOC_4 = {"SLURM_NTASKS": "4"}
SBATCH_4 = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
SRUN_1 = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
SRUN_4 = {"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}
#: the shell of salloc may be a step of one task, which keeps the allocation's number
SHELL_4 = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}


#: this environment without the variables of launchers
CLEAN = {key: value for key, value in os.environ.items() if key not in {*sum(launchers._VARIABLES.values(), ())}}


def test_what_started_this_process():
    assert launchers.detect({}) is None
    assert launchers.detect(SALLOC_4) is None
    assert launchers.detect(TORCHRUN_4) == launchers.Launcher("torchrun", 1, 4, 1, 2)
    assert launchers.detect(SRUN_4 | TORCHRUN_1 | MPICH_4).name == "MPICH"
    assert launchers.detect(SRUN_4) == launchers.Launcher("srun", 2, 4, 0, 0)
    assert launchers.detect(SHELL_4).size == 1
    assert launchers.detect(KUBERNETES_4) == launchers.Launcher("Kubernetes", 3, 4, 0, 0)
    assert launchers.detect(KUBERNETES_4 | TORCHRUN_4).name == "torchrun"
    assert launchers.detect({"JOB_COMPLETION_INDEX": "3"}) is None
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
        (TORCHRUN_4, r"torchrun started 4 ranks.*use qccl.init\(\)"),
        (KUBERNETES_4, "Kubernetes started 4 ranks"),
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
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"import qccl\n{program}"],
            env=CLEAN | {"PYTHONPATH": str(ROOT)} | environment,
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


def needs(*modules):
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


@needs("jax")
@pytest.mark.parametrize(
    ("transport", "message"),
    [("ucx", "rank {} of 2\n"), ("gloo", "EngineError: the 2 ranks of jax.distributed have no transport in common.")],
)
def test_ranks_of_jax_find_each_other(port, transport, message):
    """In processes that no launcher has started."""
    start = "import jax; jax.distributed.initialize('127.0.0.1:{}', 2, {})\n{}\njax.distributed.shutdown()"
    programs = (start.format(port, rank, INIT) for rank in range(2))
    for rank, out in enumerate(outputs(*programs, JAX_PLATFORMS="cpu", QCCL_TRANSPORT=transport)):
        assert out.startswith(message.format(rank))


@needs("torch")
@pytest.mark.parametrize("transport", ["ucx", "gloo"])
def test_ranks_of_torch_find_each_other(port, transport):
    start = (
        "import torch.distributed as dist; "
        "dist.init_process_group('gloo', 'tcp://127.0.0.1:{}', world_size=2, rank={})\n{}\ndist.barrier()"
    )
    programs = (start.format(port, rank, INIT) for rank in range(2))
    outs = outputs(*programs, GLOO_SOCKET_IFNAME="lo", QCCL_TRANSPORT=transport)
    assert outs == [f"rank {rank} of 2\n" for rank in range(2)]


#: a program per framework: connect, meet without qccl, and make the communicator
FRAMEWORKS = {
    "torch": (
        "import torch.distributed as dist; "
        "dist.init_process_group('gloo', 'tcp://127.0.0.1:{port}', world_size=2, rank={rank})\n"
        "meet, make = dist.barrier, qccl.Communicator.from_torch\n"
    ),
    "jax": (
        "import itertools, jax; jax.distributed.initialize('127.0.0.1:{port}', 2, {rank})\n"
        "from jax._src.distributed import global_state\n"
        "met = itertools.count()\n"
        "meet = lambda: global_state.client.wait_at_barrier(f'met {{next(met)}}', 60_000)\n"
        "make = qccl.Communicator.from_jax\n"
    ),
}


@needs("torch", "jax")
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_rank_that_gave_up_alone_meets_the_others_in_its_next_attempt(port, framework):
    """First rank 0 does so, then rank 1."""
    attempt = "try:\n    make(timeout=0.5)\nexcept qccl.CollectiveTimeout as error:\n    print(error)\n"
    together = "meet()\nwith make(timeout=60) as comm:\n    print(comm.allgather(bytes([comm.rank])))\n"
    programs = (
        FRAMEWORKS[framework].format(port=port, rank=rank)
        + "".join((attempt if rank == alone else "") + together for alone in range(2))
        for rank in range(2)
    )
    outs = outputs(*programs, JAX_PLATFORMS="cpu", GLOO_SOCKET_IFNAME="lo", QCCL_TRANSPORT="ucx")
    lines = [out.splitlines() for out in outs]
    for alone in range(2):
        assert f"rank {1 - alone} did not" in lines[alone].pop(alone)
    assert lines == [["[b'\\x00', b'\\x01']"] * 2] * 2


@needs("torch")
def test_a_rank_that_gives_up_while_its_name_is_read():
    """It deletes the name between the store's answer that there is one and the question for it."""
    program = """
import time
from datetime import timedelta
import torch.distributed as dist
from qccl import CollectiveTimeout, meetings

class Store(dist.HashStore):
    def wait(self, keys, timeout):
        super().wait(keys, timeout)
        self.delete_key(keys[0])

store = Store()
store.set_timeout(timedelta(seconds=60))
store.set("waiting/1", "a name")
begin = time.monotonic()
try:
    meetings.of_store(store, 0, 2).gather(b"", 0.5)
except CollectiveTimeout as error:
    print(error, time.monotonic() - begin < 30)
"""
    (out,) = outputs(program)
    assert out == "rank 1 did not come within 0.5 s (waiting/1 was deleted) True\n"


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
    assert world.startswith("ArgumentError: torchrun started 4 ranks, but MPI sees 1")
    assert init.startswith("ArgumentError: the ranks cannot find each other: MASTER_ADDR")
    assert itself == "rank 0 of 1"


@pytest.mark.parametrize(
    ("launcher", "transport"),
    [*((name, "ucx") for name in ("torchrun", "MPICH", "Open MPI", "Kubernetes", "srun")), ("torchrun", "gloo")],
)
def test_ranks_of_a_launcher_find_each_other_without_mpi(port, launcher, transport):
    rank, size, *_ = launchers._VARIABLES[launcher]
    without = "import os, sys; sys.modules['mpi4py'] = None; os.environ[{!r}] = '{}'\n{}"
    programs = (without.format(rank, number, INIT) for number in range(2))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "QCCL_TRANSPORT": transport}
    assert outputs(*programs, **place, **{size: "2"}) == [f"rank {number} of 2\n" for number in range(2)]


@needs("mpi4py")
def test_ranks_of_srun_that_mpi_does_not_know_go_on_without_it():
    """As with srun --mpi=none, or with another kind than the library's; or where mpi4py finds no library."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_STEP_NODELIST": "no-such-host.invalid", "SLURM_STEP_NUM_NODES": "1"}
    # without close() the UCX of MPICH's wheel may print an error at the end, where the other rank has left before
    programs = (f"import os; os.environ['SLURM_PROCID'] = '{rank}'\n{INIT}comm.close()\n" for rank in range(2))
    assert outputs(*programs, **step) == [f"rank {rank} of 2\n" for rank in range(2)]


@pytest.mark.parametrize(
    ("library", "advice"),
    [("MPICH", "srun --mpi=pmi2 (srun"), ("Open MPI", "srun --mpi=pmix (srun"), (None, "--mpi=pmi2 for MPICH")],
)
@pytest.mark.parametrize("environ", [SRUN_4, SRUN_4 | MPICH_4 | {"PMI_JOBID": "7.0"}])
def test_srun_is_told_what_the_library_needs(library, advice, environ, monkeypatch):
    module = library and SimpleNamespace(get_vendor=lambda: (library, (5, 0, 0)))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    launcher = launchers.detect(environ)
    assert launchers.is_of_srun(launcher, environ) and advice in launchers.remedy(launcher, environ)


@pytest.mark.mpi
@needs("mpi4py")
@pytest.mark.parametrize(
    ("has_token", "insecure", "wanted", "uses"),
    [(False, "", None, True), (True, "", None, False), (True, "1", None, True), (True, "", "mpi", True)],
)
def test_a_token_asks_for_encryption_which_mpi_has_not(has_token, insecure, wanted, uses, monkeypatch):
    monkeypatch.setenv("QCCL_TOKEN", "a token for tests only" * has_token)
    monkeypatch.setenv("QCCL_INSECURE", insecure)
    assert has_mpi(launchers.detect(MPICH_4), wanted) is uses


def test_mpiexec_in_an_allocation_of_slurm_is_not_srun():
    assert not launchers.is_of_srun(launchers.detect(SRUN_1 | MPICH_4), SRUN_1 | MPICH_4)


def test_a_launcher_of_one_rank_without_mpi():
    (out,) = outputs(f"import sys; sys.modules['mpi4py'] = None\n{INIT}", **TORCHRUN_1)
    assert out == "rank 0 of 1\n"


def test_ranks_that_allow_different_transports(port):
    """Both ranks say why there is none for them."""
    start = "import os; os.environ['RANK'] = '{}'\n"
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    other = INIT.replace('"host"', '"host", transport="gloo"')
    outs = outputs(start.format(0) + INIT, start.format(1) + other, QCCL_TRANSPORT="ucx", **place)
    for out in outs:
        assert out.startswith(
            "EngineError: the 2 ranks of torchrun have no transport in common. ucx: rank 1: the rank allows only gloo; "
            "gloo: rank 0: the rank allows only ucx"
        )
    (out,) = outputs("import os; os.environ['QCCL_TRANSPORT'] = 'tcp'\n" + INIT, **TORCHRUN_4, MASTER_PORT="1")
    assert out.startswith("ArgumentError: QCCL_TRANSPORT='tcp' does not exist; there are auto, mpi, ucx, gloo")
    with pytest.raises(qccl.ArgumentError, match="transport='MPI' does not exist; there are auto, mpi, ucx, gloo"):
        qccl.init(transport="MPI")


def test_a_batch_script_is_not_a_rank():
    (out,) = outputs(INIT, **SBATCH_4, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    assert out.startswith("ArgumentError: sbatch asked for 4 ranks")


# -- the documentation's commands --------------------------------------------------------------------------------------

PAGES = [(ROOT / page).read_text() for page in ("README.md", "docs/howto/starting.md")]
(PROGRAM,) = re.findall(r"^```python\n(# sum\.py: .*?)^```", PAGES[0], re.DOTALL | re.MULTILINE)
LINES = re.findall(
    r"^(\S.*\bsum\.py)\b", "\n".join(re.findall(r"^```bash\n(.*?)^```", "".join(PAGES), re.S | re.M)), re.M
)
#: commands that start the program, by name; those of one name run at the same time
COMMANDS = {
    "qccl-bench": ["qccl-bench run --ranks 4 -- python sum.py"],
    "mpiexec": ["mpiexec -n 4 python sum.py"],
    "torchrun": ["torchrun --nproc-per-node 4 sum.py"],
    "srun": ["srun -n 4 python sum.py"],
    "shells": [f"RANK={r} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python sum.py" for r in range(2)],
}
#: one needs two machines, and two root: tests/bench/test_bench_run.py has such commands
UNTESTED = [line for line in LINES if "--nnodes 2" in line or "--link" in line]


def test_all_commands_of_the_documentation_are_tested():
    assert set(LINES) == {command for each in COMMANDS.values() for command in each} | set(UNTESTED)
    assert len(UNTESTED) == 3 and LINES.count(COMMANDS["mpiexec"][0]) == 2  # on both pages


def on_this_machine(name: str, port: int) -> list[str]:
    """The commands, at a port that is free; Slurm's environment takes the place of srun."""
    if name == "srun":
        step = "SLURM_JOB_ID=7 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NODELIST=localhost SLURM_PROCID={0} SLURM_LOCALID={0}"
        return [f"{step.format(rank)} QCCL_PORT={port} QCCL_TRANSPORT=ucx python sum.py" for rank in range(4)]
    commands = [
        command.replace("MASTER_PORT=29500", f"QCCL_PORT={port} MASTER_PORT=29500") for command in COMMANDS[name]
    ]
    return [command.replace("torchrun", f"torchrun --master-port {port}") for command in commands]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("mpiexec", marks=[pytest.mark.mpi, needs("mpi4py")]),
        pytest.param("torchrun", marks=needs("torch")),
        "qccl-bench",
        "srun",
        "shells",
    ],
)
def test_the_program_of_the_readme_runs_unchanged(name, port, tmp_path):
    (tmp_path / "sum.py").write_text(PROGRAM)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    root = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    processes = [
        subprocess.Popen(
            ["env", *shlex.split(command)],
            cwd=tmp_path,
            env=CLEAN | root | {"PATH": path, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in on_this_machine(name, port)
    ]
    try:
        out = "".join(process.communicate(timeout=150)[0] for process in processes)
    finally:
        for process in processes:
            process.terminate()  # torchrun and mpiexec end their ranks
            process.wait(30)
    assert all(process.returncode == 0 for process in processes), out
    # the arrays, not the ranks before the lines of qccl-bench; torchrun lets ranks write parts of lines, which may mix
    found = re.findall(r"\[[- \d]*\.[-. \d]*\]", out)
    assert len(found) == (2 if name == "shells" else 4), out
    assert len(set(found)) == 1, out  # bit-identical on every rank


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
        ArgumentError, match=r"profile\.json' (is no profile|cannot be read).*comm\.profile\(\)\.save\(\)"
    ):
        qccl.init("host", profile=path)
    monkeypatch.setenv("QCCL_PROFILE", str(path))
    with pytest.raises(ArgumentError, match=r"profile\.json"):
        qccl.init("host")
    with pytest.raises(ArgumentError, match="profile must be a file's path"):
        qccl.init("host", profile=7)


def test_an_empty_variable_names_no_profile(monkeypatch):
    monkeypatch.setenv("QCCL_PROFILE", "")
    assert _profile(None) is None


def test_the_profile_of_another_group_is_refused(monkeypatch):
    for name in [*os.environ]:
        if name.startswith(("PMI", "OMPI", "SLURM")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    with pytest.raises(ArgumentError, match="the profile is that of 2 ranks"):
        qccl.init("host", profile=GroupProfile((0, 0), "ucx"))


GROWING = """
import os, pathlib, sys, time
import numpy as np
rank, place, folder = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
def total(comm):
    x = np.ones(3000, np.float32)
    comm.quantized_allreduce(x, codec="auto")
    plan = comm.plan("allreduce", 3000, codec="auto")
    print(comm.size, float(x[0]), plan.codec, plan.spec.algorithm, len(comm.profile().nodes), comm.profile().digest())
if rank < 2:
    comm = qccl.init("host", rank=rank, size=2, address=place, transport="ucx", timeout=60)
    total(comm)
    if rank == 0:
        (folder / "new").write_text(comm.address)
        os.replace(folder / "new", folder / "address")
    comm = comm.grow(3, timeout=60)
else:
    while not (folder / "address").exists():
        time.sleep(0.02)
    comm = qccl.join((folder / "address").read_text(), timeout=60)
total(comm)
(folder / f"{rank} has ended its calls").touch()
if rank == 2:
    while len(list(folder.glob("*ended*"))) < 3:
        time.sleep(0.02)
    comm.abort("it leaves")
else:
    comm = comm.shrink(timeout=20)
    total(comm)
    comm.close()
"""


def test_groups_that_grow_and_shrink_measure_anew(port, tmp_path):
    """The newcomer and the survivors choose alike."""
    argv = [[str(rank), f"127.0.0.1:{port}", str(tmp_path)] for rank in range(3)]
    first, second, third = outputs(*(f"import sys; sys.argv[1:] = {each!r}\n{GROWING}" for each in argv))
    before, grown, shrunk = first.splitlines()
    assert second.splitlines() == [before, grown, shrunk]
    assert third.splitlines() == [grown]
    for line, size in ((before, 2), (grown, 3), (shrunk, 2)):
        found = line.split()
        assert (found[0], float(found[1]), found[4]) == (str(size), size, str(size))
    assert len({line.split()[-1] for line in (before, grown, shrunk)}) == 3
