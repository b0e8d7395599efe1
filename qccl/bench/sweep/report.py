"""The JSON file of a run: the fields of nccl-tests' version 3, and further fields for compression."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from qccl.base import __version__
from qccl.base.machine_name import machine_name
from qccl.bench.lab.namespaces import congestion_control
from qccl.bench.options import NCCL_NAMES, SweepOptions
from qccl.bench.params import Link
from qccl.bench.sweep import table
from qccl.bench.sweep.measure import Row, Side

__all__ = ["RankDevice", "Report", "row_fields", "side_fields"]

#: prefixes of the recorded variables, which affect speed; others may be private
_PREFIXES = ("FI_", "MPICH_", "MPIR_", "NCCL_", "OMPI_MCA_", "OMP_", "PMIX_MCA_", "QCCL_", "UCX_")


@dataclass(frozen=True)
class RankDevice:
    """The device of a rank; ``device`` and ``device_hex`` are a GPU's number and PCI address (host: -1 and "")."""

    rank: int
    pid: int
    hostname: str
    device_info: str
    device: int = -1
    device_hex: str = ""

    @classmethod
    def of_this_process(cls, rank: int, info: str, device: int = -1, bus: str = "") -> RankDevice:
        """Make the device of the calling rank, with the name ``info``."""
        return cls(rank, os.getpid(), machine_name(), info, device, bus)


class Report:
    """Collects the rows of a run; ``document()`` is the JSON of the file.

    Attributes:
        devices: the device of each rank.
        transport: name and version of the transport's library.
        plain: name and version of the baseline's library; "none": qccl without compression.
        complete: whether the run has finished.
        errors: the errors that ended the run early.
    """

    def __init__(
        self, options: SweepOptions, devices: Sequence[RankDevice], transport: str, plain: str, link: Link | None
    ) -> None:
        self._options, self._link = options, link
        self.devices, self.transport, self.plain = devices, transport, plain
        self.complete = False
        self.errors: list[str] = []
        self._start, self._load = _now(), os.getloadavg()
        self._on_gpus = any(device.device >= 0 for device in devices)
        self._rows: list[tuple[Row, Row | None]] = []

    def add(self, row: Row, plain: Row | None) -> None:
        """Add a codec's row, with the row of the plain all-reduce of the same case."""
        self._rows.append((row, plain))

    def totals(self) -> table.Totals:
        """The figures of the footers."""
        return table.totals(self._rows, len(self.devices))

    def document(self) -> dict[str, Any]:
        """The whole report, for json.dump()."""
        t = self.totals()
        return {
            "version": 3,
            "start_time": self._start,
            "args": list(self._options.args),
            "env": [f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith(_PREFIXES)],
            "nccl_version": self.plain.removeprefix("nccl ") if self.plain.startswith("nccl ") else None,
            "qccl_version": __version__,
            "config": self._config(),
            "results": [self._result(row, plain) for row, plain in self._rows],
            "out_of_bounds": {"count": t.wrong, "okay": str(not t.wrong).lower()},
            "average_bus_bandwidth": {"bandwidth": t.bandwidth, "okay": "unchecked", "by_codec": t.by_codec},
            "speedup": {codec: {"least": ends[0], "greatest": ends[1]} for codec, ends in t.speedups.items()},
            "greatest_spread": t.spread,
            "crossed_link": t.crossed,
            "errors": self.errors,
            "complete": self.complete,
            "end_time": _now(),
        }

    def _config(self) -> dict[str, Any]:
        o = self._options
        step = {"step_bytes": o.stepbytes} if o.stepfactor is None else {"step_factor": o.stepfactor}
        return {
            "nthreads": 1,
            "ngpus": int(self._on_gpus),
            "minimum_bytes": o.minbytes,
            "maximum_bytes": o.maxbytes,
            **step,
            "warmup_iters": o.warmup_iters,
            "iterations": o.iters,
            "aggregated_iterations": 1,
            "validation": o.check,
            "average": o.average,
            "graph": o.cudagraph,
            "blocking_collectives": str(not self._on_gpus).lower(),
            "parallel_init": "false",
            "backend": "cuda" if self._on_gpus else "host",
            "transport": self.transport,
            "plain": self.plain,
            "timed": self._options.timed,
            "link": self._link_of_a_rank(),
            "ranks": len(self.devices),
            "load_average": self._load,
            "devices": [{"group": 0, **asdict(device)} for device in self.devices],
        }

    def _link_of_a_rank(self) -> dict[str, Any] | None:
        if self._link is None:
            return None
        name, rate = self._link.name, self._link.rate
        found = {"name": name, "bytes_per_second": rate, "congestion_control": congestion_control()}
        return found | self._options.network.to_json()

    def _result(self, row: Row, plain: Row | None) -> dict[str, Any]:
        result: dict[str, Any] = {
            **row_fields(row),
            "root": str(row.case.root),
            "out_of_place": self._side(row, row.out_of_place, None if plain is None else plain.out_of_place),
            "in_place": self._side(row, row.in_place, None if plain is None else plain.in_place),
            "actual_iterations": self._options.iters,
        }
        if self._link is not None:
            result["floor"] = table.floor_seconds(row, self._link) * 1e6
        return result

    def _side(self, row: Row, side: Side | None, plain: Side | None) -> dict[str, Any] | None:
        if side is None:
            return None
        result: dict[str, Any] = {
            **side_fields(row, side, len(self.devices)),
            "time_rounds": [seconds * 1e6 for seconds in side.rounds],
            "nwrong": side.wrong,
            "relative_l2_error": side.error,
        }
        if plain is not None:
            result |= {"plain_time": plain.seconds * 1e6, "plain_nwrong": plain.wrong}
            result["plain_time_rounds"] = [seconds * 1e6 for seconds in plain.rounds]
            result["speedup"] = plain.seconds / side.seconds
        if self._link is not None:
            result |= {"crossed": side.crossed, "line_share": table.line_share(row, side, self._link)}
        return result


def row_fields(row: Row) -> dict[str, Any]:
    """The call of a row, for a file."""
    case = row.case
    names = {"type": NCCL_NAMES[case.dtype.name], "redop": case.op, "codec": row.codec, "algorithm": row.algorithm}
    return {"size": case.nbytes, "count": case.count, **names, "wire_bytes": row.wire_nbytes}


def side_fields(row: Row, side: Side, ranks: int) -> dict[str, float]:
    """The time of a call in microseconds, and its rates in GB/s, for a file."""
    rates = {"alg_bw": table.algbw(row, side), "bus_bw": table.busbw(row, side, ranks)}
    return {"time": side.seconds * 1e6, **rates}


def _now() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S")
