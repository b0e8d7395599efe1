"""The messages of processes that agree on a group, and the only place that parses them.

Anything but one of these messages, with exactly its fields, of the right types and sizes, raises NotARank. Receivers
must not rely on more than that: a caller that has read this file can send well-formed messages.
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

#: most seconds for which a coordinator may ask a rank to wait
MOST_SECONDS = 86400.0
#: most processes in one list
_MOST_MEMBERS = 4096

_Id = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
#: a host's name, with labels of 1 to 63 bytes, or its address
_Host = Annotated[str, Meta(max_length=255, pattern=r"\A[0-9A-Za-z:%_-]{1,63}(?:\.[0-9A-Za-z:%_-]{1,63})*\.?\Z")]
_Number = Annotated[int, Meta(ge=0, le=1 << 62)]
#: (number of the ballot, rank of its coordinator)
Ballot = tuple[_Number, Annotated[int, Meta(ge=0, le=_MOST_MEMBERS)]]


class Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A process of a group.

    Attributes:
        id: unique and random, so only a rank can have told it to others.
        host, port: the address of the process's socket.
        machine: the process's machine and network namespace, from topology.machine().
        worker: the address of the process's wire.
        seal: checksum of the other fields. UCX ends a process that connects to an invalid address, so no damaged or
            invented address may reach UCX.
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
        """A member with its seal."""
        return cls(id, host, port, machine, worker, _seal(id, host, port, machine, worker.hex()))

    @property
    def place(self) -> tuple[str, int]:
        """The address of its socket."""
        return self.host, self.port


_Members = Annotated[tuple[Member, ...], Meta(max_length=_MOST_MEMBERS)]


class Decision(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A group on which the ranks have agreed.

    Attributes:
        epoch: the number of the group.
        members: the processes in the order of their ranks.
        calls: the number of the group's next call.
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
        """The message as bytes, for a Channel. Raises EngineError if it is too long: for several thousand ranks."""
        content = msgspec.json.encode(self)
        if len(content) > MOST_NBYTES:
            raise EngineError(
                f"the group has too many ranks: a message about it has {len(content)} bytes, and at most {MOST_NBYTES} "
                f"are allowed"
            )
        return content


class Challenge(Message, frozen=True):
    """The called process's first message. The caller's answer repeats the nonce, so old messages are useless."""

    nonce: _Id


class Knock(Message, frozen=True):
    """The request of a process that wants to join."""

    nonce: _Id
    member: Member


class Join(Message, frozen=True):
    """The first message of a rank that follows the called rank as its coordinator."""

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
    """The first message of a rank that does not follow the called one."""


class Look(Message, frozen=True):
    """The greeting of a Watch, which only asks whether the process lives."""


class Wait(Message, frozen=True):
    """The coordinator's request to wait longer."""

    seconds: Annotated[float, Meta(ge=0, le=MOST_SECONDS)]


class Stranger(Message, frozen=True):
    """The answer of a process that is not the one that was called."""


class Tell(Message, frozen=True):
    """A request to tell the latest group."""


class Prepare(Message, frozen=True):
    """The coordinator's request for a promise."""

    ballot: Ballot


class Promised(Message, frozen=True):
    """The answer to Prepare."""


class Accept(Message, frozen=True):
    """The coordinator's proposal of a group."""

    ballot: Ballot
    value: Decision


class Accepted(Message, frozen=True):
    """The answer to Accept."""


class Decided(Message, frozen=True):
    """The announcement of a group; ``to``: the id of the addressed process."""

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
    """The message with this content. Raises NotARank."""
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
