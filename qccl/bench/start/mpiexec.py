"""mpiexec: where it is, and the options and variables with which it starts the ranks of ``qccl-bench``."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from qccl.base.errors import QcclError
from qccl.bench.lab.lab import INTERFACE, Lab

__all__ = ["INSTALL", "Mpiexec", "StartError", "find_mpiexec"]

#: advice if there is no MPI
INSTALL = "install qccl[mpi], or mpi4py alone if the machine has its own MPI"


class StartError(QcclError):
    """The ranks could not be started."""


@dataclass(frozen=True, slots=True)
class Mpiexec:
    """The command that starts ranks.

    Attributes:
        path: the path of mpiexec.
        name: "MPICH" (also for its derivatives) or "Open MPI".
        version: the version, for example "5.0.2".
    """

    path: str
    name: str
    version: str

    @property
    def rank_variable(self) -> str:
        """The environment variable with a rank's number."""
        return "OMPI_COMM_WORLD_RANK" if self.name == "Open MPI" else "PMI_RANK"

    def options(self, lab: Lab | None) -> list[str]:
        """The options of mpiexec: allow more ranks than cores, and keep traffic on the lab's links."""
        if self.name != "Open MPI":
            return []
        if lab and lab.nodes < lab.ranks:
            raise StartError(
                "Open MPI treats all ranks of this machine as one node; use MPICH (qccl[mpi]) with --nodes"
            )
        tcp = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", INTERFACE]
        return ["--oversubscribe", "--bind-to", "none", *(tcp if lab else [])]

    def environment(self, ranks: int, lab: Lab | None, smallest: int) -> dict[str, str]:
        """Default variables for the ranks' environment, for calls of ``smallest`` bytes and more.

        The library's own all-reduce is the baseline, so it gets its best known settings, measured with MPICH 5.0 and
        Open MPI 5.0 on 2 cores. Waiting ranks must yield if ranks share cores (MPICH, 4 ranks behind 1 Gbit/s, 1 KiB:
        0.2 ms instead of 4.7). MPICH's automatic choice of algorithm is then within 3% of the best at every size, and
        less easily disturbed than its ring. The same holds for Open MPI in shared memory, but behind a slow link its
        ring is faster from 64 KiB on (16 MiB: 221 ms instead of 386).
        """
        yields = ranks > len(os.sched_getaffinity(0))
        ring = lab is not None and smallest >= 64 << 10
        settings = _open_mpi(lab, yields, ring) if self.name == "Open MPI" else _mpich(lab, yields)
        return {key: value for key, value in settings.items() if value}


def _mpich(lab: Lab | None, yields: bool) -> dict[str, str]:
    """MPICH's settings; empty ones are left out. Without NOLOCAL and a netmod over TCP, traffic bypasses the links.

    NUM_CLIQUES puts rank r on node r modulo the number of nodes, as the lab does.
    """
    shared = lab is not None and lab.nodes < lab.ranks
    return {
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "10" if yields else "",
        "MPIR_CVAR_NOLOCAL": "1" if lab and not shared else "",
        "MPIR_CVAR_NUM_CLIQUES": str(lab.nodes) if lab and shared else "",
        "MPIR_CVAR_CH4_NETMOD": "ofi" if lab else "",
        "FI_PROVIDER": "tcp" if lab else "",
        "FI_TCP_IFACE": INTERFACE if lab else "",
    }


def _open_mpi(lab: Lab | None, yields: bool, ring: bool) -> dict[str, str]:
    """Open MPI's settings; empty ones are left out. The ranks reach mpiexec through the bridge's address."""
    root = "1" if os.geteuid() == 0 else ""
    return {
        "OMPI_ALLOW_RUN_AS_ROOT": root,
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": root,
        "OMPI_MCA_mpi_yield_when_idle": "1" if yields else "",
        "PMIX_MCA_ptl_base_if_include": lab.bridge if lab else "",
        "PMIX_MCA_ptl_base_remote_connections": "1" if lab else "",
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1" if ring else "",
        "OMPI_MCA_coll_tuned_allreduce_algorithm": "4" if ring else "",  # 4 is the ring
    }


def find_mpiexec() -> Mpiexec:
    """Find mpiexec in this Python's folder (where the wheels of MPICH and Open MPI have it), or else in PATH.

    Raises StartError if it is not found, or mpi4py is missing.
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise StartError(f"MPI starts the ranks, but mpi4py is not installed; {INSTALL}")
    beside = Path(sys.executable).parent / "mpiexec"
    path = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if path is None:
        raise StartError(f"mpiexec starts the ranks, but it is neither beside {sys.executable} nor in PATH; {INSTALL}")
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartError(f"{path} --version failed: {error}") from error
    text = done.stdout + done.stderr
    name = "Open MPI" if "Open MPI" in text or "PRRTE" in text or "OpenRTE" in text else "MPICH"
    number = re.search(r"\d+\.\d+(?:\.\w+)*", text)
    return Mpiexec(path, name, number[0] if number else "of unknown version")
