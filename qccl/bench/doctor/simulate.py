"""``qccl-bench simulate``: a collective's times on machines that you do not have, from its schedules."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click

from qccl.base import __version__
from qccl.base.dtypes import FLOAT32
from qccl.base.errors import ArgumentError, CodecError
from qccl.base.scalars import parse_seconds
from qccl.base.trace import write_trace
from qccl.bench.doctor.simulated import Machines, Processor, Simulated, simulated
from qccl.bench.doctor.speed import measure_speed
from qccl.bench.options import DTYPES, KINDS, OPS, SweepOptions, columns_help
from qccl.bench.params import (
    AT_LEAST_0,
    AT_LEAST_1,
    Link,
    PositiveNumber,
    codec_list,
    codec_of,
    list_of,
    option,
    output_file,
    parse_rate,
    parse_size,
    write_json,
)
from qccl.bench.sweep import table
from qccl.bench.sweep.calls import cases
from qccl.bench.sweep.collective import check_sizes
from qccl.bench.sweep.measure import Row, Side
from qccl.bench.sweep.report import row_fields, side_fields
from qccl.codecs import Codec, NoCodec

__all__ = ["simulate"]

PLAIN = NoCodec().spec()
#: the collectives without further parameters
_COLLECTIVES = [name for name in KINDS if name not in ("hierarchical_allreduce", "allreduce_coalesced")]
#: most ranks; a row of the table then takes half a minute
_MOST_RANKS = 1 << 14
#: elements whose encoding is timed: less than a second for all usual codecs
_TIMED = 256 << 10

_NODES_HELP = "Number of nodes; the ranks of a node, which share its link, follow each other [--ranks]."
_LINK_HELP = "Rate of each node's link, in each direction, e.g. 25gbit or 3GBps [10gbit]."
_INTRA_HELP = "Rate of each rank inside its node, e.g. 300GBps [5GBps]."
_DELAY_HELP = "The time of a packet from one node to another, e.g. 5us, beyond the delay of one room."
_CODEC_HELP = "Codecs to compare, e.g. minmax8,none [minmax8,minmax4]."
_ALGORITHM_HELP = "Algorithms to compare, e.g. auto,two_round; on several nodes auto takes two levels [auto]."
_ENCODE_HELP = "Values of float32 that a processor encodes in a second, e.g. 4GBps, with all codecs [measured here]."
_DECODE_HELP = "Values of float32 that a processor decodes in a second."
_PROCESSORS_HELP = "Processors of each rank, at most 1; 0.5 if two ranks share one [1]."
_JSON_HELP = "Write the figures."
_TRACE_HELP = "Write a timeline of one call (largest size, first codec) for Perfetto: the ranks of the first node."


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


@click.command(epilog=columns_help(), short_help="Compute a collective's times on machines that you do not have.")
@click.argument("collective", type=click.Choice(_COLLECTIVES))
@option("--ranks", click.IntRange(1, _MOST_RANKS), "N", "Ranks of the job [2].", 2)
@option("--nodes", AT_LEAST_1, "N", _NODES_HELP)
@option("--link", parse_rate, "RATE", _LINK_HELP, "10gbit")
@option("--intra", parse_rate, "RATE", _INTRA_HELP, "5GBps")
@option("--delay", parse_seconds, "TIME", _DELAY_HELP)
@option("--processors", PositiveNumber(1), "N", _PROCESSORS_HELP, 1.0)
@option("-b --minbytes", parse_size, "SIZE", "Smallest size [64K].", "64K")
@option("-e --maxbytes", parse_size, "SIZE", "Largest size [64M].", "64M")
@option("-f --stepfactor", click.IntRange(min=2), "N", "Factor to the next [4].", 4)
@option("-o --op ops", list_of(OPS), "LIST", f"{', '.join(OPS)} or all [sum].", "sum")
@option("-d --datatype dtypes", list_of(tuple(DTYPES)), "LIST", f"{', '.join(DTYPES)} or all [float].", "float")
@option("-r --root", AT_LEAST_0, "RANK", "Root of a broadcast or reduce [0].", 0)
@option("--codec codecs", codec_list, "LIST", _CODEC_HELP, "minmax8,minmax4")
@option("--algorithm algorithms", _names, "LIST", _ALGORITHM_HELP, "auto")
@option("--chunk", AT_LEAST_1, "N", "Elements of a chunk, at most.")
@option("--encode", parse_rate, "RATE", _ENCODE_HELP)
@option("--decode", parse_rate, "RATE", _DECODE_HELP)
@option("-J --json path", output_file, "FILE", _JSON_HELP)
@option("--trace", output_file, "FILE", _TRACE_HELP)
def simulate(nodes: int | None, link: Link, intra: Link, path: str | None, trace: str | None, **given: Any) -> None:
    """Compute the times of a COLLECTIVE on machines that you do not have, with each codec, from its schedules.

    For example: qccl-bench simulate allreduce --ranks 1024 --nodes 128 --link 25gbit --intra 300GBps --delay 5us

    The table is like the table of the command with the collective's name, which measures calls. Here no calls run:
    their schedules are timed with the given rates, and with the costs of UCX over TCP between processors, not of GPUs
    and NCCL. Encoding and decoding are measured on one core of this machine.

    A time is the time of one call, which all ranks begin together. wire, floor and line describe the busiest link.
    """
    rates = given.pop("encode"), given.pop("decode")
    size = _node_size(given["ranks"], nodes)
    machines = Machines(
        ranks=given.pop("ranks"),
        processors=given.pop("processors"),
        inter=link,
        intra=intra.rate,
        delay=given.pop("delay") or 0.0,
        node_size=size,
    )
    algorithms = given.pop("algorithms")
    options = SweepOptions(**given, args=("qccl-bench", *sys.argv[1:]), json=path, trace=trace)
    _check(options, machines, algorithms, rates)
    run = _Run(options, machines, algorithms, _processor(options.codecs, rates))
    try:
        for line in run.lines():
            click.echo(line)
    except (ArgumentError, CodecError) as error:
        raise click.UsageError(str(error)) from error
    if path is not None:
        write_json(path, run.document())
    if trace is not None and run.traced is not None:
        write_trace(trace, run.traced.timeline.events)
    for written in (path, trace):
        if written is not None:
            click.echo(f"# Wrote {written}")


def _check(
    options: SweepOptions,
    machines: Machines,
    algorithms: Sequence[str],
    rates: tuple[Link | None, Link | None],
) -> None:
    """Raise UsageError for options that contradict each other."""
    check_sizes(options)
    kind = KINDS[options.collective]
    for each in algorithms:
        if each not in (allowed := ("auto", *kind.algorithms)):
            raise click.UsageError(
                f"--algorithm {each}: {options.collective} has {', '.join(allowed)}; give some of them"
            )
    if (rates[0] is None) != (rates[1] is None):
        raise click.UsageError("--encode and --decode go together; give both, or none to measure the codecs here")


def _node_size(ranks: int, nodes: int | None) -> int:
    """The ranks of a node; the last one may have fewer."""
    size = 1 if nodes is None else -(-ranks // nodes)
    if nodes not in (None, number := -(-ranks // size)):
        raise click.UsageError(f"--nodes {nodes}: {ranks} ranks fill {number} nodes of {size}; give --nodes {number}")
    return size


def _processor(codecs: Sequence[str], rates: tuple[Link | None, Link | None]) -> Processor:
    """The speeds of the codecs: given, or measured on one core of this machine."""
    speeds: dict[str, tuple[float, float]] = {}
    for spec in codecs:
        name = codec_of(spec).spec()
        if name in speeds or name == PLAIN:
            continue
        encode, decode = rates
        if encode is not None and decode is not None:
            speeds[name] = FLOAT32.itemsize / encode.rate, FLOAT32.itemsize / decode.rate
        else:
            measured = measure_speed(codec_of(spec), _TIMED)
            speeds[name] = measured.encode, measured.decode
    return Processor(speeds=speeds)


def _seconds(row: Row) -> float:
    return row.out_of_place.seconds


class _Run:
    """All calls of a command, size by size.

    Attributes:
        pairs: the rows of the codecs, each with the row of the plain call.
        traced: the last call with the first codec, in the end the call of the largest size.
    """

    def __init__(
        self, options: SweepOptions, machines: Machines, algorithms: Sequence[str], processor: Processor
    ) -> None:
        self._options, self._machines, self._algorithms, self._processor = options, machines, algorithms, processor
        self.pairs: list[tuple[Row, Row | None]] = []
        self.traced: Simulated | None = None

    def lines(self) -> Iterator[str]:
        """Yield the table, each row as soon as it is computed, and the footer."""
        o, machines = self._options, self._machines
        yield from _head(o, machines, self._processor)
        for case in cases(o, machines.ranks):
            plain = None
            if PLAIN not in o.codecs:
                plain = min((self._row(case, NoCodec(), each, PLAIN) for each in self._algorithms), key=_seconds)
                yield table.row(plain, None, machines.ranks, machines.inter)
            rows = list(self._rows(case))
            if plain is None:
                plain = min((row for row in rows if row.codec.split(",")[0] == PLAIN), key=_seconds)
            for row in rows:
                self.pairs.append((row, plain))
                yield table.row(row, plain, machines.ranks, machines.inter)
        yield from table.footer(table.totals(self.pairs, machines.ranks), PLAIN)

    def _every_row(self) -> list[Row]:
        """The rows of the plain calls, then all other rows."""
        plain = dict.fromkeys(pair[1] for pair in self.pairs if pair[1] is not None)
        return list(dict.fromkeys((*plain, *(row for row, _ in self.pairs))))

    def _rows(self, case: Any) -> Iterator[Row]:
        specs = self._options.codecs
        for spec in specs:
            for algorithm in self._algorithms:
                name = spec if len(self._algorithms) == 1 else f"{spec}, {algorithm}"
                is_first = spec == specs[0] and algorithm == self._algorithms[0]
                yield self._row(case, codec_of(spec), algorithm, name, is_traced=is_first)

    def _row(self, case: Any, codec: Codec, algorithm: str, name: str, *, is_traced: bool = False) -> Row:
        call = simulated(case, codec, algorithm, self._options.chunk, self._machines, self._processor)
        if is_traced:
            self.traced = call
        side = Side((call.timeline.total,), None, None, None)
        return Row(case, name, call.algorithm, call.wire_nbytes, side, None)

    def document(self) -> dict[str, Any]:
        """The figures, for --json."""
        rows = self._every_row()
        return {
            "qccl_version": __version__,
            "args": list(self._options.args),
            "machines": asdict(self._machines),
            "processor": asdict(self._processor),
            "results": [row_fields(row) | side_fields(row, row.out_of_place, self._machines.ranks) for row in rows],
        }


def _head(options: SweepOptions, machines: Machines, processor: Processor) -> Iterator[str]:
    m = machines
    number, size = -(-m.ranks // m.node_size), min(m.node_size, m.ranks)
    nodes = (
        f"{number} node{'s' * (number > 1)} of {'at most ' * (m.ranks % size > 0)}{size} ranks, " if size > 1 else ""
    )
    each = "rank" if m.node_size == 1 else "node"
    yield (
        f"# qccl-bench {__version__} simulate {options.collective}: computed for UCX over TCP, without GPUs; "
        f"nothing was run; plain: {PLAIN}"
    )
    yield (
        f"# ranks {m.ranks}: {nodes}{m.inter.name} per {each}, delay {m.delay * 1e6:g} us, "
        f"{m.intra / 1e9:g} GB/s inside a node, {m.processors:g} processors per rank"
    )
    for name, (encode, decode) in processor.speeds.items():
        yield f"# {name}: a processor encodes {4e-9 / encode:.3g} and decodes {4e-9 / decode:.3g} GB/s of float32"
    yield "#"
    yield from table.header(PLAIN, lab=True)
