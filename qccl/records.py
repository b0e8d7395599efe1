"""What a rank's last calls were, as a record that ``qccl-bench explain`` reads (docs/howto/hangs.md).

``Communicator.record()`` makes one. With QCCL_RECORDS set to a folder every rank writes its record there when a call
fails, and when the process gets the signal SIGUSR1.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from qccl.engine.records import STATES, CallRecord, TransferRecord
from qccl.errors import ArgumentError
from qccl.files import writing

__all__ = ["FOLDER", "CallRecord", "GroupRecord", "Measured", "TransferRecord", "read_record", "watch_signal"]
__all__ += ["write_record"]

_LOG = logging.getLogger(__name__)

#: the environment variable that names the folder
FOLDER = "QCCL_RECORDS"
#: of the files; they change with it
FORMAT = 2
#: no record of 1,024 calls is longer
_MOST_BYTES = 256 << 20
#: no number in a record is larger
_MOST = 1 << 64
_MOST_RANKS = 1 << 20
#: calls of a record, and how many of them may be calls of a measurement that has not ended
_CALLS, _MEASURED_CALLS = 1024, 32


@dataclass(frozen=True)
class GroupRecord:
    """One rank's last calls in one group.

    Attributes:
        group: name of the group, the same on its ranks.
        rank, size: in the group.
        host, pid: of the process.
        reason: why the record was made; an error's text, for example.
        written: when, in seconds since 1970, as all times of the calls.
        calls: from the oldest on.
    """

    group: str
    rank: int
    size: int
    host: str
    pid: int
    reason: str
    written: float
    calls: tuple[CallRecord, ...]

    @classmethod
    def of(cls, group: str, rank: int, size: int, calls: list[CallRecord], reason: str) -> GroupRecord:
        """The record of this process, whose calls have times of time.monotonic()."""
        now = time.time()
        shift = now - time.monotonic()
        own = tuple(_shifted(call, shift) for call in calls)
        return cls(group, rank, size, socket.gethostname(), os.getpid(), reason, now, own)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, given: Any) -> GroupRecord:
        """Of what as_dict() returned. Raises ArgumentError for anything else."""
        try:
            if given.pop("format") != FORMAT:
                raise ValueError("another version of qccl wrote it")
            calls = tuple(_call(each) for each in _list(given.pop("calls")))
            record = _checked(cls, {**given, "calls": calls})
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise ArgumentError(f"this is no record of a rank ({error})") from error
        if not 0 <= record.rank < record.size <= _MOST_RANKS:
            raise ArgumentError(f"this is no record of a rank (rank {record.rank} of {record.size})")
        if any(call.sequence >= later.sequence for call, later in pairwise(calls)):
            raise ArgumentError("this is no record of a rank (its calls are not in the order of their numbers)")
        return record


class Measured:
    """Keeps the calls of a measurement (measuring.py) apart in a rank's records: they would displace the program's.

    The call by which the measurement began stands for all of it. The last measured calls are in the records as long as
    the measurement has not ended, and stay there if it failed: they tell where it hung.
    """

    def __init__(self, before: list[CallRecord], first: int) -> None:
        """``before``: the records so far; ``first``: the number of the first measured call."""
        self._before, self._first = before, first
        self._end: int | None = None

    def end(self, number: int) -> None:
        """The measurement has ended well; ``number`` is that of the next call."""
        now = time.monotonic()
        self._before[-1:] = [dataclasses.replace(began, ended=now) for began in self._before[-1:]]
        self._end = number

    def records(self, found: list[CallRecord]) -> list[CallRecord]:
        """The last calls, with ``found`` of the engine, which has measured calls, too."""
        after = [call for call in found if call.sequence >= (self._first if self._end is None else self._end)]
        if self._end is None:
            after = after[-_MEASURED_CALLS:]
        return [*self._before, *after][-_CALLS:]


def write_record(record: GroupRecord, folder: str) -> None:
    """Write it to a file of the folder; a failure is logged."""
    name = "".join(c if c.isalnum() else "-" for c in record.group)
    path = Path(folder) / f"{name}-rank-{record.rank}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path) as file:
            file.write(json.dumps(record.as_dict()).encode())
    except OSError as error:
        _LOG.warning("rank %d could not write its record to %s: %s", record.rank, path, error)


def read_record(path: str | os.PathLike[str]) -> GroupRecord:
    """Raises ArgumentError, which names the file, for a file that is no record; OSError if it cannot be read."""
    with open(path, "rb") as file:
        content = file.read(_MOST_BYTES + 1)
    try:
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        given = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{os.fspath(path)} is no record of a rank ({error})") from error
    try:
        return GroupRecord.from_dict(given)
    except ArgumentError as error:
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


def _call(given: Any) -> CallRecord:
    transfers = tuple(_checked(TransferRecord, each) for each in _list(given.pop("transfers")))
    missing = tuple(_list(given.pop("missing")))
    if not all(type(rank) is int and 0 <= rank < _MOST_RANKS for rank in missing):
        raise ValueError("missing ranks that are no numbers of ranks")
    if given["state"] not in STATES:
        raise ValueError(f"the state {given['state']!r:.100}")
    return _checked(CallRecord, {**given, "transfers": transfers, "missing": missing})


#: what a field's value may be, by its type as it is written
_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "bool": (bool,),
    "float": (float, int),
    "float | None": (float, int, type(None)),
}


_T = TypeVar("_T", GroupRecord, CallRecord, TransferRecord)


def _checked(kind: type[_T], values: dict[str, Any]) -> _T:
    """An object of a dataclass, whose simple fields have values of their types, and no infinite numbers or NaN."""
    for field in dataclasses.fields(kind):
        allowed, value = _TYPES.get(str(field.type)), values[field.name]
        is_number = isinstance(value, (int, float))
        if allowed and (type(value) not in allowed or (is_number and not -_MOST <= value <= _MOST)):
            raise ValueError(f"{field.name} is {value!r:.100}")
    return kind(**values)


def _list(given: Any) -> list[Any]:
    if not isinstance(given, list):
        raise ValueError(f"{given!r:.100} is no list")
    return given
