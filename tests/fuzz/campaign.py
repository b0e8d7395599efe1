"""Runs the fuzz targets that ``scripts/fuzz`` has built, in turns, and says what they have found.

``scripts/fuzz [--seconds N] [--jobs N] [--target NAME ...] [--write FILE] [--add]``. Each target has the same part of
the time. A finding ends a turn, and the target goes on in its next one. After SIGINT or SIGTERM the results so far are
written; ``--add`` adds a run's to those that FILE has.

What a target has learned stays in ``build/fuzz/corpus``, and the next run goes on from there. Inputs that are findings
are in ``build/fuzz/findings``; give one to ``build/fuzz/TARGET FILE``, or to ``tests/fuzz/python_targets.py TARGET
FILE``.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import runs

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/fuzz"
FINDINGS = BUILD / "findings"
COMPILED = ("addresses", "callers", "codecs", "frames", "headers")
IN_PYTHON = ("messages", "records", "reports", "states", "texts")

#: what a target has in place of libFuzzer's defaults. Bytes of an input: a message of several parts needs many, and
#: long lists of actions take time. `codecs` has a large corpus: -entropic would take most of the time to look at it.
_OPTIONS = {
    "codecs": ("-entropic=0",),
    "frames": ("-max_len=20000",),
    "headers": ("-max_len=1536",),
}
#: an input may take so long, also on a busy machine, and the process so much memory
_LIMITS = ("-timeout=60", "-report_slow_units=60", "-rss_limit_mb=3000", "-malloc_limit_mb=1000")
#: of AddressSanitizer. Who allocated is seen when a finding is run alone. What is freed, and what returned functions
#: had on the stack, is watched in some megabytes that stay in the processor's cache: an input needs no more.
_SANITIZER = {
    **{"malloc_context_size": 0, "quarantine_size_mb": 8, "thread_local_quarantine_size_kb": 64},
    **{"max_uar_stack_size_log": 16, "use_madv_dontdump": 0},
}
#: of a turn, at most. Each begins with the corpus, and there is a line about each.
_TURN_SECONDS = 120
#: seconds that a turn may take beyond its time, which is looked at after each input: to read its corpus, and to end
_GRACE_SECONDS = 600
#: seconds in which an interrupted target has to end
_END_SECONDS = 10
#: a target with so many stays away from then on
_MOST_FINDINGS = 20


@dataclass
class Result:
    """What has become of a target so far.

    Attributes:
        inputs: that were executed, without those of the corpus, which each turn executes first.
        seconds: that it ran.
        covered, edges: edges of the target's control flow that inputs have reached, and all; None: Python's functions
            are counted when they are imported, so there is no total.
        corpus: inputs that each reach something else.
        findings: files of the inputs that are findings.
        stopped: why it has no more turns; None: it has.
    """

    target: str
    inputs: int = 0
    seconds: float = 0.0
    covered: int = 0
    edges: int | None = None
    corpus: int = 0
    findings: list[str] = field(default_factory=list)
    stopped: str | None = None

    def line(self) -> str:
        edges = f"{self.covered} of {self.edges}" if self.edges else f"{self.covered}"
        speed = self.inputs / self.seconds if self.seconds else 0
        return (
            f"{self.target:10} {self.inputs:12,} {self.seconds:9.1f} {speed:9,.0f} {edges:>16} {self.corpus:7} "
            f"{len(self.findings):9}"
        )


class Turn:
    """A target that runs, for some seconds."""

    def __init__(self, result: Result, seconds: int):
        self.result = result
        target = result.target
        corpus = BUILD / "corpus" / target
        corpus.mkdir(parents=True, exist_ok=True)
        FINDINGS.mkdir(exist_ok=True)
        self._before = self._found()
        self._log = BUILD / f"{target}.log"
        program = [str(BUILD / target)]
        if target in IN_PYTHON:
            program = [sys.executable, str(Path(__file__).with_name("python_targets.py")), target]
        command = [
            *(*program, str(corpus), str(BUILD / "seeds" / target), f"-artifact_prefix={FINDINGS}/{target}-"),
            *(f"-max_total_time={seconds}", "-max_len=4096", "-print_final_stats=1", *_LIMITS),
            *_OPTIONS.get(target, ()),
        ]
        options = ":".join(f"{name}={value}" for name, value in _SANITIZER.items())
        with self._log.open("wb") as log:
            # Ctrl-C in a terminal is for this program, which ends the others.
            self._process = subprocess.Popen(
                command, stderr=log, stdout=log, env=os.environ | {"ASAN_OPTIONS": options}, start_new_session=True
            )
        self._begin, self._limit = time.monotonic(), seconds + _GRACE_SECONDS

    def has_ended(self) -> bool:
        """True when the process has; its result is counted then. One that hangs is killed."""
        overdue = time.monotonic() - self._begin > self._limit
        if overdue:
            self._process.kill()
            self._process.wait()
        if self._process.poll() is None:
            return False
        self._count()
        found = sorted(self._found() - self._before)
        self.result.findings += found
        if overdue:
            self.result.stopped = f"it did not end in {self._limit} s: it hangs, or the machine is too busy"
        elif self._process.returncode and not found:
            self.result.stopped = f"it ended with {self._process.returncode}, see {self._log.relative_to(ROOT)}"
        elif len(self.result.findings) >= _MOST_FINDINGS:
            self.result.stopped = "it has many findings"
        return True

    def interrupt(self) -> None:
        """Ends the process, and counts what it has done."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._count()
        self.result.findings += sorted(self._found() - self._before)

    def _found(self) -> set[str]:
        return {str(path.relative_to(ROOT)) for path in FINDINGS.glob(f"{self.result.target}-*")}

    def _count(self) -> None:
        output = self._log.read_text(errors="replace")
        executed = max(_last(r"^#(\d+)\s", output), _last(r"number_of_executed_units:\s+(\d+)", output))
        result = self.result
        result.inputs += max(0, executed - _last(r"^#(\d+)\s+INITED", output))
        result.seconds = round(result.seconds + time.monotonic() - self._begin, 1)
        result.covered = max(result.covered, _last(r"cov: (\d+)", output))
        edges = re.search(r"\((\d+) inline 8-bit counters\)", output)
        result.edges = int(edges[1]) if edges and result.target in COMPILED else None
        result.corpus = sum(1 for _ in (BUILD / "corpus" / result.target).iterdir())


