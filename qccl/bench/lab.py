"""A slow network on one machine: each rank, or node of ranks, in a network namespace behind a rate-limited link.

    with Lab(4, parse_link("1gbit")) as lab:
        subprocess.run(["mpiexec", "-n", "4", *lab.enter("PMI_RANK"), "python", "train.py"], env=...)

A bridge joins the namespaces' interfaces (``eth0``); a token bucket at each limits the sending rate. Delays, losses and
queues need more: then a process of ours, the forwarder (qccl/bench/switch.py), joins the interfaces instead, in a
namespace of its own, and limits the rates, too. network_options.NetworkOptions makes such labs. All names contain
the lab's number, which is the id of the process that made it, so that runs do not collide. While that process lives it
has a claim on the number (qccl/bench/claims.py), so that the next run recognises and removes the remains of a killed
one. Requires Linux, ``ip``, ``tc`` and root.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from types import TracebackType

from qccl.bench.claims import Claim
from qccl.bench.lab_check import Checked, check_network
from qccl.bench.leftovers import FILES, IDS, prefix, remove, remove_stale
from qccl.bench.namespaces import switch_offloads_off
from qccl.bench.network import Network
from qccl.bench.sizes import Link
from qccl.bench.switch import MTU, Switch, port_address
from qccl.bench.tcp import set_congestion_control
from qccl.bench.tools import LabError
from qccl.bench.tools import run as _run

__all__ = ["INTERFACE", "Lab", "LabError", "obstacle", "remove_stale", "sent_nbytes", "shaped_nbytes"]

#: the rate-limited interface in every namespace
INTERFACE = "eth0"
_MTU = "9000"
#: ends the name of the namespace that the forwarder runs in
_SWITCH = "switch"
_HOSTS = Path("/etc/hosts")
_CAPABILITIES = 1 << 12 | 1 << 21  # CAP_NET_ADMIN, CAP_SYS_ADMIN


def obstacle() -> str | None:
    """Why this process cannot build a lab, and what to do; None if it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    if os.geteuid() != 0:
        return (
            "network namespaces need root; run it as root, for instance "
            'sudo env PATH="$PATH" qccl-bench ..., or leave --link out and measure the network there is'
        )
    if not _may_make_networks():
        return "this container is not allowed to make networks, although root; start it with that right (--privileged)"
    return None


