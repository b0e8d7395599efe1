"""All checks for a machine with one GPU: ``scripts/gpu-check``.

Each section runs in a process of its own with a time limit, so that none takes the others with it. What it finds is
printed and written to a JSON file as it comes, and the file keeps the sections of earlier calls for the same commit on
the same GPU. The exit status is 0 only if every section asked for has run and passed.
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
import shutil
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
from qccl.engine.cuda import libraries

ROOT = Path(__file__).resolve().parent.parent.parent
#: the program that a section's process runs
PROGRAM = Path(__file__)
_RESULT = "qccl-gpu-check-result: "
#: what a section tells; before it may stand the words of a library that ended no line
_TOLD = re.compile(f"({PART}|{_RESULT})(.*)")
#: characters of an error in the output, of which some machines return only the end
_MOST_PRINTED = 1000
#: characters of the output of a section that has no result, kept in its result
_MOST_KEPT = 3000
#: seconds in which a killed process must end, and between two looks at what a section has told
_KILL_SECONDS, _LOOK_SECONDS = 10.0, 1.0
#: a section is started if this part of its limit is left
_NEEDED = 0.5


def _of(module: str, function: str) -> Callable[[], dict[str, Any]]:
    """The section that a function of another file is; the file is imported by the section's process alone."""
    return lambda: getattr(importlib.import_module(module), function)()  # type: ignore[no-any-return]


#: section -> its function, and its limit in seconds; in the order of the two calls
SECTIONS: dict[str, tuple[Callable[[], dict[str, Any]], float]] = {
    "probe": (_of("probe", "measure"), 40),  # what CUDA and NCCL cost by themselves
    "driver": (_of("triage", "driver"), 30),
    "codecs": (_of("triage", "codecs"), 70),  # one case of each codec
    "nccl": (_of("triage", "nccl"), 50),
    "dispatch": (_of("calls", "dispatch"), 20),  # the host's time for a call and for a replay
    "graphs": (_of("calls", "graphs"), 40),  # capture and replay
    "streams": (_of("queues", "all_checks"), 60),
    "rates": (_of("bandwidth", "first_figures"), 40),  # of a copy and two kernels
    "kernels": (_of("codec_kernels", "check_apart"), 140),  # all cases
    "bandwidth": (_of("bandwidth", "measure"), 80),  # the kernels' rates compared with a copy
    "faults": (_of("ranks", "check_faults"), 50),  # a rank that stays away
    "torch": (_of("frameworks", "torch_checks"), 50),  # tensors, streams and graphs of PyTorch, and its NCCL
    "ranks": (_of("ranks", "check_all"), 120),  # 2 to 4 NCCL ranks
    "sanitizer": (_of("sanitizer", "one_case_each"), 60),  # memcheck and racecheck
    "staged": (_of("staged", "all_checks"), 50),  # transfers through pinned memory and a host transport
    "jax": (_of("frameworks", "jax_checks"), 50),  # arrays of JAX
}
_SECOND = list(SECTIONS).index("bandwidth")
FIRST, SECOND = list(SECTIONS)[:_SECOND], list(SECTIONS)[_SECOND:]
#: seconds of a call, unless --limit says how many are left
CALL_SECONDS = {"first": 420.0, "second": 600.0}
#: a call ends where one of these fails, because no later section can pass then
DECISIVE = ("driver", "codecs")
#: a machine without compute-sanitizer is good enough
OPTIONAL = ("sanitizer",)
REQUIRED = [name for name in SECTIONS if name not in OPTIONAL]


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


def run_apart(
    name: str, logs: Path, limit: float, keep: Callable[[dict[str, Any]], object] = lambda _: None
) -> dict[str, Any]:
    """One section in a separate process, which is ended with all its children after ``limit`` seconds.

    ``logs`` gets a file with all that it says, and NCCL's own files, unless the environment tells NCCL otherwise.
    ``keep`` gets the figures of each part when the section tells it, in case that this process is ended, too.
    """
    begin, in_time = time.monotonic(), True
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}.txt"
    nccl = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(logs / f"{name}-nccl.%h.%p.txt")}
    places = (
        ROOT,
        *(ROOT / "tests" / name for name in ("support", "engine/cuda", "gpu")),
        os.environ.get("PYTHONPATH"),
    )
    environment = nccl | os.environ | {"PYTHONPATH": os.pathsep.join(str(place) for place in places if place)}
    command, seen = [sys.executable, str(PROGRAM), "--inside", name, str(limit)], dict[str, Any]()
    with contextlib.ExitStack() as end:
        file = end.enter_context(log.open("w"))
        with _sigterm_later():  # inside Popen() it would leave a process that nothing ends
            process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            end.callback(_kill_group, process.pid)
        while process.poll() is None and in_time:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_SECONDS)
            if (parts := _read(log)[1]) != seen:
                keep(seen := parts)
            in_time = time.monotonic() < begin + limit
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
    machine |= {"gpus": libraries.device_names(), "nvidia_smi": _nvidia_smi()}
    names = ("cupy-cuda12x", "cupy-cuda13x", "numpy", "torch", "jax")
    return {
        "what": "scripts/gpu-check",
        "qccl": qccl.__version__,
        "commit": commit(),
        "machine": machine | {"libraries": libraries.part_versions()},
        "packages": {name: version for name in names if (version := _version(name)) is not None},
    }


def _nvidia_smi() -> list[str]:
    """A line for each GPU, with the driver, memory and clocks; none where the program is missing."""
    asked = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,pstate"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return []
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return [str(error)]


