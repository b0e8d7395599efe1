"""Parsers of the command line's sizes, links, lists and codecs; every error says what is allowed."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from qccl import codecs
from qccl.bench.options import STDOUT
from qccl.codecs import Codec
from qccl.collectives.hierarchical import intra_of
from qccl.dtypes import FLOAT32
from qccl.errors import CodecError
from qccl.files import is_special

__all__ = [
    *("AT_LEAST_0", "AT_LEAST_1", "PositiveNumber", "checked", "codec_list", "codec_of", "imported", "intra_codec"),
    *("list_of", "nccl_only", "option", "output_file", "output_file_or_stdout", "picture_file", "split_codecs"),
]

#: module:Class of a user's codec, before its options
_CLASS = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)(?=\s*(?:[:+]|$))", re.ASCII)
_PICTURES = (".png", ".svg", ".pdf")

AT_LEAST_0, AT_LEAST_1 = click.IntRange(min=0), click.IntRange(min=1)


class PositiveNumber(click.FloatRange):
    """A number above 0 and, if ``most`` is given, up to that; click's own range takes NaN, which no limit refuses."""

    def __init__(self, most: float | None = None) -> None:
        super().__init__(min=0, min_open=True, max=most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number; give one such as 0.5", param, ctx)
        return number


def checked(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """A click callback that gives an option the value ``parse(text)``; a ValueError becomes the option's error."""

    def callback(ctx: click.Context, param: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return callback


def option(names: str, kind: Any, metavar: str | None, text: str, default: Any = None) -> Callable[[Any], Any]:
    """click.option() with ``names`` between spaces and the help ``text``; ``kind`` is a click type or a parser."""
    given = {"type": kind} if isinstance(kind, click.ParamType) else {"callback": checked(kind)}
    return click.option(*names.split(), metavar=metavar, help=text, default=default, **given)


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
    return tuple(map(_canonical, split_codecs(text)))


def split_codecs(text: str) -> list[str]:
    """The parts of a list of codecs; a comma also separates the options of a codec, which begin with "key="."""
    return [spec.strip() for spec in re.split(r",(?!\s*\w+\s*=)", text)]


def intra_codec(text: str) -> str:
    """A codec inside nodes: ``none``, ``bfloat16`` or ``minmax8``, for example."""
    intra_of(text, FLOAT32)
    return text


def _canonical(spec: str) -> str:
    """The spelling of a specification in reports. module:Class stays, because codec.spec() does not name the module."""
    codec = codec_of(spec)
    return spec if is_class(spec) else codec.spec()


def is_class(spec: str) -> bool:
    """Whether a specification is ``module:Class``, with or without ``:key=value,...`` and ``+decorator`` after it.

    The text between the first colon and the next colon, "+" or end must be a Python name, and the text before the
    first colon must not be the name of one of qccl's codecs.
    """
    match = _CLASS.match(spec)
    return match is not None and match["module"].rstrip("0123456789") not in codecs.CODECS


def codec_of(spec: str) -> Codec:
    """The codec of a specification on the command line: one of codecs.get(), or ``module:Class``, which is imported.

    Modules may be in the current folder. Raises CodecError, a ValueError.
    """
    if not is_class(spec):
        return codecs.get(spec)
    match = _CLASS.match(spec)
    assert match is not None
    kind = _codec_class(match["module"], match["name"])
    return codecs.get(kind.name + spec[match.end() :], {kind.name: kind})


def imported(module: str, name: str) -> Any:
    """What a module in the current folder or on PYTHONPATH has under a name. Raises ImportError, AttributeError."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return getattr(importlib.import_module(module), name)


def _codec_class(module: str, name: str) -> type[Codec]:
    try:
        found = imported(module, name)
    except (ImportError, AttributeError) as error:
        raise CodecError(
            f"codec '{module}:{name}' cannot be imported ({error}); give module:Class, the module in this folder or "
            f"on PYTHONPATH, or one of {', '.join(codecs.CODECS)}"
        ) from error
    if isinstance(found, type) and dataclasses.is_dataclass(found) and issubclass(found, Codec):
        return found
    raise CodecError(
        f"codec '{module}:{name}' is {found!r}; it must be a dataclass that inherits from qccl.codecs.PythonCodec"
    )


def output_file_or_stdout(text: str) -> str:
    """The absolute path of a file that can be written; "-" stays, and is standard output."""
    return text if text == STDOUT else output_file(text)


def output_file(text: str) -> str:
    """The absolute path of a file that can be written, or of a pipe, terminal or device."""
    path = os.path.abspath(text)
    folder = os.path.dirname(os.path.realpath(path))  # of a symbolic link's target, which is replaced
    is_writable = os.access(path if is_special(path) else folder, os.W_OK)
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(path)) or not is_writable:
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