class Lab:
    """The network of ``ranks`` ranks, each sending at ``link``'s rate; a context manager.

    With ``nodes``, rank r is on node r modulo ``nodes``, and the ranks of a node share a namespace and its link. With
    ``link_per_rank`` each rank still has its own, as if every GPU had a network card.

    With ``network`` packets are delayed, lost and queued, too, and the rates are those of its sites, of which there is
    one for each link. The lab then checks itself when it is entered.

    Attributes:
        nodes, links: numbers of nodes and links.
        places: the link of each rank.
        network: as given, or None.
        tcp: TCP's congestion control in the namespaces; None: the machine's.
        checked: what the lab measured of its network when it was entered.
        bridge: the interface in this process's namespace that joins the ranks; it has a name when the lab is entered.
        address: the bridge's address, to which a launcher's ranks connect; also from then on.
        first_address: the address of rank 0, at which ranks without a launcher meet; likewise.
    """

    def __init__(
        self,
        ranks: int,
        link: Link,
        nodes: int | None = None,
        *,
        link_per_rank: bool = False,
        network: Network | None = None,
        tcp: str | None = None,
    ) -> None:
        if not 1 <= ranks <= 200:
            raise LabError(f"a lab has room for 1 to 200 ranks, not {ranks}")
        if nodes is not None and not 1 <= nodes <= ranks:
            raise LabError(f"{ranks} ranks make 1 to {ranks} nodes, not {nodes}")
        self.network, self.tcp = network, tcp
        self._switch: Switch | None = None
        self.checked: Checked | None = None
        self.ranks, self.link, self.nodes = ranks, link, ranks if nodes is None else nodes
        self.links = ranks if link_per_rank else self.nodes
        self.places = network.places if network else tuple(rank % self.links for rank in range(ranks))
        if network and (len(network.sites), len(self.places)) != (self.links, ranks):
            raise LabError(f"a lab of {ranks} ranks behind {self.links} links cannot be a network of other numbers")
        self._claim: Claim | None = None
        self._take(os.getpid())

    def __enter__(self) -> Lab:
        reason = obstacle()
        if reason is not None:
            raise LabError(f"the lab cannot be built: {reason}")
        remove_stale()
        self._claim = self._claimed()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if self._switch is not None and kind is None:
                self._switch.check_alive()
        finally:
            self.close()

    def _take(self, number: int) -> None:
        self._number = number
        self.bridge = f"qcclb{number}"
        # 198.18.0.0/15 is set apart for benchmarks (RFC 2544); every run takes a /24 of it.
        self._subnet = f"198.{18 + (number >> 8 & 1)}.{number & 255}"
        self.address, self.first_address = f"{self._subnet}.254", f"{self._subnet}.1"

    def _claimed(self) -> Claim:
        """Take a number that no other lab has, this process's id if possible, and remove its last lab's remains."""
        for number in range(os.getpid(), 9 * IDS, IDS):
            try:
                claim = Claim(number)
            except FileExistsError:
                continue
            except OSError as error:
                raise LabError(f"the lab cannot be built: {error}") from error
            self._take(number)
            remove(number)
            return claim
        raise LabError("too many labs have this process's id; end some of them")

    def enter(self, variable: str) -> list[str]:
        """The command prefix that enters a rank's namespace; the variable ``variable`` holds the rank's number."""
        ranks = {node: [str(rank) for rank, on in enumerate(self.places) if on == node] for node in range(self.links)}
        cases = " ".join(f"{'|'.join(its)}) node={node};;" for node, its in ranks.items())
        script = f'case ${variable} in {cases} esac; exec ip netns exec "{prefix(self._number)}$node" "$@"'
        return ["/bin/sh", "-c", script, "sh"]

    def shaped_nbytes(self) -> list[int]:
        """The bytes that have passed the rate limiter of each rank (or node)."""
        if self._switch is not None:
            return self.arrived_nbytes()
        return [shaped_nbytes(self._namespace(node)) for node in range(self.links)]

    def arrived_nbytes(self) -> list[int]:
        """The bytes that have arrived from each rank (or node) at the network; reading them takes no process."""
        if self._switch is not None:
            return [self._switch.counters.sent(node).nbytes for node in range(self.links)]
        names = (f"qv{self._number}.{node}" for node in range(self.links))
        return [int(Path(f"/sys/class/net/{name}/statistics/rx_bytes").read_text()) for name in names]

    @property
    def switch(self) -> Switch:
        """The forwarder of a lab with a ``network``, with its counters. Raises LabError where there is none."""
        if self._switch is None:
            raise LabError("a lab has a forwarder and its counters if it is given a network, from when it is entered")
        self._switch.check_alive()
        return self._switch

    @property
    def remark(self) -> str:
        """What went wrong in the forwarder because the machine was busy; nothing if all went well."""
        if self._switch is None:
            return ""
        counters = self._switch.counters
        return counters.lapses().remark(counters.total().delivered_packets)

    def close(self) -> None:
        """Kill all processes in the namespaces, and remove the namespaces and their files. Idempotent."""
        if self._claim is not None:
            remove(self._number)
            if self._switch is not None:
                self._switch.close()
                self._switch = None
            self._claim.release()
            self._claim = None

    @property
    def name(self) -> str:
        """How the names of the namespaces begin; the number of the rank, or node, follows."""
        return prefix(self._number)

    def _namespace(self, node: int | str) -> str:
        return f"{prefix(self._number)}{node}"

    def _build(self) -> None:
        hosts = self._hosts()
        if self.network is None:
            self._add_bridge()
        else:
            _run("ip", "netns", "add", self._namespace(_SWITCH))
        for node in range(self.links):
            name = self._namespace(node)
            _run("ip", "netns", "add", name)
            _write_hosts(name, hosts)
            if self.network is None:
                self._add_bridge_port(node)
            else:
                self._add_switch_port(node, INTERFACE, name)
            _run("ip", "-n", name, "address", "add", f"{self._subnet}.{node + 1}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            if self.tcp is not None:
                set_congestion_control(name, self.tcp)
            if self.network is None:
                self._limit(name)
        if self.network is not None:
            self._start_switch(self.network)

    def _add_bridge(self) -> None:
        _run("ip", "link", "add", self.bridge, "type", "bridge", "forward_delay", "0")
        _run("ip", "address", "add", f"{self.address}/24", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "mtu", _MTU, "up")

    def _add_bridge_port(self, node: int) -> None:
        peer = ("peer", "name", INTERFACE, "mtu", _MTU, "netns", self._namespace(node))
        _run("ip", "link", "add", self._outside(node), "mtu", _MTU, "type", "veth", *peer)
        _run("ip", "link", "set", self._outside(node), "master", self.bridge, "up")

    def _add_switch_port(self, port: int, inside: str, namespace: str) -> None:
        """Lead ``inside`` to the switch; its packets have the size and the checksums of those on a wire."""
        switch, outside = self._namespace(_SWITCH), self._outside(port)
        ends = ("mtu", MTU, "type", "veth", "peer", "name", inside, "address", port_address(port), "mtu", MTU)
        _run("ip", "-n", switch, "link", "add", outside, *ends)
        switch_offloads_off(switch, [outside, inside])
        _run("ip", "-n", switch, "link", "set", inside, "netns", namespace)
        _run("ip", "-n", switch, "link", "set", outside, "addrgenmode", "none", "up")

    def _start_switch(self, network: Network) -> None:
        """Join this process's namespace to the network, for mpiexec, and forward packets."""
        self._add_switch_port(self.links, self.bridge, str(os.getpid()))
        _run("ip", "address", "add", f"{self.address}/24", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "up")
        interfaces = [self._outside(port) for port in range(self.links + 1)]
        self._switch = Switch(self._namespace(_SWITCH), interfaces, network)
        nodes = range(self.links)
        addresses = [f"{self._subnet}.{node + 1}" for node in nodes]
        self.checked = check_network(
            network, [self._namespace(node) for node in nodes], addresses, self.switch.counters
        )

    def _outside(self, port: int) -> str:
        return f"qv{self._number}.{port}"

    def _hosts(self) -> str:
        """The hosts file inside: the machine's, with names for the nodes and for the machine outside.

        PyTorch looks up the name of every address that connects, and warns if it has none. Its sockets are of IPv6, so
        there the addresses have the form ::ffff:198.18.0.1.
        """
        own = _HOSTS.read_text() if _HOSTS.is_file() else "127.0.0.1 localhost\n"
        names = {f"{self._subnet}.{node + 1}": f"node{node}" for node in range(self.links)} | {self.address: "launcher"}
        lines = [f"{prefix}{address} {name}" for address, name in names.items() for prefix in ("", "::ffff:")]
        return "\n".join([own.rstrip("\n"), *lines, ""])

    def _limit(self, name: str) -> None:
        """Give a namespace's interface its rate limiter."""
        limiter = ("tbf", "rate", self.link.name, "burst", str(self.link.burst), "latency", "100ms")
        _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *limiter)


def shaped_nbytes(namespace: str | None = None) -> int:
    """The bytes that have passed the rate limiter of ``namespace``, or of this process's if None."""
    where = () if namespace is None else ("-n", namespace)
    text = _run("tc", *where, "-statistics", "-json", "qdisc", "show", "dev", INTERFACE)
    passed = [int(qdisc["bytes"]) for qdisc in json.loads(text) if qdisc["kind"] == "tbf"]
    if not passed:
        raise LabError(f"{INTERFACE} of {namespace or 'this namespace'} has no rate limiter")
    return passed[0]


def sent_nbytes() -> int:
    """The bytes that this process's namespace has sent to the forwarder; it has no rate limiter."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def _write_hosts(namespace: str, text: str) -> None:
    """Give a namespace its hosts file. Where /etc is read-only all else works without it."""
    folder = FILES / namespace
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _HOSTS.name).write_text(text)


def _may_make_networks() -> bool:
    """Whether this process has the capabilities to create namespaces and interfaces."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return False
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return found is not None and int(found[1], 16) & _CAPABILITIES == _CAPABILITIES