def document(about: dict[str, Any], sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The content of the results file; it has passed when every required section has, and none has failed."""
    failed = [name for name, each in sections.items() if each["status"] in ("failed", "unfinished")]
    return about | {
        "passed": not failed and not lacking(sections, REQUIRED),
        "not_run": [name for name in REQUIRED if name not in sections],
        "sections": {name: sections[name] for name in SECTIONS if name in sections},
    }


def lacking(sections: dict[str, dict[str, Any]], names: Sequence[str]) -> list[str]:
    """Those of the sections that have not passed."""
    return [name for name in names if sections.get(name, {}).get("status") != "passed"]


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


class Results:
    """The results file, docs/results/<gpu>-<date>-<commit>.json unless ``folder`` is another place.

    It has the sections of earlier calls for the same commit on the same GPU, which are in either folder.

    Attributes:
        sections: their results, by name.
        left: the sections of the first call that had not passed in the last call on this GPU, for whichever commit.
    """

    def __init__(self, about: dict[str, Any], folder: Path | None) -> None:
        self._about, self.sections = about, dict[str, dict[str, Any]]()
        stem = re.sub(r"[^a-z0-9]+", "-", about["machine"]["gpus"][0].lower()).strip("-")
        commit = re.sub(r"^(\w{8})\w*", r"\1", about["commit"])  # it may end in -dirty
        places, last = [ROOT / "docs" / "results", *([folder] if folder else [])], ("", dict[str, Any]())
        path = places[-1] / f"{stem}-{datetime.now(UTC):%Y-%m-%d}-{commit}.json"
        for found in (each for place in places for each in sorted(place.glob(f"{stem}-*.json"))):
            content = json.loads(found.read_text(encoding="utf-8"))
            if content["machine"]["gpus"] == about["machine"]["gpus"]:
                last = max(last, (content["date"], content["sections"]), key=lambda each: each[0])
                if content["commit"] == about["commit"]:
                    self.sections |= content["sections"]
                    path = places[-1] / found.name
        self.path, self.logs, self.left = path, path.with_name(f"{path.stem}-logs"), lacking(last[1], FIRST)

    def keep(self, name: str, result: dict[str, Any]) -> None:
        """Write a section's result; a call that is killed leaves the old file or the new one."""
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        self.sections[name] = result | {"date": now}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        text = json.dumps(document(self._about | {"date": now}, self.sections), indent=1)
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(self.path)


def main(arguments: Sequence[str]) -> int:
    """Run the requested sections, write the file, and print the outcome."""
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)} (all)")
    parser.add_argument("--run", choices=CALL_SECONDS, help="the first or the second of two short calls")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="start no section that would end later")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="for the results (docs/results)")
    parser.add_argument("--list", action="store_true", help="print the sections with their limits, and run nothing")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.list:
        for run, names in (("first", FIRST), ("second", SECOND)):
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
    if missing := libraries.missing():
        print(f"gpu-check: nothing can be checked here: {'; '.join(missing)}", file=sys.stderr)
        return 1
    about = description()
    if not about["commit"]:
        parser.error(f"{ROOT} is no git checkout: set QCCL_COMMIT to the commit, under which the results are kept")
    try:
        extension = importlib.import_module("qccl._host").__file__
    except ImportError as error:
        where = "run scripts/install, or carry a built extension (docs/cuda.md)"
        print(f"gpu-check: qccl's extension cannot be imported ({error}): {where}", file=sys.stderr)
        return 1
    print(json.dumps(about | {"extension": extension}), flush=True)
    results = Results(about, given.output)
    names = given.sections or (FIRST if given.run == "first" else list(SECTIONS))
    if given.run == "second":
        names = list(dict.fromkeys([*(results.left or OPTIONAL), *SECOND]))
    return check(results, names, given.limit or CALL_SECONDS.get(given.run, float("inf")), bool(given.run))


def check(results: Results, names: Sequence[str], seconds: float, is_call: bool) -> int:
    """Run what fits into so many seconds; write and print each result at once: the machine may be taken away."""
    end, done, stopped = time.monotonic() + seconds, dict[str, dict[str, Any]](), False
    for name in names:
        limit, left = SECTIONS[name][1], end - time.monotonic()
        if left < _NEEDED * limit or stopped:
            continue
        keep = lambda figures, name=name: results.keep(name, {"status": "unfinished", "figures": figures})  # noqa: E731
        keep({})
        done[name] = run_apart(name, results.logs, min(limit, left), keep)
        results.keep(name, done[name])
        print(_lines(name, done[name]), flush=True)
        stopped = is_call and name in DECISIVE and done[name]["status"] != "passed"
    print(f"wrote {results.path}", flush=True)
    bad = [name for name in lacking(done, list(done)) if name not in OPTIONAL or done[name]["status"] != "not run"]
    rest = [name for name in names if name not in done]
    print(f"to mend: {', '.join(bad) or 'nothing'}; not started: {', '.join(rest) or 'none'}", flush=True)
    return 1 if bad or rest else 0


def _lines(name: str, result: dict[str, Any]) -> str:
    """The outcome of a section; below it the figures, in case that the output is all that can be kept."""
    reason = result.get("reason", "")[:_MOST_PRINTED]  # the file has all of it
    text = f"{name:<10} {result['status']:<8} {result['seconds']:7.1f} s  {reason}".rstrip()
    return f"{text}\n    {json.dumps(result['figures'])}" if "figures" in result else text


def program() -> int:
    """main() with the command's arguments, whose section ends with it at a SIGTERM, as by timeout(1)."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(program())
