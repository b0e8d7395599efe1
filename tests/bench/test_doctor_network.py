"""qccl-bench doctor with delay and loss: the model of TCP, the measurement between ranks, and the advice."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from bench_runs import LAUNCHERS, ROOT
from click.testing import CliRunner, Result

import qccl
from qccl.bench import costs, lab, probe_traffic
from qccl.bench.advice import Advice, Conditions, advise
from qccl.bench.cli import main
from qccl.bench.costs import Cost, call_seconds, cost_of
from qccl.bench.mpiexec import StartError, find_mpiexec
from qccl.bench.probe import Pair, Probe, probe
from qccl.bench.tcp_counters import Counters, counters
from qccl.costs.profile import Gradient, Profile
from qccl.costs.step import Speed, Step, rank_of
from qccl.costs.tcp_model import MAX_LOSS, Tcp, needed_connections, rate_with_loss, wait_for_losses
from qccl.costs.timeline import Segment, step_seconds
from qccl.errors import EngineError

LINK = 12.5e6
GRADIENTS = (Gradient((1000, 400), 0.2, 1), Gradient((100,), 0.1, 0), Gradient((600, 1000), 0.05, 0))
METHODS = ("none", "cast", "powersgd:4", "minmax8", "minmax4+ef")
FLAGS = ["--parameters=1M", "--step=100ms", "--codec=minmax8"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHERS, "QCCL_TOKEN", "QCCL_TOKEN_FILE", "QCCL_WAN_CONGESTION"):
        monkeypatch.delenv(name, raising=False)


def doctor(*flags: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *flags])


def a_step(ranks: int = 4, **given: Any) -> Step:
    return Step(Profile(GRADIENTS, 0.08, 0.2, 0.02, powersgd={4: 0.03}), ranks, LINK, **given)


def cost(step: Step, method: str) -> Cost:
    return cost_of(step, method, None if method.startswith("powersgd") else Speed(1e-9, 2e-9, 0.1))


# -- the model ---------------------------------------------------------------------------------------------------------

#: link, alone and overlapped of a_step() as they were before there was a delay or a loss
BEFORE = {
    "none": ("0x1.eb91b3f20a73fp-2", "0x1.93f5e0585bcdcp-1", "0x1.60c2ad25289a8p-1"),
    "cast": ("0x1.eb91b3f20a73fp-3", "0x1.17d1d250a5c08p-1", "0x1.c93d3e3ae51a8p-2"),
    "minmax8": ("0x1.ef8eee9ad2d4ap-4", "0x1.b3d31c7b6d7ffp-2", "0x1.6d180652f4a96p-2"),
    "minmax4+ef": ("0x1.f398be7d53bdcp-5", "0x1.75f92096e7207p-2", "0x1.53d0898acebfcp-2"),
    "powersgd:4": ("0x1.7ca2120e1f7d7p-8", "0x1.5f5e56d603350p-2", "0x1.5f5e56d603350p-2"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tcp", [Tcp(), Tcp("bbr", 2), Tcp("cubic", 24)], ids=str)
def test_without_delay_and_loss_nothing_changes(method: str, tcp: Tcp) -> None:
    found = cost(a_step(tcp=tcp, gloo=tcp), method)
    assert tuple(each.hex() for each in (found.link, found.alone, found.overlapped)) == BEFORE[method]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tcp", [Tcp("bbr", 2), Tcp("cubic", 24), Tcp("cubic", 1)], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_more_delay_and_more_loss_take_longer(method: str, tcp: Tcp, ranks: int) -> None:
    delays, losses = (0.0, 1e-4, 1e-3, 0.01, 0.1, 1.0), (0.0, 1e-5, 1e-4, 1e-3, 0.01, 0.05, MAX_LOSS)
    table = [
        [cost(a_step(ranks, delay=delay, loss=loss, tcp=tcp, gloo=tcp), method) for loss in losses] for delay in delays
    ]
    for line in (*table, *zip(*table, strict=True)):
        for less, more in pairwise(line):
            assert more.link >= less.link and more.sent == less.sent
            assert more.alone >= less.alone * (1 - 1e-9) and more.overlapped >= less.overlapped * (1 - 1e-9)
    assert table[-1][0].alone > table[0][0].alone + 2.9 and table[0][-1].alone > table[0][0].alone


def test_a_long_delay_is_counted_in_messages() -> None:
    """Three delays of 1 s for qccl on any number of ranks, and 4 (n - 1) for gloo's ring."""
    for ranks in (2, 4):
        near, far = a_step(ranks), a_step(ranks, delay=1.0)
        assert cost(far, "minmax8").alone - cost(near, "minmax8").alone == pytest.approx(3, abs=0.1)
        assert cost(far, "none").alone - cost(near, "none").alone == pytest.approx(4 * (ranks - 1), abs=0.6)


