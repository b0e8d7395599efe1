"""The forwarder's counters: memory that its process writes, and the lab's process reads."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np

__all__ = ["Counters", "Lapses", "PathCounters"]

_LAPSES = ("overrun", "refused", "late", "worst_ns")
_OF_A_PATH = (
    *("packets", "nbytes", "dropped_up", "dropped_down", "lost", "cut"),
    *("delivered_packets", "delivered_nbytes", "is_cut"),
)
#: share of the packets
_MAY_BE_LATE = 0.02


@dataclass(frozen=True, slots=True)
class PathCounters:
    """Packets and bytes (with the headers of Ethernet, IP and TCP) from one site to another, or to all others.

    Attributes:
        packets, nbytes: that the sender's uplink has carried.
        dropped_up, dropped_down: packets that the full queue of the uplink (which are not in ``packets``) or of the
            downlink dropped.
        lost: packets that were lost at random.
        cut: packets that were lost while the path was cut.
        delivered_packets, delivered_nbytes: that have reached the receiver.
    """

    packets: int
    nbytes: int
    dropped_up: int
    dropped_down: int
    lost: int
    cut: int
    delivered_packets: int
    delivered_nbytes: int


@dataclass(frozen=True, slots=True)
class Lapses:
    """What the forwarder did wrong because the machine was busy.

    Attributes:
        overrun: packets that came faster than it could read them; these are lost.
        refused: packets that an interface did not take, or that were longer than the MTU; lost, too.
        late: packets that it passed on more than 1 ms too late.
        worst: the longest time in seconds by which one was late.
    """

    overrun: int
    refused: int
    late: int
    worst: float

    def remark(self, packets: int) -> str:
        """The lapses that matter among ``packets`` packets, in words; nothing if there are none."""
        wrong = self.overrun + self.refused
        if not wrong and self.late <= _MAY_BE_LATE * packets:
            return ""
        return (
            f"the lab's network lost {wrong} packets that it should not have, and {self.late} of {packets} were more "
            f"than 1 ms late (at most {self.worst * 1e3:.1f} ms): the machine is too busy, or too slow for these links"
        )


class Counters:
    """The counters of ``sites`` sites in the memory of ``file``, or in memory of its own.

    The fields are those of Lapses and Counters in kernels/lab, all of 64-bit integers.
    """

    def __init__(self, sites: int, file: int | None = None) -> None:
        words = len(_LAPSES) + sites * sites * len(_OF_A_PATH)
        if file is not None and os.fstat(file).st_size < 8 * words:
            os.ftruncate(file, 8 * words)
        self._words = np.frombuffer(mmap.mmap(-1 if file is None else file, 8 * words), np.uint64)
        self._lapses = self._words[: len(_LAPSES)]
        self._paths = self._words[len(_LAPSES) :].reshape(sites, sites, len(_OF_A_PATH))

    @property
    def addresses(self) -> tuple[int, int]:
        """The addresses of the lapses and of the paths."""
        return self._lapses.ctypes.data, self._paths.ctypes.data

    def lapses(self) -> Lapses:
        """What went wrong until now."""
        overrun, refused, late, worst = map(int, self._lapses)
        return Lapses(overrun, refused, late, worst * 1e-9)

    def total(self) -> PathCounters:
        """What went from all sites to all others."""
        return PathCounters(*map(int, self._paths[:, :, :-1].sum(axis=(0, 1))))

    def path(self, source: int, to: int) -> PathCounters:
        """What went from one site to another."""
        return PathCounters(*map(int, self._paths[source, to, :-1]))

    def sent(self, source: int) -> PathCounters:
        """What went from one site to all others."""
        return PathCounters(*map(int, self._paths[source, :, :-1].sum(axis=0)))

    def reset(self) -> None:
        """Begin to count anew; cut paths stay cut. For a moment in which nothing is under way."""
        self._lapses[:] = 0
        self._paths[:, :, :-1] = 0

    def cut(self, source: int, to: int, *, is_cut: bool) -> None:
        """Lose all packets from one site to another from now on, or no longer."""
        self._paths[source, to, -1] = is_cut
