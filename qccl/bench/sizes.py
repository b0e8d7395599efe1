"""Sizes, rates and losses as the command line spells them: 64K, 1G; 100mbit, 1gbit; 0.1%."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Link", "format_size", "parse_link", "parse_loss", "parse_rate", "parse_size", "sweep"]

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_RATES = {bits: factor / 8 for bits, factor in _DECIMAL.items()} | {"kbps": 1e3, "mbps": 1e6, "gbps": 1e9}
#: bytes in the burst of the lab's limiters: two packets at the interfaces' MTU, and one unsplit TCP segment
_PACKETS, _SEGMENT = 2 * 9_100, 66_000


@dataclass(frozen=True, slots=True)
class Link:
    """A rate-limited link.

    Attributes:
        name: as the user spelled it, e.g. "1gbit"; ``tc`` reads the same spelling.
        rate: bytes per second.
        burst: size of the token bucket: bytes that pass at full speed after the link was idle.
    """

    name: str
    rate: float
    burst: int


def parse_size(text: str) -> int:
    """Bytes of "4096", "64K", "1.5M", "2G" (powers of 1024). Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    nbytes = float(match[1]) * _BINARY[match[2].upper()] if match else -1.0
    if nbytes < 0 or not nbytes.is_integer():  # an infinity is none
        raise ValueError(
            f"{text!r} is not a size; give a number of bytes, with K, M, G or T for powers of 1024, such as 64K"
        )
    return int(nbytes)


def format_size(nbytes: int) -> str:
    """The shortest exact spelling that parse_size reads: 65536 is "64K"."""
    for suffix in reversed(_BINARY):
        unit = _BINARY[suffix]
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit}{suffix}"
    return str(nbytes)


def parse_link(text: str) -> Link:
    """The link of "100mbit", "1gbit", "2.5gbit" (bits per second, powers of 1000). Raises ValueError.

    The bucket refills while a call leaves the link idle, so the burst is the smallest with which a bulk transfer nearly
    reached the rate: up to 1 Gbit/s the bytes of 0.5 ms (the kernel's timers are that late on busy processors), at
    least two packets; then a segment of 66,000 bytes; from 2.5 Gbit/s on the bytes of 0.2 ms.
    """
    name = text.strip().lower()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", name)
    rate = float(match[1]) * _DECIMAL[match[2]] / 8 if match else 0.0
    if not 1e5 / 8 <= rate <= 1e11 / 8:
        raise ValueError(
            f"{text!r} is not a link's rate; give bits per second from 100kbit to 100gbit, such as 100mbit or 1gbit"
        )
    return Link(name, rate, _burst(rate))


def parse_rate(text: str) -> Link:
    """The link, without bursts, of "25gbit" (bits per second) or "300GBps" (bytes per second). Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit|kbps|mbps|gbps)", text.strip().lower())
    rate = float(match[1]) * _RATES[match[2]] if match else 0.0
    if not 0 < rate < math.inf:
        raise ValueError(
            f"{text!r} is not a rate; give bits per second such as 100mbit or 25gbit, or bytes per second such as "
            f"300GBps"
        )
    return Link(text.strip(), rate, 0)


def parse_loss(text: str) -> float:
    """The share of packets that "0.1%" are: 0.001. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    share = float(match[1]) / 100 if match else -1.0
    if not 0 <= share < 1:
        raise ValueError(f"{text!r} is not a loss; give a percentage of packets from 0% to below 100%, such as 0.1%")
    return share


def _burst(rate: float) -> int:
    slow = min(_SEGMENT, max(_PACKETS, round(rate * 0.53e-3)))
    return max(slow, round(rate * 0.2e-3))


def sweep(begin: int, end: int, step: int, factor: int | None) -> Iterator[int]:
    """The sizes from ``begin`` to ``end``: times ``factor``, or plus ``step`` where there is no factor."""
    size, before = begin, -1
    while before < size <= end:
        yield size
        size, before = size * factor if factor is not None else size + step, size
