"""The table of ``qccl-bench``: nccl-tests' columns and footers, and further ones for compression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qccl.bench.options import KINDS, NCCL_NAMES
from qccl.bench.params import Link
from qccl.bench.sweep.measure import Row, Side

__all__ = [
    *("Totals", "algbw", "busbw", "floor_seconds", "footer", "header", "line_share", "row", "speedups", "totals"),
]

#: minimum share of the sent bytes that a link's limiter must count
_CROSSED = 0.999


def algbw(r: Row, side: Side) -> float:
    """GB/s of uncompressed values: size divided by time (nccl-tests' definition)."""
    return r.case.nbytes / side.seconds / 1e9 if side.seconds else 0.0


def busbw(r: Row, side: Side, ranks: int) -> float:
    """algbw times the collective's factor, such as 2(n-1)/n: the rate that each link would need without compression."""
    return algbw(r, side) * KINDS[r.case.kind].factor(ranks)


def floor_seconds(r: Row, link: Link) -> float:
    """The seconds that the bytes of one call take at the link's rate."""
    return r.wire_nbytes / link.rate


def line_share(r: Row, side: Side, link: Link) -> float | None:
    """floor_seconds() divided by the time; None if the link's burst may be more than 2% of the bytes."""
    if r.wire_nbytes < 50 * link.burst:
        return None
    return floor_seconds(r, link) / side.seconds


def speedups(r: Row, plain: Row | None) -> tuple[float | None, float | None]:
    """Speed-ups over the plain all-reduce, out of place and in place, from the medians; None: not compared."""
    if plain is None:
        return None, None
    out = plain.out_of_place.seconds / r.out_of_place.seconds
    return out, None if r.in_place is None or plain.in_place is None else plain.in_place.seconds / r.in_place.seconds


def header(plain: str, *, lab: bool) -> list[str]:
    """The lines above the columns."""
    side = f"{'time':>7} {'algbw':>5} {'busbw':>5} {'#wrong':>6}"
    units = f"{'(us)':>7} {'GB/s':>5} {'GB/s':>5} {'':>6}"
    floor = (f" {'floor':>7} {'line':>5}", f" {'(us)':>7} {'(%)':>5}") if lab else ("", "")
    return [
        f"#{'':39} {'out-of-place':^26} {'in-place':^26} {'':17} {'vs ' + plain:>13} {'spread':>9}",
        f"#{'size':>9} {'count':>9} {'type':>8} {'redop':>5} {'root':>4} {side} {side}"
        f" {'wire':>9} {'L2 err':>7} {'out':>6} {'in':>6} {'out':>4} {'in':>4}{floor[0]}  codec",
        f"#{'(B)':>9} {'(elements)':>9} {'':18} {units} {units} {'(B/rank)':>9} {'':7} {'':13} {'(%)':>4} {'(%)':>4}"
        f"{floor[1]}",
    ]


def row(r: Row, plain: Row | None, ranks: int, link: Link | None) -> str:
    """One line; ``plain`` is the row of the plain all-reduce, or None."""
    sides = " ".join(_side(r, side, ranks) for side in (r.out_of_place, r.in_place))
    error = "N/A" if r.out_of_place.error is None else f"{r.out_of_place.error:.1e}"
    faster = " ".join(f"{'-' if s is None else f'{s:.2f}x':>6}" for s in speedups(r, plain))
    spreads = (None if side is None else side.spread for side in (r.out_of_place, r.in_place))
    spread = " ".join(f"{'-' if each is None else f'{each * 100:.0f}':>4}" for each in spreads)
    floor = ""
    if link is not None:
        share = line_share(r, r.out_of_place, link)
        floor = f" {_digits(floor_seconds(r, link) * 1e6, 7)} {'-' if share is None else f'{share * 100:.1f}':>5}"
    name = NCCL_NAMES[r.case.dtype.name]
    return (
        f"{r.case.nbytes:>10} {r.case.count:>9} {name:>8} {_op(r):>5} {r.case.root:>4} {sides}"
        f" {r.wire_nbytes:>9} {error:>7} {faster} {spread}{floor}  {r.codec}"
    )


@dataclass(frozen=True)
class Totals:
    """The figures of the footers.

    Attributes:
        wrong: elements out of bounds in all rows; None without a check.
        bandwidth: mean busbw in GB/s of all rows of codecs, both modes.
        by_codec: the mean busbw for each codec.
        speedups: minimum and maximum speed-up over the plain all-reduce, by codec; the slower mode of a row counts.
        spread: the maximum over all rows, including the plain all-reduce; None with one round.
        crossed: minimum share of the sent bytes that the link's limiter counted; None outside the lab.
    """

    wrong: int | None
    bandwidth: float
    by_codec: dict[str, float]
    speedups: dict[str, tuple[float, float]]
    spread: float | None
    crossed: float | None

    @property
    def okay(self) -> bool:
        """Whether no element was wrong and no traffic bypassed the limiter."""
        return not self.wrong and (self.crossed is None or self.crossed >= _CROSSED)


def totals(pairs: Sequence[tuple[Row, Row | None]], ranks: int) -> Totals:
    """Summarise the rows of the codecs, each with the row of the plain all-reduce."""
    rows = [r for r, _ in pairs]
    plain = list(dict.fromkeys(p for _, p in pairs if p is not None))
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
        _speedups_by_codec(pairs),
        max((side.spread for side in sides if side.spread is not None), default=None),
        min(crossed, default=None),
    )


