"""The messages of processes that agree on a group: which there are, their fields, and the only place that reads them.

Everything that is not one of these messages, with exactly its fields, of the right types and sizes, is NotARank. Nobody
can rely on more than that: a caller that has read this file can send well-formed messages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from qccl.errors import EngineError
from qccl.transports.strangers import NotARank

__all__ = ["Decision", "Member", "encode", "parse", "parse_member"]

#: bytes of a message, at most
MOST_NBYTES = 1 << 20
#: seconds that a coordinator may ask a rank to wait, at most
MOST_SECONDS = 86400.0
#: processes in one list, and bytes of a worker's address, at most
_MOST_MEMBERS = 4096
_MOST_WORKER_NBYTES = 8192
_MOST_NUMBER = 1 << 62

_ID = re.compile(r"[0-9a-f]{32}")
_MACHINE = re.compile(r"[0-9a-f]{64}")
#: the labels of a name have 1 to 63 bytes
_HOST = re.compile(r"(?=.{1,255}\Z)[0-9A-Za-z:%_-]{1,63}(?:\.[0-9A-Za-z:%_-]{1,63})*\.?")
_HEXADECIMAL = re.compile(r"(?:[0-9a-f]{2})*")


class Member(NamedTuple):
    """A process.

    Attributes:
        id: unique, and random: who knows it has heard it from a rank.
        host, port: the address of its socket.
        machine: its machine and network namespace, of topology.machine().
        worker: the address of its wire, in hexadecimal digits.
        seal: checksum of the other fields. UCX ends the process that connects to an address that is none, so nothing
            damaged or made up may reach it.
    """

    id: str
    host: str
    port: int
    machine: str
    worker: str
    seal: str

    @classmethod
    def make(cls, id: str, host: str, port: int, machine: str, worker: bytes) -> Member:
        """With its seal."""
        fields = id, host, port, machine, worker.hex()
        return cls(*fields, _seal(*fields))

    @classmethod
    def of(cls, found: Any) -> Member:
        """From JSON."""
        id, host, port, machine, worker, seal = _list(found, 6, 6)
        fields = _id(id), _text(host, _HOST), _integer(port, 1, 65535), _text(machine, _MACHINE), _worker(worker)
        _require(seal == _seal(*fields))
        return cls(*fields, seal)


class Decision(NamedTuple):
    """A group.

    Attributes:
        epoch: its number.
        members: in the order of their ranks.
        calls: the number of their next call.
        left_out: ranks of earlier groups that have not ended, and perhaps do not know that they are left out.
    """

    epoch: int
    members: tuple[Member, ...]
    calls: int
    left_out: tuple[Member, ...] = ()

    @classmethod
    def of(cls, found: Any) -> Decision:
        """From JSON."""
        epoch, members, calls, left_out = _list(found, 4, 4)
        decision = cls(_integer(epoch), _members(members), _integer(calls), _members(left_out))
        _require(decision.members)
        return decision


def _seal(*fields: object) -> str:
    return hashlib.blake2b(" ".join(map(str, fields)).encode(), digest_size=16, person=b"qccl member").hexdigest()


# -- fields ----------------------------------------------------------------------------------------------------------


def _require(condition: object) -> None:
    if not condition:
        raise NotARank("a message with wrong fields")


def _integer(found: Any, least: int = 0, most: int = _MOST_NUMBER) -> int:
    _require(type(found) is int and least <= found <= most)
    return int(found)


def _text(found: Any, pattern: re.Pattern[str]) -> str:
    _require(type(found) is str and pattern.fullmatch(found))
    return str(found)


def _id(found: Any) -> str:
    return _text(found, _ID)


def _worker(found: Any) -> str:
    _require(type(found) is str and len(found) <= 2 * _MOST_WORKER_NBYTES)
    return _text(found, _HEXADECIMAL)


def _list(found: Any, least: int, most: int) -> list[Any]:
    _require(type(found) is list and least <= len(found) <= most)
    return list(found)


def _members(found: Any) -> tuple[Member, ...]:
    members = tuple(Member.of(each) for each in _list(found, 0, _MOST_MEMBERS))
    _require(len({member.id for member in members}) == len({member[1:3] for member in members}) == len(members))
    return members


def _ballot(found: Any) -> tuple[int, int]:
    """Its number, and the rank that coordinates it."""
    number, rank = _list(found, 2, 2)
    return _integer(number), _integer(rank, 0, _MOST_MEMBERS)


def _accepted(found: Any) -> tuple[tuple[int, int], Decision] | None:
    """A ballot and its list; None: nothing was accepted."""
    if found is None:
        return None
    ballot, value = _list(found, 2, 2)
    return _ballot(ballot), Decision.of(value)


def _seconds(found: Any) -> float:
    _require(type(found) in (int, float) and 0 <= found <= MOST_SECONDS)
    return float(found)


#: what a rank says of itself
_HELLO: dict[str, Callable[[Any], Any]] = {
    "nonce": _id,
    "to": _id,
    "epoch": _integer,
    "member": Member.of,
    "calls": _integer,
    "newcomers": _members,
    "promised": _ballot,
    "accepted": _accepted,
}
#: kind of message -> its fields
_FIELDS: dict[str, dict[str, Callable[[Any], Any]]] = {
    # the process that was called begins; the caller's first message repeats the nonce, so an old one is of no use
    "challenge": {"nonce": _id},
    "knock": {"nonce": _id, "member": Member.of},
    "join": _HELLO,
    "probe": _HELLO,
    # of a Watch: it only wants to know whether this process lives
    "watch": {},
    "wait": {"seconds": _seconds},
    "stranger": {},
    "tell": {},
    "prepare": {"ballot": _ballot},
    "promised": {},
    "accept": {"ballot": _ballot, "value": Decision.of},
    "accepted": {},
    "decided": {"to": _id, "decided": Decision.of},
}


# -- messages --------------------------------------------------------------------------------------------------------


def encode(message: dict[str, Any]) -> bytes:
    """Raises EngineError for one that is too long: a group of several thousand ranks."""
    content = json.dumps(message, separators=(",", ":")).encode()
    if len(content) > MOST_NBYTES:
        raise EngineError(
            f"the group has too many ranks: a message about it has {len(content)} bytes, and at most {MOST_NBYTES} are "
            f"allowed"
        )
    return content


def parse(content: bytes) -> dict[str, Any]:
    """The message, its fields as values of their types. Raises NotARank."""
    message = _json(content)
    _require(type(message) is dict)
    kind = message.get("kind")
    _require(type(kind) is str and kind in _FIELDS)
    fields = _FIELDS[kind]
    _require(message.keys() == {"kind", *fields})
    return {"kind": kind} | {name: read(message[name]) for name, read in fields.items()}


def parse_member(content: bytes) -> Member:
    """A process, from the JSON of a Member. Raises NotARank."""
    return Member.of(_json(content))


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise NotARank("a message that is not JSON") from error
