"""The codecs, and their specifications: ``"minmax4:bucket=256"``, a dict with the same keys, or a Codec."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from qccl.base.errors import CodecError
from qccl.codecs.base import BucketCodec, Codec
from qccl.codecs.blocks import MXFP4, MXFP8, NVFP4, Levels
from qccl.codecs.cast import Cast
from qccl.codecs.dithering import Dithering
from qccl.codecs.encoded import Encoded
from qccl.codecs.feedback import Decorator, ErrorFeedback, Momentum
from qccl.codecs.minmax import MinMax
from qccl.codecs.none import NoCodec
from qccl.codecs.onebit import OneBit
from qccl.codecs.python import PythonCodec
from qccl.codecs.rounds import TwoRounds
from qccl.codecs.sparse import RandomK, TopK
from qccl.codecs.trellis import Trellis

__all__ = ["CODECS", "DECORATORS", "MXFP4", "MXFP8", "NVFP4", "BucketCodec", "Cast", "Codec", "Dithering"]
__all__ += ["Encoded", "ErrorFeedback", "Levels", "MinMax", "Momentum", "NoCodec", "OneBit", "PythonCodec", "RandomK"]
__all__ += ["TopK", "Trellis", "TwoRounds"]
__all__ += ["examples", "get", "identity", "is_name"]

#: all codecs by their names in specifications
CODECS: Mapping[str, type[Codec]] = {
    codec.name: codec
    for codec in (NoCodec, Cast, MinMax, OneBit, Dithering, TopK, RandomK, Trellis, Levels, MXFP8, MXFP4, NVFP4)
}

#: decorators of codecs by their names in a specification
DECORATORS: Mapping[str, type[Decorator]] = {kind.name: kind for kind in (ErrorFeedback, Momentum)}


def examples() -> list[str]:
    """Example specifications: one or a few of each codec."""
    return [get(spec).spec() for codec in CODECS.values() for spec in codec.examples or (codec.name,)]


_NAME = re.compile(r"([a-z_]+)(\d*)", re.ASCII)
#: the plus sign before a decorator, but not in a number such as 1e+3
_PLUS = re.compile(r"\+(?![0-9])")
#: the beginning of a specification that leaves the choice of the codec to qccl
_AUTO = re.compile(r"\s*auto\s*($|[:+/])", re.IGNORECASE)
#: keys of BytePS with the codec's name before the key
_BYTEPS = {"onebit_scaling": "scaling", "dithering_partition": "partition", "dithering_normalize": "normalize"}
#: fields of error feedback, and their keys in a dict, where the codec inside may have a "dtype" of its own
_FEEDBACK = {"beta": "ef_beta", "dtype": "ef_dtype"}
_MOMENTUM = (("momentum", "momentum_type"), "nesterov", "nesterov")


def get(spec: str | Mapping[str, Any] | Codec, kinds: Mapping[str, type[Codec]] | None = None) -> Codec:
    """The codec that ``spec`` names.

    A string is ``name[bits][:key=value,...]``; "+ef" (or "+ef:beta=0.95,dtype=bfloat16") and "+nesterov:mu=0.9" behind
    it add error feedback and momentum. "/" separates the codecs of the two rounds (TwoRounds); the second may be
    options that differ from those of the first, as in "topk:k=64,values=exp4/k=256+ef". A dict has the name under
    "compressor" and the same keys, each with or without the prefix ``byteps_``; with "ef" also "ef_beta" and
    "ef_dtype". Its values may be strings. ``kinds`` are the codecs by name (None: CODECS); nothing is imported. Raises
    CodecError with the wrong key or value, the allowed ones, and the nearest.
    """
    if isinstance(spec, Codec):
        return spec
    decorators: list[tuple[str, dict[str, Any]]]
    kinds = CODECS if kinds is None else kinds
    if isinstance(spec, str):
        if _AUTO.match(spec) and "auto" not in kinds:
            raise CodecError(
                f"codec {spec!r}: only 'auto' and 'auto:CODEC', in small letters, choose a codec, in calls and plans "
                f"of a communicator, and where the documentation of qccl.torch says so; name a codec here, such as "
                f"'minmax8'"
            )
        codecs, *parts = _PLUS.split(spec)
        codec = _parse_rounds(codecs, spec, kinds)
        decorators = [_parse_text(part, spec) for part in parts]
    elif isinstance(spec, Mapping):
        name, options = _parse_mapping(spec)
        decorators = _take_decorators(options, spec)
        codec = _make(name, options, spec, kinds)
    else:
        raise CodecError(f"a codec is a string, a dict or a Codec, not {type(spec).__name__}; for example 'minmax8'")
    for name, options in decorators:
        codec = _decorated(codec, name, options, spec)
    return codec


def is_name(name: str) -> bool:
    """Whether a codec has this name, with or without a number of bits behind it."""
    return _name_and_bits(name, CODECS)[0] in CODECS


def identity(codec: Codec) -> str:
    """A codec's identity, which ranks compare: its specification, and the classes that are not in CODECS."""
    kinds = dict.fromkeys([type(each.plain) for each in codec.rounds])
    foreign = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if CODECS.get(kind.name) is not kind]
    return f"{codec.spec()} ({', '.join(foreign)})" if foreign else codec.spec()


def _parse_rounds(text: str, spec: str, kinds: Mapping[str, type[Codec]]) -> Codec:
    """The codec of one specification, or of two with "/" between them."""
    first, *more = text.split("/")
    kind, given = _parameters(*_parse_text(first, spec), spec, kinds)
    codec = kind(**given)
    if not more:
        return codec
    if len(more) > 1:
        raise CodecError(f"codec {spec!r} has {text.count('/')} times '/'; an all-reduce has two rounds: write A/B")
    (second,) = more
    if "=" in second.partition(":")[0]:
        _, changed = _parse_text(f"{codec.name}:{second}", spec)
        return TwoRounds(codec, kind(**_parameters(codec.name, changed, spec, kinds, given)[1]))
    return TwoRounds(codec, _make(*_parse_text(second, spec), spec, kinds))


