"""qccl.init(): the communicator of the ranks that a launcher started (see launchers.py) or that the program names."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from qccl.base.errors import ArgumentError, EngineError, MismatchError, QcclError
from qccl.base.machine_name import machine_name
from qccl.base.removed import check_variables
from qccl.collectives.arguments import integer, setup_timeout, timeout_of
from qccl.engine.cuda.libraries import device_count, pick_device
from qccl.meeting.join_address import JoinAddress
from qccl.meeting.launchers import Launcher, check_alone, check_rank, check_size, detect, frameworks, is_of_srun, remedy
from qccl.meeting.meetings import Meeting, alone, of_address, of_jax, of_launcher, of_torch
from qccl.meeting.secret import is_insecure
from qccl.meeting.sockets import host_and_port, place_text
from qccl.meeting.strangers import printable
from qccl.transports.choice import TRUSTED_NETWORK, Offer, has_other_than_mpi, refusal_of_mpi, wanted_transport
from qccl.transports.connect import connect, connected_transport, gather_offers

if TYPE_CHECKING:
    from qccl.communicator.communicator import Communicator
    from qccl.communicator.profile import GroupProfile

__all__ = ["init", "join", "uses_mpi"]

_log = logging.getLogger("qccl")


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
    """Make the communicator of all ranks that the launcher started (one rank without a launcher).

    On the host the transport is wan, which encrypts, on several machines with a token (QCCL_TOKEN_FILE); otherwise MPI
    if the program runs under MPI and has no token; otherwise UCX, or else PyTorch's gloo. The logger "qccl" says at
    level INFO which transport is used, and why.

    Args:
        backend: "host", "cuda", or "auto": CUDA if it can be used and each machine has a GPU for each of its ranks,
            or if a ``device`` is given; otherwise the host. The ranks decide together.
        timeout: seconds until a collective that does not finish raises CollectiveTimeout; None means 60 on the host and
            600 on CUDA, counted from a call's begin on the device. Without a timeout the set-up may take 60.
        device: GPU of this rank; None means the one with the rank's number on its machine.
        rank: number of this process. ``rank``, ``size`` and ``address`` are for processes that no launcher started.
        size: number of processes.
        address: "host:port", a free port on the machine of rank 0.
        transport: "mpi", "ucx", "wan" or "gloo", for host memory; "auto" means QCCL_TRANSPORT, or the choice described
            above.
        profile: the group's profile, by which ``codec="auto"`` and ``algorithm="auto"`` decide: a file that
            ``comm.profile().save()`` wrote, or the result of profile(). None means the file that QCCL_PROFILE names;
            without a profile, calls with ``codec="auto"`` are measured at the first call of a kind.

    Raises:
        ArgumentError: a value is not allowed; the profile is another group's; MPI has another number of ranks than the
            launcher; a launcher's numbers are out of range, or contradict those of another launcher; or this is a
            single rank although a variable, torch.distributed, jax.distributed or mpi4py says that there are more.
        MismatchError: the ranks passed different backends, or have different profiles. If only some have a profile, a
            later call raises it.
        CollectiveTimeout: not every rank called init() in time.
        EngineError: the backend cannot be used on this machine, or the ranks have no transport in common; the message
            says why.
    """
    check_variables()
    setup_timeout(timeout)  # raises, before anything is opened
    loaded = _profile(profile)
    if backend not in ("auto", "host", "cuda"):
        raise ArgumentError(f'backend {backend!r} does not exist; there are "auto", "host" and "cuda"')
    if backend == "host" and device is not None:
        raise ArgumentError(f"device={device!r} was given, but the host backend has no devices; leave it out")
    device = None if device is None else integer(device, "device")
    backend = backend if device is None else "cuda"
    wanted = wanted_transport(transport)
    meeting = _given(rank, size, address) or _find_meeting(wanted)
    comm = _communicator(meeting, wanted, backend, device, timeout)
    if loaded is not None:
        try:
            comm._adopt(loaded)
        except BaseException as error:
            comm.abort(str(error))
            comm.close()
            raise
    return comm


def _communicator(
    meeting: Meeting | None, wanted: str | None, backend: str, device: int | None, timeout: float | None
) -> Communicator:
    """Make the communicator of the meeting's ranks, or of MPI's."""
    from qccl.communicator.communicator import Communicator

    setup = setup_timeout(timeout)
    if meeting is None:
        return _by_mpi(backend, device, timeout)
    with contextlib.closing(meeting):
        offers = _offers(meeting, backend, wanted, setup)
        comm = None if backend == "host" else _on_gpus(meeting, offers, device, timeout)
        return comm or Communicator._from_transport(connect(meeting, setup, offers=offers), timeout=timeout)


def _profile(given: str | os.PathLike[str] | GroupProfile | None) -> GroupProfile | None:
    """Load the profile that the program or QCCL_PROFILE names. Raises ArgumentError for another file."""
    from qccl.communicator.profile import GroupProfile

    if given is None:
        given = os.environ.get("QCCL_PROFILE") or None
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
    """Join a group as a new rank, when the group calls Communicator.grow(). Returns its communicator.

    Args:
        address: the ``address`` of a rank's communicator, as a whole: it has the job's secret.
        timeout: seconds until CollectiveTimeout is raised if the group does not grow, and the communicator's timeout.

    Raises ArgumentError if ``address`` is not an address, or has no secret (unless QCCL_INSECURE=1 is set).
    """
    check_variables()
    from qccl.communicator.communicator import Communicator

    timeout = timeout_of(timeout)
    found = JoinAddress.of(address)
    if found.secret is None and not is_insecure():
        raise ArgumentError(
            f"the address {place_text(found.place)!r} has no secret: pass all of a rank's comm.address, with the part "
            f"behind the #; for a group without a secret set QCCL_INSECURE=1"
        )
    transport, calls = connected_transport(found.transport).join(
        found.place, timeout, found.secret, encrypts=found.encrypts
    )
    try:
        return Communicator._joined(transport, calls, timeout)
    except BaseException:
        transport.close()
        raise


def _given(rank: int | None, size: int | None, address: str | None) -> Meeting | None:
    """The meeting of the ranks that the program names; None if it names no ranks."""
    if rank is None and size is None and address is None:
        return None

    place = host_and_port(address)
    if rank is None or size is None or place is None:
        raise ArgumentError(
            f'rank={rank!r}, size={size!r}, address={address!r}: give all three, the address as "host:port" of a free '
            f"port on the machine of rank 0"
        )
    rank, size = integer(rank, "rank"), integer(size, "size")
    check_rank(rank, size)
    return of_address("qccl.init()", rank, size, place)


def _find_meeting(wanted: str | None) -> Meeting | None:
    """Find out how the ranks meet; None: by MPI. Raises ArgumentError if two sources give different sizes."""
    joined = {name: size for name, size, _ in frameworks() if size > 1}
    launcher = detect(allows_halves=bool(joined))
    if launcher is not None and launcher.size > 1 and not (launcher.processes == 1 and joined):
        for name, size in joined.items():
            if size != launcher.size:
                raise ArgumentError(f"{launcher.name} started {launcher.size} ranks, but {name} has {size}")
        if launcher.name == "sbatch":
            check_size(launcher, 1)  # raises: a batch script runs once
        return None if uses_mpi(launcher, wanted) else of_launcher(launcher)
    if "torch.distributed" in joined:
        return of_torch()
    if "jax.distributed" in joined:
        return of_jax()
    check_alone()
    return alone()


def uses_mpi(launcher: Launcher, wanted: str | None) -> bool:
    """Whether MPI brings the ranks together: it is the transport, can be loaded, and under srun knows the ranks.

    srun starts ranks for any MPI library, also if the library does not support srun. Ranks that MPI does not know, and
    ranks whose mpi4py finds no library, use another transport.
    """
    if refusal_of_mpi(launcher, wanted):
        return False
    if wanted:
        return True
    who = launcher.rank, launcher.size
    try:
        mpi = _load_mpi()
    except EngineError as error:
        if not has_other_than_mpi(launcher):
            raise
        _log.warning("rank %d of %d goes on without MPI: %s", *who, error)
        return False
    if not is_of_srun(launcher) or mpi.world_size() == launcher.size or not has_other_than_mpi(launcher):
        return True
    _log.info("rank %d of %d goes on without MPI, which does not know srun's ranks: %s", *who, remedy(launcher))
    return False


def _load_mpi() -> ModuleType:
    """Import qccl.transports.mpi. Raises EngineError if mpi4py is missing, or finds no library."""
    try:
        return importlib.import_module("qccl.transports.mpi")
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise EngineError(
            f"mpi4py cannot be used ({reason}); install qccl[mpi], or mpi4py alone if the machine has its own MPI, "
            f"or allow another transport, such as UCX (QCCL_TRANSPORT=ucx)"
        ) from error


def _by_mpi(backend: str, device: int | None, timeout: float | None) -> Communicator:
    """Make the communicator of MPI's world: on GPUs if all ranks have one, otherwise on the host."""
    from qccl.communicator.communicator import Communicator

    setup = setup_timeout(timeout)
    transport = _load_mpi().MpiTransport.world(setup)
    launcher = detect()
    assert launcher is not None  # _find_meeting()
    check_size(launcher, transport.size)
    own = f"{backend} {_too_few(transport.local_size) if backend == 'auto' else ''}"
    notes = [note.partition(b" ") for note in transport.allgather(own.encode(), setup)]
    try:
        _check_asked([printable(asked) for asked, _, _ in notes])
    except MismatchError:
        transport.close()
        raise
    if backend != "host" and not _first_reason([reason for _, _, reason in notes]):
        return Communicator._over(transport, device, timeout)
    trusted = f"; {TRUSTED_NETWORK}" if len(set(transport.nodes)) > 1 else ""
    who = transport.rank, transport.size
    _log.info("rank %d of %d uses the transport mpi: %s started it%s", *who, launcher.name, trusted)
    return Communicator._from_transport(transport, timeout=timeout)


