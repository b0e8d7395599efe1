"""qccl.init(): the communicator of the ranks that a launcher started (see launchers.py) or that the program names."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qccl.arguments import integer, setup_timeout, timeout_of
from qccl.cuda.libraries import device_count, pick_device
from qccl.errors import ArgumentError, EngineError, MismatchError, QcclError
from qccl.launchers import Launcher, check_alone, check_size, detect, frameworks, is_of_srun, remedy
from qccl.meetings import (
    Meeting,
    alone,
    connect_by,
    connected_transport,
    gather_offers,
    obstacle,
    of_address,
    of_jax,
    of_launcher,
    of_torch,
    offer_of,
    wanted_transport,
)
from qccl.transports.choice import TRUSTED_NETWORK, Offer
from qccl.transports.join_address import JoinAddress
from qccl.transports.secret import is_insecure
from qccl.transports.sockets import host_and_port, place_text
from qccl.transports.strangers import printable

if TYPE_CHECKING:
    from qccl.communicator import Communicator
    from qccl.costs.group import GroupProfile

__all__ = ["has_mpi", "init", "join", "uses_mpi"]

_log = logging.getLogger("qccl")

#: all ranks have GPUs; one has none; they were asked for different things
_YES, _NO, _MIXED = b"+", b"-", b"x"


def init(
    backend: str = "auto",
    timeout: float | None = None,
    device: int | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    transport: str = "auto",
    profile: str | os.PathLike[str] | GroupProfile | None = None,
) -> Communicator:
    """The communicator of all ranks that the launcher started (one rank, if none did).

    On the host the transport is MPI if the program runs under it; otherwise wan, which encrypts, on several machines
    with a token (QCCL_TOKEN_FILE); otherwise UCX, or else PyTorch's gloo. The logger "qccl" says at level INFO which
    one, and why.

    Args:
        backend: "host", "cuda", or "auto": CUDA where it can be used and each machine has a GPU for each of its ranks,
            or where a ``device`` is given; otherwise the host. The ranks decide together.
        timeout: seconds until a collective that does not finish raises CollectiveTimeout; None means 60 on the host and
            600 on CUDA, where they count from a call's begin on the device. The set-up has 60 if it is None.
        device: GPU of this rank; None means the one with the rank's number on its machine.
        rank: number of this process. ``rank``, ``size`` and ``address`` are for processes that no launcher started.
        size: number of processes.
        address: "host:port", a free port on the machine of rank 0.
        transport: "mpi", "ucx", "wan" or "gloo", for host memory; "auto" means QCCL_TRANSPORT, or the choice described
            above.
        profile: the group's profile, by which ``codec="auto"`` and ``algorithm="auto"`` decide: a file that
            ``comm.profile().save()`` wrote, or what profile() returned. None means the file that QCCL_PROFILE names;
            without it, calls with ``codec="auto"`` are measured when they come.

    Raises:
        ArgumentError: a value is not allowed; the profile is another group's; MPI has another number of ranks than the
            launcher; or this is a single rank although the environment, torch.distributed, jax.distributed or mpi4py
            says that there are more.
        MismatchError: the ranks passed different backends, or have different profiles. If only some have one, a later
            call raises it.
        CollectiveTimeout: not every rank called init() in time.
        EngineError: the backend cannot be used on this machine, or the ranks have no transport in common; the message
            says why.
    """
    setup_timeout(timeout)  # raises, before anything is opened
    loaded = _profile(profile)
    if backend not in ("auto", "host", "cuda"):
        raise ArgumentError(f'backend {backend!r} does not exist; there are "auto", "host" and "cuda"')
    if backend == "host" and device is not None:
        raise ArgumentError(f"device={device!r} was given, but the host backend has no devices; leave it out")
    device = None if device is None else integer(device, "device")
    must = backend == "cuda" or device is not None
    wanted = wanted_transport(transport)
    meeting = _given(rank, size, address) or _find_meeting(detect(), wanted)
    comm = _communicator(meeting, wanted, backend, device, timeout, must=must)
    if loaded is not None:
        try:
            comm._adopt(loaded)
        except BaseException as error:
            comm.abort(str(error))
            comm.close()
            raise
    return comm


def _communicator(
    meeting: Meeting | None, wanted: str | None, backend: str, device: int | None, timeout: float | None, *, must: bool
) -> Communicator:
    """The ranks of the meeting, or of MPI; ``must``: on their GPUs."""
    from qccl.communicator import Communicator

    setup = setup_timeout(timeout)
    if meeting is None:
        return _by_mpi(backend, device, timeout, must=must)
    with contextlib.closing(meeting):
        offers = _offers(meeting, "cuda" if must else backend, wanted, setup)
        comm = None if backend == "host" else _on_gpus(meeting, offers, device, timeout)
        return comm or Communicator._from_transport(connect_by(meeting, offers, setup), timeout=timeout)


def _profile(given: str | os.PathLike[str] | GroupProfile | None) -> GroupProfile | None:
    """The profile that the program or QCCL_PROFILE names. Raises ArgumentError for a file that is none."""
    from qccl.costs.group import GroupProfile

    given = given or os.environ.get("QCCL_PROFILE") or None
    if given is None or isinstance(given, GroupProfile):
        return given
    if not isinstance(given, str | os.PathLike):
        raise ArgumentError(f"profile must be a file's path, or what comm.profile() returned, not {given!r}")
    try:
        return GroupProfile.load(given)
    except OSError as error:
        raise ArgumentError(
            f"the profile {os.fspath(given)!r} cannot be read ({error.strerror}); give a file that "
            f"comm.profile().save() wrote, or leave out profile= and QCCL_PROFILE"
        ) from error


def join(address: str, timeout: float = 60.0) -> Communicator:
    """The communicator of a group that this process joins as a new rank, when the group calls Communicator.grow().

    Args:
        address: the ``address`` of a rank's communicator, as a whole: it has the job's secret.
        timeout: seconds until CollectiveTimeout is raised if the group does not grow, and the communicator's timeout.

    Raises ArgumentError if ``address`` is not one, or has no secret, unless QCCL_INSECURE=1 is set.
    """
    from qccl.communicator import Communicator

    timeout = timeout_of(timeout)
    found = JoinAddress.of(address)
    if found.secret is None and not is_insecure():
        raise ArgumentError(
            f"the address {place_text(found.place)!r} has no secret: pass all of a rank's comm.address, with the part "
            f"behind the #; for a group that has none, set QCCL_INSECURE=1"
        )
    transport, calls = connected_transport(found.transport).join(
        found.place, timeout, found.secret, encrypts=found.encrypts
    )
    return Communicator._joined(transport, calls, timeout)


def _given(rank: int | None, size: int | None, address: str | None) -> Meeting | None:
    """The ranks that the program names; None if it names none."""
    if rank is None and size is None and address is None:
        return None

    place = host_and_port(address)
    if rank is None or size is None or place is None:
        raise ArgumentError(
            f'rank={rank!r}, size={size!r}, address={address!r}: give all three, the address as "host:port" of a free '
            f"port on the machine of rank 0"
        )
    rank, size = integer(rank, "rank"), integer(size, "size")
    if not 0 <= rank < size:
        raise ArgumentError(f"rank {rank} of {size} ranks does not exist; ranks are 0 to size - 1")
    return of_address("qccl.init()", rank, size, place)


def _find_meeting(launcher: Launcher | None, wanted: str | None) -> Meeting | None:
    """How the ranks find each other; None: by MPI. Raises ArgumentError where two sources say different sizes."""
    if launcher is not None and launcher.size > 1:
        for name, size, _ in frameworks():
            if size not in (1, launcher.size):
                raise ArgumentError(f"{launcher.name} started {launcher.size} ranks, but {name} has {size}")
        if launcher.name == "sbatch":
            check_size(launcher, 1)  # raises: a batch script runs once
        return None if uses_mpi(launcher, wanted) else of_launcher(launcher)
    for name, size, _ in frameworks():
        if size > 1 and name == "torch.distributed":
            return of_torch()
        if size > 1 and name == "jax.distributed":
            return of_jax()
    check_alone()
    return alone()


def has_mpi(launcher: Launcher, wanted: str | None) -> bool:
    """Whether MPI carries the bytes: it is ``wanted``, or mpi4py is there and the launcher is one of MPI's."""
    if wanted:
        return wanted == "mpi"
    if launcher.name in ("torchrun", "Kubernetes") or (launcher.name == "srun" and "MASTER_ADDR" in os.environ):
        return False
    return importlib.util.find_spec("mpi4py") is not None


