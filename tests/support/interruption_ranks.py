"""A rank of tests/test_interruptions.py over UCX: ``interruption_ranks.py RANK ADDRESS MODE ARGUMENT...``.

MODE is "entries" or "instructions" with a stride, or "times" with seconds and a seed; names of kinds may follow. Rank 0
prints how many injections went on how, and what was wrong; then it exits with status 1.
"""

from __future__ import annotations

import json
import sys

from interruption_kinds import KINDS
from interruptions import at_random_times, every_entry

import qccl


def main(rank: str, address: str, mode: str, argument: str, *more: str) -> int:
    with qccl.init("host", 60.0, rank=int(rank), size=2, address=address) as parent:
        assert parent.transport.name == "ucx"
        if mode == "times":
            tally = at_random_times(parent, float(argument), int(more[0]), more[1:] or tuple(KINDS))
        else:
            tally = every_entry(parent, more or tuple(KINDS), opcodes=mode == "instructions", stride=int(argument))
    if parent.rank == 0:
        print(json.dumps(tally.stories))
        print(*tally.wrong, sep="\n")
    return 1 if tally.wrong else 0


sys.exit(main(*sys.argv[1:]))