def _speedups_by_codec(pairs: Sequence[tuple[Row, Row | None]]) -> dict[str, tuple[float, float]]:
    found: dict[str, list[float]] = {}
    for r, plain in pairs:
        if modes := [speedup for speedup in speedups(r, plain) if speedup is not None]:
            found.setdefault(r.codec, []).append(min(modes))
    return {codec: (min(each), max(each)) for codec, each in found.items()}


def footer(t: Totals, plain: str) -> list[str]:
    """The lines below the table."""
    wrong = "N/A" if t.wrong is None else f"{t.wrong} {'FAILED' if t.wrong else 'OK'}"
    lines = [f"# {'Out of bounds values':<20} : {wrong}", f"# {'Avg bus bandwidth':<20} : {t.bandwidth:g}"]
    if len(t.by_codec) > 1:
        lines += [f"#   {codec:<18} : {bandwidth:g}" for codec, bandwidth in t.by_codec.items()]
    if t.speedups:
        lines.append(f"# {'Speed-up over ' + plain:<20} : of the slower of out of place and in place")
        lines += [f"#   {codec:<18} : {_range(*ends)}x" for codec, ends in t.speedups.items()]
    if t.spread is not None:
        lines.append(f"# {'Spread of the rounds':<20} : at most {t.spread * 100:.0f}% of the median")
    if t.crossed is not None:
        verdict = "OK" if t.crossed >= _CROSSED else "FAILED: traffic bypassed the link"
        lines.append(f"# {'Crossed the link':<20} : at least {t.crossed * 100:.1f}% of the bytes sent {verdict}")
    return [*lines, "#"]


def _range(*ends: float) -> str:
    return " to ".join(dict.fromkeys(f"{end:.2f}" for end in ends))


def _op(r: Row) -> str:
    return r.case.op if KINDS[r.case.kind].combines else "none"


def _side(r: Row, side: Side | None, ranks: int) -> str:
    if side is None:
        return f"{'N/A':>7} {'N/A':>5} {'N/A':>5} {'N/A':>6}"
    wrong = "N/A" if side.wrong is None else str(side.wrong)
    bandwidths = f"{_digits(algbw(r, side), 5)} {_digits(busbw(r, side, ranks), 5)}"
    return f"{_digits(side.seconds * 1e6, 7)} {bandwidths} {wrong:>6}"


def _digits(value: float, width: int) -> str:
    """Format a number with as many decimals as fit into ``width``, at most 2 (3 below 1)."""
    for decimals in (3, 2, 1) if value < 1 else (2, 1):
        text = f"{value:>{width}.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:>{width}.0f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
