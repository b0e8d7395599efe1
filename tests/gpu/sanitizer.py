"""The kernels under compute-sanitizer, where it is installed: accesses outside of allocations, races in shared memory.

A tool that misses a planted mistake proves nothing, so each must find one first.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from reports import Missing, each_of

__all__ = ["on_case", "one_case_each"]

#: the exit status when it has found something
_FOUND = 99
#: the mistakes that codec_kernels.py makes for each tool
_MISTAKES = {"memcheck": "overrun", "racecheck": "race"}
#: how long it may look at a case that has failed, and how much of its words is kept
_SECONDS, _MOST_KEPT = 40.0, 3000


def one_case_each() -> dict[str, Any]:
    """One case under each tool: of minmax, and of topk, whose threads share memory."""
    from kernel_cases import CASES

    first = {case.codec.name: number for number, case in reversed(list(enumerate(CASES)))}
    chosen = {"memcheck": first["minmax"], "racecheck": first["topk"]}
    return each_of({tool: partial(_clean, tool, str(number)) for tool, number in chosen.items()})


def on_case(number: int) -> str:
    """What memcheck says of a case that has failed; empty without compute-sanitizer."""
    try:
        status, output = _under("memcheck", str(number), limit=_SECONDS)
    except Missing:
        return ""
    except subprocess.TimeoutExpired:
        return f"compute-sanitizer did not end within {_SECONDS:.0f} s"
    lines = [line for line in output.splitlines() if line.startswith("=====")]
    return f"exit status {status}\n" + "\n".join(lines)[:_MOST_KEPT]


def _clean(tool: str, number: str) -> dict[str, Any]:
    mistake = _MISTAKES[tool]
    status, output = _under(tool, mistake)
    if status != _FOUND:
        raise Missing(f"compute-sanitizer does not find a planted mistake (exit status {status}): {output[-600:]}")
    status, output = _under(tool, number)
    assert status == 0, f"exit status {status}: {output[-1500:]}"
    compared = re.search(r"^ended (\d+)", output, re.MULTILINE)
    assert compared is not None, f"nothing was compared: {output[-600:]}"
    summary = next((line for line in output.splitlines() if "SUMMARY" in line), "")
    return {"operations": int(compared[1]), "summary": summary.strip("= "), "finds_a_planted": mistake}


def _under(tool: str, what: str, limit: float | None = None) -> tuple[int, str]:
    """Exit status and output of codec_kernels.py under a tool. Without ``limit`` the section's own ends it."""
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        raise Missing("there is no compute-sanitizer in PATH or /usr/local/cuda/bin")
    command = [program, "--tool", tool, "--error-exitcode", str(_FOUND), "--print-limit", "5"]
    command += ["--report-api-errors", "no"]  # CuPy and qccl ask questions that the driver may answer with an error
    command += [sys.executable, str(Path(__file__).with_name("codec_kernels.py")), what, "unpooled"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit)
    return done.returncode, done.stdout
