"""A slow network on one machine: each rank, or node of ranks, in a network namespace behind a rate-limited link.

    with Lab(4, parse_link("1gbit")) as lab:
        subprocess.run(["mpiexec", "-n", "4", *lab.enter("PMI_RANK"), "python", "train.py"], env=...)

A bridge joins the namespaces' interfaces (``eth0``), and a token bucket at each limits the sending rate. For delays and
losses the bridge's ports have the kernel's netem. If the kernel has no netem, the delay line, a process of qccl's own
(kernels/lab), is the bridge; it is built with qccl but is not in its wheels. All names contain the lab's number, which
is the id of the process that made it, so that runs do not collide (leftovers.py). Requires Linux, ``ip``, ``tc`` and
root.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path
from types import TracebackType

from qccl.bench.lab.leftovers import FILES, claim, prefix, remove, remove_stale
from qccl.bench.lab.namespaces import LabError, set_congestion_control, switch_offloads_off
from qccl.bench.lab.namespaces import run as _run
from qccl.bench.params import Link

__all__ = ["INTERFACE", "Lab", "LabError", "obstacle", "remove_stale", "shaped_nbytes"]

#: the rate-limited interface in every namespace
INTERFACE = "eth0"
#: bytes of a packet on links, and on links with delay or loss, which has the internet's size
_MTU, _FAR_MTU = "9000", "1500"
#: netem's limit of packets under way, more than any link has
_UNDER_WAY = "10000000"
_DELAY_LINE = Path(str(getattr(importlib.util.find_spec("qccl._host"), "origin", ""))).with_name("delay_line")
#: bytes per second of the fastest link that the delay line was measured with
_DELAY_LINE_RATE = 1e9 / 8
_HOSTS = Path("/etc/hosts")
_CAPABILITIES = 1 << 12 | 1 << 21  # CAP_NET_ADMIN, CAP_SYS_ADMIN


def obstacle() -> str | None:
    """Say why this process cannot build a lab, and what to do; None if it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    if os.geteuid() != 0:
        return (
            "network namespaces need root; run it as root, for instance "
            'sudo env PATH="$PATH" qccl-bench ..., or leave --link out and measure the network there is'
        )
    if not _may_make_networks():
        return "this container may not make networks, although its user is root; start it with --privileged"
    return None