def test_calls_that_are_under_way_together_share_the_delay() -> None:
    many = Profile(tuple(Gradient((1024, 1024), 0.001, 0) for _ in range(8)), 0.08, 0.2, 0.02)
    near, far = (cost_of(Step(many, 2, 125e6, delay=delay), "minmax8", Speed(1e-12, 1e-12, 0)) for delay in (0, 0.1))
    assert far.alone - near.alone < 0.35


#: ms of an all-reduce of 4 MiB of float32 in minmax8 on 2 ranks behind 100 Mbit/s, with 25 ms in each direction: loss,
#: connections, and the range of what was measured
MEASURED = [
    (0.0, Tcp(), 125, 128),  # UCX, and wan
    (0.001, Tcp("bbr", 1), 160, 175),  # UCX
    (0.001, Tcp("bbr", 2), 144, 150),  # wan
    (0.001, Tcp("cubic", 24), 170, 170),
    (0.001, Tcp("cubic", 1), 1116, 1160),  # UCX, 200 calls; the medians of short runs are 412 to 1217
    (0.01, Tcp("bbr", 1), 218, 225),
    (0.01, Tcp("bbr", 2), 240, 240),
    (0.01, Tcp("cubic", 24), 300, 300),
    (0.01, Tcp("cubic", 1), 3850, 4070),
]


@pytest.mark.parametrize(("loss", "tcp", "least", "most"), MEASURED)
def test_the_calls_that_were_measured_are_predicted(loss: float, tcp: Tcp, least: float, most: float) -> None:
    """Within 15%."""
    step = Step(Profile((), 0, 0, 0), 2, LINK, delay=0.025, loss=loss, tcp=tcp)
    found = call_seconds(step, "minmax8", 1 << 20, Speed(0.14e-9, 0.15e-9, 0)) * 1e3
    assert 0.85 * least <= found <= 1.15 * most


#: delay in ms, ranks, elements, and the ms of a call of minmax8 over wan, without loss
DELAYED = [(50, 2, 1 << 20, 193), (100, 2, 1 << 20, 340), (100, 2, 1 << 16, 305), (50, 4, 1 << 20, 210)]


@pytest.mark.parametrize(("delay", "ranks", "count", "seconds"), DELAYED)
def test_longer_delays_are_predicted(delay: float, ranks: int, count: int, seconds: float) -> None:
    step = Step(Profile((), 0, 0, 0), ranks, LINK, 0.5, delay=delay / 1e3)
    assert call_seconds(step, "minmax8", count, Speed(0.14e-9, 0.15e-9, 0)) * 1e3 == pytest.approx(seconds, rel=0.12)


#: delay in ms, loss, congestion control, ranks, elements, and the ms of a float32 all-reduce of gloo behind 100 Mbit/s
GLOO = [
    (100, 0.0, "cubic", 2, 1 << 18, 489),
    (25, 0.0, "bbr", 2, 1 << 20, 466),
    (50, 0.0, "cubic", 4, 1 << 18, 695),
    (25, 0.001, "bbr", 2, 1 << 20, 505),
    (25, 0.001, "cubic", 2, 1 << 19, 2204),
]


@pytest.mark.parametrize(("delay", "loss", "congestion", "ranks", "count", "seconds"), GLOO)
def test_the_calls_of_gloo_are_predicted(
    delay: float, loss: float, congestion: str, ranks: int, count: int, seconds: float
) -> None:
    """Within 15%."""
    step = Step(Profile((), 0, 0, 0), ranks, LINK, delay=delay / 1e3, loss=loss, gloo=Tcp(congestion))
    call = costs._gloo(step, 4 * count, 0.0, 0.0, rounds=1)
    found = step_seconds([Segment(0.0, [call]), Segment(0.0, waits=True)], rank_of(step))
    assert found * 1e3 == pytest.approx(seconds, rel=0.15)