def _last(pattern: str, text: str) -> int:
    return int((re.findall(pattern, text, re.MULTILINE) or [0])[-1])


class Campaign:
    """All targets, in turns."""

    def __init__(
        self, targets: list[str], seconds: int, jobs: int, file: Path | None, before: dict[str, Any] | None = None
    ):
        self.results = [Result(target) for target in targets]
        self._earlier = before or {}
        self.is_complete = self._is_interrupted = False
        self._seconds, self._jobs, self._file = seconds, jobs, file
        self._running: list[Turn] = []
        earlier = {"commit": before["machine"]["commit"]} if before else {}
        self._machine = runs.machine() | _versions() | earlier  # store() adds this run's commit

    def interrupt(self, *_: object) -> None:
        self._is_interrupted = True

    def run(self) -> None:
        """Until the time is over, each target is stopped, or interrupt() was called."""
        each = self._seconds * self._jobs / len(self.results)  # of a target
        try:
            while not self._is_interrupted:
                self._start(each)
                if not self._running:
                    break
                time.sleep(0.05)
                for turn in [turn for turn in self._running if turn.has_ended()]:
                    self._running.remove(turn)
                    print(turn.result.line(), turn.result.stopped or "", flush=True)
                    self._write()
        finally:  # also if the results cannot be written: the targets do not end with this program
            for turn in self._running:
                turn.interrupt()
        self.is_complete = not self._is_interrupted and not any(result.stopped for result in self.results)
        self._write()

    def _start(self, each: float) -> None:
        """Turns of the targets that had the least time so far."""
        while len(self._running) < self._jobs:
            busy = [turn.result for turn in self._running]
            # less than a second that is left over is no turn
            waiting = [it for it in self.results if it not in busy and not it.stopped and each - it.seconds >= 1]
            if not waiting:
                return
            result = min(waiting, key=lambda it: it.seconds)
            self._running.append(Turn(result, min(_TURN_SECONDS, int(each - result.seconds))))

    def _write(self) -> None:
        if self._file is None:
            return
        targets = {each["target"]: each for each in self._earlier.get("targets", ())}
        for result in self.results:
            targets[result.target] = _sum(targets.get(result.target), asdict(result))
        document = {
            "machine": self._machine,
            "complete": self.is_complete,  # False: it was interrupted, or a target was stopped
            "runs": self._earlier.get("runs", 0) + 1,
            "inputs": sum(each["inputs"] for each in targets.values()),
            "targets": list(targets.values()),
        }
        runs.store(self._file, document)

    def table(self) -> str:
        head = f"{'target':10} {'inputs':>12} {'seconds':>9} {'per s':>9} {'edges reached':>16} {'corpus':>7}  findings"
        together = f"{'together':10} {sum(each.inputs for each in self.results):12,}"
        return "\n".join((head, *(each.line() for each in self.results), together))