class Lab:
    """The network of ``ranks`` ranks, each sending at ``link``'s rate; a context manager.

    With ``nodes``, rank r is on node r modulo ``nodes``, and the ranks of a node share a namespace and its link. With
    ``link_per_rank`` each rank still has its own, as if every GPU had a network card.

    ``delay`` is each packet's delay in seconds, and ``loss`` the share of the packets that are lost. With either,
    packets are like the internet's: an MTU of 1500, no offloads.

    Attributes:
        nodes, links: the numbers of nodes and links.
        tcp: TCP's congestion control in the namespaces; None: the machine's.
        bridge: the name of the interface in this process's namespace that joins the ranks; set when the lab is entered.
        address: the bridge's address, to which a launcher's ranks connect; set when the lab is entered.
        first_address: the address of rank 0, at which ranks without a launcher meet; set when the lab is entered.
    """

    def __init__(
        self,
        ranks: int,
        link: Link,
        nodes: int | None = None,
        *,
        link_per_rank: bool = False,
        delay: float = 0.0,
        loss: float = 0.0,
        tcp: str | None = None,
    ) -> None:
        if not 1 <= ranks <= 200:
            raise LabError(f"a lab has room for 1 to 200 ranks, not {ranks}")
        if nodes is not None and not 1 <= nodes <= ranks:
            raise LabError(f"{ranks} ranks make 1 to {ranks} nodes, not {nodes}")
        self.delay, self.loss, self.tcp = delay, loss, tcp
        self.ranks, self.link, self.nodes = ranks, link, ranks if nodes is None else nodes
        self.links = ranks if link_per_rank else self.nodes
        self._line: subprocess.Popen[bytes] | None = None
        self._claim: socket.socket | None = None
        self._take(os.getpid())

    def __enter__(self) -> Lab:
        reason = obstacle()
        if reason is not None:
            raise LabError(f"the lab cannot be built: {reason}")
        remove_stale()
        number, self._claim = claim()
        self._take(number)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        status = self._line.poll() if self._line else None
        self.close()
        if kind is None and status is not None:
            raise LabError(f"the lab's delay line has ended with status {status}, and no packets arrive any more")

    def _take(self, number: int) -> None:
        self.bridge, self.name = f"qcclb{number}", prefix(number)
        self._number = number
        # 198.18.0.0/15 is set apart for benchmarks (RFC 2544); every run takes a /24 of it.
        self._subnet = f"198.{18 + (number >> 8 & 1)}.{number & 255}"
        self.address, self.first_address = f"{self._subnet}.254", f"{self._subnet}.1"

    def enter(self, variable: str) -> list[str]:
        """The command prefix that enters a rank's namespace; the variable ``variable`` holds the rank's number."""
        script = f'exec ip netns exec "{self.name}$((${variable} % {self.links}))" "$@"'
        return ["/bin/sh", "-c", script, "sh"]

    def shaped_nbytes(self) -> list[int]:
        """The bytes that have passed the rate limiter of each rank (or node)."""
        return [shaped_nbytes(f"{self.name}{node}") for node in range(self.links)]

    def close(self) -> None:
        """Kill all processes in the namespaces, and remove the namespaces and their files. Idempotent."""
        if self._claim is not None:
            if self._line is not None:  # its exit status tells of errors
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._line.communicate(timeout=5)
            remove(self._number)
            if self._line is not None:
                self._line.wait()
            self._claim.close()
        self._line = self._claim = None

    def _build(self) -> None:
        hosts = self._hosts()
        is_far = bool(self.delay or self.loss)
        line = f"{self.name}line" if is_far and not self._has_netem() else None
        if line is None:
            self._add_bridge(_FAR_MTU if is_far else _MTU)
        for node in range(self.links):
            name = f"{self.name}{node}"
            _run("ip", "netns", "add", name)
            _write_hosts(name, hosts)
            if line is not None:
                self._add_line_port(line, node, INTERFACE, name)
            else:
                self._add_bridge_port(node, name, _FAR_MTU if is_far else _MTU)
            if line is None and is_far:
                switch_offloads_off(name, [INTERFACE])
                _run("tc", "qdisc", "add", "dev", self._outside(node), "root", *self._netem())
            _run("ip", "-n", name, "address", "add", f"{self._subnet}.{node + 1}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            if self.tcp is not None:
                set_congestion_control(name, self.tcp)
            limiter = ("tbf", "rate", self.link.name, "burst", str(self.link.burst), "latency", "100ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *limiter)
        if line is not None:
            self._start_line(line)

    def _add_bridge(self, mtu: str) -> None:
        _run("ip", "link", "add", self.bridge, "type", "bridge", "forward_delay", "0")
        _run("ip", "address", "add", f"{self.address}/24", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "mtu", mtu, "up")

    def _add_bridge_port(self, node: int, namespace: str, mtu: str) -> None:
        peer = ("peer", "name", INTERFACE, "mtu", mtu, "netns", namespace)
        _run("ip", "link", "add", self._outside(node), "mtu", mtu, "type", "veth", *peer)
        _run("ip", "link", "set", self._outside(node), "master", self.bridge, "up")

    def _netem(self) -> list[str]:
        """The arguments of netem, the kernel's delay and loss, for packets that leave the bridge by a port."""
        loss = ["loss", f"{self.loss * 100:g}%"] if self.loss else []
        return ["netem", "limit", _UNDER_WAY, "delay", f"{self.delay * 1e6:.0f}us", *loss]

    def _has_netem(self) -> bool:
        """Whether the kernel has netem, by a trial in a namespace. Raises LabError if there is no delay line either."""
        namespace = f"{self.name}line"
        _run("ip", "netns", "add", namespace)
        try:
            _run("tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", *self._netem())
            return True
        except LabError as error:
            if not _DELAY_LINE.is_file():
                raise LabError(
                    f"--delay and --loss need the kernel's netem ({error}); load it with modprobe sch_netem, or build "
                    f"qccl from its sources (pip install --no-binary qccl qccl), which adds a delay line of its own"
                ) from error
        if self.link.rate > _DELAY_LINE_RATE:
            raise LabError(
                f"a link of {self.link.name} is too fast for the delay line; with --delay or --loss give at most "
                f"1gbit, or load the kernel's netem with modprobe sch_netem"
            )
        return False

    def _add_line_port(self, line: str, port: int, inside: str, namespace: str) -> None:
        """Connect ``inside`` to the delay line, which knows each port by its Ethernet address."""
        outside, address = self._outside(port), f"02:71:63:63:{port >> 8:02x}:{port & 255:02x}"
        ends = ("mtu", _FAR_MTU, "type", "veth", "peer", "name", inside, "address", address, "mtu", _FAR_MTU)
        _run("ip", "-n", line, "link", "add", outside, *ends)
        switch_offloads_off(line, [outside, inside])
        _run("ip", "-n", line, "link", "set", inside, "netns", namespace)
        _run("ip", "-n", line, "link", "set", outside, "addrgenmode", "none", "up")

    def _start_line(self, line: str) -> None:
        """Join this process's namespace to the network, for mpiexec, and start the delay line."""
        self._add_line_port(line, self.links, self.bridge, str(os.getpid()))
        _run("ip", "address", "add", f"{self.address}/24", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "up")
        ports = [self._outside(port) for port in range(self.links + 1)]
        self._line = subprocess.Popen(
            ["ip", "netns", "exec", line, str(_DELAY_LINE), str(self.delay), str(self.loss), *ports],
            stdin=subprocess.PIPE,  # the delay line ends with this process
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process alone
        )
        assert self._line.stdout is not None
        if self._line.stdout.readline() != b"ready\n":
            raise LabError(f"the lab's delay line did not start: it ended with status {self._line.wait()}")

    def _outside(self, port: int) -> str:
        return f"qv{self._number}.{port}"

    def _hosts(self) -> str:
        """The hosts file inside: the machine's file, with names for the nodes and for the machine outside.

        PyTorch looks up the name of every address that connects, and warns if there is no name. It uses sockets of
        IPv6, where the addresses have the form ::ffff:198.18.0.1.
        """
        own = _HOSTS.read_text() if _HOSTS.is_file() else "127.0.0.1 localhost\n"
        names = {f"{self._subnet}.{node + 1}": f"node{node}" for node in range(self.links)} | {self.address: "launcher"}
        lines = [f"{prefix}{address} {name}" for address, name in names.items() for prefix in ("", "::ffff:")]
        return "\n".join([own.rstrip("\n"), *lines, ""])


def shaped_nbytes(namespace: str | None = None) -> int:
    """The bytes that have passed the rate limiter of ``namespace``, or of this process's if None."""
    where = () if namespace is None else ("-n", namespace)
    text = _run("tc", *where, "-statistics", "-json", "qdisc", "show", "dev", INTERFACE)
    passed = [int(qdisc["bytes"]) for qdisc in json.loads(text) if qdisc["kind"] == "tbf"]
    if not passed:
        raise LabError(f"{INTERFACE} of {namespace or 'this namespace'} has no rate limiter")
    return passed[0]


def _write_hosts(namespace: str, text: str) -> None:
    """Give a namespace its hosts file. If /etc is read-only, the rest works without the file."""
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