def _offers(meeting: Meeting, backend: str, wanted: str | None, setup: float) -> list[Offer]:
    """Collective: exchange all ranks' offers of transports and backends. Raises MismatchError if backends differ.

    The same message says whether this rank has a GPU: without GPUs no second message is needed.
    """
    no_gpu = _too_few(1) if backend == "auto" else ""
    offers = gather_offers(meeting, setup, wanted, host=machine_name(), backend=backend, no_gpu=no_gpu)
    _check_asked([offer.backend for offer in offers])
    return offers


def _check_asked(backends: Sequence[str]) -> None:
    """Raise MismatchError if the ranks were asked for different backends."""
    for rank, each in enumerate(backends):
        if each != backends[0]:
            this, first = (f"backend={x!r}{' or a device' if x == 'cuda' else ''}" for x in (each, backends[0]))
            raise MismatchError(
                f"rank {rank} called init() with {this}, and rank 0 with {first}; all ranks must be given the same"
            )


def _on_gpus(
    meeting: Meeting, offers: Sequence[Offer], device: int | None, timeout: float | None
) -> Communicator | None:
    """Connect the ranks on their GPUs. Returns None if some rank has none and backend="auto" permits the host.

    Each rank sends its reason if it has no GPU, so that all ranks do the same.
    """
    from qccl.communicator.communicator import Communicator
    from qccl.engine.cuda.nccl import agreed_id

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
    text = _first_reason(meeting.gather(reason.encode(errors="backslashreplace"), setup))
    if not text:
        unique_id = agreed_id(meeting.rank, lambda note: meeting.gather(note, setup))
        return Communicator(unique_id, meeting.rank, meeting.size, timeout=timeout, device=chosen)
    if must:
        raise EngineError(text)
    return None


def _too_few(ranks: int) -> str:
    """Say that this machine has too few GPUs for its ranks; an empty text if it has enough."""
    count = device_count()
    return "" if count >= ranks else f"its machine has {count} usable GPUs for {ranks} ranks"


def _first_reason(notes: Sequence[bytes]) -> str:
    """The first rank that has no GPU, with its reason; an empty text if all ranks have one."""
    return next((f"rank {rank}: {printable(note)}" for rank, note in enumerate(notes) if note), "")
