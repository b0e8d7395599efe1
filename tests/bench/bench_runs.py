"""What the tests of qccl-bench share: how it is started, a user's codec, and what a run leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import patience
from plain_ranks import free_ports, torch_variables

LAUNCHERS = (
    "PMI_RANK",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "RANK",
    "WORLD_SIZE",
    "SLURM_PROCID",
)
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "qccl.bench"]

USERS = Path(__file__).with_name("users_codec.py").read_text()

#: traces() of a lab of two ranks: a bridge, and for each rank a namespace, its files and an interface
OF_TWO_RANKS = 7


def bench(*arguments: str, limit: float = 100.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run qccl-bench in a process of its own, under no launcher."""
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in LAUNCHERS} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit,
    )


def started(*arguments: str) -> subprocess.Popen[str]:
    """qccl-bench in a process and a session of its own, under no launcher, that has just started."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in LAUNCHERS},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def codecs_of(table: str) -> list[str]:
    """The codecs of a table's rows."""
    return [line.split()[-1] for line in table.splitlines() if line and not line.startswith("#")]


def under_torchrun(*flags: str) -> list[tuple[str, str]]:
    """The output and the errors of two ranks of qccl-bench with torchrun's variables."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PMI_", "OMPI_", "SLURM_"))}
    (port,) = free_ports(1)
    ranks = [
        subprocess.Popen(
            [*COMMAND, *flags],
            cwd=ROOT,
            env=environment | torch_variables(rank, 2, port),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return ends_of(ranks)


def ends_of(processes: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """The output and the errors of processes that must end well."""
    try:
        ends = [process.communicate(timeout=100 * patience.factor()) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), ends
    return ends


def peer_ranks(system: str, folder: Path) -> list[dict]:
    """What two ranks of bench/peer_rank.py write that reduce 5,000 values with a system."""
    task = {"system": system, "folder": str(folder), "cases": [{"count": 5000, "calls": 2}]}
    port, own = free_ports(2)
    command = [sys.executable, str(ROOT / "bench" / "peer_rank.py"), json.dumps(task)]
    variables = [torch_variables(rank, 2, port) | {"QCCL_PORT": str(own)} for rank in range(2)]
    ends_of([subprocess.Popen(command, env=os.environ | each, text=True) for each in variables])
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def traces(pid: int) -> list[str]:
    """The interfaces of a process's lab, its namespaces and their folders of files."""
    folders = [Path(each) for each in ("/sys/class/net", "/run/netns", "/etc/netns")]
    names = [name for folder in folders if folder.is_dir() for name in os.listdir(folder)]
    return [name for name in names if re.search(rf"^(qccl-|qcclb|qv){pid}\b", name)]


def workers(pid: int) -> list[int]:
    """The live processes that process ``pid``, a run of qccl-bench, started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            marked = f"QCCL_BENCH_RUN={pid}-".encode() in (entry / "environ").read_bytes()
            if marked and (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found.append(int(entry.name))
    return found
