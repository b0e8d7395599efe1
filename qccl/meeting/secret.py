"""The token that a user gives all ranks of a job, the job's secret, and the keys derived from them.

The **token** is a text in QCCL_TOKEN, or in a file that QCCL_TOKEN_FILE names and that only its owner may read. It
protects the meeting in which the ranks find each other. There rank 0 gives the others 32 random bytes. Each rank
computes the **job's secret** from these bytes and from the token, if there is one. Each purpose has a key of its own,
so that a key that becomes known tells nothing about the others.

Tokens, secrets and keys are never part of a message, a log or a repr().
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from qccl.base.errors import ArgumentError, EngineError
from qccl.base.files import reading

__all__ = [
    "NBYTES",
    "Secret",
    "derive",
    "draw",
    "is_insecure",
    "job_secret",
    "new_token",
    "read_private",
    "token_key",
    "write_token",
]

#: bytes of a secret, and of a key
NBYTES = 32
#: least characters of a token, and most bytes of its file
_LEAST, _MOST_NBYTES = 16, 4096
_ADVICE = "make one with: qccl-bench token FILE"


class Secret(bytes):
    """Bytes that nobody may see: their text says only that they are secret."""

    def __repr__(self) -> str:
        return "<secret>"

    __str__ = __repr__


def draw() -> Secret:
    """A new secret of 32 random bytes."""
    return Secret(os.urandom(NBYTES))


def derive(secret: bytes, purpose: str) -> Secret:
    """The key for a purpose: 32 bytes. ``secret`` must be random, or the result of this function."""
    return Secret(hmac.digest(secret, f"qccl {purpose}".encode(), "sha256"))


def job_secret(drawn: bytes, token: bytes | None) -> Secret:
    """The secret of a job whose rank 0 has drawn these bytes; ``token``: token_key().

    With a token the secret depends on both, so a reader of the notes, which a store keeps unencrypted, does not know
    it.
    """
    return derive(hmac.digest(token or bytes(NBYTES), drawn, "sha256"), "job")


def token_key(environ: Mapping[str, str] = os.environ) -> Secret | None:
    """The secret from which all keys of the token are derived; None if the environment names no token.

    Raises ArgumentError for a token that is too short, and for a file that others may read.
    """
    text, path = environ.get("QCCL_TOKEN", ""), environ.get("QCCL_TOKEN_FILE", "")
    if text and path:
        raise ArgumentError("QCCL_TOKEN and QCCL_TOKEN_FILE are both set; set one of them")
    if not text and not path:
        return None
    source = f"QCCL_TOKEN_FILE={path!r}" if path else "QCCL_TOKEN"
    token = (read_private(Path(path), source) if path else text).strip()
    if len(token) < _LEAST:
        raise ArgumentError(f"{source}: a token has at least {_LEAST} characters; {_ADVICE}")
    return _stretch(Secret(token.encode(errors="surrogateescape")))


@cache
def _stretch(token: Secret) -> Secret:
    """Derive a key slowly, in some hundredths of a second, so that a token invented by a person is hard to guess."""
    try:
        return Secret(hashlib.scrypt(token, salt=b"qccl token", n=1 << 14, r=8, p=1, dklen=NBYTES))
    except AttributeError:
        raise EngineError("this Python was built without OpenSSL, whose scrypt tokens need (hashlib.scrypt)") from None


def read_private(path: Path, source: str, most: int = _MOST_NBYTES) -> str:
    """The text of a file of at most ``most`` bytes.

    The file belongs to this user or to root, and nobody else may read or write it. ``source`` names it in errors.
    Raises ArgumentError.
    """
    try:
        with reading(path, most, name=source) as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in (0, os.geteuid()):
                raise ArgumentError(f"{source} belongs to another user; {_ADVICE}")
            if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ArgumentError(f"{source}: other users may read or change this file; run chmod 600 on it")
            return file.read(most).decode(errors="surrogateescape")
    except OSError as error:
        raise ArgumentError(f"{source} cannot be read ({error.strerror})") from error


def is_insecure(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether QCCL_INSECURE allows connections between machines that are not encrypted."""
    found = environ.get("QCCL_INSECURE", "")
    if found not in ("", "0", "1"):
        raise ArgumentError(f"QCCL_INSECURE={found!r} is neither 1 nor 0")
    return found == "1"


def new_token() -> str:
    """A random token: 43 letters, digits, - and _."""
    return secrets.token_urlsafe(NBYTES)


def write_token(path: Path) -> None:
    """Make a file with a new token, which only this user may read. Raises FileExistsError if it is there."""
    with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        os.fchmod(file.fileno(), 0o600)  # independent of the umask
        file.write(new_token() + "\n")
