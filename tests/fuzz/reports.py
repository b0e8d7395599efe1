"""The fuzz target of results files."""

from __future__ import annotations

import contextlib
from pathlib import Path

import atheris
from python_inputs import path_of

with atheris.instrument_imports(include=["runs"]):
    import runs


def reports(content: bytes) -> None:
    """The document of a file, or the reason why there is none."""
    with contextlib.suppress(SystemExit):
        runs.read(Path(path_of(content)))
