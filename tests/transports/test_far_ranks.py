"""Ranks with a slow link between two of them, each in a network namespace of its own."""

from __future__ import annotations

import subprocess

import pytest
from namespaces import NEEDS_LAB, start, texts_of
from plain_ranks import free_ports, torch_variables
from start_ranks import needs_ucx

from qccl.bench.lab import lab
from qccl.bench.params import parse_link

pytestmark = NEEDS_LAB

RANKS = 3
#: a rank that calls shrink() as soon as its own call has ended; it must end on all of them, with the right sum
PROGRAM = """
import numpy as np, qccl, patience
comm = qccl.init("host", 60.0 * patience.factor())
size = comm.size
for count in (10, 1000, 300_000):
    found = comm.quantized_allreduce(np.full(count, comm.rank + 1, np.float32), codec="none")
    comm = comm.shrink()
    assert comm.size == size
    assert (found == size * (size + 1) / 2).all()
with comm:
    print(f"rank {comm.rank} of {size} over {comm.transport.name} is done", flush=True)
"""


def slow_down(network: lab.Lab, rank: int, peer: int) -> None:
    """Let a rank send to one of the others at 10 Mbit/s."""
    place = network.first_address[:-1] + str(peer + 1)
    device = ["dev", lab.INTERFACE]
    match = ["protocol", "ip", "u32", "match", "ip", "dst", place, "flowid", "1:2"]
    for words in (
        ["qdisc", "replace", *device, "root", "handle", "1:", "htb", "default", "1"],
        ["class", "add", *device, "parent", "1:", "classid", "1:1", "htb", "rate", "100mbit"],
        ["class", "add", *device, "parent", "1:", "classid", "1:2", "htb", "rate", "10mbit"],
        ["filter", "add", *device, "parent", "1:", *match],
    ):
        subprocess.run(["tc", "-n", f"{network.name}{rank}", *words], check=True, timeout=20, capture_output=True)


@pytest.mark.parametrize("transport", [pytest.param("ucx", marks=needs_ucx), "wan"])
def test_a_rank_that_shrinks_after_a_call_ends_it_on_no_other_rank(transport):
    """At that moment the others, between which the link is slow, still wait for the last bytes of the call."""
    own = {"QCCL_TRANSPORT": transport, "OMP_NUM_THREADS": "1"}
    own |= {"QCCL_TOKEN": "a token of this test alone"} if transport == "wan" else {"UCX_TLS": "tcp,self"}
    (port,) = free_ports(1)
    with lab.Lab(RANKS, parse_link("100mbit")) as network:
        slow_down(network, 1, 2)
        slow_down(network, 2, 1)
        places = [torch_variables(rank, RANKS, port) | {"MASTER_ADDR": network.first_address} for rank in range(RANKS)]
        texts = texts_of([start(network.enter("RANK"), "-c", PROGRAM, **own, **place) for place in places])
    for rank, text in enumerate(texts):
        assert text == f"rank {rank} of {RANKS} over {transport} is done\n", texts
