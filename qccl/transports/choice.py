"""Which transport the ranks use on the host.

Where MPI started the ranks, each one decides alone whether MPI carries the bytes: refusal_of_mpi(). Otherwise the ranks
meet, and choose(): all of them know all offers, and so decide the same.

- All ranks on one machine: UCX, otherwise gloo, otherwise wan, unencrypted over the loopback interface.
- On several machines, with a token: wan, because a token says that the network between them is not trusted.
- On several machines without a token, or with QCCL_INSECURE=1: UCX, otherwise gloo. The network must be trusted.

A program, or QCCL_TRANSPORT, may name the only transport that it allows. Between machines wan needs a token, or
QCCL_INSECURE=1 on all ranks, and then encrypts nothing. With a token it always encrypts.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from qccl.base.errors import ArgumentError, EngineError, MismatchError, QcclError
from qccl.meeting import tls
from qccl.meeting.launchers import Launcher
from qccl.meeting.secret import derive, is_insecure, token_key
from qccl.meeting.strangers import printable
from qccl.meeting.topology import memory_id, network_id

__all__ = [
    "TRANSPORTS",
    "TRUSTED_NETWORK",
    "Choice",
    "Offer",
    "choose",
    "failure",
    "is_alone",
    "obstacle",
    "refusal_of_mpi",
    "wanted_transport",
]

TRUSTED_NETWORK = "nothing is encrypted: the network between the machines must be trusted"

#: between processes, the first choice first; but where MPI started the ranks, MPI comes before the others
TRANSPORTS = ("ucx", "mpi", "gloo", "wan")
_DRAWN = re.compile(r"[0-9a-f]{64}")
#: characters of a reason, at most
_MOST_REASON = 1500
_NEEDS_TOKEN = (
    "between machines wan needs a token, the same on all ranks: qccl-bench token FILE makes one, for QCCL_TOKEN_FILE "
    "or QCCL_TOKEN; or set QCCL_INSECURE=1, and nothing is encrypted"
)
_NOT_STARTED = "it did not start the ranks"


class Offer(NamedTuple):
    """The facts about a rank that decide the transport: texts of one line.

    Attributes:
        network: equal for ranks that reach each other by the loopback interface; empty: unknown.
        memory: equal for ranks of one machine that can share memory; empty: unknown.
        wanted: the only transport that it allows; empty: any.
        token: tells different tokens apart, and nothing more; empty: it has none.
        insecure: "1" with QCCL_INSECURE=1, otherwise empty.
        drawn: 32 random bytes in hexadecimal digits, of rank 0.
        no_tls, ucx, gloo, wan: why it cannot use each of them; empty: it can.
        host: the name of its machine, for the choice between GPUs and host memory (launch.py), as are the others.
        backend: of init(): "host", "auto", or "cuda" where the program allows nothing else.
        no_gpu: why it cannot use a GPU, whatever the other ranks have; empty: perhaps it can.
        mpi: as ucx. Ranks that meet do not use it; those that are yet to be started (by qccl-bench) may.
    """

    network: str = ""
    memory: str = ""
    wanted: str = ""
    token: str = ""
    insecure: str = ""
    drawn: str = ""
    no_tls: str = ""
    ucx: str = ""
    gloo: str = ""
    wan: str = ""
    host: str = ""
    backend: str = ""
    no_gpu: str = ""
    mpi: str = _NOT_STARTED

    @classmethod
    def here(cls, wanted: str | None = None, **others: str) -> Offer:
        """The offer of this process; ``wanted``: see wanted_transport(); ``others``: fields that the caller knows."""
        found = {name: obstacle(name) for name in TRANSPORTS if name != "mpi"}
        # where a rank names its network, processes of other machines may join later
        network = "" if {"QCCL_NET", "UCX_NET_DEVICES"} & os.environ.keys() else network_id()
        found |= {"network": network, "memory": memory_id(), "no_tls": failure(tls.load_library), **others}
        return _by_settings(wanted)._replace(**found)

    def __repr__(self) -> str:
        return f"Offer of {self.wanted or 'any transport'}"  # drawn is secret

    def note(self) -> bytes:
        """For the meeting."""
        return "\n".join(printable(line, _MOST_REASON) for line in self).encode()

    @classmethod
    def of(cls, rank: int, note: bytes) -> Offer:
        """The reverse of note(). Raises MismatchError where the rank's note is none."""
        lines = [printable(line, 2 * _MOST_REASON) for line in note.split(b"\n")]
        if len(lines) != len(cls._fields) or (rank == 0 and not _DRAWN.fullmatch(lines[cls._fields.index("drawn")])):
            raise MismatchError(
                f"rank {rank} brought a note that is not one of this version of qccl; install the same one on all ranks"
            )
        return cls(*lines)


class Choice(NamedTuple):
    """The transport that the ranks use, and how.

    Attributes:
        name: in TRANSPORTS.
        why: in words.
        is_local: all ranks are on one machine, and in one network namespace.
        shares_memory: and they can share memory.
        has_secret: the ranks have a secret in common: all of them have TLS.
        encrypts: wan encrypts.
    """

    name: str
    why: str
    is_local: bool
    shares_memory: bool
    has_secret: bool
    encrypts: bool