def _sum(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """What a target has done in runs before and in this one."""
    if before is None:
        return now
    sums = {name: round(before[name] + now[name], 1) for name in ("inputs", "seconds")}
    findings = before["findings"] + now["findings"]
    return now | sums | {"covered": max(before["covered"], now["covered"]), "findings": findings}


def _versions() -> dict[str, str]:
    """Of the tools."""
    packages = {each.name: each.version for each in distributions(path=[str(BUILD / "packages")])}
    return {name: packages[name] for name in ("atheris", "ziglang")}


def main() -> None:
    """The exit status is 0 if the targets had their time, and there are no findings."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description="Fuzz what reads foreign bytes.")
    parser.add_argument("--seconds", type=int, default=60, help="for all targets together (60)")
    parser.add_argument("--jobs", type=int, default=1, help="targets that run at once (1)")
    parser.add_argument("--target", action="append", choices=[*COMPILED, *IN_PYTHON], help="this one; repeatable (all)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="results as JSON, after each turn")
    parser.add_argument("--add", action="store_true", help="to what FILE has, if it is there")
    given = parser.parse_args()
    if given.add and not given.write:
        parser.error("--add adds to the results in a file: give it with --write FILE")
    targets = list(dict.fromkeys(given.target or [*COMPILED, *IN_PYTHON]))
    if given.jobs < 1:
        parser.error(f"--jobs {given.jobs} is less than 1")
    if given.seconds * given.jobs < len(targets):
        parser.error(f"--seconds {given.seconds} is less than a second for each of {len(targets)} targets")
    if given.write and not given.write.parent.is_dir():
        parser.error(f"--write {given.write}: there is no folder {given.write.parent}; make it first")
    before = runs.read(given.write) if given.add and given.write.exists() else {}
    if before and "targets" not in before:
        parser.error(f"--add would replace {given.write}, which has no results of scripts/fuzz: give another file")
    campaign = Campaign(targets, given.seconds, given.jobs, given.write, before)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, campaign.interrupt)
    campaign.run()
    print(campaign.table())
    for result in campaign.results:
        for path in result.findings:
            print(f"a finding: {path}")
        if result.stopped:
            print(f"{result.target} was stopped: {result.stopped}")
    if not campaign.is_complete:
        print("not complete")
    sys.exit(not campaign.is_complete or any(each.findings for each in campaign.results))


if __name__ == "__main__":
    main()
