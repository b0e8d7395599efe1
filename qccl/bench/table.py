"""The table of ``qccl-bench``: nccl-tests' columns and footers, and behind them what compression adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qccl.bench.kinds import KINDS
from qccl.bench.measure import Row, Side
from qccl.bench.options import NCCL_NAMES
from qccl.bench.sizes import Link

__all__ = ["Totals", "algbw", "busbw", "floor_seconds", "footer", "header", "line_share", "row", "totals"]

#: least share of the sent bytes that a link's limiter must have counted
_CROSSED = 0.999


def algbw(r: Row, side: Side) -> float:
    """GB/s of uncompressed values: the size over the time, as nccl-tests define it."""
    return r.case.nbytes / side.seconds / 1e9 if side.seconds else 0.0


def busbw(r: Row, side: Side, ranks: int) -> float:
    """The algbw times the collective's factor, as 2(n-1)/n: what each link would carry without compression."""
    return algbw(r, side) * KINDS[r.case.kind].factor(ranks)


def floor_seconds(r: Row, link: Link) -> float:
    """The time that the bytes of one call take at the link's rate."""
    return r.wire_nbytes / link.rate


def line_share(r: Row, side: Side, link: Link, iters: int) -> float | None:
    """The floor over the time; None where what passes in the link's burst would count for more than 2%."""
    if r.wire_nbytes * iters < 50 * link.burst:
        return None
    return floor_seconds(r, link) / side.seconds


def header(plain: str, *, lab: bool) -> list[str]:
    """The lines above the columns."""
    side = f"{'time':>7} {'algbw':>5} {'busbw':>5} {'#wrong':>6}"
    units = f"{'(us)':>7} {'GB/s':>5} {'GB/s':>5} {'':>6}"
    floor = (f" {'floor':>7} {'line':>5}", f" {'(us)':>7} {'(%)':>5}") if lab else ("", "")
    return [
        f"#{'':39} {'out-of-place':^26} {'in-place':^26}",
        f"#{'size':>9} {'count':>9} {'type':>8} {'redop':>5} {'root':>4} {side} {side}"
        f" {'wire':>9} {'L2 err':>7} {'vs ' + plain:>6}{floor[0]}  codec",
        f"#{'(B)':>9} {'(elements)':>9} {'':18} {units} {units} {'(B/rank)':>9} {'':14}{floor[1]}".rstrip(),
    ]


def row(r: Row, ranks: int, speedup: float | None, link: Link | None, iters: int) -> str:
    """One line."""
    sides = " ".join(_side(r, side, ranks) for side in (r.out_of_place, r.in_place))
    error = "N/A" if r.out_of_place.error is None else f"{r.out_of_place.error:.1e}"
    faster = "-" if speedup is None else f"{speedup:.2f}x"
    floor = ""
    if link is not None:
        share = line_share(r, r.out_of_place, link, iters)
        floor = f" {_digits(floor_seconds(r, link) * 1e6, 7)} {'-' if share is None else f'{share * 100:.1f}':>5}"
    name = NCCL_NAMES[r.case.dtype.name]
    return (
        f"{r.case.nbytes:>10} {r.case.count:>9} {name:>8} {_op(r):>5} {r.case.root:>4} {sides}"
        f" {r.wire_nbytes:>9} {error:>7} {faster:>6}{floor}  {r.codec}"
    )


@dataclass(frozen=True)
class Totals:
    """What the footers say.

    Attributes:
        wrong: elements out of bounds in all rows; None where nothing was checked.
        bandwidth: mean busbw in GB/s of all rows of codecs, both modes.
        by_codec: the same for each codec.
        crossed: least share of the sent bytes that the link's limiter counted; None outside the lab.
    """

    wrong: int | None
    bandwidth: float
    by_codec: dict[str, float]
    crossed: float | None

    @property
    def okay(self) -> bool:
        """Whether nothing was wrong, and nothing went past the limiter."""
        return not self.wrong and (self.crossed is None or self.crossed >= _CROSSED)


def totals(rows: Sequence[Row], plain: Sequence[Row], ranks: int) -> Totals:
    """Sum up the rows of the codecs and those of the plain all-reduce."""
    sides = [side for r in (*rows, *plain) for side in r.sides]
    checked = [side.wrong for side in sides if side.wrong is not None]
    crossed = [side.crossed for side in sides if side.crossed is not None]
    by_codec: dict[str, list[float]] = {}
    for r in rows:
        by_codec.setdefault(r.codec, []).extend(busbw(r, side, ranks) for side in r.sides)
    every = [b for bandwidths in by_codec.values() for b in bandwidths]
    return Totals(
        sum(checked) if checked else None,
        _mean(every),
        {codec: _mean(bandwidths) for codec, bandwidths in by_codec.items()},
        min(crossed, default=None),
    )


def footer(t: Totals, link: Link | None) -> list[str]:
    """The lines below the table."""
    wrong = "N/A" if t.wrong is None else f"{t.wrong} {'FAILED' if t.wrong else 'OK'}"
    lines = [f"# {'Out of bounds values':<20} : {wrong}", f"# {'Avg bus bandwidth':<20} : {t.bandwidth:g}"]
    if len(t.by_codec) > 1:
        lines += [f"#   {codec:<18} : {bandwidth:g}" for codec, bandwidth in t.by_codec.items()]
    if link is not None and t.crossed is not None:
        verdict = "OK" if t.crossed >= _CROSSED else "FAILED: traffic went past the link"
        lines.append(f"# {'Crossed the link':<20} : at least {t.crossed * 100:.1f}% of the bytes sent {verdict}")
    return [*lines, "#"]


def _op(r: Row) -> str:
    return r.case.op if KINDS[r.case.kind].combines else "none"


def _side(r: Row, side: Side | None, ranks: int) -> str:
    if side is None:
        return f"{'N/A':>7} {'N/A':>5} {'N/A':>5} {'N/A':>6}"
    wrong = "N/A" if side.wrong is None else str(side.wrong)
    bandwidths = f"{_digits(algbw(r, side), 5)} {_digits(busbw(r, side, ranks), 5)}"
    return f"{_digits(side.seconds * 1e6, 7)} {bandwidths} {wrong:>6}"


def _digits(value: float, width: int) -> str:
    """A number of at most 2 decimals (3 below 1), with as many as fit into ``width``."""
    for decimals in (3, 2, 1) if value < 1 else (2, 1):
        text = f"{value:>{width}.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:>{width}.0f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
