"""The link between the ranks of a communicator, measured by a few calls for about a second."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from qccl.communicator import Communicator
from qccl.costs.step import LATENCY, sent_nbytes

__all__ = ["Link", "measure_link"]

#: calls of one element, each of which takes the time of one message, after one that prepares them
_SMALL_CALLS = 9
#: bytes of the large call: from the first to the last, four times as many each, until its bytes take so many seconds
_FIRST_NBYTES, _LAST_NBYTES, _ENOUGH_SECONDS = 16 << 10, 4 << 20, 0.1
_LARGE_CALLS = 3
#: messages that a call of two rounds waits for (qccl.costs.step)
_DELAYS = 3


@dataclass(frozen=True)
class Link:
    """Rate and delay between ranks; those of the slowest rank.

    Attributes:
        rate: bytes per second of each rank's link, in each direction.
        delay: seconds that a message is under way beyond those in one room.
    """

    rate: float
    delay: float


def measure_link(comm: Communicator, timeout: float | None) -> Link:
    """Collective: measure the link by all-reduces without a codec. ``timeout`` is that of each call, in seconds.

    Calls of one element give the time of a message. Larger ones, whose bytes take at least 0.1 s if they are not 4 MiB
    already, give the rate. All ranks go by the times of the slowest one.
    """
    x = np.zeros(_LAST_NBYTES // 4, np.float32)

    def slowest(elements: int, algorithm: str, calls: int) -> float:
        times = []
        for _ in range(calls):
            begin = time.perf_counter()
            comm.quantized_allreduce(x[:elements], codec="none", algorithm=algorithm, timeout=timeout)
            times.append(time.perf_counter() - begin)
        return max(float(each) for each in comm.allgather(repr(statistics.median(times)).encode()))

    slowest(1, "one_shot", 1)
    message = slowest(1, "one_shot", _SMALL_CALLS)
    nbytes = _FIRST_NBYTES
    while True:
        seconds = slowest(nbytes // 4, "two_round", 1) - _DELAYS * message
        if seconds >= _ENOUGH_SECONDS or nbytes >= _LAST_NBYTES:
            break
        nbytes *= 4
    whole = slowest(nbytes // 4, "two_round", _LARGE_CALLS)
    carried = max(whole - _DELAYS * message, whole / 4)  # of a call that is shorter than its messages, a part remains
    return Link(sent_nbytes(nbytes, comm.size) / carried, max(0.0, message - LATENCY))