def uses_mpi(launcher: Launcher, wanted: str | None) -> bool:
    """Whether MPI brings the ranks together, after it was started where srun has started the ranks.

    srun starts programs of every MPI library, and does not know whether the library fits. If MPI then does not know the
    ranks, they use another transport. Otherwise as has_mpi(), which looks only at the environment.
    """
    if wanted or not has_mpi(launcher, wanted) or not is_of_srun(launcher):
        return has_mpi(launcher, wanted)
    try:
        from qccl.transports.mpi import world_size

        if world_size() == launcher.size:
            return True
        reason = remedy(launcher)
    except (ImportError, RuntimeError) as error:  # mpi4py finds no library
        reason = str(error).partition("\n")[0]
    if obstacle("ucx") and obstacle("gloo"):
        return True  # MPI's error says what to do
    _log.info(
        "rank %d of %d goes on without MPI, which does not know srun's ranks: %s", launcher.rank, launcher.size, reason
    )
    return False


def _by_mpi(backend: str, device: int | None, timeout: float | None, *, must: bool) -> Communicator:
    """The ranks of MPI's world: on GPUs if all have one, otherwise on the host."""
    from qccl.communicator import Communicator
    from qccl.transports.mpi import MpiTransport

    setup = setup_timeout(timeout)
    transport = MpiTransport.world(setup)
    launcher = detect()
    assert launcher is not None  # _find_meeting()
    check_size(launcher, transport.size)
    if backend != "host":
        kind, text = _verdict(transport.allgather(_note(must, "" if must else _too_few(transport.local_size)), setup))
        if kind == _MIXED:
            transport.close()
            raise MismatchError(text)
        if kind == _YES:
            return Communicator._over(transport, device, timeout)
    trusted = f"; {TRUSTED_NETWORK}" if len(set(transport.nodes)) > 1 else ""
    who = transport.rank, transport.size
    _log.info("rank %d of %d uses the transport mpi: %s started it%s", *who, launcher.name, trusted)
    return Communicator._from_transport(transport, timeout=timeout)


