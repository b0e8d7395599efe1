"""Parsers of the command line: sizes, rates, lists, codecs and files; every error says what is allowed."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from qccl import codecs
from qccl.base.dtypes import FLOAT32
from qccl.base.errors import CodecError
from qccl.base.files import check_writable, writing
from qccl.codecs import Codec
from qccl.collectives.hierarchical import intra_of

__all__ = [
    *("AT_LEAST_0", "AT_LEAST_1", "Link", "PositiveNumber", "codec_list", "codec_of", "format_size"),
    *("imported", "intra_codec", "list_of", "nccl_only", "option", "output_file"),
    *("parse_link", "parse_loss", "parse_rate", "parse_size", "split_codecs", "write_json"),
]

AT_LEAST_0, AT_LEAST_1 = click.IntRange(min=0), click.IntRange(min=1)

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
#: units of rates in bytes per second
_RATES = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "kbps": 1e3, "mbps": 1e6, "gbps": 1e9}
#: bytes in the burst of the lab's limiters: two packets at the interfaces' MTU, and one unsplit TCP segment
_PACKETS, _SEGMENT = 2 * 9_100, 66_000
#: module:Class of a user's codec, before its options
_CLASS = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)(?=\s*(?:[:+]|$))", re.ASCII)


class PositiveNumber(click.FloatRange):
    """A finite number above 0, at most ``most`` if given; click's own range does not refuse NaN."""

    def __init__(self, most: float | None = None) -> None:
        super().__init__(min=0, min_open=True, max=most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number; give one such as 0.5", param, ctx)
        return number


def option(names: str, kind: Any, metavar: str | None, text: str, default: Any = None) -> Callable[[Any], Any]:
    """Do click.option() with ``names`` between spaces and the help ``text``; ``kind`` is a click type or a parser.

    A parser's ValueError becomes the option's error.
    """

    def parsed(ctx: click.Context, param: click.Parameter, given: str | None) -> Any:
        try:
            return None if given is None else kind(given)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error

    how: dict[str, Any] = {"type": kind} if isinstance(kind, click.ParamType) else {"callback": parsed}
    return click.option(*names.split(), metavar=metavar, help=text, default=default, **how)


#: flags of nccl-tests that have one possible value here: letter, name, value, why
_NCCL_ONLY = (
    ("-t", "--nthreads", 1, "a rank is a process; start more with --ranks"),
    ("-g", "--ngpus", 1, "a rank is a process; start more with --ranks"),
    ("-m", "--agg_iters", 1, "calls are not aggregated"),
    ("-p", "--parallel_init", 0, "every rank has its own process"),
    ("-z", "--blocking", 1, "calls on the host block, and calls on CUDA never do"),
    ("-C", "--report_cputime", 0, "the processor's time is not measured"),
)


def nccl_only(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``command`` accept _NCCL_ONLY with their one value, and refuse other values with the reason."""

    def only(value: int, why: str) -> Callable[[click.Context, click.Parameter, int | None], None]:
        def check(ctx: click.Context, param: click.Parameter, given: int | None) -> None:
            if given not in (None, value):
                raise click.BadParameter(f"{given} is not possible, only {value}: {why}", ctx, param)

        return check

    for letter, name, value, why in reversed(_NCCL_ONLY):
        given: dict[str, Any] = {"callback": only(value, why), "expose_value": False, "hidden": True}
        command = click.option(letter, name, type=int, **given)(command)
    return command


def parse_size(text: str) -> int:
    """Parse bytes: "4096", "64K", "1.5M", "2G" (powers of 1024). Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    nbytes = float(match[1]) * _BINARY[match[2].upper()] if match else -1.0
    if nbytes < 0 or not nbytes.is_integer():  # also refuses infinity
        raise ValueError(
            f"{text!r} is not a size; give a number of bytes, with K, M, G or T for powers of 1024, such as 64K"
        )
    return int(nbytes)


def format_size(nbytes: int) -> str:
    """The shortest exact spelling that parse_size reads: 65536 is "64K"."""
    for suffix, unit in reversed(_BINARY.items()):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit}{suffix}"
    return str(nbytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """A rate-limited link.

    Attributes:
        name: the user's spelling, e.g. "1gbit", which ``tc`` reads, too.
        rate: bytes per second.
        burst: size of the token bucket: bytes that pass at full speed after the link was idle.
    """

    name: str
    rate: float
    burst: int


def parse_link(text: str) -> Link:
    """Parse a link: "100mbit", "1gbit", "2.5gbit" (bits per second, powers of 1000). Raises ValueError.

    The bucket refills while a call leaves the link idle, so the burst is the smallest with which a bulk transfer nearly
    reached the rate: up to 1 Gbit/s the bytes of 0.5 ms (the kernel's timers are that late on busy processors), at
    least two packets; then a segment of 66,000 bytes; from 2.5 Gbit/s on the bytes of 0.2 ms.
    """
    name = text.strip().lower()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", name)
    rate = float(match[1]) * _RATES[match[2]] if match else 0.0
    if not 1e5 / 8 <= rate <= 1e11 / 8:
        raise ValueError(
            f"{text!r} is not a link's rate; give bits per second from 100kbit to 100gbit, such as 100mbit or 1gbit"
        )
    return Link(name, rate, max(min(_SEGMENT, max(_PACKETS, round(rate * 0.53e-3))), round(rate * 0.2e-3)))


def parse_rate(text: str) -> Link:
    """The link, without bursts, of "25gbit" (bits per second) or "300GBps" (bytes per second). Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg](?:bit|bps))", text.strip().lower())
    rate = float(match[1]) * _RATES[match[2]] if match else 0.0
    if not 0 < rate < math.inf:
        raise ValueError(
            f"{text!r} is not a rate; give bits per second such as 100mbit or 25gbit, or bytes per second such as "
            f"300GBps"
        )
    return Link(text.strip(), rate, 0)


def parse_loss(text: str) -> float:
    """Parse a share of packets: "0.1%" is 0.001. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    share = float(match[1]) / 100 if match else -1.0
    if not 0 <= share < 1:
        raise ValueError(f"{text!r} is not a loss; give a percentage of packets from 0% to below 100%, such as 0.1%")
    return share


def list_of(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Make a parser for one or several of ``allowed``, with commas between them, or "all"."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(allowed) if text == "all" else tuple(part.strip() for part in text.split(","))
        for part in chosen:
            if part not in allowed:
                raise ValueError(f"{part!r} is not one of {', '.join(allowed)}, all")
        return chosen

    return parse


def split_codecs(text: str) -> list[str]:
    """Split a list of codecs at its commas, but not before an option of a codec, which begins with "key="."""
    return [spec.strip() for spec in re.split(r",(?!\s*\w+\s*=)", text)]


def codec_list(text: str) -> tuple[str, ...]:
    """Parse ``minmax8,minmax4:bucket=256,rounding=stochastic,none`` to specifications in the spelling of reports.

    ``module:Class`` stays unchanged, because codec.spec() does not name the module.
    """
    found = [(spec, codec_of(spec)) for spec in split_codecs(text)]
    return tuple(spec if _class_in(spec) else codec.spec() for spec, codec in found)


def intra_codec(text: str) -> str:
    """Check a codec inside nodes: ``none``, ``bfloat16`` or ``minmax8``, for example."""
    intra_of(text, FLOAT32)
    return text


def _class_in(spec: str) -> re.Match[str] | None:
    """Find module and class in a specification ``module:Class``, also with ``:key=value,...`` or ``+decorator``.

    The text between the first colon and the next colon, "+" or end must be a Python name, and the text before the
    first colon must not be the name of one of qccl's codecs.
    """
    match = _CLASS.match(spec)
    return None if match is None or codecs.is_name(match["module"]) else match


def codec_of(spec: str) -> Codec:
    """Make the codec of a specification: one of codecs.get(), or ``module:Class``, which is imported.

    Modules may be in the current folder. Raises CodecError, a ValueError.
    """
    match = _class_in(spec)
    if match is None:
        return codecs.get(spec)
    try:
        kind = imported(match["module"], match["name"])
    except (ImportError, AttributeError) as error:
        raise CodecError(
            f"codec '{match[0]}' cannot be imported ({error}); give module:Class, the module in this folder or "
            f"on PYTHONPATH, or one of {', '.join(codecs.CODECS)}"
        ) from error
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind) and issubclass(kind, Codec)):
        raise CodecError(
            f"codec '{match[0]}' is {kind!r}; it must be a dataclass that inherits from qccl.codecs.PythonCodec"
        )
    return codecs.get(kind.name + spec[match.end() :], {kind.name: kind})


def imported(module: str, name: str) -> Any:
    """Import a name from a module in the current folder or on PYTHONPATH. Raises ImportError, AttributeError."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return getattr(importlib.import_module(module), name)


def output_file(text: str) -> str:
    """Make an absolute path, and check that the file, pipe, terminal or device can be written."""
    if text == "-":  # standard output in earlier versions
        raise ValueError("'-' is not a file; give the name of a file, which is replaced after each size")
    path = os.path.abspath(text)
    try:
        check_writable(path)
    except OSError as error:
        why = f"{text!r} cannot be written ({error.strerror}); give a file in a folder that exists"
        raise ValueError(why) from error
    return path


def write_json(path: str, document: Any) -> None:
    """Replace the file by ``document``, whole even if the program is killed; see qccl.base.files.writing()."""
    text = json.dumps(document, indent=1) + "\n"
    with writing(path) as file:
        file.write(text.encode())
