"""All checks for a machine with one GPU: ``scripts/gpu-check``.

Each section runs in a process of its own with a time limit, so that none takes the others with it. After each one its
result is printed and written to a JSON file, which keeps the sections of earlier runs of the same commit on the same
GPU. The exit status is 0 only if every section asked for has run and passed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from reports import FAILED, PART, Missing, stacks_before

import qccl
from qccl.cuda import libraries

ROOT = Path(__file__).resolve().parent.parent.parent
_RESULT = "qccl-gpu-check-result: "
#: what a section tells; before it may stand the words of a library that ended no line
_TOLD = re.compile(f"({PART}|{_RESULT})(.*)")
#: characters of an error in the output, of which some machines return only the end
_MOST_PRINTED = 1000
#: characters of the output of a section that has no result, kept in its result
_MOST_KEPT = 3000
#: seconds in which a killed process must end
_KILL_SECONDS = 10.0


def _of(module: str, function: str) -> Callable[[], dict[str, Any]]:
    """The section that a function of another file is; the file is imported by the section's process alone."""
    return lambda: getattr(importlib.import_module(module), function)()  # type: ignore[no-any-return]


#: section -> its function, and its limit in seconds
SECTIONS: dict[str, tuple[Callable[[], dict[str, Any]], float]] = {
    "kernels": (_of("codec_kernels", "check_apart"), 140),
    "streams": (_of("queues", "all_checks"), 60),
    "graphs": (_of("calls", "graphs"), 40),  # capture and replay
    "dispatch": (_of("calls", "dispatch"), 20),  # the host's time for a call and for a replay
    "overlap": (_of("calls", "overlap"), 40),  # chunks against one chunk over a slow link
    "bandwidth": (_of("bandwidth", "measure"), 80),  # the kernels' rates compared with a copy
    "staged": (_of("staged", "all_checks"), 50),  # transfers through pinned memory and a host transport
    "ranks": (_of("ranks", "check_all"), 120),  # 2 to 4 NCCL ranks
    "faults": (_of("ranks", "check_faults"), 50),  # a rank that stays away
    "torch": (_of("frameworks", "torch_checks"), 50),  # tensors, streams and graphs of PyTorch, and its NCCL
    "jax": (_of("frameworks", "jax_checks"), 50),  # arrays of JAX
    "large": (_of("large", "check"), 60),  # more than 2^31 elements
    "memcheck": (_of("sanitizer", "memcheck"), 190),
    "racecheck": (_of("sanitizer", "racecheck"), 190),
    "driver": (_of("triage", "driver"), 30),
    "codecs": (_of("triage", "codecs"), 70),
    "nccl": (_of("triage", "nccl"), 50),
    "rates": (_of("triage", "rates"), 40),
    "sanitizer": (_of("sanitizer", "one_case_each"), 60),
}
#: A machine may be available for ten minutes at a time only. So the limits of a run's sections are six and a half
#: minutes together, and those of the triage five.
RUNS = {
    "1": ("kernels", "streams", "graphs", "dispatch", "overlap", "bandwidth"),
    "2": ("staged", "ranks", "faults", "torch", "jax", "large"),
    "3": ("memcheck", "racecheck"),
    "triage": ("driver", "codecs", "nccl", "rates", "sanitizer"),
}
#: a machine without compute-sanitizer is good enough
OPTIONAL = ("sanitizer",)
#: the sections that must pass; those of the triage ask less of the same
REQUIRED = [name for name in SECTIONS if name not in RUNS["triage"]]
RUN_SECONDS, TRIAGE_SECONDS = 380, 300


def run_section(name: str) -> dict[str, Any]:
    """One section in this process."""
    begin = time.monotonic()
    try:
        result: dict[str, Any] = {"status": "passed", "figures": _rounded(SECTIONS[name][0]())}
    except Missing as error:
        result = {"status": "not run", "reason": str(error)}
    except Exception as error:
        reason: Any = error
        result = {"status": "failed"}
        if isinstance(error, AssertionError) and len(error.args) == 2:  # a check's failure, with its figures
            reason, result["figures"] = error.args[0], _rounded(error.args[1])
        result["reason"] = f"{type(error).__name__}: {reason}"
        traceback.print_exc()
    return result | {"seconds": round(time.monotonic() - begin, 2)}


def _rounded(figures: Any) -> Any:
    """The same figures, with four digits."""
    return json.loads(json.dumps(figures), parse_float=lambda text: float(f"{float(text):.4g}"))


