"""All checks for a machine with one GPU: ``scripts/gpu-check``.

Each section runs in a process of its own with a limit of time, so that none takes the others with it. The results go to
a JSON file; the exit status is 0 only if every section asked for has run and passed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import qccl
from qccl.cuda import libraries

ROOT = Path(__file__).resolve().parent.parent.parent
_RESULT = "qccl-gpu-check-result: "
#: compute-sanitizer's exit status when it has found something
_FOUND = 99


class Missing(Exception):
    """A section cannot run; the text says why."""


def kernels() -> dict[str, Any]:
    """Every codec, element type, bucket and alignment against the host's bytes."""
    from codec_kernels import cases, check

    compared, differences = check(list(cases()))
    assert not differences, "; ".join(differences[:5]) + f" ({len(differences)} cases)"
    return {"operations": compared}


def streams() -> dict[str, Any]:
    """Producer, collective, consumer, ordered by streams; deadlines while queues are full, results after a failure."""
    import queues
    from calls import stream_order

    return stream_order() | queues.all_checks()


def graphs() -> dict[str, Any]:
    """Capture and replay."""
    from calls import graphs

    return graphs()


def dispatch() -> dict[str, Any]:
    """The host's time for a call and for a replay."""
    from calls import dispatch

    return dispatch()


def overlap() -> dict[str, Any]:
    """Chunks against one chunk over a slow link."""
    from calls import overlap

    return overlap()


def ranks() -> dict[str, Any]:
    """2 to 4 NCCL ranks on this GPU."""
    from ranks import check

    return {f"{size} ranks": check(size) for size in (2, 3, 4)}


def faults() -> dict[str, Any]:
    """A rank that stays away."""
    from ranks import check_faults

    return check_faults()


def staged() -> dict[str, Any]:
    """Transfers through pinned memory and a host transport."""
    from staged import all_checks

    return all_checks()


def bandwidth() -> dict[str, Any]:
    """The kernels' rates compared with a copy."""
    from bandwidth import measure

    figures = measure()
    if figures["slower_than_limit"]:
        raise AssertionError(f"below {figures['limit']:.0%} of the copy: {figures['slower_than_limit']}", figures)
    return figures


def memcheck() -> dict[str, Any]:
    """No access outside an allocation."""
    return _sanitize("memcheck", 7, "overrun")


def racecheck() -> dict[str, Any]:
    """No races in shared memory."""
    return _sanitize("racecheck", 11, "race")


def _sanitize(tool: str, every: int, mistake: str) -> dict[str, Any]:
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        raise Missing("there is no compute-sanitizer in PATH or /usr/local/cuda/bin")
    status, output = _under(program, tool, mistake)
    if status != _FOUND:  # a tool that misses the planted error proves nothing
        raise Missing(f"compute-sanitizer does not find a planted mistake (exit status {status}): {output[-600:]}")
    status, output = _under(program, tool, str(every))
    assert status == 0, f"exit status {status}: {output[-1500:]}"
    compared = re.search(r"(\d+) operations compared", output)
    assert compared is not None, f"nothing was compared: {output[-600:]}"
    summary = next((line for line in output.splitlines() if "SUMMARY" in line), "")
    return {"operations": int(compared[1]), "summary": summary.strip("= "), "finds_a_planted": mistake}


def _under(program: str, tool: str, argument: str) -> tuple[int, str]:
    """Exit status and output of the kernels under compute-sanitizer."""
    command = [program, "--tool", tool, "--error-exitcode", str(_FOUND), "--print-limit", "5"]
    command += [sys.executable, str(Path(__file__).with_name("codec_kernels.py")), argument]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # run_apart() limits it
    return done.returncode, done.stdout


#: section -> its function, and its limit in seconds
SECTIONS: dict[str, tuple[Callable[[], dict[str, Any]], float]] = {
    "kernels": (kernels, 300),
    "streams": (streams, 60),
    "graphs": (graphs, 60),
    "dispatch": (dispatch, 30),
    "overlap": (overlap, 60),
    "bandwidth": (bandwidth, 120),
    "staged": (staged, 50),
    "ranks": (ranks, 240),
    "faults": (faults, 90),
    "memcheck": (memcheck, 240),
    "racecheck": (racecheck, 240),
}


