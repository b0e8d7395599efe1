"""A slow network on one machine: each rank, or node of ranks, in a network namespace behind a rate-limited link.

    with Lab(4, parse_link("1gbit")) as lab:
        subprocess.run(["mpiexec", "-n", "4", *lab.enter("PMI_RANK"), "python", "train.py"], env=...)

A bridge joins the namespaces' interfaces (``eth0``); a token bucket at each limits the sending rate. All names contain
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
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from qccl.bench.claims import Claim
from qccl.bench.sizes import Link
from qccl.errors import QcclError

__all__ = ["INTERFACE", "Lab", "LabError", "congestion_control", "obstacle", "remove_stale", "shaped_nbytes"]

#: the rate-limited interface in every namespace
INTERFACE = "eth0"
_MTU = "9000"
#: packets that may be under way; more would be lost
_DELAYED = "100000"
_NAMESPACES = Path("/run/netns")
#: ``ip netns exec NAME`` mounts the files of the folder NAME here over those of /etc
_FILES = Path("/etc/netns")
_HOSTS = Path("/etc/hosts")
_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_CAPABILITIES = 1 << 12 | 1 << 21  # CAP_NET_ADMIN, CAP_SYS_ADMIN
_OWNED = re.compile(r"(?:qccl-|qcclb|qv)(\d+)(?:[-.]\d+)?")
#: process ids are less; further labs of the same id, in other PID namespaces or in one process, add multiples of it
_IDS = 10_000_000


class LabError(QcclError):
    """The lab's network could not be built, or traffic bypassed it."""


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

    ``delay`` is the time in seconds that each packet waits before it is sent; the kernel needs netem for it.

    Attributes:
        nodes, links: numbers of nodes and links.
        bridge: the interface in this process's namespace that joins the ranks; it has a name when the lab is entered.
        address: the bridge's address, to which a launcher's ranks connect; also from then on.
        first_address: the address of rank 0, at which ranks without a launcher meet; likewise.
    """

    def __init__(
        self, ranks: int, link: Link, nodes: int | None = None, *, link_per_rank: bool = False, delay: float = 0.0
    ) -> None:
        if not 1 <= ranks <= 200:
            raise LabError(f"a lab has room for 1 to 200 ranks, not {ranks}")
        if nodes is not None and not 1 <= nodes <= ranks:
            raise LabError(f"{ranks} ranks make 1 to {ranks} nodes, not {nodes}")
        self.delay = delay
        self.ranks, self.link, self.nodes = ranks, link, ranks if nodes is None else nodes
        self.links = ranks if link_per_rank else self.nodes
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
        self.close()

    def _take(self, number: int) -> None:
        self._number = number
        self.bridge = f"qcclb{number}"
        # 198.18.0.0/15 is set apart for benchmarks (RFC 2544); every run takes a /24 of it.
        self._subnet = f"198.{18 + (number >> 8 & 1)}.{number & 255}"
        self.address, self.first_address = f"{self._subnet}.254", f"{self._subnet}.1"

    def _claimed(self) -> Claim:
        """Take a number that no other lab has, this process's id if possible, and remove its last lab's remains."""
        for number in range(os.getpid(), 9 * _IDS, _IDS):
            try:
                claim = Claim(number)
            except FileExistsError:
                continue
            except OSError as error:
                raise LabError(f"the lab cannot be built: {error}") from error
            self._take(number)
            _remove(number)
            return claim
        raise LabError("too many labs have this process's id; end some of them")

    def enter(self, variable: str) -> list[str]:
        """The command prefix that enters a rank's namespace; the variable ``variable`` holds the rank's number."""
        script = f'exec ip netns exec "{_prefix(self._number)}$(({variable} % {self.links}))" "$@"'
        return ["/bin/sh", "-c", script, "sh"]

    def shaped_nbytes(self) -> list[int]:
        """The bytes that have passed the rate limiter of each rank (or node)."""
        return [shaped_nbytes(self._namespace(node)) for node in range(self.links)]

    def arrived_nbytes(self) -> list[int]:
        """The bytes that have arrived from each rank (or node) at the bridge; reading them takes no process."""
        names = (f"qv{self._number}.{node}" for node in range(self.links))
        return [int(Path(f"/sys/class/net/{name}/statistics/rx_bytes").read_text()) for name in names]

    def close(self) -> None:
        """Kill all processes in the namespaces, and remove the namespaces and their files. Idempotent."""
        if self._claim is not None:
            _remove(self._number)
            self._claim.release()
            self._claim = None

    def _namespace(self, node: int) -> str:
        return f"{_prefix(self._number)}{node}"

    def _build(self) -> None:
        _run("ip", "link", "add", self.bridge, "type", "bridge", "forward_delay", "0")
        _run("ip", "address", "add", f"{self.address}/24", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "mtu", _MTU, "up")
        hosts = self._hosts()
        for node in range(self.links):
            name, outside = self._namespace(node), f"qv{self._number}.{node}"
            inside = ("ip", "-n", name)
            _run("ip", "netns", "add", name)
            _write_hosts(name, hosts)
            _run("ip", "link", "add", outside, "mtu", _MTU, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _run("ip", "link", "set", outside, "master", self.bridge, "up")
            _run(*inside, "address", "add", f"{self._subnet}.{node + 1}/24", "dev", INTERFACE)
            _run(*inside, "link", "set", INTERFACE, "mtu", _MTU, "up")
            _run(*inside, "link", "set", "lo", "up")
            self._limit(name)

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
        """Give a namespace's interface its rate limiter, inside a delay if there is one."""
        add = ("tc", "-n", name, "qdisc", "add", "dev", INTERFACE)
        limiter = ("tbf", "rate", self.link.name, "burst", str(self.link.burst), "latency", "100ms")
        if not self.delay:
            _run(*add, "root", *limiter)
            return
        try:
            _run(*add, "root", "handle", "1:", "netem", "delay", f"{round(self.delay * 1e6)}us", "limit", _DELAYED)
        except LabError as error:
            raise LabError(
                f"links cannot have a delay, because this kernel has no netem ({error}); use a kernel with the module "
                f"sch_netem, or no delay"
            ) from error
        _run(*add, "parent", "1:1", "handle", "10:", *limiter)