def test_the_rate_of_cubic_is_the_published_one() -> None:
    """Mathis for short round trips, RFC 9438 for long ones; more connections have more; timeouts lower it further."""
    for round_trip, loss in ((0.05, 1e-3), (1.0, 1e-4), (0.1, 1e-6)):
        reno, cubic = math.sqrt(1.5 / loss), 1.054 * (round_trip / loss) ** 0.75
        published = 1448 * max(reno, cubic) / round_trip
        assert 0.6 * published < rate_with_loss(1e12, round_trip, loss, Tcp(), 1) <= published * 1.001
    one = rate_with_loss(1e12, 0.05, 0.01, Tcp("cubic", 1), 1)
    assert rate_with_loss(1e12, 0.05, 0.01, Tcp("cubic", 4), 3) == pytest.approx(12 * one)
    assert rate_with_loss(LINK, 0.05, 0.01, Tcp("bbr", 1), 1) == pytest.approx(0.99 * LINK)
    assert rate_with_loss(LINK, 0.05, 0.0, Tcp(), 1) == LINK
    count = needed_connections(LINK, 0.05, 0.01, 1)
    assert rate_with_loss(LINK, 0.05, 0.01, Tcp("cubic", count), 1) == pytest.approx(0.99 * LINK)
    assert rate_with_loss(LINK, 0.05, 0.01, Tcp("cubic", count - 1), 1) < 0.99 * LINK
    assert needed_connections(LINK, 0.05, 0.0, 1) == 1


def test_the_wait_for_losses_has_limits() -> None:
    assert wait_for_losses(LINK, 0.05, 0.0, 1e6, 2) == 0
    assert wait_for_losses(LINK, 0.05, 0.15, 1e9, 64) == pytest.approx(0.05, rel=0.01)  # almost always the last packet
    rare = wait_for_losses(LINK, 0.05, 1e-6, 1448, 2)  # one packet on each of two ranks
    assert rare == pytest.approx(2e-6 * 0.05, rel=0.01)


# -- the measurement ---------------------------------------------------------------------------------------------------


def test_two_ranks_measure_their_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qccl.bench.probe._BULK_SECONDS", 0.2)
    shown: list[str] = []
    probes = qccl.run_ranks(2, lambda comm: probe(comm, "", shown.append if comm.rank == 0 else lambda _: None))
    first, second = probes
    assert first == second and [pair.ranks for pair in first.pairs] == [(0, 1), (1, 0)]
    assert 0 < first.round_trip < 0.5 and first.rate > 1e5
    assert len(shown) == 4 and shown[0] == "round trips"
    if first.loss is not None:
        assert first.loss < 0.01 and all(pair.packets > 10 for pair in first.pairs)


def test_a_rank_that_cannot_be_reached_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(place: tuple[str, int], timeout: float) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr("qccl.bench.probe.connect", fail)
    monkeypatch.setattr("qccl.bench.probe._CONNECT_SECONDS", 0.3)

    def rank(comm: qccl.Communicator) -> str:
        with pytest.raises(EngineError) as error:
            probe(comm, "", lambda _: None)
        return str(error.value)

    for text in qccl.run_ranks(2, rank):
        assert "rank 0: rank 1 cannot be reached at 127.0.0.1:" in text and "give --link, --delay and --loss" in text


def test_a_stranger_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not know the cookie is no rank."""
    import socket

    from qccl.bench import probe as program

    real, strangers = program.connect, []

    def connect(place: tuple[str, int], timeout: float) -> socket.socket:
        strangers.append(socket.create_connection(place))
        strangers[-1].sendall(bytes(16))
        return real(place, timeout)

    monkeypatch.setattr("qccl.bench.probe.connect", connect)
    monkeypatch.setattr("qccl.bench.probe._BULK_SECONDS", 0.1)
    found = qccl.run_ranks(2, lambda comm: probe(comm, "", lambda _: None))
    assert found[0].rate > 1e5 and strangers
    for each in strangers:
        each.close()


def test_what_follows_from_the_pairs() -> None:
    """The rate is that of the slowest rank's link: a slow second transfer of the same rank does not count."""
    pairs = (
        Pair((0, 1), 0.02, 10.0, 900, 1),
        Pair((1, 2), 0.05, 8.0, 100, 1),
        Pair((2, 0), None, 9.0),
        Pair((1, 0), None, 2.0),
        Pair((2, 1), None, 9.5),
        Pair((0, 2), 0.03, 7.0),
    )
    found = Probe(pairs)
    assert (found.round_trip, found.rate, found.loss) == (0.05, 8.0, 2 / 1000)
    assert Probe((Pair((0, 1), 0.1, 1.0),)).loss is None


def test_the_counters_of_a_connection() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            for _ in range(5):
                one.sendall(b"x")
                other.recv(1)
            found = counters(one)
    if found is not None:
        assert found == Counters(5, 0) and found + Counters(1, 1) == Counters(6, 1)


