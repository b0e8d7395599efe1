"""The fuzz targets in Python: what reads messages of other processes, and files.

``python_targets.py TARGET ARGUMENTS``: each target is a function of an input. It raises Finding, or anything else,
for a finding. Atheris gives the inputs, by libFuzzer, which has the arguments.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import socket
import struct
import sys
import zlib
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path

import atheris


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
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


find_plainly()
with atheris.instrument_imports(include=["qccl"]):
    from qccl import codecs
    from qccl.base.errors import ArgumentError, CodecError
    from qccl.bench.explain import explained
    from qccl.communicator.profile import GroupProfile
    from qccl.communicator.saved import load_state, save_state
    from qccl.meeting.channel import Channel
    from qccl.meeting.join_address import JoinAddress
    from qccl.meeting.meeting_messages import Hello, MeetingKind, part
    from qccl.meeting.meeting_messages import parse as parse_meeting
    from qccl.meeting.messages import parse, parse_member
    from qccl.meeting.strangers import NotARank
    from qccl.observe.records import read_record

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
    require(parse(found.packed()) == found, "a message reads as another one when it is sent on")


def _channel(content: bytes) -> None:
    with _connection(content) as connection:
        channel = Channel(connection, parse)
        channel.hear()


def _meeting_message(content: bytes) -> None:
    kind, said = parse_meeting(content)
    if kind is MeetingKind.NOTES:
        notes = part(said, 3)
        require(notes is None or sum(map(len, notes)) + 12 == len(said), "notes with other bytes")
    elif kind is MeetingKind.HELLO:
        hello = Hello.of(said)
        hello.refusal(3, 0)
        require(hello.message() == (kind, said), "a hello that reads as another one when it is sent on")


def _join_address(content: bytes) -> None:
    with contextlib.suppress(ArgumentError):
        found = JoinAddress.of(content.decode(errors="surrogateescape"))
        require(JoinAddress.of(found.text()) == found, "an address that reads as another one")


_MESSAGES: tuple[Callable[[bytes], object], ...] = (
    *(_group_message, _channel, parse_member, _join_address, _meeting_message),
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
            record = read_record(path_of(line))
            found[record.rank] = record
    for sentence in explained(found) if found else ():
        require(sentence.isprintable(), f"a sentence that controls a terminal: {sentence!r}")
        sentence.encode()


def _codec(given: object) -> None:
    with contextlib.suppress(CodecError):
        found = codecs.get(given)  # type: ignore[arg-type]
        require(codecs.get(found.spec()) == found, f"{found.spec()} is another codec than {found!r}")
        for count in (0, 1, 1000):
            found.encoded_nbytes(count, "float16")


def _codec_text(content: bytes) -> None:
    _codec(content.decode(errors="surrogateescape"))


def _codec_dict(content: bytes) -> None:
    with contextlib.suppress(ValueError, RecursionError):
        _codec(json.loads(content))


def _group_profile(content: bytes) -> None:
    with contextlib.suppress(ArgumentError):
        GroupProfile.load(path_of(content))


def texts(content: bytes) -> None:
    """Codecs as texts and dicts, and profiles of groups."""
    if content:
        (_codec_text, _codec_dict, _group_profile)[content[0] % 3](content[1:])


TARGETS = {target.__name__: target for target in (messages, records, states, texts)}


def main() -> None:
    target = TARGETS[sys.argv.pop(1)]
    gc.freeze()  # what is imported is not looked at again and again
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
