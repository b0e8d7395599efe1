"""The sweep that every rank of ``qccl-bench`` runs; rank 0 prints, and writes the files."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from qccl.base import __version__
from qccl.base.errors import QcclError
from qccl.base.trace import TraceEvent, write_trace
from qccl.bench.lab.lab import shaped_nbytes
from qccl.bench.lab.namespaces import congestion_control
from qccl.bench.options import KINDS, SweepOptions
from qccl.bench.params import codec_of, write_json
from qccl.bench.sweep import table
from qccl.bench.sweep.arrays import Arrays, arrays_of
from qccl.bench.sweep.calls import Case, PlainCall, QuantizedCall, Wiring, cases, parameters
from qccl.bench.sweep.data import gaussian
from qccl.bench.sweep.measure import Counts, measure
from qccl.bench.sweep.plain import baseline
from qccl.bench.sweep.report import RankDevice, Report
from qccl.codecs import Codec, NoCodec
from qccl.engine.cuda.libraries import nccl_version
from qccl.transports import ucx

if TYPE_CHECKING:
    from qccl.communicator.communicator import Communicator

__all__ = ["Sweep"]

#: explanations of SweepOptions.timed in the head of the table
_TIMED = {
    "method": "the communicator's method, as programs call it",
    "plan": "start and wait of a plan that was bound once",
    "graph": "replays of a captured plan",
}


class Sweep:
    """One run: ``run()`` measures all cases on all ranks, and returns whether all results were right.

    On rank 0 the lines of the table go to ``emit``.
    """

    def __init__(self, comm: Communicator, options: SweepOptions, emit: Callable[[str], None]) -> None:
        self._comm, self._options = comm, options
        self._emit = emit if comm.rank == 0 else _silent
        self._network = options.network
        self._link = self._network.rate
        self._kind = KINDS[options.collective]
        ranks, nodes = range(comm.size), options.nodes or comm.size
        on = tuple(rank % nodes for rank in ranks)
        self._wiring = Wiring(on, tuple(ranks) if options.link_per_rank else on)
        self._cases = list(cases(options, comm.size))
        self._codecs = [codec_of(spec) for spec in options.codecs]
        self._counts = Counts(options.iters, options.warmup_iters, options.check, options.average)
        self._plain = baseline(comm, options.plain) if self._kind.is_allreduce else str(comm.transport.name)
        self._arrays = arrays_of(comm, options.cudagraph)
        self._has_plain_call = self._kind.is_allreduce and self._plain not in options.codecs
        over, plain = _library(str(comm.transport.name)), _library(self._plain)
        self._report = Report(options, _devices(comm, self._arrays), over, plain, self._link)

    def run(self) -> bool:
        """Collective: measure all rows, write all files. Returns whether all was right and no bytes bypassed links."""
        try:
            return self._run()
        except QcclError as error:
            self._report.errors.append(f"{type(error).__name__}: {error}")
            self._save()
            raise

    def _run(self) -> bool:
        for line in self._head():
            self._emit(line)
        endless = self._options.run_cycles == 0
        for _ in itertools.count() if endless else range(self._options.run_cycles):
            for case in self._cases:
                self._measure_size(case)
        self._report.complete = True
        totals = self._report.totals()
        for line in table.footer(totals, self._plain):
            self._emit(line)
        self._write_files()
        return totals.okay

    def _measure_size(self, case: Case) -> None:
        """Measure the plain all-reduce and each codec, in turns."""
        plain_call = self._plain_call(case)
        calls = [self._call(case, codec) for codec in self._codecs]
        rows = measure(
            self._comm,
            calls if plain_call is None else [plain_call, *calls],
            self._counts,
            meter=self._meter if self._link else None,
            arrays=self._arrays,
        )
        plain = next((row for row in rows if row.codec == self._plain), None)
        if plain_call is not None:
            self._emit(table.row(rows.pop(0), plain, self._comm.size, self._link))
        for row in rows:
            self._report.add(row, plain)
            self._emit(table.row(row, plain, self._comm.size, self._link))
        self._save()

    def _call(self, case: Case, codec: Codec) -> QuantizedCall:
        o = self._options
        given = (self._comm, case, codec, o.algorithm, o.chunk, parameters(o, self._comm.nodes), self._wiring)
        return QuantizedCall(*given, as_plan=o.timed != "method")

    def _plain_call(self, case: Case) -> QuantizedCall | PlainCall | None:
        """Make the baseline; None if it is one of the codecs, or the library cannot reduce this type."""
        if not self._has_plain_call:
            return None
        if self._plain == "none":
            return self._call(case, NoCodec())
        call = PlainCall(self._comm, case, self._wiring, self._plain)
        return call if call.is_supported(self._arrays) else None

    def _meter(self) -> int:
        """The bytes that passed this rank's link; only the first rank behind a link counts them, others return 0."""
        first = self._wiring.links.index(self._wiring.links[self._comm.rank])
        if first != self._comm.rank:
            return 0
        return shaped_nbytes()

    def _head(self) -> Iterator[str]:
        o, report = self._options, self._report
        step = f"{o.stepbytes}(bytes)" if o.stepfactor is None else f"{o.stepfactor}(factor)"
        each = "rank" if o.nodes is None or o.link_per_rank else "node"
        where = f" link: {self._network.describe(each)}, TCP {congestion_control()}" if self._link else ""
        where += f" nodes: {o.nodes}" if o.nodes else ""
        yield f"# qccl-bench {__version__} {o.collective} over {report.transport}, plain: {report.plain}"
        yield (
            f"# ranks {self._comm.size} minBytes {o.minbytes} maxBytes {o.maxbytes} step: {step} "
            f"warmup iters: {o.warmup_iters} iters: {o.iters} validation: {o.check} algorithm: {o.algorithm}{where}"
        )
        yield f"# timed: {_TIMED[o.timed]}"
        load = " ".join(f"{minutes:.1f}" for minutes in os.getloadavg())
        yield f"# load average {load}, {os.cpu_count()} cores"
        yield "#"
        yield "# Using devices"
        for d in report.devices:
            yield f"#  Rank {d.rank:2d} Pid {d.pid:6d} on {d.hostname:>10s} {d.device_info}"
        yield "#"
        yield from table.header(self._plain, lab=self._link is not None)

    # -- files -------------------------------------------------------------------------------------------------------

    def _write_files(self) -> None:
        o = self._options
        if o.trace is not None:
            write_trace(o.trace, self._trace(), self._comm)
        if self._comm.rank != 0:
            return
        self._save()
        if o.trace is not None:
            self._emit(f"# Wrote {o.trace}")

    def _save(self) -> None:
        """Write all results so far, so that an error or Ctrl-C loses none."""
        if self._options.json is None or self._comm.rank != 0:
            return
        write_json(self._options.json, self._report.document())

    def _trace(self) -> list[TraceEvent]:
        """This rank's events of one more call, of the largest size with the first codec."""
        comm, case = self._comm, self._cases[-1]
        call = self._call(case, self._codecs[0])
        given, taken = call.counts(comm)
        x, y = self._arrays.empty(given, case.dtype), self._arrays.empty(taken, case.dtype)
        self._arrays.put(x, gaussian(comm.rank, 0, given, case.dtype, seed=0))
        plan = call.plan_on(x, y)
        events: list[TraceEvent] = []
        plan.start().synchronize()
        comm.barrier()
        plan.start(trace=events).synchronize()
        return events


def _silent(line: str) -> None:
    pass


def _devices(comm: Communicator, arrays: Arrays) -> list[RankDevice]:
    mine = RankDevice.of_this_process(comm.rank, *arrays.device())
    return [RankDevice(**json.loads(item)) for item in comm.allgather(json.dumps(asdict(mine)).encode())]


def _library(name: str) -> str:
    """Name a transport's or a baseline's library with its version, and its all-reduce's algorithm if one is set."""
    match name:
        case "nccl":
            return f"nccl {nccl_version()}"
        case "gloo":
            return f"gloo of PyTorch {importlib.metadata.version('torch')}"
        case "mpi":
            return _mpi_library()
        case "ucx":
            return f"UCX {ucx.version()}"
    return name


def _mpi_library() -> str:
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    chosen = {
        key: value for key, value in os.environ.items() if "ALLREDUCE" in key.upper() and "ALGORITHM" in key.upper()
    }
    return " ".join([name, ".".join(map(str, version)), *(f"{key}={value}" for key, value in chosen.items())])
