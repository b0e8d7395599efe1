"""Chooses the transport of several ranks on the host.

launch.py decides the rest for init(): whether the ranks use GPUs, and so NCCL (_by_mpi, _on_gpus), and what they do if
MPI cannot be loaded (uses_mpi). A single rank has the transport loopback (connect.py).

If MPI started the ranks, and the program does not give init() their numbers, each rank decides alone whether MPI
carries the bytes: refusal_of_mpi(). Otherwise, and in from_torch(), from_jax() and the backend of torch.distributed,
the ranks meet and exchange their offers, and each rank calls choose() with the same offers.

- All ranks on one machine: UCX, otherwise gloo, otherwise wan, unencrypted over the loopback interface.
- On several machines, with a token: wan, because a token says that the network between them is not trusted.
- On several machines without a token, or with QCCL_INSECURE=1: UCX, otherwise gloo. The network must be trusted.

A program, or QCCL_TRANSPORT, may name the only transport that it allows. Between machines wan needs a token, or
QCCL_INSECURE=1 on all ranks, and then encrypts nothing. With a token it always encrypts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

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
    "has_other_than_mpi",
    "is_alone",
    "obstacle",
    "reason_of",
    "refusal_of_mpi",
    "wanted_transport",
]

TRUSTED_NETWORK = "nothing is encrypted: the network between the machines must be trusted"

#: the transports between processes, in the order in which choose() tries them. MPI's place counts only for ranks that
#: qccl-bench has yet to start; ranks that MPI started prefer it to all others (refusal_of_mpi)
TRANSPORTS = ("ucx", "mpi", "gloo", "wan")
_DRAWN = re.compile(r"[0-9a-f]{64}")
#: most characters of a reason in a note
_MOST_REASON = 1500
_NEEDS_TOKEN = (
    "between machines wan needs a token, the same on all ranks: qccl-bench token FILE makes one, for QCCL_TOKEN_FILE "
    "or QCCL_TOKEN; or set QCCL_INSECURE=1, and nothing is encrypted"
)
_NOT_STARTED = "it did not start the ranks"


class Offer(NamedTuple):
    """The facts about a rank that decide the transport.

    Attributes:
        network: equal for ranks that reach each other by the loopback interface; empty: unknown.
        memory: equal for ranks of one machine that can share memory; empty: unknown.
        wanted: the only transport that the rank allows; empty: any.
        token: a digest that tells different tokens apart; empty: the rank has no token.
        insecure: QCCL_INSECURE=1 is set.
        drawn: 32 random bytes of rank 0 in hexadecimal digits; empty on the other ranks.
        no_tls: why the rank cannot use TLS; empty: it can.
        ucx, gloo, wan: why the rank cannot use each transport; empty: it can.
        mpi: why MPI cannot carry the bytes: it did not start the rank, or mpiexec cannot (qccl-bench); empty: it can.
        host, backend, no_gpu: for launch.py, which chooses between GPUs and host memory: the name of the rank's
            machine, the backend given to init(), and why the rank cannot use a GPU (empty: perhaps it can).
    """

    network: str = ""
    memory: str = ""
    wanted: str = ""
    token: str = ""
    insecure: bool = False
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
        """The offer of this process. ``wanted``: see wanted_transport(); ``others``: fields that the caller knows."""
        found: dict[str, Any] = {name: obstacle(name) for name in TRANSPORTS if name != "mpi"}
        # if the user names a network, processes of other machines may join later
        network = "" if {"QCCL_NET", "UCX_NET_DEVICES"} & os.environ.keys() else network_id()
        found |= {"network": network, "memory": memory_id(), "no_tls": reason_of(tls.load_library), **others}
        return _by_settings(wanted)._replace(**found)

    def __repr__(self) -> str:
        return f"Offer of {self.wanted or 'any transport'}"  # drawn is secret

    def note(self) -> bytes:
        """The offer as the bytes that this rank brings to the meeting."""
        return json.dumps([each[:_MOST_REASON] if isinstance(each, str) else each for each in self]).encode()

    @classmethod
    def of(cls, rank: int, note: bytes) -> Offer:
        """The reverse of note(). Raises MismatchError if the rank's note is not an offer."""
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            offer = cls._make(json.loads(note))
            if [*map(type, offer)] == [*map(type, cls())] and (rank or _DRAWN.fullmatch(offer.drawn)):
                return cls._make(printable(each, _MOST_REASON) if isinstance(each, str) else each for each in offer)
        raise MismatchError(
            f"rank {rank} brought a note that this version of qccl cannot read; install the same version on all ranks"
        )


class Choice(NamedTuple):
    """The transport that the ranks use, and how.

    Attributes:
        name: one of TRANSPORTS.
        why: the reason for the choice, in words.
        is_local: all ranks are on one machine, and in one network namespace.
        can_share_memory: the ranks are local, and can share memory.
        has_secret: all ranks have TLS, and so can agree on a secret.
        encrypts: the transport is wan, and encrypts.
    """

    name: str
    why: str
    is_local: bool
    can_share_memory: bool
    has_secret: bool
    encrypts: bool