def run_section(name: str) -> dict[str, Any]:
    """One section in this process."""
    begin = time.monotonic()
    try:
        result: dict[str, Any] = {"status": "passed", "figures": SECTIONS[name][0]()}
    except Missing as error:
        result = {"status": "not run", "reason": str(error)}
    except Exception as error:
        result = {"status": "failed", "reason": f"{type(error).__name__}: {error.args[0] if error.args else error}"}
        if len(error.args) > 1:
            result["figures"] = error.args[1]
        traceback.print_exc()
    return result | {"seconds": round(time.monotonic() - begin, 2)}


def run_apart(name: str) -> dict[str, Any]:
    """One section in a separate process, which is ended with all its children."""
    limit = SECTIONS[name][1]
    begin = time.monotonic()
    places = (ROOT, ROOT / "tests", ROOT / "tests" / "gpu", os.environ.get("PYTHONPATH"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(place) for place in places if place)}
    command = [sys.executable, str(Path(__file__)), "--inside", name]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    in_time = True
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        in_time = False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    seconds = round(time.monotonic() - begin, 2)
    if not in_time:
        out, err = process.communicate(timeout=30)
        return {
            "status": "failed",
            "reason": f"not done after {limit:.0f} s: {(out + err)[-500:]!r}",
            "seconds": seconds,
        }
    for line in out.splitlines():
        if line.startswith(_RESULT):
            result: dict[str, Any] = json.loads(line.removeprefix(_RESULT))
            if result["status"] == "failed":
                print(err[-3000:], file=sys.stderr)
            return result
    return {"status": "failed", "reason": f"exit status {process.returncode}: {err[-800:]}", "seconds": seconds}


def document(sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The content of the results file."""
    machine = {"cpu_count": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    if not libraries.missing():
        machine["gpus"] = libraries.device_names()
        machine["nccl"] = libraries.nccl_version()
        runtime = libraries.cuda_libraries().runtime
        machine["cuda_driver"], machine["cuda_runtime"] = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    names = ("cupy-cuda12x", "cupy-cuda13x", "cuda-bindings", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
    return {
        "what": "scripts/gpu-check",
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "qccl": qccl.__version__,
        "commit": _commit(),
        "machine": machine,
        "packages": {name: version for name in names if (version := _version(name)) is not None},
        "sections": sections,
        "passed": bool(sections) and all(each["status"] == "passed" for each in sections.values()),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit, marked if files differ from it; as given if there is no repository."""
    try:
        run = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 30, "check": True}
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **run).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], **run).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("QCCL_COMMIT", "unknown")
    return f"{commit} and changes" if changed else commit


def default_output(names: Sequence[str], now: datetime) -> Path:
    """docs/results/<gpu>-<date>.json"""
    slug = re.sub(r"[^a-z0-9]+", "-", (names[0] if names else "no-gpu").lower()).strip("-")
    return ROOT / "docs" / "results" / f"{slug}-{now:%Y-%m-%d}.json"


def main(arguments: Sequence[str]) -> int:
    """Run the requested sections, write the file, and print the outcome."""
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)} (all)")
    parser.add_argument("-o", "--output", type=Path, help="the results file (docs/results/<gpu>-<date>.json)")
    parser.add_argument("--inside", choices=SECTIONS, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.inside is not None:
        print(_RESULT + json.dumps(run_section(given.inside)), flush=True)
        return 0
    unknown = [name for name in given.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"there is no section {', '.join(unknown)}; the sections are {', '.join(SECTIONS)}")
    lacking = libraries.missing()
    if lacking:
        print(f"gpu-check: nothing can be checked here: {'; '.join(lacking)}", file=sys.stderr)
        return 1
    found: dict[str, dict[str, Any]] = {}
    output = given.output or default_output(libraries.device_names(), datetime.now(UTC))
    for name in given.sections or SECTIONS:
        found[name] = run_apart(name)
        print(f"{name:<10} {found[name]['status']:<8} {found[name]['seconds']:7.1f} s  {found[name].get('reason', '')}")
        write(output, document(found))  # after each section, because the machine may be taken away
    print(f"wrote {output}")
    return 0 if document(found)["passed"] else 1


def write(path: Path, content: dict[str, Any]) -> None:
    """Write the results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
