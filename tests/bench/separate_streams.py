"""qccl-bench in this process, with standard output and standard error apart, whichever click is installed."""

from __future__ import annotations

import inspect

from click.testing import CliRunner, Result

from qccl.bench.cli import main

#: click 8.1 mixes the streams unless it is told not to; click 8.2 has no such parameter
_SEPARATE = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}


def invoke(*arguments: str) -> Result:
    return CliRunner(**_SEPARATE).invoke(main, arguments)
