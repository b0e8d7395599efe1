"""The messages of processes that agree on a group: which there are, their fields, and the only place that reads them.

Everything that is not one of these messages, with exactly its fields, of the right types and sizes, is NotARank. Nobody
can rely on more than that: a caller that has read this file can send well-formed messages.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from qccl.base.errors import EngineError
from qccl.meeting.channel import MOST_NBYTES
from qccl.meeting.strangers import NotARank

__all__ = ["Decision", "Member", "Message", "parse", "parse_member"]

#: seconds that a coordinator may ask a rank to wait, at most
MOST_SECONDS = 86400.0
#: processes in one list, at most
_MOST_MEMBERS = 4096

_Id = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
#: the labels of a name have 1 to 63 bytes
_Host = Annotated[str, Meta(max_length=255, pattern=r"\A[0-9A-Za-z:%_-]{1,63}(?:\.[0-9A-Za-z:%_-]{1,63})*\.?\Z")]
_Number = Annotated[int, Meta(ge=0, le=1 << 62)]
#: its number, and the rank that coordinates it
Ballot = tuple[_Number, Annotated[int, Meta(ge=0, le=_MOST_MEMBERS)]]


class Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A process.

    Attributes:
        id: unique, and random: who knows it has heard it from a rank.
        host, port: the address of its socket.
        machine: its machine and network namespace, of topology.machine().
        worker: the address of its wire.
        seal: checksum of the other fields. UCX ends the process that connects to an address that is none, so nothing
            damaged or made up may reach it.
    """

    id: _Id
    host: _Host
    port: Annotated[int, Meta(ge=1, le=65535)]
    machine: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    worker: Annotated[bytes, Meta(max_length=8192)]
    seal: str

    def __post_init__(self) -> None:
        if self.seal != _seal(self.id, self.host, self.port, self.machine, self.worker.hex()):
            raise ValueError("another seal")

    @classmethod
    def make(cls, id: str, host: str, port: int, machine: str, worker: bytes) -> Member:
        """With its seal."""
        return cls(id, host, port, machine, worker, _seal(id, host, port, machine, worker.hex()))

    @property
    def place(self) -> tuple[str, int]:
        """The address of its socket."""
        return self.host, self.port


_Members = Annotated[tuple[Member, ...], Meta(max_length=_MOST_MEMBERS)]


class Decision(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A group.

    Attributes:
        epoch: its number.
        members: in the order of their ranks.
        calls: the number of their next call.
        left_out: ranks of earlier groups that have not ended, and perhaps do not know that they are left out.
    """

    epoch: _Number
    members: Annotated[_Members, Meta(min_length=1)]
    calls: _Number
    left_out: _Members = ()

    def __post_init__(self) -> None:
        _check_distinct(self.members)
        _check_distinct(self.left_out)


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag=str.lower):
    """Base of all messages."""

    def packed(self) -> bytes:
        """For a Channel. Raises EngineError for a message that is too long: of a group of several thousand ranks."""
        content = msgspec.json.encode(self)
        if len(content) > MOST_NBYTES:
            raise EngineError(
                f"the group has too many ranks: a message about it has {len(content)} bytes, and at most {MOST_NBYTES} "
                f"are allowed"
            )
        return content


class Challenge(Message, frozen=True):
    """The process that was called begins. The caller's first message repeats the nonce, so an old one is of no use."""

    nonce: _Id


class Knock(Message, frozen=True):
    """A process wants to join."""

    nonce: _Id
    member: Member


class Join(Message, frozen=True):
    """A rank says who it is, and follows the called one."""

    nonce: _Id
    to: _Id
    epoch: _Number
    member: Member
    calls: _Number
    newcomers: _Members
    promised: Ballot
    accepted: tuple[Ballot, Decision] | None

    def __post_init__(self) -> None:
        _check_distinct(self.newcomers)


class Probe(Join, frozen=True):
    """A rank says who it is, and does not follow."""


class Look(Message, frozen=True):
    """The greeting of a Watch: it only wants to know whether this process lives."""


class Wait(Message, frozen=True):
    """The coordinator asks for patience."""

    seconds: Annotated[float, Meta(ge=0, le=MOST_SECONDS)]


class Stranger(Message, frozen=True):
    """The called process is another one."""


class Tell(Message, frozen=True):
    """The other side is to tell its latest group."""


class Prepare(Message, frozen=True):
    """The coordinator asks for a promise."""

    ballot: Ballot


class Promised(Message, frozen=True):
    """The answer to Prepare."""


class Accept(Message, frozen=True):
    """The coordinator proposes a group."""

    ballot: Ballot
    value: Decision


class Accepted(Message, frozen=True):
    """The answer to Accept."""


class Decided(Message, frozen=True):
    """A group that exists; ``to``: the id of the process that hears of it."""

    to: _Id
    decided: Decision


def _seal(*fields: object) -> str:
    return hashlib.blake2b(" ".join(map(str, fields)).encode(), digest_size=16, person=b"qccl member").hexdigest()


def _check_distinct(members: tuple[Member, ...]) -> None:
    if not len({member.id for member in members}) == len({member.place for member in members}) == len(members):
        raise ValueError("a process comes twice")


_messages = msgspec.json.Decoder(
    Challenge | Knock | Join | Probe | Look | Wait | Stranger | Tell | Prepare | Promised | Accept | Accepted | Decided
)
_members = msgspec.json.Decoder(Member)
_T = TypeVar("_T")


def parse(content: bytes) -> Any:
    """The message. Raises NotARank."""
    return _decoded(_messages, content)


def parse_member(content: bytes) -> Member:
    """A process, from the JSON of a Member. Raises NotARank."""
    return _decoded(_members, content)


def _decoded(decoder: msgspec.json.Decoder[_T], content: bytes) -> _T:
    try:
        return decoder.decode(content)
    except msgspec.ValidationError as error:
        raise NotARank("a message with wrong fields") from error
    except (ValueError, RecursionError) as error:
        raise NotARank("a message that is not JSON") from error
