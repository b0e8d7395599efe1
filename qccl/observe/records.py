"""Records of a rank's last calls, which ``qccl-bench explain`` reads (docs/howto/hangs.md).

``Communicator.record()`` makes one. With QCCL_RECORDS set to a folder every rank writes its record there when a call
fails, and when the process gets the signal SIGUSR1.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from qccl.base.conversion import converted
from qccl.base.errors import ArgumentError, PeerLost, QcclError
from qccl.base.files import read_file, writing
from qccl.base.machine_name import machine_name
from qccl.base.scalars import MOST_RANKS
from qccl.observe.call_records import CallRecord, State, TransferRecord

__all__ = ["FOLDER", "CallRecord", "GroupRecord", "Measured", "TransferRecord", "read_record", "watch_signal"]
__all__ += ["write_record"]

_LOG = logging.getLogger(__name__)

#: the environment variable that names the folder
FOLDER = "QCCL_RECORDS"
#: version of the files' format
FORMAT = 2
#: most bytes of a file; a record of 1,024 calls is shorter
_MOST_BYTES = 256 << 20
#: most calls of a record, and most calls among them of a measurement that has not ended
_CALLS, _MEASURED_CALLS = 1024, 32


@dataclass(frozen=True)
class GroupRecord:
    """One rank's last calls in one group.

    Attributes:
        group: name of the group, the same on its ranks.
        rank, size: number of the rank in the group, and number of all.
        host, pid: machine and process of the rank.
        reason: why the record was made; for example the text of the group's failure.
        written: time of the record in seconds since 1970, like all times of the calls.
        calls: the calls, the oldest first.
        error: the type of that failure, such as "PeerLost"; empty for another reason.
        lost: the rank on which the group has ended according to that failure, or None.
    """

    group: str
    rank: int
    size: int
    host: str
    pid: int
    reason: str
    written: float
    calls: tuple[CallRecord, ...]
    error: str = ""
    lost: int | None = None

    @classmethod
    def of(cls, group: str, rank: int, size: int, calls: list[CallRecord], reason: str | QcclError) -> GroupRecord:
        """The record of this process, whose calls have times of time.monotonic()."""
        now = time.time()
        shift = now - time.monotonic()
        own = tuple(_shifted(call, shift) for call in calls)
        error = type(reason).__name__ if isinstance(reason, QcclError) else ""
        lost = reason.rank if isinstance(reason, PeerLost) else None
        return cls(group, rank, size, machine_name(), os.getpid(), str(reason), now, own, error, lost)

    def as_dict(self) -> dict[str, Any]:
        """The record as a dict for JSON."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, given: Any) -> GroupRecord:
        """The record whose as_dict() is given. Raises ArgumentError for anything else."""
        try:
            given = (
                {"error": "", "lost": None} | given if isinstance(given, dict) else given
            )  # earlier files lack these
            converted(given, _allowed())
            record: GroupRecord = converted(given, cls)
            if not max(record.rank, record.lost or 0) < record.size <= MOST_RANKS:
                raise ValueError(f"rank {record.rank} of {record.size}, which has lost {record.lost}")
            if any(call.sequence >= later.sequence for call, later in pairwise(record.calls)):
                raise ValueError("its calls are not in the order of their numbers")
        except ValueError as error:
            raise ArgumentError(f"this is not a record of a rank, or of another version of qccl ({error})") from error
        return record


class Measured:
    """Keeps the calls of a measurement (measuring.py) apart, so that they do not displace the program's records.

    The first call of the measurement represents all of it. Records show the last measured calls while the measurement
    runs, and after it has failed, because they tell where it hung.
    """

    def __init__(self, before: list[CallRecord], first: int) -> None:
        """``before``: the records so far; ``first``: the number of the first measured call."""
        self._before, self._first = before, first
        self._end: int | None = None

    def end(self, number: int) -> None:
        """End a measurement that succeeded; ``number``: the number of the next call."""
        now = time.monotonic()
        self._before[-1:] = [dataclasses.replace(began, ended=now) for began in self._before[-1:]]
        self._end = number

    def records(self, found: list[CallRecord]) -> list[CallRecord]:
        """The records of the last calls; ``found``: the engine's records, with measured calls among them."""
        after = [call for call in found if call.sequence >= (self._first if self._end is None else self._end)]
        if self._end is None:
            after = after[-_MEASURED_CALLS:]
        return [*self._before, *after][-_CALLS:]


def write_record(record: GroupRecord, folder: str) -> None:
    """Write a record to a file in the folder; log a failure."""
    name = "".join(c if c.isalnum() else "-" for c in record.group)
    path = Path(folder) / f"{name}-rank-{record.rank}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path) as file:
            file.write(json.dumps(record.as_dict()).encode())
    except OSError as error:
        _LOG.warning("rank %d could not write its record to %s: %s", record.rank, path, error)


def read_record(path: str | os.PathLike[str]) -> GroupRecord:
    """Read the record in a file, or in a pipe, to its end.

    Raises ArgumentError, with the file's name, if the file is not a record; OSError if it cannot be read.
    """
    content = read_file(path, _MOST_BYTES, pipes=True)
    try:
        given = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{os.fspath(path)} is not a record of a rank ({error})") from error
    try:
        return GroupRecord.from_dict(given)
    except (ArgumentError, RecursionError) as error:
        raise ArgumentError(f"{os.fspath(path)}: {error}") from error


def watch_signal(write_all: Callable[[], None]) -> None:
    """Call ``write_all`` when SIGUSR1 comes, if QCCL_RECORDS is set and the program has no handler of its own."""
    if not os.environ.get(FOLDER) or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, lambda number, frame: write_all())


def _shifted(call: CallRecord, shift: float) -> CallRecord:
    transfers = tuple(dataclasses.replace(each, since=each.since + shift) for each in call.transfers)
    begun, ended = (time and time + shift for time in (call.begun, call.ended))
    return dataclasses.replace(call, begun=begun, ended=ended, transfers=transfers)


def _allowed() -> Any:
    """The type of a record in a file, for msgspec: exactly the fields of the dataclasses, with limits of numbers."""
    from msgspec import Meta, defstruct

    natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    rank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
    seconds = Annotated[float, Meta(ge=-(2.0**64), le=2.0**64)]
    types: dict[str, Any] = {"int": natural, "str": str, "bool": bool, "float": seconds, "float | None": seconds | None}
    types |= {"State": State, "int | None": rank | None, "tuple[int, ...]": tuple[rank, ...]}
    for kind in (TransferRecord, CallRecord, GroupRecord):
        fields = [(field.name, types[str(field.type)]) for field in dataclasses.fields(kind)]
        fields += [("format", Literal[FORMAT])] if kind is GroupRecord else []
        struct = defstruct(kind.__name__, fields, forbid_unknown_fields=True)
        types[f"tuple[{kind.__name__}, ...]"] = tuple[struct, ...]  # type: ignore[valid-type]
    return struct
