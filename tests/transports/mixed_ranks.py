"""The ranks of test_mixed_lab.py: ``mixed_ranks.py NAME`` with torchrun's variables, 2 machines with 2 ranks each.

Rank r is on machine r % 2. Each says what it has done in lines, and goes on when it reads one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import patience

import qccl

TIMEOUT = 30.0 * patience.factor()
#: elements of the calls whose bytes are counted
COUNT = 1 << 20


def say(text: object) -> None:
    print(text, flush=True)


def connect() -> qccl.Communicator:
    comm = qccl.init("host", TIMEOUT)
    assert comm.transport.carrier == f"wan; ucx with {(comm.rank + 2) % 4}", comm.transport.carrier
    assert comm.nodes == (0, 1, 0, 1), comm.nodes
    return comm


def check_sum(comm: qccl.Communicator) -> None:
    x = np.full(100_000, comm.rank + 1, np.float32)
    assert (comm.quantized_allreduce(x, codec="none") == comm.size * (comm.size + 1) / 2).all()


def counted() -> None:
    """One line for each kind of call: the test counts the bytes between them."""
    with connect() as comm:
        x = np.random.default_rng(comm.rank).standard_normal(COUNT, np.float32)
        kinds = (
            lambda: comm.hierarchical_allreduce(x.copy(), layout="leader", codec="minmax8"),
            lambda: comm.hierarchical_allreduce(x.copy(), layout="sharded", codec="minmax8"),
            lambda: comm.hierarchical_allreduce(x.copy(), node_ids=[0, 1, 0, 1], intra="none", codec="minmax4"),
        )
        check_sum(comm)
        for kind in kinds:
            comm.barrier()
            say("ready")
            sys.stdin.readline()
            for _ in range(5):
                kind()
            comm.barrier()
            say("made")
            sys.stdin.readline()
    say("done")


def lost() -> None:
    """Rank VICTIM ends or stops, by SIGNAL; the others name it, go on, and take in a new process at the end."""
    victim, number = int(os.environ["VICTIM"]), int(os.environ["SIGNAL"])
    place = Path(os.environ["PLACE"])
    if not os.environ.get("RANK"):
        comm = qccl.join(place.read_text(), TIMEOUT)
    else:
        comm = connect()
        check_sum(comm)
        if comm.rank == victim:
            say("ending")
            os.kill(os.getpid(), number)
            time.sleep(3600)
        comm.timeout = TIMEOUT if number == signal.SIGKILL else 2.0 * patience.factor()
        try:
            while True:
                check_sum(comm)
        except (qccl.PeerLost, qccl.CollectiveTimeout) as error:
            assert f"rank {victim}" in str(error), error
        comm = comm.shrink(timeout=3.0 * patience.factor())
        comm.timeout = TIMEOUT
        assert comm.size == 3
        check_sum(comm)
        if comm.rank == 0:
            place.with_suffix(".new").write_text(comm.address)
            place.with_suffix(".new").replace(place)
        comm = comm.grow(4, TIMEOUT)
    check_sum(comm)
    check_sum(comm)
    say(f"{comm.rank} {comm.transport.carrier}")
    comm.barrier()
    comm.close()
    say("done")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
