"""The lab's network: the model of its queues and delays without sockets, files of sites, and what is refused."""

from __future__ import annotations

import itertools
import math
from pathlib import Path as File

import pytest
from click.testing import CliRunner

from qccl._host import LabNetwork
from qccl.bench.cli import main
from qccl.bench.counters import Counters, Lapses
from qccl.bench.network import Network, Path, Site
from qccl.bench.network_options import NetworkOptions
from qccl.bench.sites import parse_sites, sites_file
from qccl.bench.sizes import parse_link, parse_loss
from qccl.errors import ArgumentError

RATE = 1e6


class Model:
    """A network of the forwarder's model, with its counters."""

    def __init__(
        self, sites: int = 2, *, up: float = RATE, down: float = RATE, queue: float = 0.1, seed: int = 1, **path: float
    ) -> None:
        self.counters = Counters(sites)
        self._network = LabNetwork([(up, queue, down, queue)] * sites, seed, self.counters.addresses[1])
        for pair in itertools.permutations(range(sites), 2):
            self._network.set_path(*pair, path.get("delay", 0.0), path.get("jitter", 0.0), path.get("loss", 0.0))
        self.send, self.next = self._network.send, self._network.next

    def take(self, until: float = math.inf) -> list[tuple[int, int, int, float, bool]]:
        """What comes out until then: tag, source, destination, time, whether it has arrived."""
        return list(iter(lambda: self._network.take(until), None))


def test_packets_leave_at_the_rate_and_arrive_after_the_delay() -> None:
    model = Model(delay=0.025)
    assert all(model.send(0, 1, 1000, 0.0, tag) for tag in range(50))
    times = [time for *_, time, arrived in model.take() if arrived]
    # 1 ms in the uplink each, 25 ms on the way, and 1 ms in the downlink, where none waits for another
    assert times == pytest.approx([0.001 * (tag + 1) + 0.025 + 0.001 for tag in range(50)])
    assert model.counters.path(0, 1).delivered_nbytes == 50_000 and model.next() == math.inf


def test_both_directions_and_all_paths_are_apart() -> None:
    model = Model(3)
    for source, to in itertools.permutations(range(3), 2):
        assert model.send(source, to, 100, 0.0, 10 * source + to)
    assert sorted(out[:3] for out in model.take()) == [(10 * i + j, i, j) for i in range(3) for j in range(3) if i != j]
    assert all(model.counters.path(*pair).packets == 1 for pair in itertools.permutations(range(3), 2))


def test_nothing_comes_out_before_its_time() -> None:
    model = Model(delay=0.025)
    model.send(0, 1, 1000, 0.0, 7)
    assert model.take(0.0269) == [] and model.next() == pytest.approx(0.027)
    assert [out[0] for out in model.take(0.0271)] == [7]


def test_a_full_queue_drops_what_comes_last() -> None:
    model = Model(queue=0.1005)  # 100 packets of 1 ms, and the one that is being sent
    taken = [model.send(0, 1, 1000, 0.0, tag) for tag in range(150)]
    assert taken == [True] * 101 + [False] * 49
    assert [out[0] for out in model.take()] == list(range(101))
    found = model.counters.path(0, 1)
    assert (found.packets, found.dropped_up, found.dropped_down) == (101, 49, 0)
    assert model.send(0, 1, 1000, 0.0021, 150)  # two have left


def test_a_slow_downlink_drops_what_several_send() -> None:
    """Two uplinks fill the one downlink, which is as fast as one of them."""
    model = Model(3, queue=0.02)
    for tag in range(100):
        assert model.send(0, 2, 1000, tag * 1e-3, tag) and model.send(1, 2, 1000, tag * 1e-3, 100 + tag)
    out = model.take()
    arrived = [each for each in out if each[4]]
    dropped = sum(model.counters.path(site, 2).dropped_down for site in (0, 1))
    assert len(out) == 200 and len(arrived) == 200 - dropped == sum(
        model.counters.path(site, 2).delivered_packets for site in (0, 1)
    )
    assert 70 <= dropped <= 85  # 200 ms of packets come in 100 ms, and the queue has 20
    gaps = [b[3] - a[3] for a, b in itertools.pairwise(arrived)]
    assert min(gaps) > 0.999e-3