def run_apart(name: str, logs: Path) -> dict[str, Any]:
    """One section in a separate process, which is ended with all its children.

    ``logs`` gets a file with all that it says, and NCCL's own files, unless the environment tells NCCL otherwise.
    """
    limit, begin = SECTIONS[name][1], time.monotonic()
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}.txt"
    nccl = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(logs / f"{name}-nccl.%h.%p.txt")}
    places = (ROOT, *(ROOT / "tests" / name for name in ("support", "cuda", "gpu")), os.environ.get("PYTHONPATH"))
    environment = nccl | os.environ | {"PYTHONPATH": os.pathsep.join(str(place) for place in places if place)}
    command, in_time = [sys.executable, str(Path(__file__)), "--inside", name, str(limit)], True
    with contextlib.ExitStack() as end:
        file = end.enter_context(log.open("w"))
        with _sigterm_later():  # inside Popen() it would leave a process that nothing ends
            process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            end.callback(_kill_group, process.pid)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            in_time = False
    with contextlib.suppress(subprocess.TimeoutExpired):  # the driver may keep it from ending: the next sections run
        process.wait(_KILL_SECONDS)
    result, parts, said = _read(log)
    if result is None:
        reason = f"exit status {process.returncode}" if in_time else f"not done after {limit:.0f} s"
        if process.returncode is None:
            reason += f", and its process {process.pid} did not end when it was killed"
        before = [f"{name} {each}; then " for name, each in parts.items() if str(each).startswith(FAILED)]
        result = {"status": "failed", "reason": f"{''.join(before)}{reason}: {said[-_MOST_KEPT:]}"}
        result["seconds"] = round(time.monotonic() - begin, 2)
    if result["status"] == "failed":
        print(said[-_MOST_PRINTED:], file=sys.stderr)
        if parts or "figures" in result:
            result["figures"] = parts | result.get("figures", {})
    return result


def _read(log: Path) -> tuple[dict[str, Any] | None, dict[str, Any], str]:
    """The result of a section, the parts of its figures that it has told, and all else that it said."""
    result, parts, rest = None, dict[str, Any](), []
    for line in log.read_text(errors="replace").splitlines():
        told = _TOLD.search(line)
        try:
            if told and told[1] == PART:
                parts |= _rounded(json.loads(told[2]))
            elif told:
                result = json.loads(told[2])
        except ValueError:  # the process was ended while it wrote it
            told = None
        rest += [line] if told is None else filter(None, [line[: told.start()]])
    return result, parts, "\n".join(rest)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


@contextlib.contextmanager
def _sigterm_later() -> Iterator[None]:
    """A SIGTERM within it is handled at its end."""
    received: list[int] = []
    handler = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        for number in received:
            signal.raise_signal(number)


