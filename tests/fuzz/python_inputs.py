"""What the fuzz targets in Python share: qccl as Atheris needs it, findings, files in memory, and changes of seeds.

An input is what the target reads; or, behind the byte CHANGES, choices of changes of a seed that is JSON: libFuzzer
seldom makes JSON by itself.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]


def find_plainly() -> None:
    """Have qccl's Python files found by sys.path, as Atheris needs it, not by the editable installation's finder.

    The extension is the installed one.
    """
    host = importlib.util.find_spec("qccl._host")
    sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in type(each).__module__]
    for name in [name for name in sys.modules if name.partition(".")[0] == "qccl"]:
        del sys.modules[name]

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            return host if name == "qccl._host" else None

    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    sys.path.insert(0, str(ROOT))


#: what a changed document has in place of a value
_VALUES = (
    *(None, True, 0, -1, 1, 1 << 31, 1 << 63, 10**400, -(10**400), 0.0, 1.5, -1e308, math.inf, math.nan),
    *("", "a", "\x1b[2J", "\ud800", "0" * 40, [], [0], {}, {"a": 0}),
)
#: the first byte of an input that changes a seed
CHANGES = 0xFF
#: a file in memory, for what is read by its path
_FILE = os.memfd_create("input")


class Finding(Exception):
    """Something that must not happen."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise Finding(what)


def path_of(content: bytes) -> str:
    """Of a file with this content, until the next call."""
    os.ftruncate(_FILE, 0)
    os.pwrite(_FILE, content, 0)
    return f"/proc/self/fd/{_FILE}"


# -- documents -------------------------------------------------------------------------------------------------------

#: of a value: the keys of the lists and dicts that it is in, from the outermost on
_Place = tuple[Any, ...]


class Seed(NamedTuple):
    """A seed of one document of JSON, or several, one a line.

    Attributes:
        prefix: the bytes before the documents.
        text: the list of the documents.
        places: of every value in this list.
    """

    prefix: bytes
    text: str
    places: tuple[_Place, ...]


def read_seeds(folder: Path) -> list[Seed]:
    """The seeds that are JSON, most after a byte of their own."""
    found = []
    for path in sorted(folder.iterdir()):
        for start in (0, 1):
            with contextlib.suppress(ValueError):
                content = path.read_bytes()
                documents = [json.loads(line) for line in content[start:].split(b"\n")]
                found.append(Seed(content[:start], json.dumps(documents), tuple(_places(documents))))
                break
    return found


def _places(document: Any) -> Iterator[_Place]:
    for key in range(len(document)) if isinstance(document, list) else list(document):
        yield (key,)
        if isinstance(document[key], list | dict):
            yield from ((key, *rest) for rest in _places(document[key]))


def changed(seeds: Sequence[Seed], choices: bytes) -> bytes:
    """A seed with some values replaced, removed or repeated, by choices of four bytes each."""
    seed = seeds[choices[0] % len(seeds)] if choices else seeds[0]
    documents = json.loads(seed.text)
    for at in range(1, min(len(choices), 33) - 3, 4):
        place = seed.places[int.from_bytes(choices[at : at + 2]) % len(seed.places)]
        with contextlib.suppress(LookupError, TypeError):  # an earlier change has removed the place
            *outside, key = place
            _change(
                reduce(getitem, outside, documents), key, choices[at + 2] % 6, choices[at + 3], documents, seed.places
            )
    return seed.prefix + b"\n".join(json.dumps(each).encode() for each in documents)


def _change(inside: Any, key: Any, action: int, value: int, documents: Any, places: Sequence[_Place]) -> None:
    if action == 0:
        del inside[key]
    elif action == 1 and isinstance(inside, list):
        inside.insert(key, inside[key])
    elif action == 2:
        inside[key] = copy.deepcopy(reduce(getitem, places[value % len(places)], documents))
    elif action == 3 and isinstance(inside, dict):
        inside[str(_VALUES[value % len(_VALUES)])] = inside[key]
    else:
        inside[key] = copy.deepcopy(_VALUES[value % len(_VALUES)])
