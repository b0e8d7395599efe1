"""Two machines with two ranks each, in network namespaces: bits, the bytes on the link, and ranks that are lost."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import mixed_ranks
import patience
import pytest
from mixed_ranks import COUNT
from namespaces import NEEDS_LAB, texts_of
from namespaces import start as start_inside
from start_ranks import needs_ucx

from qccl.base.dtypes import FLOAT32
from qccl.bench.lab.lab import Lab
from qccl.bench.params import parse_link
from qccl.codecs import get

pytestmark = [*NEEDS_LAB, needs_ucx]


@pytest.fixture
def network() -> Iterator[Lab]:
    with Lab(4, parse_link("1gbit"), nodes=2) as made:
        yield made


def start(network: Lab, name: str, rank: int | None, machine: int, **more: str) -> subprocess.Popen[str]:
    """A rank, or with None a process that joins, on a machine."""
    place = {"MASTER_ADDR": network.first_address, "MASTER_PORT": "29544", "WORLD_SIZE": "4", "PLACED": str(machine)}
    settings = {"QCCL_TOKEN": "a token for tests only", "QCCL_TRANSPORT": "wan", "OMP_NUM_THREADS": "1"}
    own = {} if rank is None else {"RANK": str(rank), "LOCAL_RANK": str(rank // 2), "LOCAL_WORLD_SIZE": "2"}
    return start_inside(network.enter("PLACED"), mixed_ranks.__file__, name, **place, **settings, **own, **more)


def ends(processes: list[subprocess.Popen[str]]) -> list[str]:
    texts = texts_of(processes)
    for text in texts:
        assert text.endswith("done\n"), "\n".join(texts)
    return texts


def loopback_nbytes(network: Lab) -> list[int]:
    """The bytes that have passed each machine's loopback interface, which its own addresses lead to, too."""
    found = []
    for machine in range(network.nodes):
        command = ["ip", "-json", "-stats", "-n", f"{network.name}{machine}", "link", "show", "lo"]
        done = subprocess.run(command, check=True, capture_output=True, timeout=20)
        found.append(int(json.loads(done.stdout)[0]["stats64"]["rx"]["bytes"]))
    return found


def test_only_the_codes_between_machines_cross_the_link(network: Lab) -> None:
    """The values that the ranks of a machine exchange are 4 to 8 times as many bytes, and use no network at all.

    TCP sends some packets again where the machine is busy.
    """
    ranks = [start(network, "counted", rank, rank % 2) for rank in range(4)]
    sent, inside = [], []

    def hear(text: str) -> None:
        for rank in ranks:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            assert line == f"{text}\n", line + rank.stdout.read()

    def go() -> None:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()

    try:
        for _ in range(3):
            hear("ready")
            before = network.shaped_nbytes() + loopback_nbytes(network)
            go()
            hear("made")
            after = network.shaped_nbytes() + loopback_nbytes(network)
            passed = [now - then for now, then in zip(after, before, strict=True)]
            sent.append(passed[:2])
            inside += passed[2:]
            go()
    finally:
        ends(ranks)
    for codec, found in zip(("minmax8", "minmax8", "minmax4"), sent, strict=True):
        codes = 5 * get(codec).encoded_nbytes(COUNT, FLOAT32)
        assert all(codes <= nbytes < 2 * codes for nbytes in found), (codec, codes, found)
    assert max(inside) < 100_000, inside


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [2, 3])
def test_a_rank_is_lost_and_the_next_groups_share_memory(
    network: Lab, tmp_path: Path, number: signal.Signals, victim: int
) -> None:
    """For rank 0 the victim is on the same machine, or on the other one. The new process shares memory there."""
    more = {"VICTIM": str(victim), "SIGNAL": str(int(number)), "PLACE": str(tmp_path / "address")}
    ranks = [start(network, "lost", rank, rank % 2, **more) for rank in range(4)]
    others = [each for rank, each in enumerate(ranks) if rank != victim]
    try:
        end = time.monotonic() + 90 * patience.factor()
        while not (tmp_path / "address").exists() and time.monotonic() < end:
            assert all(each.poll() is None for each in others), ends(others)
            if number == signal.SIGKILL:
                ranks[victim].poll()
            time.sleep(0.05)
        others.append(start(network, "lost", None, victim % 2, **more))
        texts = ends(others)
    finally:
        ranks[victim].kill()
        ranks[victim].communicate(timeout=20)
    # the new process is rank 3, and the victim's place is taken by the next rank
    near = {0: 3, 1: 2, 2: 1, 3: 0} if victim == 2 else {0: 2, 1: 3, 2: 0, 3: 1}
    lines = sorted(text.splitlines()[-2] for text in texts)
    assert lines == [f"{rank} wan; ucx with {near[rank]}" for rank in range(4)]
