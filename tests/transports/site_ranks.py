"""Ranks of two sites: ``site_ranks.py COUNT FOLDER``. They call with so many values, and take in a third process.

It joins from the site of rank 1. Then all call again, also in a smaller group and in one that follows.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import qccl

#: the values of the arrays; sums of a few are exact
MARK = np.float32(1_234_567)


def check(comm: qccl.Communicator | None, count: int) -> None:
    x = np.full(count, MARK)
    comm.quantized_allreduce(x, codec="none")
    assert (x == MARK * comm.size).all()


def main(count: int, place: Path) -> None:
    third = None
    if sys.argv[3:] == ["joins"]:
        comm = qccl.join(place.read_text(), timeout=60)
    else:
        comm = qccl.init(backend="host", timeout=60)
        check(comm, count)
        if comm.rank == 0:
            place.with_name("part").write_text(comm.address)
            place.with_name("part").rename(place)
        else:
            while not place.exists():
                time.sleep(0.05)
            third = subprocess.Popen([sys.executable, *sys.argv, "joins"], stdout=subprocess.DEVNULL)
        comm = comm.grow(3, timeout=60)
    check(comm, count)
    check(comm.split(0, -comm.rank), count)
    comm = comm.shrink(timeout=60)
    check(comm, count)
    print(comm.size, comm.address.partition(":")[0], comm.rank)
    assert third is None or third.wait(timeout=60) == 0


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]) / "address")
