"""``qccl-bench explain``: which rank the others wait for, from the records of all ranks."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from qccl.bench.torch_record import as_torch
from qccl.bench.verdict import findings, names
from qccl.errors import ArgumentError
from qccl.records import GroupRecord, read_record
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
        click.echo(f"{name}: records of {names(sorted(records))} of {max(record.size for record in records.values())}")
        for sentence in explained(records):
            click.echo(f"  {sentence}")
        if folder is not None:
            _write_for_torch(Path(folder), records)


def explained(records: dict[int, GroupRecord]) -> Iterator[str]:
    """Of a group's records by rank: who is behind, in which call and why, and what the ranks said."""
    for finding in findings(records):
        yield finding.text
    for rank, record in sorted(records.items()):
        if record.reason:
            yield f"rank {rank} wrote its record because: {printable(record.reason)}"


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