def test_a_slower_downlink_sets_the_rate() -> None:
    model = Model(up=10 * RATE, down=RATE)
    for tag in range(20):
        model.send(0, 1, 1000, 0.0, tag)
    times = [out[3] for out in model.take()]
    assert times[-1] - times[0] == pytest.approx(19e-3)


@pytest.mark.parametrize("loss", [0.001, 0.01, 0.3])
def test_the_share_that_is_lost(loss: float) -> None:
    model, count = Model(up=math.inf, down=math.inf, loss=loss), 100_000
    lost = [tag for tag in range(count) if not model.send(0, 1, 1500, tag * 1e-4, tag)]
    assert abs(len(lost) - loss * count) < 4 * math.sqrt(loss * count)
    assert len(model.take()) == count - len(lost) == model.counters.path(0, 1).packets - model.counters.path(0, 1).lost


def test_losses_are_those_of_the_seed_and_differ_between_paths() -> None:
    def lost(seed: int, source: int, to: int) -> list[int]:
        model = Model(up=math.inf, down=math.inf, loss=0.1, seed=seed)
        return [tag for tag in range(300) if not model.send(source, to, 1500, tag * 1e-4, tag)]

    assert lost(1, 0, 1) == lost(1, 0, 1) != []
    assert len({tuple(lost(seed, *pair)) for seed in (0, 1, 2) for pair in ((0, 1), (1, 0))}) == 6


@pytest.mark.parametrize("gap", [1e-5, 1e-3, 0.1])
def test_jitter_stays_within_its_bounds_and_keeps_the_order(gap: float) -> None:
    model, count = Model(up=math.inf, down=math.inf, delay=0.02, jitter=0.02), 5000
    for tag in range(count):
        assert model.send(0, 1, 1500, tag * gap, tag)
    out = model.take()
    assert [each[0] for each in out] == list(range(count))
    delays = [each[3] - each[0] * gap for each in out]
    assert min(delays) >= -1e-9 and max(delays) <= 0.04 + 1e-9
    if gap * count > 1:  # long enough to have seen most of the range
        assert max(delays) - min(delays) > 0.03


def test_a_cut_path_loses_everything_until_it_is_joined() -> None:
    model = Model()
    model.counters.cut(0, 1, is_cut=True)
    assert not model.send(0, 1, 1000, 0.0, 0) and model.send(1, 0, 1000, 0.0, 1)
    model.counters.cut(0, 1, is_cut=False)
    assert model.send(0, 1, 1000, 0.1, 2)
    assert [out[0] for out in model.take()] == [1, 2] and model.counters.path(0, 1).cut == 1
    model.counters.reset()
    assert model.counters.total().packets == 0


def test_what_a_lab_says_of_its_forwarder() -> None:
    assert Lapses(0, 0, 20, 0.005).remark(1000) == "" == Lapses(0, 0, 0, 0.0).remark(0)
    late = "lost 0 packets that it should not have, and 21 of 1000 were more than 1 ms late (at most 5.0 ms)"
    assert late in Lapses(0, 0, 21, 0.005).remark(1000) and "lost 3 packets" in Lapses(1, 2, 0, 0.0).remark(1000)


# -- networks, and files of sites --------------------------------------------------------------------------------------

SITES = """
queue = "50ms"

[sites.berlin]
ranks = [0, 1]
link = "1gbit"

[sites.tokyo]
ranks = [2]
up = "20mbit"
down = "100mbit"

[sites.oslo]
ranks = [3]
link = "100mbit"

[[between]]
sites = ["berlin", "tokyo"]
delay = "120ms"
jitter = "5ms"
loss = "0.1%"

[[between]]
sites = ["oslo", "berlin"]
delay = "10ms"

[[between]]
sites = ["oslo", "tokyo"]
delay = "130ms"
"""


