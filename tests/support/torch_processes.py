"""Runs functions of torch_ranks.py and its like on ranks of torch.distributed, each a process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """How a rank ended ("stopped" where it did not), when, and what it wrote."""

    status: str
    time: float
    out: str
    err: str

    def check(self, last: str) -> None:
        assert self.status == "0" and self.out.endswith(f"done {last}\n"), f"{self.status}\n{self.out}\n{self.err}"


def run(folder: Path, size: int, *names: str) -> list[Ended]:
    """Run functions of torch_ranks.py, one after the other, on ranks of one group."""
    command = [sys.executable, str(ROOT / "tests" / "support" / "torch_fork.py"), str(folder), str(size), *names]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, _ = process.communicate(timeout=90)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)
    ends = sorted(line.split() for line in out.splitlines())
    written = [[(folder / f"{rank}.{kind}").read_text() for kind in ("out", "err")] for rank in range(size)]
    return [Ended(status, float(at), *texts) for (_, status, at), texts in zip(ends, written, strict=True)]