def choose(offers: Sequence[Offer], who: str) -> Choice:
    """The transport for the ranks of ``offers``; ``who``: the launcher that brought them together, for errors.

    Raises EngineError with each transport's obstacle if no transport suits all ranks, MismatchError for different
    tokens.
    """
    _check_tokens(offers)
    is_local = _are_equal(offer.network for offer in offers)
    can_share_memory = is_local and _are_equal(offer.memory for offer in offers)
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
            return Choice(name, why, is_local, can_share_memory, not no_tls, encrypts)
        against.append(f"{name}: rank {found[0]}: {found[1]}")
    raise EngineError(f"the {len(offers)} ranks of {who} have no transport in common. {'; '.join(against)}")


def is_alone(offers: Sequence[Offer], rank: int) -> bool:
    """Whether no other rank can share memory with ``rank``. A rank that does not tell its machine may be near."""
    machines = [(offer.network, offer.memory) for offer in offers]
    return not any("" in each for each in machines) and machines.count(machines[rank]) == 1


def _remarks(name: str, against: list[str], no_tls: str, *, is_safe: bool) -> Iterator[str]:
    """The reasons for a transport, and warnings about what it does not protect."""
    yield from against or ["it is the fastest" if name == "ucx" else "the ranks allow no other"]
    if not is_safe:
        yield TRUSTED_NETWORK
    if no_tls:
        yield f"anybody may join, because there is no TLS ({no_tls})"


def _are_equal(texts: Iterable[str]) -> bool:
    """Whether all texts are the same, and not empty."""
    found = {*texts}
    return len(found) == 1 and "" not in found


def _check_tokens(offers: Sequence[Offer]) -> None:
    for rank, offer in enumerate(offers):
        if offer.token != offers[0].token:
            has = "no token" if not offer.token else "a token" if not offers[0].token else "another token"
            first = "one" if offers[0].token else "none"
            raise MismatchError(f"rank {rank} has {has}, and rank 0 has {first}: set the same QCCL_TOKEN on all ranks")


def _reason(offer: Offer, name: str, is_local: bool) -> str:
    """The reason why a rank does not use a transport; empty if it can."""
    if offer.wanted not in ("", name):
        return f"the rank allows only {offer.wanted}"
    is_trusted = is_local or offer.insecure
    if name == "wan" and not offer.token and not is_trusted:
        return _NEEDS_TOKEN
    if name != "wan" and offer.token and not is_trusted and not offer.wanted:
        return f"it does not encrypt, and the rank has a token; to use it all the same, set QCCL_TRANSPORT={name}"
    return str(getattr(offer, name))


def refusal_of_mpi(launcher: Launcher, wanted: str | None = None) -> str:
    """The reason why MPI does not carry the bytes of the ranks that ``launcher`` started; empty if it does.

    The ranks have not met yet, so they may be on several machines.
    """
    if not launcher.is_of_mpi or (launcher.name == "srun" and os.environ.get("MASTER_ADDR")):
        why = _NOT_STARTED
    else:
        why = "" if importlib.util.find_spec("mpi4py") else "mpi4py is not installed"
    return _reason(_by_settings(wanted)._replace(mpi="" if wanted else why), "mpi", is_local=False)


def has_other_than_mpi(launcher: Launcher) -> bool:
    """Whether a rank of MPI can use another transport. If not, MPI's error is raised, with its advice."""
    own, is_local = _by_settings(None), launcher.local_size == launcher.size
    return any(not (_reason(own, name, is_local) or obstacle(name)) for name in TRANSPORTS if name != "mpi")


def _by_settings(wanted: str | None) -> Offer:
    """Make this process's offer from the settings of the program and of the user alone."""
    token = token_key()
    return Offer(
        wanted=wanted or wanted_transport() or "",
        token=derive(token, "check").hex()[:16] if token else "",
        insecure=is_insecure(),
    )


def obstacle(transport: str) -> str:
    """The reason why this process cannot use "ucx", "wan" or "gloo"; empty if it can."""
    if transport != "gloo" and not importlib.util.find_spec("msgspec"):  # scripts/gpu-check runs without msgspec
        return "msgspec is not installed (pip install msgspec)"
    if transport == "wan":
        return reason_of(tls.load_library) if token_key() else ""
    if transport == "gloo":
        return "" if importlib.util.find_spec("torch") else "PyTorch is not installed"
    from qccl.transports.ucx import load_library

    return reason_of(load_library)


def reason_of(find: Callable[[], object]) -> str:
    """The text of the QcclError that ``find`` raises; empty if it returns."""
    try:
        find()
    except QcclError as error:
        return str(error)
    return ""


def wanted_transport(given: str = "auto") -> str | None:
    """The only transport allowed: ``given`` by the program, or QCCL_TRANSPORT if it is "auto"; None: any."""
    name, wanted = ("transport", given) if given != "auto" else ("QCCL_TRANSPORT", os.environ.get("QCCL_TRANSPORT"))
    if wanted not in (None, "", "auto", *TRANSPORTS):
        raise ArgumentError(f"{name}={wanted!r} does not exist; there are auto, {', '.join(TRANSPORTS)}")
    return None if wanted in ("", "auto") else wanted
