"""Explanations of the columns of ``qccl-bench``, for ``--help``; bench/README.md has the same list."""

from __future__ import annotations

import textwrap

__all__ = ["COLUMNS", "columns_help"]

#: by the columns' names in the table, in its order
COLUMNS = {
    "size": "bytes of the whole vector, uncompressed",
    "count": "number of elements",
    "type": "element type",
    "redop": "how the ranks' values are combined; none if they are only moved",
    "root": "the rank that has or gets the vector; -1 if there is no root",
    "time": "microseconds of a call: the median of five rounds of back-to-back calls, on the slowest rank (-a)",
    "algbw": "GB/s: the uncompressed size over the time",
    "busbw": "algbw times nccl-tests' factor, 2(n-1)/n for all-reduce: more than the link carries is the gain",
    "#wrong": "elements that are not the codec's bits, or further from the exact result than its derived bound",
    "wire": "bytes that the busiest rank sends in a call; for the plain all-reduce: what any algorithm must send",
    "L2 err": "norm of the error over the norm of the exact result, of standard normal values",
    "vs mpi": "time of the plain all-reduce (of MPI, NCCL, gloo; vs none: qccl's) over this, out of place and in place",
    "spread": "the slowest round less the fastest one, in percent of the median, out of place and in place",
    "floor": "with --link: microseconds that the wire bytes take at the link's rate",
    "line": "with --link: floor over time; - where the limiter's burst is more than 2% of the bytes",
    "bulk": "with --link: time of a plain transfer of the same bytes over this time",
    "codec": "what encodes the values; the plain all-reduce has the library's name here, or none",
}


def columns_help() -> str:
    """The columns as a paragraph of help that is not wrapped again."""
    width = max(map(len, COLUMNS)) + 2
    lines = []
    for name, text in COLUMNS.items():
        lines += textwrap.wrap(
            text, 76, initial_indent=name.ljust(width), subsequent_indent=" " * width, break_on_hyphens=False
        )
    return "\n".join(["\b", "Columns (an N/A was not measured):", *(f"  {line}" for line in lines)])
