"""What a process and a relay (qccl-relay) say to each other before the relay forwards.

The relay greets with a nonce. The process answers with its role, its job, a name and a proof. When two processes of one
job have given the same name, one as a caller and one as a listener, the relay tells both that they are joined. From
then on it forwards what they send, which is TLS with a key that the relay does not have. A process can also ask whether
the listeners of a name have ended.

The **relay key** follows from the job's token. The relay has the relay keys of the jobs that may use it, and so knows
its users, but neither their tokens nor what follows from the job's secret. A name is 32 bytes that follow from a secret
of the job, so that nobody else can give it. kernels/engine/wan_relay.h speaks the same protocol.
"""

from __future__ import annotations

import hmac
import struct
from enum import Enum
from typing import NamedTuple

from qccl.transports.secret import NBYTES, Secret, derive

__all__ = [
    "ENDED",
    "FULL",
    "GREETING_NBYTES",
    "HELLO_NBYTES",
    "JOINED",
    "NOT_ENDED",
    "NO_KEY",
    "Hello",
    "Role",
    "greeting",
    "job_id",
    "reason",
    "relay_key",
]

_MAGIC = b"qccl/rl1"
_NONCE_NBYTES = 16
GREETING_NBYTES = len(_MAGIC) + _NONCE_NBYTES
#: magic, role, job, name, proof
_HELLO = struct.Struct("<8sc8s32s32s")
HELLO_NBYTES = _HELLO.size

#: the relay's answers, each one byte, after which all but the first close the connection
JOINED, NO_KEY, FULL = b"J", b"K", b"F"
#: those to Role.ASKER
ENDED, NOT_ENDED = b"E", b"N"
_REASONS = {
    NO_KEY: "the relay does not know this job; give it the key that qccl-relay --show-key prints where the token is",
    FULL: "the relay has no room for further connections of this job",
}


class Role(Enum):
    """What a process is to the other one with its name.

    The two ``SOLE`` roles are for names of which each side has one connection at a time: a new one ends its
    predecessor, and the connection that this was joined to. ``ASKER`` is joined to nobody: it asks whether all
    connections that waited as ``LISTENER`` were closed by their machine, which happens when the process ends.
    """

    CALLER = b"c"
    LISTENER = b"l"
    SOLE_CALLER = b"C"
    SOLE_LISTENER = b"L"
    ASKER = b"a"

    @property
    def other(self) -> Role:
        """The role that it is joined with."""
        return _OTHERS[self]

    @property
    def is_caller(self) -> bool:
        """Whether this side calls the other one."""
        return self in (Role.CALLER, Role.SOLE_CALLER)

    @property
    def is_sole(self) -> bool:
        """Whether each side has one connection at a time."""
        return self.value.isupper()


_OTHERS = {
    Role.CALLER: Role.LISTENER,
    Role.LISTENER: Role.CALLER,
    Role.SOLE_CALLER: Role.SOLE_LISTENER,
    Role.SOLE_LISTENER: Role.SOLE_CALLER,
}


def relay_key(token: bytes) -> Secret:
    """The key with which processes of a job use a relay; ``token``: of secret.token_key()."""
    return derive(token, "relay")


def job_id(key: bytes) -> bytes:
    """8 bytes that say which relay key a process has, and nothing more."""
    return derive(key, "relay job")[:8]


class Hello(NamedTuple):
    """What a process says.

    Attributes:
        role: what it is to the other one.
        job: of job_id().
        name: 32 bytes that the other one gives, too.
        proof: that it has the job's relay key.
    """

    role: Role
    job: bytes
    name: bytes
    proof: bytes

    @classmethod
    def make(cls, role: Role, name: bytes, key: bytes, greeted: bytes) -> Hello:
        """The answer to the relay's greeting ``greeted``. Raises ConnectionError if that is none."""
        return cls(role, job_id(key), name, _proof(key, _nonce(greeted), role, name))

    @classmethod
    def of(cls, found: bytes) -> Hello | None:
        """From HELLO_NBYTES bytes; None: they are something else."""
        magic, role, job, name, proof = _HELLO.unpack(found)
        if magic != _MAGIC or role not in {each.value for each in Role}:
            return None
        return cls(Role(role), job, name, proof)

    def packed(self) -> bytes:
        """As it is sent."""
        return _HELLO.pack(_MAGIC, self.role.value, self.job, self.name, self.proof)

    def is_proved(self, key: bytes, nonce: bytes) -> bool:
        """Whether its author has the key."""
        return hmac.compare_digest(self.proof, _proof(key, nonce, self.role, self.name))


def _proof(key: bytes, nonce: bytes, role: Role, name: bytes) -> bytes:
    return hmac.digest(key, nonce + role.value + name, "sha256")


def greeting(nonce: bytes) -> bytes:
    """What the relay says first; ``nonce``: 16 random bytes."""
    return _MAGIC + nonce


def _nonce(greeting: bytes) -> bytes:
    """The relay's nonce. Raises ConnectionError where that is no relay's greeting."""
    if not greeting.startswith(_MAGIC):
        raise ConnectionError("what answers there is not a relay of this version of qccl")
    return greeting[len(_MAGIC) :]


def reason(answer: bytes) -> str:
    """Why the relay did not join this process to another one."""
    return _REASONS.get(answer, "the relay closed the connection")


assert _HELLO.size == 49 + NBYTES
