"""What ranks and sizes need of this machine, and what it has: checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click

from qccl.bench.kinds import KINDS
from qccl.bench.options import DTYPES, Options
from qccl.bench.params import codec_of
from qccl.codecs.feedback import state_nbytes
from qccl.dtypes import get

__all__ = ["available_nbytes", "check_memory", "needed_nbytes", "shared_processors"]

_MIB = 1 << 20
#: memory of a rank without arrays, less than measured (UCX 34 MiB, MPI 26, gloo with PyTorch 186): a rank that is a
#: thread takes less; where the transport is not known the least counts
_RANK_NBYTES = {"ucx": 30 * _MIB, "mpi": 24 * _MIB, "gloo": 150 * _MIB, "loopback": 1 * _MIB}
#: ranks that share a processor without a remark
_PATIENCE = 8


def needed_nbytes(options: Options, ranks: int, here: int, transport: str | None) -> int:
    """The memory, in bytes, that ``here`` of ``ranks`` ranks need at the largest size, rather too low than too high.

    Each has its input and output, wire slots of a chunked call (taken as half the vector), and for codecs with state
    the old and the new state. On GPUs only the processes count.
    """
    each = _RANK_NBYTES.get(transport or "", min(_RANK_NBYTES["mpi"], _RANK_NBYTES["ucx"]))
    if options.backend == "host":
        kind, size = KINDS[options.collective], options.maxbytes
        part = size // ranks
        each += (size if kind.whole_input else part) + (size if kind.whole_output else part) + size // 2
        itemsize = min(get(DTYPES[name]).itemsize for name in options.dtypes)
        states = max(state_nbytes(codec_of(spec)) for spec in options.codecs)
        each += 2 * states * size // itemsize
    return each * here


def check_memory(options: Options, ranks: int, here: int, transport: str | None) -> None:
    """Raise UsageError if ``here`` ranks on this machine need more memory than it has."""
    needed, available = needed_nbytes(options, ranks, here, transport), available_nbytes()
    if available is not None and needed > available:
        raise click.UsageError(
            f"{here} ranks with vectors of up to {_size(options.maxbytes)} need about {_size(needed)} of memory on "
            f"this machine, {_size(needed // here)} each, and {_size(available)} are available; give a smaller -e, or "
            f"fewer ranks"
        )


def shared_processors(ranks: int) -> str | None:
    """A remark for runs in which very many ranks share the processors; None for others."""
    processors = len(os.sched_getaffinity(0))
    if ranks <= _PATIENCE * processors:
        return None
    return (
        f"{ranks} ranks share {processors} processor{'s' if processors > 1 else ''}; starting them takes long, and the "
        f"times show the processors, not the network"
    )


def available_nbytes() -> int | None:
    """The memory in bytes that new processes can have: the machine's, or of a control group; None: unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return min([free, *_left_in_control_groups()])


def _left_in_control_groups(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """The bytes that this process's control group (version 2) and those above it may still take."""
    try:
        (line,) = [line for line in (proc / "self/cgroup").read_text().splitlines() if line.startswith("0::")]
    except (OSError, ValueError):
        return
    folder = root / line.removeprefix("0::/")
    for each in (folder, *folder.parents):
        if root not in (each, *each.parents):
            return
        try:
            limit, used = ((each / f"memory.{name}").read_text().strip() for name in ("max", "current"))
            reclaimable = dict(line.split() for line in (each / "memory.stat").read_text().splitlines())
        except OSError:  # the topmost group has none of these
            continue
        if limit != "max":
            yield max(0, int(limit) - int(used) + int(reclaimable.get("inactive_file", 0)))


def _size(nbytes: int) -> str:
    """Such as 1.5 GiB."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}" if nbytes < 1000 * unit else f"{nbytes / unit:.0f} {name}"
    return f"{nbytes} bytes"
