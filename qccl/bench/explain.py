"""``qccl-bench explain``: which rank the others wait for, from the records of all ranks."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from qccl.bench.torch_record import as_torch
from qccl.errors import ArgumentError
from qccl.records import CallRecord, GroupRecord, TransferRecord, read_record
from qccl.transports.strangers import printable

__all__ = ["explain", "explained"]


@click.command(short_help="Say from the ranks' records who is behind, in which call, and why.")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--torch", "folder", type=click.Path(file_okay=False), help="Also write files that torchfrtrace reads.")
def explain(files: Sequence[str], folder: str | None) -> None:
    """Say from the ranks' records FILES who is behind, in which call, and why.

    Ranks write records where QCCL_RECORDS names a folder: when a call fails, and when they get the signal SIGUSR1.
    """
    try:
        groups = _groups(files)
    except (ArgumentError, OSError) as error:
        raise click.ClickException(str(error)) from error
    for name, records in groups.items():
        click.echo(f"{name}: records of {_ranks(records)} of {max(records.values(), key=_size).size}")
        for sentence in explained(records):
            click.echo(f"  {sentence}")
        if folder is not None:
            _write_for_torch(Path(folder), records)


def explained(records: dict[int, GroupRecord]) -> Iterator[str]:
    """Of a group's records by rank: who is behind, in which call and why, and what the ranks said."""
    yield from _verdict(records)
    for rank, record in sorted(records.items()):
        if record.reason:
            yield f"rank {rank} wrote its record because: {printable(record.reason)}"


def _verdict(records: dict[int, GroupRecord]) -> Iterator[str]:
    stuck = _oldest_call(records)
    absent = set(range(max(record.size for record in records.values()))) - records.keys()
    if stuck is None:
        yield f"no call is under way{_last_calls(records)}" if not absent else _without_calls(records, absent)
        return
    calls = {rank: call for rank, record in records.items() if (call := _find(record, stuck)) is not None}
    text = f"call {stuck}, {printable(next(iter(calls.values())).text)}"
    waiting = sorted(rank for rank, call in calls.items() if call.state != "ended")
    since = max(_waited(records[rank], calls[rank]) for rank in waiting)
    missing = {rank for rank in waiting for rank in calls[rank].missing}
    late = sorted(rank for rank in records if rank not in calls)
    for rank in late:
        yield (
            f"rank {rank} has not made {text}, in which {_names(waiting)} waited for {since:.1f} s: "
            f"{_doing(records[rank])}"
        )
    lost = sorted(absent & (missing | {each.peer for rank in waiting for each in calls[rank].transfers}))
    for rank in lost:
        yield (
            f"rank {rank} has left no record, and {_names(waiting)} waited {since:.1f} s for it in {text}: it has "
            f"ended, was stopped, or {_unreachable(rank, missing)}"
        )
    if late or lost:
        return
    computing = [rank for rank in waiting if calls[rank].computes]
    for rank in computing:
        yield f"rank {rank} computes its part of {text}, which {_names(waiting)} began {since:.1f} s before"
    if not computing:
        yield from _transfers(text, {rank: calls[rank] for rank in waiting}, records)


def _transfers(text: str, calls: dict[int, CallRecord], records: dict[int, GroupRecord]) -> Iterator[str]:
    """All ranks have made the call: the transfers under way for which both sides wait, and the ranks in between."""
    receives = [(rank, each) for rank, call in calls.items() for each in call.transfers if not each.is_send]
    sends = {(rank, each.peer): each for rank, call in calls.items() for each in call.transfers if each.is_send}
    found = False
    for rank, each in sorted(receives, key=lambda pair: pair[1].since):
        send = sends.get((each.peer, rank))
        if send is None and each.peer in calls:
            continue  # that rank has not begun to send: it waits itself
        found = True
        yield f"{_transfer(each.peer, rank, each)} of {text} has made no progress for {_since(records[rank], each)}"
    if not found:
        for (rank, peer), each in sorted(sends.items(), key=lambda pair: pair[1].since):
            yield f"{_transfer(rank, peer, each)} of {text} has made no progress for {_since(records[rank], each)}"
            found = True
    if not found:
        for rank in calls:
            yield f"rank {rank} has made its part of {text}, and has not ended it"


def _transfer(source: int, target: int, transfer: TransferRecord) -> str:
    return f"the transfer of {transfer.nbytes:,} bytes from rank {source} to rank {target}"


def _since(record: GroupRecord, transfer: TransferRecord) -> str:
    return f"{max(0.0, record.written - transfer.since):.1f} s"


def _doing(record: GroupRecord) -> str:
    """What a rank did that has not made a call."""
    if not record.calls:
        return "it has made none so far"
    last = record.calls[-1]
    if last.state != "ended" or last.ended is None:
        return f"it was in call {last.sequence}, {printable(last.text)}"
    return (
        f"it ended call {last.sequence}, {printable(last.text)}, {record.written - last.ended:.1f} s before, and did "
        "something else since"
    )


def _without_calls(records: dict[int, GroupRecord], absent: set[int]) -> str:
    return f"{_names(sorted(absent))} left no record, and no call is under way{_last_calls(records)}"


def _last_calls(records: dict[int, GroupRecord]) -> str:
    last = {rank: record.calls[-1].sequence for rank, record in records.items() if record.calls}
    return (
        "; the last ones were " + ", ".join(f"{n} on rank {rank}" for rank, n in sorted(last.items())) if last else ""
    )


def _unreachable(rank: int, missing: set[int]) -> str:
    return "had not made the call" if rank in missing else "cannot be reached"


def _oldest_call(records: dict[int, GroupRecord]) -> int | None:
    """The number of the oldest call that a rank has begun and not ended."""
    numbers = [call.sequence for record in records.values() for call in record.calls if call.state != "ended"]
    return min(numbers, default=None)


def _find(record: GroupRecord, sequence: int) -> CallRecord | None:
    return next((call for call in record.calls if call.sequence == sequence), None)


def _waited(record: GroupRecord, call: CallRecord) -> float:
    return 0.0 if call.begun is None else max(0.0, record.written - call.begun)


def _groups(files: Sequence[str]) -> dict[str, dict[int, GroupRecord]]:
    """The records by group and rank; of two of one rank the later one."""
    groups: dict[str, dict[int, GroupRecord]] = defaultdict(dict)
    for path in files:
        record = read_record(path)
        before = groups[printable(record.group)].setdefault(record.rank, record)
        if before.written < record.written:
            groups[printable(record.group)][record.rank] = record
    return groups


def _write_for_torch(folder: Path, records: dict[int, GroupRecord]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, record in records.items():
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(as_torch(record)))
    click.echo(f"  torchfrtrace {folder} --prefix rank_  # with PyTorch, shows these records")


def _size(record: GroupRecord) -> int:
    return record.size


def _ranks(records: dict[int, GroupRecord]) -> str:
    return _names(sorted(records))


def _names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if ranks else "no rank"