def test_a_transfer_ends_though_nothing_says_so() -> None:
    """The packet that ends a connection may be lost."""
    import socket

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(bytes(1000))
        assert probe_traffic.flood([], [ours], 0.1) == (0.0, Counters())


@pytest.mark.parametrize("failures", [1, 2])
def test_a_rank_that_receives_nothing_gets_a_second_try(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine, where its process did not run."""
    tries, real = [0, 0], probe_traffic.flood

    def probe_of(comm: qccl.Communicator) -> Probe:
        ranks.rank = comm.rank
        return probe(comm, "", lambda _: None)

    def flood(*given: Any) -> tuple[float, Counters]:
        rate, counted = real(*given)
        tries[ranks.rank] += 1
        return (0.0 if ranks.rank == 1 and tries[1] <= failures else rate), counted

    ranks = threading.local()
    monkeypatch.setattr("qccl.bench.probe.flood", flood)
    monkeypatch.setattr("qccl.bench.probe._BULK_SECONDS", 0.1)
    monkeypatch.setattr("qccl.bench.probe._LONGEST_SECONDS", 0.2)
    if failures == 2:
        with pytest.raises(EngineError, match="rank 1: hardly any bytes came from the neighbour"):
            qccl.run_ranks(2, probe_of)
    else:
        assert all(found.rate > 0 for found in qccl.run_ranks(2, probe_of))
    assert tries == ([4, 4] if failures == 1 else [2, 2])


def measured(tmp_path: Path, *command: str, ranks: int) -> dict[str, Any]:
    path = tmp_path / "x.json"
    done = subprocess.run(
        [*command, sys.executable, "-m", "qccl.bench", "doctor", "--measure", *FLAGS, f"--json={path}"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert "measuring round trips" in done.stderr and "Transport: " in done.stdout
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["step"]["ranks"] == ranks and found["network"]["pairs"]
    return found


@pytest.mark.mpi
def test_ranks_of_one_machine_are_measured(tmp_path: Path) -> None:
    try:
        mpi = find_mpiexec()
    except StartError as error:
        pytest.skip(str(error))
    found = measured(tmp_path, mpi.path, *mpi.options(None), "-n", "2", ranks=2)
    assert found["network"]["is_one_machine"] and found["advice"]["transport"]["value"] == "ucx"
    assert found["step"]["delay"] == found["step"]["loss"] == 0


@pytest.mark.lab
@pytest.mark.skipif(lab.obstacle() is not None, reason=f"no lab here: {lab.obstacle()}")
def test_a_network_with_delay_and_loss_is_measured(tmp_path: Path) -> None:
    network = ("--link", "50mbit", "--delay", "20ms", "--loss", "1%")
    found = measured(tmp_path, sys.executable, "-m", "qccl.bench", "run", "--ranks", "2", *network, "--", ranks=2)
    assert found["network"]["delay"] == pytest.approx(0.02, rel=0.25)
    assert found["network"]["loss"] is None or 0.002 < found["network"]["loss"] < 0.03
    assert found["network"]["rate"] < 50e6 / 8 * 1.2
    assert found["advice"]["transport"]["value"] == "wan"


# -- the advice --------------------------------------------------------------------------------------------------------

CLUSTER = Conditions(1.25e9)
SITES = Conditions(LINK, 0.025, 0.001, permits_bbr=True)


@pytest.mark.parametrize(
    ("conditions", "transport", "connections", "congestion"),
    [
        (CLUSTER, "ucx", 1, "cubic"),
        (replace(CLUSTER, congestion="bbr"), "ucx", 1, "cubic"),
        (replace(CLUSTER, is_one_machine=True, has_token=True), "ucx", 1, "cubic"),
        (replace(CLUSTER, has_token=True), "wan", 2, "bbr"),
        (replace(CLUSTER, loss=None), "ucx", 1, "cubic"),
        (SITES, "wan", 2, "bbr"),
        (replace(SITES, loss=0.0), "wan", 2, "bbr"),
        (replace(SITES, delay=0.0), "wan", 2, "bbr"),
        (replace(SITES, permits_bbr=False), "wan", 24, "bbr"),
        (replace(SITES, permits_bbr=False, loss=0.0), "wan", 2, "bbr"),
        (replace(SITES, permits_bbr=False, loss=None), "wan", 24, "bbr"),
        (replace(SITES, permits_bbr=False, loss=0.05), "wan", 64, "bbr"),
    ],
)
def test_the_advice(conditions: Conditions, transport: str, connections: int, congestion: str) -> None:
    found = advise(conditions, 2)
    values = [found.transport.value, found.connections.value, found.congestion.value]
    assert values == [transport, str(connections), congestion]
    assert found.tcp.connections == connections
    for choice in (found.transport, found.connections, found.congestion):
        assert str(choice).startswith(f"{choice.value}, because ") and not choice.reason.endswith(".")


def text_of(found: Advice) -> str:
    return f"{found.transport} {found.connections} {found.congestion}"


def test_the_advice_says_what_to_set_and_who() -> None:
    assert "QCCL_TRANSPORT=wan" in text_of(advise(SITES, 2)) and "qccl-bench token" in text_of(advise(SITES, 2))
    without = text_of(advise(replace(SITES, permits_bbr=False), 2))
    assert "the administrator of each one runs" in without and "tcp_allowed_congestion_control" in without
    assert "QCCL_WAN_CONNECTIONS=24" in without and "the figures are those of cubic" in without
    assert "tcp_congestion_control=cubic" in text_of(advise(replace(CLUSTER, congestion="bbr"), 2))


def test_fewer_connections_suffice_for_each_pair_of_more_ranks() -> None:
    counts = [advise(replace(SITES, permits_bbr=False), ranks).tcp.connections for ranks in (2, 3, 5, 9)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] >= 2


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_with_delay_and_loss(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    flags = [*FLAGS, "--ranks=3", "--link=100mbit", "--delay=25ms", "--loss=0.1%", "--tcp=cubic", f"--json={path}"]
    result = doctor(*flags)
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert (found["step"]["delay"], found["step"]["loss"]) == (0.025, 0.001)
    assert found["step"]["gloo"] == {"congestion": "cubic", "connections": 1}
    assert found["advice"]["tcp"] == found["step"]["tcp"] and found["network"]["rate"] == LINK
    lines = result.output.splitlines()
    assert "# delay: 25.0 ms from one rank to another; loss: 0.10% of the packets" in lines
    for name, choice in (
        ("Transport", "transport"),
        ("Connections", "connections"),
        ("Congestion control", "congestion"),
    ):
        advice = found["advice"][choice]
        assert f"# {name}: {advice['value']}, because {advice['reason']}" in lines
    assert any(line.startswith("# With bbr for gloo, too, a step would take ") for line in lines)
    assert "With bbr for gloo" not in doctor(*flags, "--tcp=bbr").output


def test_the_rate_alone_gives_no_advice_on_the_transport(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    result = doctor(*FLAGS, "--link=100mbit", f"--json={path}")
    found = json.loads(path.read_text())
    assert found["advice"] is None and "Transport: " not in result.output
    zero = doctor(*FLAGS, "--link=100mbit", "--loss=0%", f"--json={path}")
    assert "# Transport: ucx, because" in zero.output
    assert json.loads(path.read_text())["step"] == found["step"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--measure", "--delay=25ms"], "--delay is for --link, whose network it describes: --link 100mbit --delay"),
        (["--measure", "--loss=1%"], "--loss is for --link"),
        (["--loss=1%"], "give the network once: --link RATE, or --measure under a launcher; --loss is for --link"),
        (["--measure", "--tcp=bbr"], "--tcp is for --link"),
        (["--link=1gbit", "--delay=0ms"], "is not a time; give a positive number with us, ms or s"),
        (["--link=1gbit", "--delay=11s"], "a delay of 11 s is not possible; give 0 to 10 s"),
        (["--link=1gbit", "--loss=0.1"], "is not a loss; give a percentage"),
        (["--link=1gbit", "--loss=16%"], "is more than is known of TCP; give a loss from 0% to 15%"),
        (["--link=1gbit", "--tcp=vegas"], "'vegas' is not one of 'cubic', 'bbr'"),
    ],
)
def test_refused(flags: list[str], reason: str) -> None:
    result = doctor(*FLAGS, *flags)
    assert result.exit_code == 2 and reason in " ".join(result.output.split()), result.output


@pytest.mark.parametrize("name", ["none_such", "\udcff"])  # the second one is a byte that is not UTF-8
def test_a_congestion_control_that_is_not_permitted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QCCL_WAN_CONGESTION", name)
    result = doctor(*FLAGS, "--link=1gbit", "--delay=25ms")
    assert result.exit_code == 2 and "this kernel does not allow it" in " ".join(result.output.split())
