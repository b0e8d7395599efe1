"""The text by which a process joins a group: Communicator.address, with the job's secret.

``host:port#secret`` over UCX, ``wan://host:port#secret`` over encrypted connections between sites, and
``wan-plain://host:port#secret`` over unencrypted ones. The secret is in base64url; a group without TLS has
none. Errors show nothing behind the #.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from typing import NamedTuple

from qccl.base.errors import ArgumentError
from qccl.meeting.secret import NBYTES, Secret
from qccl.meeting.sockets import Place, host_and_port, place_text
from qccl.meeting.strangers import printable

__all__ = ["JoinAddress"]

#: the prefix of an address -> the transport, and whether it encrypts
_SCHEMES = {"wan://": ("wan", True), "wan-plain://": ("wan", False), "": ("ucx", True)}


class JoinAddress(NamedTuple):
    """The place where a group takes in processes, and the transport, secret and ``encrypts`` of its ranks."""

    transport: str
    place: Place
    secret: bytes | None
    encrypts: bool

    def text(self) -> str:
        """The address as text, for another process."""
        encrypts = self.encrypts or self.transport == "ucx"
        scheme = next(text for text, found in _SCHEMES.items() if found == (self.transport, encrypts))
        secret = "" if self.secret is None else "#" + base64.urlsafe_b64encode(self.secret).decode().rstrip("=")
        return f"{scheme}{place_text(self.place)}{secret}"

    @classmethod
    def of(cls, text: object) -> JoinAddress:
        """The reverse of text(). Raises ArgumentError."""
        rest, mark, secret = str(text).partition("#")
        scheme = next(each for each in _SCHEMES if rest.startswith(each))
        place = host_and_port(rest.removeprefix(scheme))
        if place is None or "/" in place[0] or (mark and _secret(secret) is None):
            shown = printable(rest, 300) + ("#..." if mark else "")
            raise ArgumentError(
                f'address={shown!r} is not the comm.address of a rank: "host:port", with the job\'s secret behind a #'
            )
        return cls(_SCHEMES[scheme][0], place, _secret(secret), _SCHEMES[scheme][1])


def _secret(text: str) -> Secret | None:
    """The secret that a text encodes; None if the text is not a valid secret."""
    with contextlib.suppress(binascii.Error, ValueError):
        found = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        if len(found) == NBYTES:
            return Secret(found)
    return None
