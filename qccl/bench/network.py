"""The networks that the lab's forwarder can be: sites with links, and the delay, jitter and loss between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qccl.bench.sizes import Link
from qccl.errors import ArgumentError

__all__ = ["DEFAULT_QUEUE", "MAX_PACKET", "MAX_RATE", "Network", "Path", "Site"]

#: seconds that a packet may wait in front of a link, where nothing else is given
DEFAULT_QUEUE = 0.2
#: bytes per second of the fastest link that the forwarder was measured with
MAX_RATE = 1e9 / 8
_MAX_SECONDS = 10.0
#: bytes of a packet, with the header of Ethernet
MAX_PACKET = 1514
#: seconds between two rounds of the forwarder, as a share of the shortest delay, and the least and most
_GRAIN, _MIN_GRAIN, _MAX_GRAIN = 0.02, 100e-6, 500e-6


@dataclass(frozen=True, slots=True)
class Path:
    """One way between two sites.

    Attributes:
        delay: seconds that a packet is under way.
        jitter: seconds by which the delay becomes shorter or longer in the course of time. Packets stay in order.
        loss: the share of the packets that are lost, at random.
    """

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.delay <= _MAX_SECONDS:
            raise ArgumentError(f"a delay of {self.delay:g} s is not possible; give 0 to {_MAX_SECONDS:g} s")
        if not 0 <= self.jitter <= self.delay:
            raise ArgumentError(
                f"a jitter of {self.jitter * 1e3:g} ms needs a delay of as much or more, not {self.delay * 1e3:g} ms: "
                f"packets take from delay - jitter to delay + jitter"
            )
        if not 0 <= self.loss < 1:
            raise ArgumentError(f"a loss of {self.loss:.4g} is not possible; give 0 or more, and less than 1 (100%)")


@dataclass(frozen=True, slots=True)
class Site:
    """Ranks that share a link, and reach each other without it.

    Attributes:
        name: of the site, in reports.
        ranks: their numbers.
        up, down: what the site sends and receives through.
    """

    name: str
    ranks: tuple[int, ...]
    up: Link
    down: Link

    def __post_init__(self) -> None:
        for link in (self.up, self.down):
            if link.rate > MAX_RATE:
                raise ArgumentError(
                    f"a link of {link.name} is too fast for the forwarder, which delays, loses and queues packets at "
                    f"up to {MAX_RATE * 8e-9:g}gbit; give at most that, or only --link, which the kernel limits"
                )


@dataclass(frozen=True)
class Network:
    """Sites, and the paths between them.

    Attributes:
        sites: each with at least one rank.
        paths: by (index of the sender's site, of the receiver's); a Path() where there is none.
        queue: seconds that a packet may wait in front of a link, up or down; one that would wait longer is dropped.
        seed: of the random losses and the jitter.
    """

    sites: tuple[Site, ...]
    paths: Mapping[tuple[int, int], Path] = field(default_factory=dict)
    queue: float = DEFAULT_QUEUE
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.queue <= _MAX_SECONDS:
            raise ArgumentError(f"a queue of {self.queue:g} s is not possible; give up to {_MAX_SECONDS:g} s")
        if (packet := MAX_PACKET / self.slowest.rate) > self.queue:
            raise ArgumentError(
                f"a queue of {self.queue * 1e3:g} ms is shorter than a packet takes on a link of {self.slowest.name}; "
                f"give {packet * 1e3:.3g} ms or more"
            )
        ranks = sorted(rank for site in self.sites for rank in site.ranks)
        if ranks != list(range(len(ranks))) or not ranks:
            raise ArgumentError(f"the sites have the ranks {ranks}; each rank from 0 on belongs to one site")

    @classmethod
    def uniform(
        cls, ranks: int, sites: int, up: Link, down: Link, path: Path, queue: float = DEFAULT_QUEUE, seed: int = 0
    ) -> Network:
        """``sites`` equal sites, any two of them with the same path between them; rank r is on site r % sites."""
        members = [tuple(range(site, ranks, sites)) for site in range(sites)]
        paths = {(i, j): path for i in range(sites) for j in range(sites) if i != j}
        return cls(tuple(Site(f"node{i}", its, up, down) for i, its in enumerate(members)), paths, queue, seed)

    @property
    def places(self) -> tuple[int, ...]:
        """The index of each rank's site."""
        where = {rank: index for index, site in enumerate(self.sites) for rank in site.ranks}
        return tuple(where[rank] for rank in range(len(where)))

    @property
    def slowest(self) -> Link:
        """The link with the lowest rate, up or down."""
        return min((link for site in self.sites for link in (site.up, site.down)), key=lambda link: link.rate)

    @property
    def grain(self) -> float:
        """Seconds between two rounds of the forwarder; it sends a packet on half of it too early or too late.

        A round costs some 30 us of processor time on a virtual machine, most of it for sleeping.
        """
        shortest = min((path.delay for path in self.paths.values()), default=0.0)
        return min(max(_GRAIN * shortest, _MIN_GRAIN), _MAX_GRAIN)

    def path(self, source: int, to: int) -> Path:
        """The path from one site to another, by their indices."""
        return self.paths.get((source, to), Path())

    def to_json(self) -> dict[str, Any]:
        """For the forwarder's process: numbers only."""
        return {
            "sites": [[site.up.rate, self.queue, site.down.rate, self.queue] for site in self.sites],
            "paths": [[*ends, path.delay, path.jitter, path.loss] for ends, path in self.paths.items()],
            "seed": self.seed,
            "grain": self.grain,
        }