def test_a_file_of_sites() -> None:
    network = parse_sites(SITES)
    assert [site.name for site in network.sites] == ["berlin", "tokyo", "oslo"]
    assert network.places == (0, 0, 1, 2) and network.queue == 0.05 and network.slowest.name == "20mbit"
    assert network.path(0, 1) == network.path(1, 0) == Path(0.12, 0.005, 0.001)
    assert network.path(2, 0) == Path(0.01) and network.path(1, 2) == Path(0.13)
    options = NetworkOptions(sites=SITES)
    assert options.ranks == 4 and options.describe("rank") == "each site's (berlin, tokyo, oslo)"
    assert options.to_json() == {"sites": SITES} and options.flag == "--sites"
    assert [name for name, _ in options.uplinks(4)] == ["berlin", "tokyo", "oslo"]


def test_pairs_that_a_file_does_not_name() -> None:
    text = 'delay = "25ms"\nloss = "1%"\n' + SITES.partition("[[between]]")[0].partition("\n\n")[2]
    network = parse_sites(text)
    assert all(network.path(*pair) == Path(0.025, 0.0, 0.01) for pair in itertools.permutations(range(3), 2))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("[sites.oslo]", "[sites.oslo", "it is not TOML"),
        ("[sites.oslo]", "[site.oslo]", "at the top there is 'site'; possible are sites, between, queue"),
        ("ranks = [2]", "", "in [sites.tokyo] ranks is None; write a list of numbers"),
        (
            "ranks = [2]",
            "ranks = [1]",
            "the sites have the ranks [0, 1, 1, 3]; each rank from 0 on belongs to one site",
        ),
        ('up = "20mbit"', "", 'in [sites.tokyo] a rate is missing; write link = "100mbit", or both up and down'),
        ('up = "20mbit"', "up = 20", "in [sites.tokyo] up is 20; write it with a unit, in quotation marks"),
        ('up = "20mbit"', 'up = "20"', "in [sites.tokyo]: up: '20' is not a link's rate"),
        ('up = "20mbit"', 'up = "20gbit"', "a link of 20gbit is too fast for the forwarder"),
        ('["oslo", "tokyo"]', '["oslo", "rome"]', "write two of berlin, tokyo, oslo"),
        ('["oslo", "tokyo"]', '["tokyo", "berlin"]', "[[between]] names tokyo and berlin twice"),
        ('delay = "130ms"', "", "between oslo and tokyo no delay is given"),
        ('loss = "0.1%"', 'loss = "100%"', "'100%' is not a loss; give a percentage"),
        ('loss = "0.1%"', 'lost = "1%"', "in [[between]] there is 'lost'; possible are sites, delay, jitter, loss"),
        ('jitter = "5ms"', 'jitter = "500ms"', "a jitter of 500 ms needs a delay of as much or more, not 120 ms"),
        ('queue = "50ms"', 'queue = "100us"', "a queue of 0.1 ms is shorter than a packet takes on a link of 20mbit"),
    ],
)
def test_a_file_that_is_wrong(old: str, new: str, reason: str, tmp_path: File) -> None:
    assert old in SITES
    path = tmp_path / "sites.toml"
    path.write_text(SITES.replace(old, new))
    with pytest.raises(ValueError) as raised:
        sites_file(str(path))
    assert str(path) in str(raised.value) and reason in str(raised.value)


def test_a_pair_that_is_not_named_needs_a_delay() -> None:
    with pytest.raises(ValueError, match="between tokyo and oslo no delay is given"):
        parse_sites(SITES.rpartition("[[between]]")[0])


def test_losses() -> None:
    assert [parse_loss(text) for text in ("0%", "0.1%", "1 %", "99.9%")] == pytest.approx([0, 0.001, 0.01, 0.999])
    for text in ("", "1", "0.01", "-1%", "100%", "150%"):
        with pytest.raises(ValueError, match="is not a loss; give a percentage of packets from 0% to below 100%"):
            parse_loss(text)


