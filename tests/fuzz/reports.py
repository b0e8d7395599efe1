"""The fuzz target of what was measured, in files and by other processes.

That is the answers that ``qccl-bench top`` shows, the choice of ``compress(codec="auto")``, results files, and sites.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import atheris
from python_inputs import path_of, require

with atheris.instrument_imports(include=["qccl", "runs"]):
    import runs

    from qccl.bench import scrape
    from qccl.bench.sites import parse_sites
    from qccl.bench.top import lines
    from qccl.errors import ArgumentError
    from qccl.torch.decision import Decision, without_choice

_PLACE = ("192.0.2.1", 9400)
#: of the parameters whose choice the seeds have
ALLOWED = {"weight": ("none", "minmax8", "minmax4"), "bias": ("none", "minmax8")}


def _answers(content: bytes) -> None:
    """Two answers of an endpoint, one after the other, and the table of what happened in between."""
    samples = []
    for number, text in enumerate(content.split(b"\0")[:2]):
        with contextlib.suppress(ValueError):  # as scrape() does
            samples.append(scrape.parsed(text.decode(), float(number)))
    for line in lines([_PLACE], samples[:1], samples[-1:]) if samples else ():
        require(line.isprintable(), f"a line that controls a terminal: {line!r}")
        line.encode()


def _decision(content: bytes) -> None:
    with contextlib.suppress(ArgumentError):
        found = Decision.from_text(content.decode(errors="surrogateescape"), ALLOWED)
        require(Decision.from_text(found.text(), ALLOWED) == found, "a choice reads as another one when it is sent on")
        require(found.codecs.keys() == ALLOWED.keys(), "a choice for other parameters")
        for line in (*found.lines(), *found.errors()):
            require(line.isprintable(), f"a line that controls a terminal: {line!r}")


def _saved_choice(content: bytes) -> None:
    with contextlib.suppress(ValueError, RecursionError):
        without_choice(json.loads(content))


def _results(content: bytes) -> None:
    with contextlib.suppress(SystemExit):
        runs.read(Path(path_of(content)))


def _sites(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        parse_sites(content.decode())


_READERS = (_answers, _decision, _saved_choice, _results, _sites)


def reports(content: bytes) -> None:
    """What was measured."""
    if content:
        _READERS[content[0] % len(_READERS)](content[1:])
