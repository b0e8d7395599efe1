"""The fuzz targets in Python: what reads messages of other processes, and files.

``python_targets.py TARGET ARGUMENTS``: each target is a function of an input. It raises Finding, or anything else, for
a finding. Atheris gives the inputs, by libFuzzer, which has the arguments. An input is what the target reads; or,
behind a byte 255, choices of changes of a seed that is JSON: libFuzzer seldom makes JSON by itself.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib.util
import json
import math
import os
import socket
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from io import BytesIO
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import atheris

_ROOT = Path(__file__).resolve().parents[2]


def _find_plainly() -> None:
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
    sys.path.insert(0, str(_ROOT))


_find_plainly()
with atheris.instrument_imports(include=["qccl"]):
    from qccl import codecs
    from qccl.bench.explain import explained
    from qccl.bench.simulated import Profile
    from qccl.costs.group import GroupProfile
    from qccl.errors import ArgumentError, CodecError, EngineError
    from qccl.records import read_record
    from qccl.saved import load_state, save_state
    from qccl.transports import relay_protocol
    from qccl.transports.channel import Channel
    from qccl.transports.invitation import Invitation
    from qccl.transports.join_address import JoinAddress
    from qccl.transports.meeting_messages import HELLO_NBYTES, Hello, Kind, part, receive_message
    from qccl.transports.messages import encode, parse, parse_member
    from qccl.transports.strangers import NotARank

#: what a changed document has in place of a value
_VALUES = (
    *(None, True, 0, -1, 1, 1 << 31, 1 << 63, 10**400, -(10**400), 0.0, 1.5, -1e308, math.inf, math.nan),
    *("", "a", "\x1b[2J", "\ud800", "0" * 40, [], [0], {}, {"a": 0}),
)
#: the first byte of an input that changes a seed
_CHANGES = 0xFF
#: seconds that a wait may take: what is waited for is there, or has ended
_SECONDS = 5.0
#: a file in memory, for what is read by its path
_FILE = os.memfd_create("input")


class Finding(Exception):
    """Something that must not happen."""


def _require(condition: object, what: str) -> None:
    if not condition:
        raise Finding(what)


def _path_of(content: bytes) -> str:
    """Of a file with this content, until the next call."""
    os.ftruncate(_FILE, 0)
    os.pwrite(_FILE, content, 0)
    return f"/proc/self/fd/{_FILE}"


# -- documents -------------------------------------------------------------------------------------------------------

#: of a value: the keys of the lists and dicts that it is in, from the outermost on
_Place = tuple[Any, ...]


class _Seed(NamedTuple):
    """A seed of one document of JSON, or several, one a line.

    Attributes:
        prefix: the bytes before the documents.
        text: the list of the documents.
        places: of every value in this list.
    """

    prefix: bytes
    text: str
    places: tuple[_Place, ...]


def _read_seeds(folder: Path) -> list[_Seed]:
    """The seeds that are JSON, most after a byte of their own."""
    found = []
    for path in sorted(folder.iterdir()):
        for start in (0, 1):
            with contextlib.suppress(ValueError):
                content = path.read_bytes()
                documents = [json.loads(line) for line in content[start:].split(b"\n")]
                found.append(_Seed(content[:start], json.dumps(documents), tuple(_places(documents))))
                break
    return found


def _places(document: Any) -> Iterator[_Place]:
    for key in range(len(document)) if isinstance(document, list) else list(document):
        yield (key,)
        if isinstance(document[key], list | dict):
            yield from ((key, *rest) for rest in _places(document[key]))


def _changed(seeds: Sequence[_Seed], choices: bytes) -> bytes:
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


# -- messages --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _connection(content: bytes):
    """A socket whose other side has sent ``content`` and closed."""
    here, there = socket.socketpair()
    with here, there:
        there.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            there.send(content)
        there.shutdown(socket.SHUT_WR)
        yield here


def _group_message(content: bytes) -> None:
    found = parse(content)
    _require(parse(encode(found)) == found, "a message reads as another one when it is sent on")


def _channel(content: bytes) -> None:
    with _connection(content) as connection:
        channel = Channel(connection, b"", is_caller=True)
        channel.hear()


def _meeting_message(content: bytes) -> None:
    with _connection(content) as connection, contextlib.suppress(EngineError, ConnectionError):
        found = receive_message(connection, ("127.0.0.1", 1), 3, time.monotonic() + _SECONDS, tuple(Kind))
        if found is not None and found[0] is Kind.NOTES:
            notes = part(found[1], 3)
            _require(notes is None or sum(map(len, notes)) + 12 == len(found[1]), "notes with other bytes")


def _hello(content: bytes) -> None:
    if len(content) >= HELLO_NBYTES:
        with contextlib.suppress(ValueError):
            Hello.unpack(content[:HELLO_NBYTES]).refusal(3, 0, b"job")


def _relay_hello(content: bytes) -> None:
    if len(content) >= relay_protocol.HELLO_NBYTES:
        found = relay_protocol.Hello.of(content[: relay_protocol.HELLO_NBYTES])
        if found is not None:
            _require(found.packed() == content[: relay_protocol.HELLO_NBYTES], "a hello that reads as another one")
            found.is_proved(bytes(32), bytes(16))


def _join_address(content: bytes) -> None:
    with contextlib.suppress(ArgumentError):
        found = JoinAddress.of(content.decode(errors="surrogateescape"))
        _require(JoinAddress.of(found.text()) == found, "an address that reads as another one")


def _invitation(content: bytes) -> None:
    found = Invitation.parse(content)
    if found is not None and found.process != os.getpid():
        found.content()


_MESSAGES: tuple[Callable[[bytes], object], ...] = (
    *(_group_message, _channel, parse_member, _invitation, _join_address, _meeting_message, _hello, _relay_hello),
)


def messages(content: bytes) -> None:
    """What processes say to each other before they are a group."""
    if content:
        with contextlib.suppress(NotARank):
            _MESSAGES[content[0] % len(_MESSAGES)](content[1:])


# -- files -----------------------------------------------------------------------------------------------------------


def _archive(parts: Mapping[str, bytes]) -> bytes:
    """A .zip file, in a fraction of the time that zipfile takes (its format: PKWARE's APPNOTE.TXT)."""
    files, directory = b"", b""
    for name, content in parts.items():
        about = struct.pack("<5H3I2H", 20, 0, 0, 0, 33, zlib.crc32(content), len(content), len(content), len(name), 0)
        directory += b"PK\1\2\x14\0" + about + struct.pack("<3H2I", 0, 0, 0, 0, len(files)) + name.encode()
        files += b"PK\3\4" + about + name.encode() + content
    end = struct.pack("<4H2IH", 0, 0, len(parts), len(parts), len(directory), len(files), 0)
    return files + directory + b"PK\5\6" + end


def _array(description: str, nbytes: int, content: bytes) -> bytes:
    """An .npy file (numpy.lib.format) of an array with one axis."""
    head = (
        f"{{'descr': '{description}', 'fortran_order': False, 'shape': ({len(content) // nbytes},)}}".ljust(117) + "\n"
    )
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head.encode() + content


_PART_NAMES = ("state.npy", *(f"{i}.npy" for i in range(16)))
_NUMBERS = _array("<u2", 2, bytes(6))


def _parts(content: bytes) -> dict[str, bytes]:
    """Each has its length before it."""
    found: dict[str, bytes] = {}
    while len(content) >= 2 and len(found) < len(_PART_NAMES):
        (nbytes,) = struct.unpack_from("<H", content)
        found[_PART_NAMES[len(found)]] = content[2 : 2 + nbytes]
        content = content[2 + nbytes :]
    return found


def states(content: bytes) -> None:
    """load_state() of a file; or of one with these parts, whose checksums are right; or of one with this structure.

    A state that could be read is saved again if the first byte says so.
    """
    kind, file = content[0] if content else 0, content[1:]
    if kind & 3 == 1:
        file = _archive(_parts(file))
    elif kind & 3 == 2:
        file = _archive({"state.npy": _array("|u1", 1, file), "0.npy": _NUMBERS, "1.npy": _NUMBERS})
    with contextlib.suppress(ArgumentError):
        state = load_state(BytesIO(file))
        if kind & 4:
            save_state(BytesIO(), state)  # an ArgumentError: JSON has keys that a state has not


def records(content: bytes) -> None:
    """``qccl-bench explain`` of the records of several ranks, one a line."""
    found = {}
    for line in content.split(b"\n")[:4]:
        with contextlib.suppress(ArgumentError):
            record = read_record(_path_of(line))
            found[record.rank] = record
    for sentence in explained(found) if found else ():
        _require(sentence.isprintable(), f"a sentence that controls a terminal: {sentence!r}")
        sentence.encode()


def _codec(given: object) -> None:
    with contextlib.suppress(CodecError):
        found = codecs.get(given)  # type: ignore[arg-type]
        _require(codecs.get(found.spec()) == found, f"{found.spec()} is another codec than {found!r}")
        for count in (0, 1, 1000):
            found.encoded_nbytes(count, "float16")


def _codec_text(content: bytes) -> None:
    _codec(content.decode(errors="surrogateescape"))


def _codec_dict(content: bytes) -> None:
    with contextlib.suppress(ValueError, RecursionError):
        _codec(json.loads(content))


def _profile(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        Profile.read(content.decode(errors="surrogateescape"))


def _group_profile(content: bytes) -> None:
    with contextlib.suppress(ArgumentError):
        GroupProfile.load(_path_of(content))


def texts(content: bytes) -> None:
    """Codecs as texts and dicts, and profiles of the simulator and of groups."""
    if content:
        (_codec_text, _codec_dict, _profile, _group_profile)[content[0] % 4](content[1:])


TARGETS = {target.__name__: target for target in (messages, records, states, texts)}


def main() -> None:
    name = sys.argv.pop(1)
    target, seeds = TARGETS[name], _read_seeds(_ROOT / "build/fuzz/seeds" / name)

    def one_input(content: bytes) -> None:
        is_change = seeds and content[:1] == bytes([_CHANGES])
        target(_changed(seeds, content[1:]) if is_change else content)

    gc.freeze()  # what is imported is not looked at again and again
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