def choose(offers: Sequence[Offer], who: str) -> Choice:
    """The transport for these ranks. ``who`` brought them together.

    Raises EngineError with a rank's reason where they have none in common, MismatchError where their tokens differ.
    """
    _check_tokens(offers)
    is_local = _are_equal(offer.network for offer in offers)
    shares_memory = is_local and _are_equal(offer.memory for offer in offers)
    wanted = {offer.wanted for offer in offers}
    names = [name for name in TRANSPORTS if wanted == {name}] or TRANSPORTS
    against: list[str] = []
    for name in names:
        found = next(((r, why) for r, each in enumerate(offers) if (why := _reason(each, name, is_local))), None)
        if found is None:
            encrypts = name == "wan" and bool(offers[0].token)
            no_tls = next((f"rank {r}: {each.no_tls}" for r, each in enumerate(offers) if each.no_tls), "")
            why = "; ".join(_remarks(name, against, no_tls, is_safe=is_local or encrypts))
            if encrypts and not is_local:
                why = "it encrypts, and the ranks have a token"
            return Choice(name, why, is_local, shares_memory, not no_tls, encrypts)
        against.append(f"{name}: rank {found[0]}: {found[1]}")
    raise EngineError(f"the {len(offers)} ranks of {who} have no transport in common. {'; '.join(against)}")


def is_alone(offers: Sequence[Offer], rank: int) -> bool:
    """Whether no other rank can share memory with ``rank``. Where a rank does not tell its machine, it may."""
    machines = [(offer.network, offer.memory) for offer in offers]
    return not any("" in each for each in machines) and machines.count(machines[rank]) == 1


def _remarks(name: str, against: list[str], no_tls: str, *, is_safe: bool) -> Iterator[str]:
    """Why it is this transport, and what it does not protect."""
    yield from against or ["it is the fastest" if name == "ucx" else "the ranks allow no other"]
    if not is_safe:
        yield TRUSTED_NETWORK
    if no_tls:
        yield f"anybody may join, because there is no TLS ({no_tls})"


def _are_equal(texts: Iterable[str]) -> bool:
    """Whether all are the same, and none is empty."""
    found = {*texts}
    return len(found) == 1 and "" not in found


def _check_tokens(offers: Sequence[Offer]) -> None:
    for rank, offer in enumerate(offers):
        if offer.token != offers[0].token:
            has = "no token" if not offer.token else "a token" if not offers[0].token else "another token"
            first = "one" if offers[0].token else "none"
            raise MismatchError(f"rank {rank} has {has}, and rank 0 has {first}: set the same QCCL_TOKEN on all ranks")


def _reason(offer: Offer, name: str, is_local: bool) -> str:
    """Why a rank does not use a transport; nothing if it can."""
    if offer.wanted not in ("", name):
        return f"the rank allows only {offer.wanted}"
    is_trusted = is_local or bool(offer.insecure)
    if name == "wan" and not offer.token and not is_trusted:
        return _NEEDS_TOKEN
    if name != "wan" and offer.token and not is_trusted and not offer.wanted:
        return f"it does not encrypt, and the rank has a token; to use it all the same, set QCCL_TRANSPORT={name}"
    return str(getattr(offer, name))


def refusal_of_mpi(launcher: Launcher, wanted: str | None = None) -> str:
    """Why MPI does not carry the bytes of the ranks that ``launcher`` started; nothing if it does.

    The ranks have not met, and so may be on several machines.
    """
    if not launcher.is_of_mpi or (launcher.name == "srun" and os.environ.get("MASTER_ADDR")):
        why = _NOT_STARTED
    else:
        why = "" if importlib.util.find_spec("mpi4py") else "mpi4py is not installed"
    return _reason(_by_settings(wanted)._replace(mpi="" if wanted else why), "mpi", is_local=False)


def _by_settings(wanted: str | None) -> Offer:
    """The part of this process's offer that the program and the user have set."""
    token = token_key()
    return Offer(
        wanted=wanted or wanted_transport() or "",
        token=derive(token, "check").hex()[:16] if token else "",
        insecure="1" if is_insecure() else "",
    )


def obstacle(transport: str) -> str:
    """Why this process cannot use "ucx", "wan" or "gloo"; nothing if it can."""
    if transport != "gloo" and not importlib.util.find_spec("msgspec"):  # as on a machine of scripts/gpu-check
        return "msgspec is not installed (pip install msgspec)"
    if transport == "wan":
        return failure(tls.load_library) if token_key() else ""
    if transport == "gloo":
        return "" if importlib.util.find_spec("torch") else "PyTorch is not installed"
    from qccl.transports.ucx import load_library

    return failure(load_library)


def failure(find: Callable[[], object]) -> str:
    """Why ``find`` does not find what it looks for; nothing if it does."""
    try:
        find()
    except QcclError as error:
        return str(error)
    return ""


def wanted_transport(given: str = "auto") -> str | None:
    """The transport that the program or, if it has given "auto", QCCL_TRANSPORT names; None: the fastest."""
    name, wanted = ("transport", given) if given != "auto" else ("QCCL_TRANSPORT", os.environ.get("QCCL_TRANSPORT"))
    if wanted not in (None, "", "auto", *TRANSPORTS):
        raise ArgumentError(f"{name}={wanted!r} does not exist; there are auto, {', '.join(TRANSPORTS)}")
    return None if wanted in ("", "auto") else wanted
