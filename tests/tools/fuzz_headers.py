"""Random changes of the control messages of real calls, and what honest ranks make of them.

``fuzz_headers.py --rounds 1000 [--seed N] [--over ucx]`` makes so many groups of 2 to 4 threads. In each the
control messages of the last rank are changed, once or a few times. The other ranks must return right results, bit for
bit, or raise an error that names a rank; and they may send nothing but what they send when nobody changes anything, and
their last control message. A round takes some 10 ms; it follows from its seed, but for the timing of threads.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))  # for runs by command

import numpy as np
from hostile import Changed, Recorded, announcing, kind_of, of_call, of_kind, outcomes_over_ucx, sequence_of
from schedule_cases import one_rank
from threads import CODEC, Caller, outcomes, ramp

from qccl.base.dtypes import FLOAT32
from qccl.base.errors import QcclError
from qccl.collectives.allreduce import one_shot, two_round
from qccl.engine.control import CONTROL_TAG, HEADER_NBYTES, ControlKind

COUNTS = (0, 1, 63, 1000, 3000, 20_000)
TIMEOUT = 10.0

Plan = tuple[int, tuple[tuple[Callable, int], ...], bool]


def without_data(message: bytes, number: int) -> bytes:
    """The header alone, for another call. With this call's data it might be an honest message: a rank gives what it
    likes.
    """
    return announcing(of_call(message[:HEADER_NBYTES], number), 0)


def changed(rng: random.Random, message: bytes, earlier: list[bytes]) -> list[bytes]:
    """What becomes of a message; its data is the sender's own, so mostly the header changes."""
    head, number, count = message[:HEADER_NBYTES], sequence_of(message), rng.choice((1, 1, 2, 8))
    begin = rng.choice((0, 4, 6, 8, 16, 48, HEADER_NBYTES - 4, rng.randrange(HEADER_NBYTES)))
    end = min(begin + rng.choice((1, 2, 4, 8, 64)), HEADER_NBYTES)
    nbytes = rng.choice((0, 1, len(message), 8192, 40_960, (1 << 31) - 1, -1, CODEC.encoded_nbytes(20_000, FLOAT32)))
    step = rng.choice((-1, 1, 15, 16, 17, 1 << 32, 1 << 63, -(1 << 63)))
    bits = bytearray(message)
    for _ in range(count):
        bits[rng.randrange(HEADER_NBYTES)] ^= 1 << rng.randrange(8)
    another = (
        *(bytes(bits), message[:begin] + rng.randbytes(end - begin) + message[end:]),
        message[: rng.choice((0, 1, 8, 16, HEADER_NBYTES - 1, HEADER_NBYTES, rng.randrange(len(message) + 1)))],
        message + rng.randbytes(rng.choice((1, 100, 8192, 20_000))),
        *(announcing(each, nbytes) for each in (message, head)),
        *(rng.choice(earlier), without_data(message, number + step)),
        of_kind(rng.choice((message, head)), rng.choice((0, 2, 3, 4, 5, 0xFFFF))),
        rng.randbytes(rng.choice((0, 1, 7, HEADER_NBYTES, len(message), 8704, 8705))),
    )
    if rng.random() < 0.2:  # honest messages only, but too many
        following = [without_data(message, number + i) for i in range(1, rng.choice((2, 15, 16, 17, 100)))]
        return rng.choice(([message] * rng.choice((2, 3, 11, 40)), [message, *following]))
    other = rng.choice(another)
    return rng.choice(([other], [message, other], [other, message]))


class Changes:
    """Changes the messages with the given numbers, among the control messages that a rank sends."""

    def __init__(self, seed: int, numbers: set[int]) -> None:
        self._rng, self._numbers, self._earlier = random.Random(seed), numbers, [bytes(HEADER_NBYTES)]

    def __call__(self, peer: int, tag: int, message: bytes) -> list[bytes]:
        if tag != CONTROL_TAG:
            return [message]
        number = len(self._earlier) - 1
        self._earlier.append(message)
        return changed(self._rng, message, self._earlier) if number in self._numbers else [message]


def calls(t: Any, plan: Plan) -> tuple[list[bytes | QcclError], list[tuple[int, int, bytes]]]:
    """Results or errors of a rank's calls, and what it sent."""
    _, each, overlap = plan
    recorded = Recorded(t)
    caller = Caller(recorded, timeout=TIMEOUT)
    found: list[bytes | QcclError] = []
    under_way = []
    try:
        for number, (make, count) in enumerate(each):
            x = ramp(t.rank + 31 * number, count)
            y = np.full_like(x, -1)
            program = caller.engine.compile(one_rank(make, t.rank, t.size, count, FLOAT32, CODEC))
            under_way.append((caller.start(program, x, y), y))
            while under_way and (not overlap or number == len(each) - 1):
                execution, y = under_way.pop(0)
                execution.run()
                found.append(y.tobytes())
    except QcclError as error:
        found.append(error)
    caller.engine.close(TIMEOUT)
    return found, recorded.sent


@cache
def unchanged(plan: Plan) -> list[Any]:
    return outcomes(plan[0], lambda t: calls(t, plan))


def fuzz(seed: int, over: Callable = outcomes) -> str:
    """One round; the kind of error that rank 0 met, or nothing. Raises AssertionError."""
    rng = random.Random(seed)
    n = rng.choice((2, 2, 3, 4))
    each = tuple((rng.choice((one_shot, two_round)), rng.choice(COUNTS)) for _ in range(rng.choice((1, 2, 3, 20))))
    plan = n, each, rng.random() < 0.5
    numbers = {rng.randrange((n - 1) * len(each)) for _ in range(rng.choice((1, 1, 2, 5)))}
    changes = Changes(rng.randrange(1 << 32), numbers)
    expected = unchanged(plan)
    found = over(n, lambda t: calls(Changed(t, changes) if t.rank == n - 1 else t, plan))
    for rank in range(n - 1):
        assert isinstance(found[rank], tuple), f"seed {seed}, rank {rank}: {found[rank]!r}"
        results, sent = found[rank]
        for number, result in enumerate(results):
            if isinstance(result, QcclError):
                assert "rank" in str(result), f"seed {seed}, rank {rank}: {result!r} names no rank"
            else:
                assert result == expected[rank][0][number], f"seed {seed}, rank {rank}: call {number} is wrong"
        honest = set(expected[rank][1])
        for peer, tag, message in sent:
            last_words = tag == CONTROL_TAG and len(message) == HEADER_NBYTES and kind_of(message) != ControlKind.CALL
            assert last_words or (peer, tag, message) in honest, f"seed {seed}, rank {rank} sent {message[:64]!r}"
    last = found[0][0][-1]
    return type(last).__name__ if isinstance(last, QcclError) else ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--over", choices=["loopback", "ucx"], default="loopback")
    args = parser.parse_args()
    over = outcomes if args.over == "loopback" else outcomes_over_ucx
    begin = time.monotonic()
    kinds = Counter(fuzz(seed, over) for seed in range(args.seed, args.seed + args.rounds))
    print(f"{args.rounds} rounds in {time.monotonic() - begin:.0f} s: {dict(kinds)}")


if __name__ == "__main__":
    sys.exit(main())