def shaped_nbytes(namespace: str | None = None) -> int:
    """The bytes that have passed the rate limiter of ``namespace``, or of this process's if None."""
    where = () if namespace is None else ("-n", namespace)
    text = _run("tc", *where, "-statistics", "-json", "qdisc", "show", "dev", INTERFACE)
    passed = [int(qdisc["bytes"]) for qdisc in json.loads(text) if qdisc["kind"] == "tbf"]
    if not passed:
        raise LabError(f"{INTERFACE} of {namespace or 'this namespace'} has no rate limiter")
    return passed[0]


def congestion_control() -> str:
    """The algorithm that TCP limits its rate by in this process's namespace; a new one has the machine's."""
    try:
        return _CONGESTION_CONTROL.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def _write_hosts(namespace: str, text: str) -> None:
    """Give a namespace its hosts file. Where /etc is read-only all else works without it."""
    folder = _FILES / namespace
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


def remove_stale() -> None:
    """Remove the labs of processes that no longer exist (killed by SIGKILL, or out of memory)."""
    for number in set(_numbers()):
        if not _is_alive(number % _IDS):
            with contextlib.suppress(OSError):  # FileExistsError: its process lives in another PID namespace
                claim = Claim(number)
                _remove(number)
                claim.release()


def _prefix(number: int) -> str:
    return f"qccl-{number}-"


def _numbers() -> Iterator[int]:
    """The labs' numbers in the names of every interface, namespace and folder that a lab made."""
    names = os.listdir("/sys/class/net")
    for folder in (_NAMESPACES, _FILES):
        names += os.listdir(folder) if folder.is_dir() else []
    for name in names:
        if match := _OWNED.fullmatch(name):
            yield int(match[1])


def _remove(number: int) -> None:
    """Remove what a lab has made, and kill the processes in it."""
    for name in os.listdir("/sys/class/net"):
        if (match := _OWNED.fullmatch(name)) and int(match[1]) == number:
            _run("ip", "link", "del", name, check=False)  # deletes both ends of the pair
    for path in _NAMESPACES.glob(f"{_prefix(number)}*"):
        for process in _run("ip", "netns", "pids", path.name, check=False).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        _run("ip", "netns", "del", path.name, check=False)
    for path in _FILES.glob(f"{_prefix(number)}*"):
        shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _run(*command: str, check: bool = True) -> str:
    """Run a tool and return its output. Raises LabError if it fails and ``check`` is set."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        if not check:
            return ""
        raise LabError(f"{' '.join(command)}: {error}") from error
    if check and done.returncode != 0:
        raise LabError(f"{' '.join(command)} failed: {done.stderr.strip()}; the kernel may lack veth, bridge or tbf")
    return done.stdout
