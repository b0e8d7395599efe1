"""``qccl-bench explain``: finds the rank that the others wait for, from the records of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import click

from qccl.base.errors import ArgumentError
from qccl.bench.verdict import findings, names
from qccl.meeting.strangers import printable
from qccl.observe.records import GroupRecord, read_record

__all__ = ["explain", "explained"]

#: seconds within which the ranks of one run usually write their records
_ONE_RUN_SECONDS = 600.0


@click.command(short_help="Say from the ranks' records who is behind, in which call, and why.")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
def explain(files: Sequence[str]) -> None:
    """Say from the ranks' records FILES who is behind, in which call, and why.

    Ranks write records if QCCL_RECORDS names a folder: when a call fails, and when they get the signal SIGUSR1.
    """
    try:
        groups = _groups(files)
    except (ArgumentError, OSError) as error:
        raise click.ClickException(printable(str(error))) from error
    for (name, size), records in groups.items():
        click.echo(f"{name}: records of {names(sorted(records))} of {size}")
        for sentence in explained(records):
            click.echo(f"  {sentence}")


def explained(records: dict[int, GroupRecord]) -> Iterator[str]:
    """Yield sentences that say who is behind, in which call and why, and the ranks' errors, from records by rank."""
    for finding in findings(records):
        yield finding.text
    newest = max(record.written for record in records.values())
    for rank, record in sorted(records.items()):
        if (older := newest - record.written) > _ONE_RUN_SECONDS:
            yield f"rank {rank}'s record is {older:,.0f} s older than the newest: is it of an earlier run?"
    for rank, record in sorted(records.items()):
        if record.reason:
            yield f"rank {rank} wrote its record because: {printable(record.reason)}"


def _groups(files: Sequence[str]) -> dict[tuple[str, int], dict[int, GroupRecord]]:
    """Sort records by group with its size, and by rank; if a rank has two, the later one is taken.

    Groups with the same name and different sizes belong to different runs.
    """
    groups: dict[tuple[str, int], dict[int, GroupRecord]] = defaultdict(dict)
    for path in files:
        record = read_record(path)
        group = groups[printable(record.group), record.size]
        before = group.setdefault(record.rank, record)
        if before.written < record.written:
            group[record.rank] = record
    return groups