def _parse_text(text: str, spec: str) -> tuple[str, dict[str, Any]]:
    name, colon, text = text.strip().partition(":")
    options: dict[str, Any] = {}
    for part in text.split(",") if colon else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise CodecError(f"codec {spec!r}: {part!r} is not key=value; write it like 'minmax8:bucket=256'")
        _add(options, key, value, spec)
    return name.strip(), options


def _parse_mapping(spec: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {}
    for key, value in spec.items():
        name = str(key).removeprefix("byteps_")
        name = "compressor" if name == "compressor_type" else name.removeprefix("compressor_")
        _add(options, _BYTEPS.get(name, name), value, spec)
    if "compressor" not in options:
        raise CodecError(f"codec {dict(spec)!r} lacks the key 'compressor'; its value is one of {_list(CODECS)}")
    return str(options.pop("compressor")), options


def _add(options: dict[str, Any], key: str, value: Any, spec: object) -> None:
    if key in options:
        raise CodecError(f"codec {spec!r} gives {key!r} twice")
    options[key] = _literal(value) if isinstance(value, str) and key != "compressor" else value


def _literal(text: str) -> int | float | bool | str:
    """The number or truth value that ``text`` spells; otherwise the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def _make(name: str, options: dict[str, Any], spec: object, kinds: Mapping[str, type[Codec]]) -> Codec:
    kind, given = _parameters(name, options, spec, kinds)
    return kind(**given)


def _parameters(
    name: str, options: dict[str, Any], spec: object, kinds: Mapping[str, type[Codec]], same: Mapping[str, Any] = {}
) -> tuple[type[Codec], dict[str, Any]]:
    """The class of a codec and its arguments, from its name and options; missing ones are taken from ``same``."""
    found, bits = _name_and_bits(name, kinds)
    if found not in kinds:
        raise CodecError(
            f"codec {spec!r}: there is no codec {name!r}; the codecs are {_list(kinds)}{_near(name, kinds)}"
        )
    kind = kinds[found]
    keys = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if bits:
        if "bits" not in keys:
            raise CodecError(f"codec {spec!r}: {found} has no bits; write {found!r} alone")
        _add(options, "bits", bits, spec)
    given: dict[str, Any] = {}
    for key, value in options.items():
        field, values = kind.aliases.get(key, (key, None))
        if field not in keys:
            allowed = _list(keys) if keys else "none"
            raise CodecError(f"codec {spec!r}: {found} has no key {key!r}; its keys: {allowed}{_near(key, keys)}")
        if values is not None and value not in tuple(values):  # a tuple, because a value may be unhashable
            raise CodecError(f"codec {spec!r}: {key}={value!r} is not possible; allowed are {_list(map(str, values))}")
        _add(given, field, value if values is None else values[value], spec)
    given = {**same, **given}
    for each in dataclasses.fields(kind):  # type: ignore[arg-type]
        if each.default is dataclasses.MISSING and each.name not in given:
            raise CodecError(f"codec {spec!r}: {found} needs the key {each.name!r}; its keys: {_list(keys)}")
    return kind, given


def _name_and_bits(name: str, kinds: Mapping[str, type[Codec]]) -> tuple[str, str]:
    """A name without the digits behind it, which are the number of bits unless they are part of the name (mxfp8)."""
    match = _NAME.fullmatch(name)
    return (name, "") if name in kinds or match is None else (match[1], match[2])


def _take_decorators(options: dict[str, Any], spec: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Remove the decorators from a dict's options and return them."""
    found: list[tuple[str, dict[str, Any]]] = []
    for keys, name, value in ((("ef", "error_feedback_type"), "ef", "vanilla"), _MOMENTUM):
        given = [options.pop(key) for key in keys if key in options]
        if given and given != [value]:
            raise CodecError(
                f"codec {dict(spec)!r}: {keys[0]}={given[-1]!r} is not possible; give {value!r} once, or leave it out"
            )
        if given:
            found.append((name, {}))
    feedback = {field: options.pop(key) for field, key in _FEEDBACK.items() if key in options}
    if feedback:
        if not found or found[0][0] != "ef":
            raise CodecError(f"codec {dict(spec)!r} gives {_list(_FEEDBACK.values())} without ef; add ef='vanilla'")
        found[0][1].update(feedback)
    mu = [options.pop(key) for key in ("mu", "momentum_mu") if key in options]
    if mu:
        if not found or found[-1][0] != "nesterov" or len(mu) > 1:
            raise CodecError(f"codec {dict(spec)!r} gives mu without momentum, or twice; add momentum='nesterov'")
        found[-1][1]["mu"] = mu[0]
    return found


def _decorated(codec: Codec, name: str, options: dict[str, Any], spec: object) -> Codec:
    if name not in DECORATORS:
        raise CodecError(
            f"codec {spec!r}: there is no decorator {name!r}; the decorators are "
            f"{_list(DECORATORS)}{_near(name, DECORATORS)}"
        )
    kind = DECORATORS[name]
    keys = [field.name for field in dataclasses.fields(kind) if field.name != "codec"]
    for key in options:
        if key not in keys:
            allowed = _list(keys) if keys else "none"
            raise CodecError(f"codec {spec!r}: {name} has no key {key!r}; its keys: {allowed}{_near(key, keys)}")
    return kind(codec, **options)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def _near(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f". Did you mean {close[0]!r}?" if close else ""