def description() -> dict[str, Any]:
    """What the results file says of qccl, the machine and the packages."""
    machine = {"cpu_count": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    machine["gpus"] = libraries.device_names()
    machine["nccl"] = libraries.nccl_version()
    runtime = libraries.cuda_libraries().runtime
    machine["cuda_driver"], machine["cuda_runtime"] = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    names = ("cupy-cuda12x", "cupy-cuda13x", "cuda-bindings", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
    names += ("torch", "jax")
    return {
        "what": "scripts/gpu-check",
        "qccl": qccl.__version__,
        "commit": commit(),
        "machine": machine,
        "packages": {name: version for name in names if (version := _version(name)) is not None},
    }


def document(about: dict[str, Any], sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The content of the results file; it has passed when every required section has, and none has failed."""
    lacking = [name for name in REQUIRED if name not in sections]
    failed = [name for name, each in sections.items() if each["status"] == "failed"]
    return about | {
        "passed": not lacking and not failed and all(sections[name]["status"] == "passed" for name in REQUIRED),
        "not_run": lacking,
        "sections": {name: sections[name] for name in SECTIONS if name in sections},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit that QCCL_COMMIT names, or else that of the checkout, marked if files differ from it; "" for none."""
    given = os.environ.get("QCCL_COMMIT", "").strip()
    if given or not (ROOT / ".git").exists():  # without it git would find a repository in a folder above
        return given
    try:
        command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude", "*"]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.strip()


def stem(names: Sequence[str]) -> str:
    """The GPU's name, as the names of its results files begin."""
    return re.sub(r"[^a-z0-9]+", "-", names[0].lower()).strip("-")


def default_output(names: Sequence[str], now: datetime) -> Path:
    """docs/results/<gpu>-<date>.json"""
    return ROOT / "docs" / "results" / f"{stem(names)}-{now:%Y-%m-%d}.json"


def earlier(about: dict[str, Any], paths: Sequence[Path]) -> tuple[dict[str, dict[str, Any]], Path | None]:
    """The sections in those results files that are of the same commit and GPU, and the last of the files."""
    found, last = {}, None
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if content.get("commit") == about["commit"] and content["machine"]["gpus"] == about["machine"]["gpus"]:
            found, last = found | content["sections"], path
    return found, last


def main(arguments: Sequence[str]) -> int:
    """Run the requested sections, write the file, and print the outcome."""
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=__doc__)
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)} (all but the triage's)"
    )
    parser.add_argument("--run", choices=RUNS, help="triage: the most decisive checks; 1 to 3: all others")
    parser.add_argument("-o", "--output", type=Path, help="the results file (docs/results/<gpu>-<date>.json)")
    parser.add_argument("--list", action="store_true", help="print the sections with their limits, and run nothing")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.list:
        for run, names in RUNS.items():
            print(f"--run {run}: " + ", ".join(f"{name} ({SECTIONS[name][1]:.0f} s)" for name in names))
        return 0
    if given.inside is not None:
        name, limit = given.inside
        stacks_before(float(limit))
        print(_RESULT + json.dumps(run_section(name)), flush=True)
        return 0
    unknown = [name for name in given.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"there is no section {', '.join(unknown)}; the sections are {', '.join(SECTIONS)}")
    if given.sections and given.run:
        parser.error("give either --run or names of sections, not both")
    lacking = libraries.missing()
    if lacking:
        print(f"gpu-check: nothing can be checked here: {'; '.join(lacking)}", file=sys.stderr)
        return 1
    about = description()
    if not about["commit"]:
        parser.error(f"{ROOT} is no git checkout: set QCCL_COMMIT to the commit, under which the results are kept")
    try:
        importlib.import_module("qccl._host")
    except ImportError as error:
        where = "run scripts/install, or carry a built extension (docs/cuda.md)"
        print(f"gpu-check: qccl's extension cannot be imported ({error}): {where}", file=sys.stderr)
        return 1
    return check(about, given.sections or RUNS.get(given.run) or REQUIRED, given.output)


def check(about: dict[str, Any], names: Sequence[str], output: Path | None) -> int:
    """Run sections, and write and print each result at once, because the machine may be taken away."""
    default = default_output(about["machine"]["gpus"], datetime.now(UTC))
    beside = sorted(default.parent.glob(f"{stem(about['machine']['gpus'])}-*.json"))
    found, last = earlier(about, [*beside, *([output] if output else [])])
    output = output or last or default
    for name in names:
        found[name] = run_apart(name, output.with_name(f"{output.stem}-logs")) | {
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        }
        write(output, document(about, found))
        print(_lines(name, found[name]), flush=True)
    print(f"wrote {output}", flush=True)
    good = {name: ("passed", "not run") if name in OPTIONAL else ("passed",) for name in names}
    bad = [name for name in names if found[name]["status"] not in good[name]]
    if tuple(names) == RUNS["triage"]:
        print(verdict(bad, found), flush=True)
    return 1 if bad else 0


def verdict(bad: Sequence[str], sections: dict[str, dict[str, Any]]) -> str:
    """A line on the triage: the first section that did not pass, or what comes next."""
    if bad:
        return f"verdict: not usable yet: {bad[0]}: {sections[bad[0]].get('reason', '')[:_MOST_PRINTED]}"
    return "verdict: usable: the kernels' bytes are the host's, and NCCL's ranks agree; go on with --run 1, 2, 3"


def _lines(name: str, result: dict[str, Any]) -> str:
    """The outcome of a section; below it the figures, in case that the output is all that can be kept."""
    reason = result.get("reason", "")[:_MOST_PRINTED]  # the file has all of it
    text = f"{name:<10} {result['status']:<8} {result['seconds']:7.1f} s  {reason}".rstrip()
    return f"{text}\n    {json.dumps(result['figures'])}" if "figures" in result else text


def write(path: Path, content: dict[str, Any]) -> None:
    """Write the results file; a run that is killed leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the section's process ends, too
    sys.exit(main(sys.argv[1:]))
