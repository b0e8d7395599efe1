"""Ranks in two network namespaces, as on two machines, with and without a token, while a program reads all packets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import site_ranks
from namespaces import NEEDS_LAB, linked, outputs, started
from site_ranks import MARK

from qccl.meeting.topology import network_id

pytestmark = NEEDS_LAB

#: the begin of what a rank tells of its network, in the meeting
OFFERED = network_id().encode()[:36]
#: what the packets must not have: values of the arrays, and what is said in the meeting and in the membership
PLAIN = [MARK.tobytes() * 3, OFFERED, b"nonce", b"127.0.0.1", b"10.99.7.", b"rank"]

SNIFFER = """
import signal, socket, sys
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
packets.bind(("qccl-veth1", 0))
packets.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
signal.signal(signal.SIGTERM, lambda *_: packets.setblocking(False))  # take what has come, and end
print("ready", flush=True)
with open(sys.argv[1], "wb") as file:
    try:
        while True:
            file.write(packets.recv(1 << 17))
    except BlockingIOError:
        pass
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[list[str]]:
    with linked() as names:
        yield names


def run(machines: list[str], tmp_path: Path, **settings: str) -> tuple[list[str], bytes]:
    """What two ranks say that take in a third process, and all packets."""
    packets = tmp_path / "packets"
    with started(machines[1], "-c", SNIFFER, str(packets)) as sniffer:
        assert sniffer.stdout is not None and sniffer.stdout.readline() == "ready\n"
        place = {"MASTER_ADDR": "10.99.7.1"} | settings
        found = outputs(machines, site_ranks.__file__, "1000", str(tmp_path), **place)
        sniffer.terminate()
        sniffer.wait(20)
    return found, packets.read_bytes()


@pytest.mark.quick
def test_with_a_token_nothing_can_be_read(machines, tmp_path):
    """Neither in the meeting, nor of the arrays, nor when a process joins."""
    found, packets = run(machines, tmp_path, QCCL_TOKEN="a token for the tests of two machines")
    assert found == ["3 wan 0\n", "3 wan 1\n"]
    assert len(packets) > 12_000
    assert [text for text in PLAIN if text in packets] == []


def test_without_a_token_all_of_it_can_be_read(machines, tmp_path):
    """So the test before finds what it looks for; the membership is encrypted all the same."""
    found, packets = run(machines, tmp_path, QCCL_TRANSPORT="wan", QCCL_INSECURE="1")
    assert found == ["3 wan-plain 0\n", "3 wan-plain 1\n"]
    for text in (MARK.tobytes() * 3, OFFERED, b"10.99.7.", b"rank"):
        assert text in packets
