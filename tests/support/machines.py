"""Ranks of one machine that take themselves for ranks of several, as they would be in network namespaces."""

from __future__ import annotations

import os

from qccl.meeting import topology

__all__ = ["RANKS_EACH", "pretend"]

#: the variable with the number of ranks on each of the machines; without it all are on one
RANKS_EACH = "QCCL_TEST_RANKS_EACH"


def pretend(rank: int) -> None:
    """From now on this process takes itself for one on the machine of ``rank``. A process forked later does, too."""
    if each := int(os.environ.get(RANKS_EACH, "0")):
        topology._network = lambda: 1 + rank // each
