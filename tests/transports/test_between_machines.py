"""Ranks in two network namespaces, as on two machines, with and without a token, while a program reads all packets."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from namespaces import NEEDS_LAB, linked, start

pytestmark = NEEDS_LAB

TOKEN = "a token for the tests of two machines"
PLACE = {"MASTER_ADDR": "10.99.7.1", "MASTER_PORT": "29533", "WORLD_SIZE": "2"}
#: what the packets must not have: values of the arrays, and what is said in the meeting and in the membership
MARK = np.float32(1.2345678)
PLAIN = [MARK.tobytes() * 3, b"qccl/rdv", b"nonce", b"127.0.0.1", b"10.99.7.", b"rank"]

PROGRAM = f"""
import json, os, pathlib, sys
import numpy as np
import qccl

place = pathlib.Path(sys.argv[1])
if len(sys.argv) > 2:
    comm = qccl.join(place.read_text(), 60.0)
else:
    comm = qccl.init("host", 60.0)
    comm.quantized_allreduce(np.full(1000, {MARK}, np.float32), codec="none")
    if comm.rank == 0:
        place.touch(0o600)
        place.with_suffix(".new").write_text(comm.address)
        place.with_suffix(".new").replace(place)
    comm = comm.grow(3, 60.0)
found = comm.quantized_allreduce(np.full(1000, {MARK}, np.float32), codec="none")
said = {{"rank": comm.rank, "size": comm.size, "transport": comm.transport.name}}
said["scheme"] = comm.address.partition(":")[0]
comm.barrier()
comm.close()
print(json.dumps(said | {{"right": bool((found == np.float32({MARK}) * 3).all() or (found > 3.7).all())}}))
"""

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


def run(machines: list[str], tmp_path: Path, **settings: str) -> tuple[list[dict[str, object]], bytes]:
    """What two ranks and a process that joins them say, and all packets."""
    packets = tmp_path / "packets"
    sniffer = start(machines[1], "-c", SNIFFER, str(packets))
    assert sniffer.stdout is not None and sniffer.stdout.readline() == "ready\n"
    command = "-c", PROGRAM, str(tmp_path / "address")
    processes = []
    try:
        for rank in range(2):
            processes.append(start(machines[rank], *command, **PLACE, **settings, RANK=str(rank)))
        while not (tmp_path / "address").exists() or not (tmp_path / "address").read_text():
            assert all(process.poll() is None for process in processes), ends(processes)
            time.sleep(0.01)
        processes.append(start(machines[1], *command, "join"))
        found = [json.loads(line) for line in ends(processes)]
    finally:
        for process in (*processes, sniffer):
            process.terminate()
            process.wait(20)
        sniffer.stdout.close()
    return sorted(found, key=lambda each: each["rank"]), packets.read_bytes()


def ends(processes: list[subprocess.Popen[str]]) -> list[str]:
    return [process.communicate(timeout=100)[0].strip() for process in processes]


@pytest.mark.quick
def test_with_a_token_nothing_can_be_read(machines, tmp_path):
    """Neither in the meeting, nor of the arrays, nor when a process joins, which has the address and no token."""
    found, packets = run(machines, tmp_path, QCCL_TOKEN=TOKEN)
    expected = {"size": 3, "transport": "wan", "scheme": "wan", "right": True}
    assert found == [{"rank": rank} | expected for rank in range(3)]
    assert len(packets) > 12_000
    assert [text for text in PLAIN if text in packets] == []


def test_without_a_token_all_of_it_can_be_read(machines, tmp_path):
    """So the test before finds what it looks for; the membership is encrypted all the same."""
    found, packets = run(machines, tmp_path, QCCL_TRANSPORT="wan", QCCL_INSECURE="1")
    expected = {"size": 3, "transport": "wan", "scheme": "wan-plain", "right": True}
    assert found == [{"rank": rank} | expected for rank in range(3)]
    for text in (MARK.tobytes() * 3, b"qccl/rdv", b"10.99.7.", b"rank"):
        assert text in packets


@pytest.mark.parametrize("rank", [0, 1])
def test_wan_without_a_token(machines, rank):
    """Both ranks say what to do."""
    program = "import qccl; qccl.init('host', 20.0, transport='wan')"
    processes = [start(machines[each], "-c", program, **PLACE, RANK=str(each)) for each in (rank, 1 - rank)]
    for out in ends(processes):
        assert "EngineError" in out and "between machines wan needs a token" in out and "QCCL_INSECURE=1" in out, out