def _offers(meeting: Meeting, backend: str, wanted: str | None, setup: float) -> list[Offer]:
    """Collective: what all ranks bring, with the backend that each was asked for. Raises MismatchError if they differ.

    Whether this rank has a GPU at all, and the offers of transports, are one message: without GPUs no other is needed.
    """
    no_gpu = _too_few(1) if backend == "auto" else ""
    if meeting.size == 1:
        return [Offer(host=socket.gethostname(), backend=backend, no_gpu=no_gpu)]
    own = offer_of(meeting, wanted)._replace(host=socket.gethostname(), backend=backend, no_gpu=no_gpu)
    offers = gather_offers(meeting, own, setup)
    for rank, offer in enumerate(offers):
        if offer.backend != offers[0].backend:
            raise MismatchError(
                f"rank {rank} called init() with {_asked(offer)}, and rank 0 with {_asked(offers[0])}; all ranks must "
                f"be given the same"
            )
    return offers


def _asked(offer: Offer) -> str:
    return f"backend={offer.backend!r}{' or a device' if offer.backend == 'cuda' else ''}"


def _on_gpus(
    meeting: Meeting, offers: Sequence[Offer], device: int | None, timeout: float | None
) -> Communicator | None:
    """The ranks on their GPUs; None: not all have one, and they were not asked for GPUs.

    Each says what keeps it from a GPU, so that all do the same.
    """
    from qccl.communicator import Communicator
    from qccl.cuda.nccl import agreed_id

    if any(offer.no_gpu for offer in offers):
        return None
    setup = setup_timeout(timeout)
    hosts, must = [offer.host for offer in offers], offers[0].backend == "cuda"
    here = hosts[meeting.rank]
    chosen, reason = None, ""
    try:
        reason = "" if must else _too_few(hosts.count(here))
        if not reason:
            chosen = pick_device(device, hosts[: meeting.rank].count(here) if meeting.name else None)
    except QcclError as error:
        if meeting.size == 1:
            raise
        reason = str(error).partition("\n")[0]
    kind, text = _verdict(meeting.gather(_note(must, reason), setup))
    if kind == _YES:
        unique_id = agreed_id(meeting.rank, lambda note: meeting.gather(note, setup))
        return Communicator(unique_id, meeting.rank, meeting.size, timeout=timeout, device=chosen)
    if must:
        raise EngineError(text)
    return None


def _too_few(ranks: int) -> str:
    """Why this machine has no GPU for each of its ranks; nothing where it has."""
    count = device_count()
    return "" if count >= ranks else f"its machine has {count} usable GPUs for {ranks} ranks"


def _note(must: bool, reason: str) -> bytes:
    """What a rank brings: whether it was asked for GPUs, and what keeps it from one."""
    return (b"!" if must else b"?") + reason.encode()


def _verdict(notes: Sequence[bytes]) -> tuple[bytes, str]:
    """What follows from all ranks' notes, and why."""
    must = [rank for rank, note in enumerate(notes) if note[:1] == b"!"]
    if 0 < len(must) < len(notes):
        other = next(rank for rank in range(len(notes)) if rank not in must)
        return _MIXED, (
            f'rank {must[0]} called init() with backend="cuda" or a device, and rank {other} with backend="auto"; all '
            f"ranks must be given the same"
        )
    for rank, note in enumerate(notes):
        if note[1:]:
            return _NO, f"rank {rank}: {printable(note[1:])}"
    return _YES, ""
