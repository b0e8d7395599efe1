"""``qccl-bench info``: shows which parts of qccl can be used on this machine, and why others cannot."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from qccl.base import __version__
from qccl.base.errors import EngineError, QcclError
from qccl.bench.lab import lab
from qccl.bench.start.mpiexec import INSTALL, find_mpiexec
from qccl.bench.start.start import obstacle
from qccl.codecs.operations import instruction_set, usable_instruction_sets
from qccl.meeting import tls
from qccl.meeting.launchers import Launcher, detect
from qccl.meeting.secret import is_insecure, token_key
from qccl.transports import ucx
from qccl.transports.choice import Offer, choose, refusal_of_mpi, wanted_transport
from qccl.transports.wan import memory_obstacle

__all__ = ["info"]

# Runs in a process of its own, because an MPI library that fails to load may end its process.
_ASK_MPI = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
name, version = MPI.get_vendor()
print(name, ".".join(map(str, version)))
"""

#: the launcher if the user started ranks by mpiexec
_MPIEXEC = Launcher("MPICH", 0, 2, 0, 2)


@click.command(short_help="Show which parts can be used here, and why others cannot.")
def info() -> None:
    """Print the versions of qccl and its dependencies, which engines can be used here, and why others cannot."""
    for name, text in _facts():
        click.echo(f"{name:<14} {text}")


def _facts() -> Iterator[tuple[str, str]]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "qccl", __version__
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}, {cores} cores"
    yield "numpy", _version("numpy") or "no: install numpy"
    yield "host engine", _host()
    yield "cuda engine", _cuda()
    yield "cuda parts", _cuda_parts()
    yield "mpi", (mpi := _mpi())
    yield "mpiexec", _mpiexec()
    yield "ucx", _ucx()
    yield "wan", _wan()
    torch = _version("torch")
    yield "gloo", f"yes: PyTorch {torch}" if torch else "no: PyTorch is not installed"
    yield "launcher", _launcher()
    yield "qccl.init()", _transport(has_library=mpi.startswith("yes"))
    yield "lab (--link)", "yes" if (reason := lab.obstacle()) is None else f"no: {reason}"
    prometheus = _version("prometheus_client")
    yield "metrics", f"yes: prometheus_client {prometheus}" if prometheus else "no: install qccl[metrics]"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _host() -> str:
    try:
        return f"yes: kernels for {instruction_set()} (this processor runs {', '.join(usable_instruction_sets())})"
    except ImportError as error:
        return f"no: the extension qccl._host cannot be loaded ({error}); install qccl again"


def _cuda() -> str:
    from qccl.engine.cuda import libraries

    lacking = libraries.missing()
    if lacking:
        return f"no: {'; '.join(lacking)}"
    return f"yes: {', '.join(libraries.device_names())}"


def _cuda_parts() -> str:
    from qccl.engine.cuda import libraries

    parts = ", ".join(f"{name} {version}" for name, version in libraries.part_versions().items())
    order = os.environ.get(libraries.LAUNCH_ORDER)
    return f"{parts}; {libraries.LAUNCH_ORDER} is {order or 'not set (qccl sets it to 1 beside PyTorch)'}"


def _mpi() -> str:
    if importlib.util.find_spec("mpi4py") is None:
        return f"no: mpi4py is not installed; {INSTALL}"
    try:
        done = subprocess.run([sys.executable, "-c", _ASK_MPI], capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return "no: loading the MPI library took more than 30 s"
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return f"no: mpi4py {_version('mpi4py')} finds no MPI library ({reason}); install qccl[mpi]"
    return f"yes: mpi4py {_version('mpi4py')}, {done.stdout.strip()}"


def _mpiexec() -> str:
    try:
        found = find_mpiexec()
    except QcclError as error:
        return f"no: {error}"
    return f"yes: {found.path} ({found.name} {found.version})"


def _ucx() -> str:
    if reason := obstacle("ucx"):
        return f"no: {reason}"
    # a line of mappings has five fields without blanks before the path
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    paths = {fields[5] for fields in lines if "/libucp" in fields[-1]}
    kind = "the wheel libucx-cu12" if any("/libucx/" in path for path in paths) else "the system's"
    return f"yes: UCX {ucx.version()}, {' '.join(sorted(paths))} ({kind}; beside MPI its own is used, if it has one)"


def _wan() -> str:
    try:
        library = tls.version()
        token = "with a token" if token_key() else "without a token (QCCL_TOKEN_FILE, QCCL_TOKEN): on one machine only"
    except QcclError as error:
        return f"no: {error}"
    return f"yes: {library}, {token}{', or QCCL_INSECURE' if is_insecure() else ''}; {_inside_machines()}"


def _inside_machines() -> str:
    """The transport between ranks of one machine under wan."""
    reason = memory_obstacle()
    return f"inside a machine {f'wan, too: {reason}' if reason else 'ucx by shared memory'}"


def _transport(*, has_library: bool = True) -> str:
    """The transport that qccl.init() would use in this environment, for several ranks, and why.

    ``has_library``: mpi4py finds an MPI library.
    """
    try:
        launcher, wanted = detect(), wanted_transport()
        starter = launcher if launcher and launcher.size > 1 else _MPIEXEC
        has_mpi = (wanted or has_library) and not refusal_of_mpi(starter, wanted)
        if has_mpi and (wanted or starter is launcher):
            return f"mpi: {f'QCCL_TRANSPORT is {wanted}' if wanted else f'{starter.name} started the ranks'}"
        here, apart = _chosen(Offer.here()), _chosen(Offer.here(network=""))
    except QcclError as error:
        return f"no: {error}"
    if here.partition(":")[0] != apart.partition(":")[0]:
        here += f"; among several machines {apart}"
    return here if launcher or not has_mpi or obstacle("mpi") else f"{here}; mpi for ranks that mpiexec started"


def _chosen(each: Offer) -> str:
    """The transport of two ranks with this offer, with the reason, or the reason why they have none."""
    try:
        found = choose([each, each], "one group")
    except EngineError as error:
        return f"no: {error}"
    return f"{found.name}: {f'QCCL_TRANSPORT is {found.name}' if each.wanted else found.why}"


def _launcher() -> str:
    try:
        found = detect()
    except QcclError as error:
        return f"no: {error}"
    return (
        "none; qccl-bench starts its own ranks" if found is None else f"{found.name}, rank {found.rank} of {found.size}"
    )
