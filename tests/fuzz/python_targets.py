"""The fuzz targets in Python: what reads messages of other processes, and files.

``python_targets.py TARGET ARGUMENTS``: each target is a function of an input. It raises Finding, or anything else, for
a finding. Atheris gives the inputs, by libFuzzer, which has the arguments. An input is what the target reads; or,
behind a byte 255, choices of changes of a seed that is JSON: libFuzzer seldom makes JSON by itself.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import math
import os
import socket
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import atheris
import numpy as np

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
_FOLDER = Path(os.environ.get("TMPDIR", "/dev/shm"))


class Finding(Exception):
    """Something that must not happen."""


def _require(condition: object, what: str) -> None:
    if not condition:
        raise Finding(what)


# -- documents -------------------------------------------------------------------------------------------------------

#: of a target's seeds: the bytes before the documents, and the documents, one a line
_Seed = tuple[bytes, list[Any]]


def _read_seeds(folder: Path) -> list[_Seed]:
    """The seeds that are JSON, most after a byte of their own."""
    found = []
    for path in sorted(folder.iterdir()):
        for start in (0, 1):
            with contextlib.suppress(ValueError):
                content = path.read_bytes()
                found.append((content[:start], [json.loads(line) for line in content[start:].split(b"\n")]))
                break
    return found


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every value, as its list or dict and its key there."""
    for key in range(len(document)) if isinstance(document, list) else list(document):
        yield document, key
        if isinstance(document[key], list | dict):
            yield from _places(document[key])


def _changed(seeds: Sequence[_Seed], choices: bytes) -> bytes:
    """A seed with some values replaced, removed or repeated, by choices of four bytes each."""
    prefix, documents = seeds[choices[0] % len(seeds)] if choices else seeds[0]
    documents = copy.deepcopy(documents)
    for at in range(1, min(len(choices), 33) - 3, 4):
        places = list(_places(documents))
        if not places:
            break
        inside, key = places[int.from_bytes(choices[at : at + 2]) % len(places)]
        action, value = choices[at + 2] % 6, choices[at + 3]
        if action == 0:
            del inside[key]
        elif action == 1 and isinstance(inside, list):
            inside.insert(key, inside[key])
        elif action == 2:
            other, its_key = places[value % len(places)]
            inside[key] = copy.deepcopy(other[its_key])
        elif action == 3 and isinstance(inside, dict):
            inside[str(_VALUES[value % len(_VALUES)])] = inside[key]
        else:
            inside[key] = copy.deepcopy(_VALUES[value % len(_VALUES)])
    return prefix + b"\n".join(json.dumps(each).encode() for each in documents)


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


def states(content: bytes) -> None:
    """load_state() of a file; or of one with these parts, whose checksums are right; or of one with this structure."""
    file = BytesIO(content[1:])
    if content[:1] == b"\2":
        file, array = BytesIO(), np.arange(3, dtype=np.uint16)
        np.savez(file, **{"state": np.frombuffer(content[1:], np.uint8), "0": array, "1": array})
        file.seek(0)
    if content[:1] == b"\1":
        file = BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            at, names = 1, iter(("state.npy", *(f"{i}.npy" for i in range(16))))
            while at + 2 <= len(content) and (name := next(names, None)):
                (nbytes,) = struct.unpack_from("<H", content, at)
                archive.writestr(name, content[at + 2 : at + 2 + nbytes])
                at += 2 + nbytes
    with contextlib.suppress(ArgumentError):
        state = load_state(file)
        with contextlib.suppress(ArgumentError):  # JSON has keys that a state has not
            save_state(BytesIO(), state)


def records(content: bytes) -> None:
    """``qccl-bench explain`` of the records of several ranks, one a line."""
    found = {}
    path = _FOLDER / f"qccl-fuzz-record-{os.getpid()}"
    for line in content.split(b"\n")[:4]:
        path.write_bytes(line)
        try:
            record = read_record(path)
        except ArgumentError:
            continue
        finally:
            path.unlink()
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
    file = os.memfd_create("profile")
    try:
        os.write(file, content)
        with contextlib.suppress(ArgumentError):
            GroupProfile.load(f"/proc/self/fd/{file}")
    finally:
        os.close(file)


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

    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
