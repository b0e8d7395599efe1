"""Reads the endpoints of running ranks (metrics.py), whose text is checked: another program may answer at a port."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from qccl.metrics import GROUP_SIZE
from qccl.transports.sockets import Place, connect, place_text

__all__ = ["Sample", "parsed", "scrape"]

_SECONDS = 1.0
_MOST_BYTES = 4 << 20
_MOST_AT_ONCE = 32
_PART_BYTES = 1 << 16
#: no endpoint says a larger number
_MOST = float(1 << 64)

_LABEL = r'[a-z_]+="(?:[^"\\\n]|\\["\\n])*"'
_LINE = re.compile(rf"(qccl_[a-z_]+)\{{({_LABEL}(?:,{_LABEL})*)\}} ([0-9][0-9.e+-]*)")
_PARTS = re.compile(r'([a-z_]+)="((?:[^"\\\n]|\\["\\n])*)"')
_ESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}

#: group and rank
Rank = tuple[str, str]


@dataclass
class Sample:
    """What one endpoint said.

    Attributes:
        time: of the answer, in time.monotonic() seconds.
        sizes: of each group, and its rank there.
        counters: by group and rank, then by codec, then by name: sums over the collectives.
        error: why there is no answer; "" for none.
    """

    time: float
    sizes: dict[Rank, int] = field(default_factory=dict)
    counters: dict[Rank, dict[str, dict[str, float]]] = field(default_factory=dict)
    error: str = ""


def scrape(places: Sequence[Place]) -> list[Sample]:
    """One sample of each endpoint, all at once; takes about a second at most."""
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(places))) as pool:
        return list(pool.map(_sample, places))


def _sample(place: Place) -> Sample:
    try:
        text = _get(place)
        return parsed(text, time.monotonic())
    except TimeoutError:
        error = f"no answer within {_SECONDS:g} s"
    except (OSError, ValueError) as found:
        error = str(found)
    return Sample(time.monotonic(), error=error)


def _get(place: Place) -> str:
    """The body of the answer. Raises OSError, and ValueError for an answer that is not of an endpoint of qccl."""
    deadline = time.monotonic() + _SECONDS
    parts, nbytes = [], 0
    with connect(place, _SECONDS) as connection:
        connection.settimeout(_SECONDS)
        connection.sendall(f"GET /metrics HTTP/1.1\r\nHost: {place_text(place)}\r\nConnection: close\r\n\r\n".encode())
        while part := connection.recv(_PART_BYTES):
            parts.append(part)
            nbytes += len(part)
            left = deadline - time.monotonic()
            if nbytes > _MOST_BYTES:
                raise ValueError(f"it sends more than {_MOST_BYTES >> 20} MiB")
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    if head.split(b" ")[1:2] != [b"200"]:
        raise ValueError("no endpoint of qccl answers there")
    return body.decode()


def parsed(text: str, now: float) -> Sample:
    """What an endpoint says in ``text`` at the time ``now``. Raises ValueError for a line that qccl does not write."""
    sample = Sample(now)
    for line in text.split("\n"):
        if line.startswith("#") or not line:
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError("no endpoint of qccl answers there")
        labels = {name: _unescaped(value) for name, value in _PARTS.findall(match[2])}
        rank, value = (labels.get("group", ""), labels.get("rank", "")), float(match[3])
        if value > _MOST:
            raise ValueError(f"it says {match[3]:.40}, which is too large for {match[1]:.40}")
        if match[1] == GROUP_SIZE:
            sample.sizes[rank] = int(value)
        else:
            of_rank = sample.counters.setdefault(rank, defaultdict(lambda: defaultdict(float)))
            of_rank[labels.get("codec", "")][match[1]] += value
    return sample


def _unescaped(text: str) -> str:
    return re.sub(r'\\["\\n]', lambda found: _ESCAPED[found[0]], text)
