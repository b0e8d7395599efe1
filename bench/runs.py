"""Runs qccl-bench and prints tables in Markdown; what the scripts beside this one have in common."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["allreduce", "print_table"]


def allreduce(*flags: str) -> dict[str, Any]:
    """The JSON document of ``qccl-bench allreduce`` with ``flags``; its table goes to standard error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        command = [sys.executable, "-m", "qccl.bench", "allreduce", *flags, "--json", str(path)]
        subprocess.run(command, stdout=sys.stderr, check=True, timeout=3600)
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return document


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table."""
    print("| " + " | ".join(head) + " |")
    print("| " + " | ".join("---" for _ in head) + " |")
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)