@pytest.mark.parametrize(
    ("path", "reason"),
    [({"delay": 11.0}, "a delay of 11 s"), ({"loss": 1.0}, "a loss of 1 "), ({"jitter": 0.1}, "a jitter of 100 ms")],
)
def test_paths_that_cannot_be(path: dict[str, float], reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        Path(**path)


def test_the_forwarder_looks_at_its_packets_more_often_where_delays_are_short() -> None:
    link = parse_link("100mbit")

    def grain(delay: float) -> float:
        return Network.uniform(2, 2, link, link, Path(delay)).grain

    assert [grain(delay) for delay in (0.0, 0.01, 0.025, 1.0)] == [1e-4, 2e-4, 5e-4, 5e-4]


def test_sites_without_ranks() -> None:
    link = parse_link("100mbit")
    with pytest.raises(ArgumentError, match=r"the sites have the ranks \[0, 2\]"):
        Network((Site("a", (0,), link, link), Site("b", (2,), link, link)))


# -- the flags ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--delay=25ms"], "--delay is for the lab's links, which need rates, too; give --link, or --up and --down"),
        (["--up=10mbit"], "--up is for the lab's links"),
        (["--link=10gbit", "--loss=1%"], "a link of 10gbit is too fast for the forwarder"),
        (["--link=1gbit", "--loss=150%"], "'150%' is not a loss; give a percentage of packets from 0% to below 100%"),
        (["--link=1gbit", "--jitter=5ms"], "a jitter of 5 ms needs a delay of as much or more, not 0 ms"),
        (["--link=1gbit", "--queue=20s"], "a queue of 20 s is not possible; give up to 10 s"),
        (
            ["--link=1mbit", "--queue=1ms"],
            "a queue of 1 ms is shorter than a packet takes on a link of 1mbit; give 12.1",
        ),
        (["--tcp=bbr"], "--tcp is for the lab's links, which need rates, too"),
        (["--link=1gbit", "--tcp=a b"], "'a b' is no congestion control's name"),
        (["--sites=no-such-file"], "'no-such-file' cannot be read"),
    ],
)
@pytest.mark.parametrize("command", [["allreduce"], ["run", "true"]])
def test_refused(command: list[str], flags: list[str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("collective", "run"):
        monkeypatch.setattr(f"qccl.bench.{module}.obstacle", lambda: None)
    result = CliRunner().invoke(main, [command[0], *flags, *command[1:]])
    assert result.exit_code == 2 and reason in " ".join(result.output.split()), result.output


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--link=1gbit"], "--link cannot be added to --sites, whose file has all of it; write it there"),
        (["--delay=1ms"], "--delay cannot be added to --sites"),
        (["--ranks=3"], "the file of --sites has 4 ranks on 3 sites, not 3 on 3; leave --ranks and --nodes out"),
        (["--nodes=2"], "has 4 ranks on 3 sites, not 4 on 2"),
    ],
)
def test_sites_have_it_all(flags: list[str], reason: str, tmp_path: File, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qccl.bench.collective.obstacle", lambda: None)
    path = tmp_path / "sites.toml"
    path.write_text(SITES)
    result = CliRunner().invoke(main, ["allreduce", f"--sites={path}", *flags])
    assert result.exit_code == 2 and reason in " ".join(result.output.split()), result.output


def test_the_network_in_words_and_in_results() -> None:
    options = NetworkOptions(link="100mbit", up="20mbit", delay=0.025, jitter=0.005, loss=0.001)
    words = "20mbit up and 100mbit down per rank, delay 25 ms, jitter 5 ms, loss 0.1%, queue 200 ms"
    assert options.describe("rank") == words and options.flag == "--link 100mbit"
    rest = {"delay": 0.025, "jitter": 0.005, "loss": 0.001, "queue": 0.2}
    assert options.to_json() == {"up": "20mbit", "down": "100mbit", **rest}
    assert NetworkOptions(link="1gbit").describe("node") == "1gbit per node" and NetworkOptions().flag == ""
    assert NetworkOptions(link="1gbit").to_json() == {} and NetworkOptions(up="1mbit", down="2mbit").is_forwarded
