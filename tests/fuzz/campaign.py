"""Runs the fuzz targets that ``scripts/fuzz`` has built, one after the other, and says what they have found.

``scripts/fuzz [--seconds N] [--target NAME ...] [--write FILE]``. Each target has the same part of the time. What a
target has learned stays in ``build/fuzz/corpus``, and the next run goes on from there. Inputs that are findings are in
``build/fuzz/findings``; give one to ``build/fuzz/TARGET FILE``, or to ``tests/fuzz/python_targets.py TARGET FILE``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path

import runs

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/fuzz"
COMPILED = ("addresses", "codecs", "frames", "headers")
IN_PYTHON = ("messages", "records", "states", "texts")

#: bytes of an input, at most, where libFuzzer's 4,096 are too few
_MOST_NBYTES = {"codecs": 20_000, "frames": 20_000}
#: an input may take so long, also on a busy machine, and the process so much memory
_LIMITS = ("-timeout=60", "-report_slow_units=60", "-rss_limit_mb=3000", "-malloc_limit_mb=1000")
#: seconds that a target may take beyond its time, which is looked at after each input: to read its corpus, and to end
_GRACE_SECONDS = 600


@dataclass(frozen=True)
class Result:
    """What became of a target.

    Attributes:
        inputs: that were executed.
        seconds: that it ran.
        covered, edges: edges of the target's control flow that inputs have reached, and all; None: Python's functions
            are counted when they are imported, so there is no total.
        corpus: inputs that each reach something else.
        findings: files of the inputs that are findings.
    """

    target: str
    inputs: int
    seconds: float
    covered: int
    edges: int | None
    corpus: int
    findings: tuple[str, ...]


def run(target: str, seconds: int) -> Result:
    corpus, findings = BUILD / "corpus" / target, BUILD / "findings"
    corpus.mkdir(parents=True, exist_ok=True)
    findings.mkdir(exist_ok=True)
    before = set(findings.iterdir())
    program = (
        [BUILD / target]
        if target in COMPILED
        else [sys.executable, Path(__file__).with_name("python_targets.py"), target]
    )
    command = [
        *map(str, program),
        *(str(corpus), str(BUILD / "seeds" / target), f"-artifact_prefix={findings}/{target}-"),
        *(f"-max_total_time={seconds}", f"-max_len={_MOST_NBYTES.get(target, 4096)}", "-print_final_stats=1", *_LIMITS),
    ]
    begin = datetime.now(UTC)
    fast = os.environ | {"ASAN_OPTIONS": "malloc_context_size=0"}  # who allocated is seen when a finding is run alone
    try:
        ended = subprocess.run(command, capture_output=True, timeout=seconds + _GRACE_SECONDS, env=fast)
    except subprocess.TimeoutExpired as error:
        sys.exit(f"{target} did not end in {error.timeout} s: it hangs, or the machine is too busy; run it alone")
    output = ended.stderr.decode(errors="replace")
    log = BUILD / f"{target}.log"
    log.write_text(output)
    found = tuple(sorted(str(path.relative_to(ROOT)) for path in set(findings.iterdir()) - before))
    if ended.returncode and not found:
        sys.exit(f"{' '.join(command)} ended with {ended.returncode}; its output is in {log}:\n{output[-3000:]}")
    edges = re.search(r"\((\d+) inline 8-bit counters\)", output)
    return Result(
        target,
        inputs=_last(r"number_of_executed_units:\s+(\d+)", output),
        seconds=round((datetime.now(UTC) - begin).total_seconds(), 1),
        covered=_last(r"cov: (\d+)", output),
        edges=int(edges[1]) if edges and target in COMPILED else None,
        corpus=sum(1 for _ in corpus.iterdir()),
        findings=found,
    )


def _last(pattern: str, text: str) -> int:
    return int((re.findall(pattern, text) or [0])[-1])


def _versions() -> dict[str, str]:
    """Of the tools."""
    packages = {each.name: each.version for each in distributions(path=[str(BUILD / "packages")])}
    return {name: packages[name] for name in ("atheris", "ziglang")}


def _table(results: list[Result]) -> str:
    lines = [f"{'target':10} {'inputs':>12} {'seconds':>8} {'edges reached':>16} {'corpus':>7} {'findings':>9}"]
    for each in results:
        edges = f"{each.covered} of {each.edges}" if each.edges else f"{each.covered}"
        lines.append(
            f"{each.target:10} {each.inputs:12,} {each.seconds:8.1f} {edges:>16} {each.corpus:7} {len(each.findings):9}"
        )
    lines.append(f"{'together':10} {sum(each.inputs for each in results):12,}")
    return "\n".join(lines)


def main() -> None:
    """The exit status is 1 where there are findings."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description="Fuzz what reads foreign bytes.")
    parser.add_argument("--seconds", type=int, default=60, help="for all targets together (60)")
    parser.add_argument("--target", action="append", choices=[*COMPILED, *IN_PYTHON], help="this one; repeatable (all)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="results as JSON")
    given = parser.parse_args()
    targets = given.target or [*COMPILED, *IN_PYTHON]
    if given.seconds < len(targets):
        parser.error(f"--seconds {given.seconds} is less than a second for each of {len(targets)} targets")
    results = []
    for target in targets:
        results.append(run(target, given.seconds // len(targets)))
        print(_table(results[-1:]).splitlines()[1], flush=True)
    print(_table(results))
    for path in (path for each in results for path in each.findings):
        print(f"a finding: {path}")
    if given.write:
        document = {
            "machine": runs.machine() | _versions(),
            "inputs": sum(each.inputs for each in results),
            "targets": [asdict(each) for each in results],
        }
        given.write.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(any(each.findings for each in results))


if __name__ == "__main__":
    main()
