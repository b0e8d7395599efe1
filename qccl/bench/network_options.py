"""The network that ``--link``, ``--delay``, ``--loss`` and so on ask for, and the lab that is this network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qccl.bench.lab import Lab
from qccl.bench.network import DEFAULT_QUEUE, Network, Path
from qccl.bench.sites import parse_sites
from qccl.bench.sizes import Link, parse_link
from qccl.errors import ArgumentError

__all__ = ["NetworkOptions"]


@dataclass(frozen=True)
class NetworkOptions:
    """The network that a lab shall be. Raises ArgumentError for options that contradict each other.

    Attributes:
        link, up, down: rates of each rank's link, such as "100mbit"; None where they are not given.
        delay, jitter, queue: in seconds, or None.
        loss: a share of the packets, or None.
        sites: the text of a file of sites, or None.
        tcp: TCP's congestion control, or None: the machine's.
        seed: of losses and jitter.
    """

    link: str | None = None
    up: str | None = None
    down: str | None = None
    delay: float | None = None
    jitter: float | None = None
    loss: float | None = None
    queue: float | None = None
    sites: str | None = None
    tcp: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        others = [f"--{name}" for name in ("up", "down", "delay", "jitter", "loss", "queue") if self._has(name)]
        if self.sites is not None and (others or self.link is not None):
            raise ArgumentError(
                f"{(others or ['--link'])[0]} cannot be added to --sites, whose file has all of it; write it there"
            )
        others += ["--tcp"] if self.tcp is not None else []
        if self.sites is None and others and None in self._rates():
            raise ArgumentError(
                f"{others[0]} is for the lab's links, which need rates, too; give --link, or --up and --down"
            )
        if self.is_forwarded:
            self.network(2)  # raises ArgumentError

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None

    def _rates(self) -> tuple[str | None, str | None]:
        return self.up or self.link, self.down or self.link

    @property
    def flag(self) -> str:
        """The flag that asks for the lab, with its value; nothing without a lab."""
        rates = [f"--{name} {getattr(self, name)}" for name in ("link", "up") if self._has(name)]
        return "--sites" if self.sites is not None else rates[0] if rates else ""

    @property
    def ranks(self) -> int | None:
        """The number of ranks, if a file of sites says it."""
        return None if self.sites is None else len(parse_sites(self.sites).places)

    @property
    def is_forwarded(self) -> bool:
        """Whether the forwarder makes the network; otherwise the kernel limits the rates alone."""
        return any(self._has(name) for name in ("up", "down", "delay", "jitter", "loss", "queue", "sites"))

    @property
    def slowest(self) -> Link | None:
        """The link with the lowest rate; None without a lab."""
        if self.is_forwarded:
            return self.network(2).slowest
        return None if self.link is None else parse_link(self.link)

    def places(self, ranks: int, nodes: int) -> tuple[int, ...]:
        """The node, or site, of each rank."""
        return parse_sites(self.sites).places if self.sites else tuple(rank % nodes for rank in range(ranks))

    def network(self, ranks: int, sites: int | None = None) -> Network:
        """The network of ``ranks`` ranks behind ``sites`` links (None: one each); those of a file are the file's."""
        if self.sites is not None:
            return parse_sites(self.sites, self.seed)
        up, down = self._rates()
        assert up is not None and down is not None
        path = Path(self.delay or 0.0, self.jitter or 0.0, self.loss or 0.0)
        links, queue = (parse_link(up), parse_link(down)), self.queue or DEFAULT_QUEUE
        return Network.uniform(ranks, sites or ranks, *links, path, queue, self.seed)

    def lab(self, ranks: int, nodes: int | None = None, *, link_per_rank: bool = False) -> Lab | None:
        """The lab for ``ranks`` ranks on ``nodes`` nodes, not yet entered; None if no network is asked for."""
        slowest = self.slowest
        if slowest is None:
            return None
        if self.sites is not None:
            network = self.network(ranks)
            if len(network.places) != ranks or nodes is not None:
                raise ArgumentError(
                    f"the file of --sites has {len(network.places)} ranks on {len(network.sites)} sites, not "
                    f"{ranks} on {nodes or len(network.sites)}; leave --ranks and --nodes out"
                )
            return Lab(ranks, slowest, len(network.sites), network=network, tcp=self.tcp)
        sites = ranks if link_per_rank else nodes
        network_or_none = self.network(ranks, sites) if self.is_forwarded else None
        return Lab(ranks, slowest, nodes, link_per_rank=link_per_rank, network=network_or_none, tcp=self.tcp)

    def uplinks(self, ranks: int) -> list[tuple[str, float]]:
        """The name of each site, or the rank's number, and the bytes per second that it can send."""
        if self.sites is not None:
            return [(site.name, site.up.rate) for site in parse_sites(self.sites).sites]
        rate = parse_link(self._rates()[0] or "").rate
        return [(str(rank), rate) for rank in range(ranks)]

    def describe(self, each: str) -> str:
        """The network in words: "100mbit per rank, delay 25 ms, loss 0.1%, queue 200 ms", where ``each`` is "rank"."""
        if self.sites is not None:
            return f"each site's ({', '.join(site.name for site in parse_sites(self.sites).sites)})"
        up, down = self._rates()
        parts = [f"{up} per {each}" if up == down else f"{up} up and {down} down per {each}"]
        for name in ("delay", "jitter"):
            parts += [f"{name} {getattr(self, name) * 1e3:g} ms"] if self._has(name) else []
        parts += [f"loss {self.loss * 100:g}%"] if self.loss is not None else []
        parts += [f"queue {(self.queue or DEFAULT_QUEUE) * 1e3:g} ms"] if self.is_forwarded else []
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """What a results file says besides the slowest rate; nothing if the kernel limits the rates alone."""
        if not self.is_forwarded:
            return {}
        if self.sites is not None:
            return {"sites": self.sites}
        up, down = self._rates()
        values = {name: getattr(self, name) or 0.0 for name in ("delay", "jitter", "loss")}
        return {"up": up, "down": down, **values, "queue": self.queue or DEFAULT_QUEUE}
