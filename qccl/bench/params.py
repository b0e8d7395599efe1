"""How the command line is read: sizes, links, lists, codecs; every error says what is allowed."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import click

from qccl import codecs
from qccl.bench.options import STDOUT

__all__ = ["checked", "codec_list", "list_of", "nccl_only", "output_file", "output_file_or_stdout", "picture_file"]

_PICTURES = (".png", ".svg", ".pdf")


def checked(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """A click callback that gives an option the value ``parse(text)``; a ValueError becomes the option's error."""

    def callback(ctx: click.Context, param: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return callback


def list_of(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of one or several of ``allowed``, with commas between them; "all" is all of them."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(allowed) if text == "all" else tuple(part.strip() for part in text.split(","))
        for part in chosen:
            if part not in allowed:
                raise ValueError(f"{part!r} is not one of {', '.join(allowed)}, all")
        return chosen

    return parse


def codec_list(text: str) -> tuple[str, ...]:
    """Codecs with commas between them: ``minmax8,minmax4:bucket=256,rounding=stochastic,none``."""
    # A comma also separates the options of a codec, which begin with "key=".
    return tuple(codecs.get(spec.strip()).spec() for spec in re.split(r",(?!\s*\w+\s*=)", text))


def output_file_or_stdout(text: str) -> str:
    """The absolute path of a file that can be written; "-" stays, and is standard output."""
    return text if text == STDOUT else output_file(text)


def output_file(text: str) -> str:
    """The absolute path of a file that can be written."""
    path = os.path.abspath(text)
    folder = os.path.dirname(path)
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ValueError(f"{text!r} cannot be written; give a file in a folder that exists")
    return path


def picture_file(text: str) -> str:
    """The absolute path of a picture that can be drawn and written."""
    if not text.endswith(_PICTURES):
        raise ValueError(f"{text!r} has none of the endings {', '.join(_PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("drawing needs matplotlib; install qccl[plot], or use --json")
    return output_file(text)


#: flags of nccl-tests that have one possible value here: letter, name, value, why
_NCCL_ONLY = (
    ("-t", "--nthreads", 1, "a rank is a process; start more with --ranks"),
    ("-g", "--ngpus", 1, "a rank is a process; start more with --ranks"),
    ("-m", "--agg_iters", 1, "calls are not aggregated"),
    ("-p", "--parallel_init", 0, "every rank has its own process"),
    ("-z", "--blocking", 1, "calls on the host block, and calls on CUDA never do"),
    ("-C", "--report_cputime", 0, "it is not measured"),
)


def nccl_only(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``command`` accept those flags of nccl-tests with their one value, and refuse others with the reason."""

    def option(letter: str, name: str, value: int, why: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def check(ctx: click.Context, param: click.Parameter, given: int | None) -> None:
            if given not in (None, value):
                raise click.BadParameter(f"{given} is not possible, only {value}: {why}", ctx, param)

        return click.option(letter, name, type=int, callback=check, expose_value=False, hidden=True)

    for each in reversed(_NCCL_ONLY):
        command = option(*each)(command)
    return command
