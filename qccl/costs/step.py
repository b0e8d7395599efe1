"""A training step whose gradients travel by calls of qccl: what a call costs, and the step as a timeline.

The constants below are of qccl over UCX's TCP, fitted to the steps of docs/results (2 and 4 ranks on 2 cores behind
100 Mbit/s and 1 Gbit/s, and in shared memory). bench/doctor_accuracy.py compares the predictions with measured steps.

With a delay, a message arrives that much later. Calls that are under way together share this time, and so do the
chunks of a call. Measured with 25, 50 and 100 ms, a call took three delays, one for each round and one between them.
What lost packets cost is in tcp_model.py. A lost packet holds up all that is behind it, so nothing overlaps the wait
for it: that of both rounds is added at the end of the second one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qccl import _host
from qccl.codecs import Codec
from qccl.collectives.partitions import partition
from qccl.costs.profile import Profile
from qccl.costs.tcp_model import Tcp, rate_with_loss, wait_for_losses
from qccl.costs.timeline import Call, Rank, Segment, step_seconds
from qccl.dtypes import FLOAT32, DType

__all__ = ["ADD", "BYTE", "COPIED", "HEADERS", "HEADER_NBYTES", "LATENCY", "MESSAGE", "Reduction", "Speed", "Step"]
__all__ += [
    "encoded_nbytes",
    "later",
    "link_seconds",
    "predicted",
    "rank_of",
    "reduction",
    "round_nbytes",
    "sent_nbytes",
    "two_rounds",
]

#: seconds until a message is noticed; ranks that share a processor wait for it, too
LATENCY, _SHARED_LATENCY = 0.2e-3, 0.8e-3
#: seconds of a processor for a byte that is sent or received, and to add or copy an element
BYTE, ADD = 0.3e-9, 0.17e-9
#: bytes of the control message that a rank sends each other one in a call
HEADER_NBYTES: int = _host.HEADER_NBYTES
#: seconds of a processor for a message
MESSAGE = 11e-6
#: time on the link beyond that of the payload, for headers and pauses; and between sites, where 1448 bytes are a packet
#: of 1514, and for two packets there is an acknowledgement of 66 bytes in the other direction
HEADERS, _HEADERS_OF_SITES = 1.012, (1514 + 33) / 1448
#: connections of UCX and of gloo
_ONE = Tcp()


@dataclass(frozen=True)
class Step:
    """A training step.

    Attributes:
        profile: its computation on one rank.
        ranks: their number.
        rate: bytes per second of each rank's link, in each direction.
        processors: of each rank; less than 1 if ranks share one.
        delay: seconds that a packet is under way from one rank to another, beyond those in one room.
        loss: the share of the packets that are lost, at most tcp_model.MAX_LOSS.
        tcp: the connections of qccl between two ranks.
        gloo: those of gloo, which has one.
    """

    profile: Profile
    ranks: int
    rate: float
    processors: float = 1.0
    delay: float = 0.0
    loss: float = 0.0
    tcp: Tcp = _ONE
    gloo: Tcp = _ONE

    @property
    def threads(self) -> int:
        """Of the trainer's computation on a rank."""
        return max(1, int(self.processors))

    @property
    def round_trip(self) -> float:
        """Seconds from a packet to its acknowledgement."""
        return 2 * (self.delay + LATENCY)

    @property
    def own_rate(self) -> float:
        """Bytes per second that a rank gets of its link with qccl, which sends to all other ranks at once."""
        return rate_with_loss(self.rate, self.round_trip, self.loss, self.tcp, self.ranks - 1)

    @property
    def gloo_rate(self) -> float:
        """And with gloo, whose ring sends to one."""
        return rate_with_loss(self.rate, self.round_trip, self.loss, self.gloo, 1)


@dataclass(frozen=True)
class Speed:
    """A codec on one core: seconds to encode and to decode an element, and the relative L2 error of one encoding."""

    encode: float
    decode: float
    error: float


#: the speed of values that are sent as they are
COPIED = Speed(ADD, ADD, 0.0)


@dataclass(frozen=True)
class Reduction:
    """A call of the step's timeline, and what it costs.

    Attributes:
        ready: seconds from the start of the backward pass until it may start.
        call: what the timeline runs.
        encoded: encoded bytes.
        processor: seconds of a processor to encode and decode.
    """

    ready: float
    call: Call
    encoded: float
    processor: float


def encoded_nbytes(codec: Codec, count: int, dtype: DType = FLOAT32) -> float:
    """The encoded bytes of ``count`` elements, the mean of both rounds."""
    return sum(each.encoded_nbytes(count, dtype) for each in codec.rounds) / 2


def sent_nbytes(encoded: float, ranks: int) -> float:
    """Bytes that a rank sends in a two-round all-reduce of a vector that takes ``encoded`` bytes."""
    return 2 * (ranks - 1) / ranks * encoded


def round_nbytes(step: Step, encoded: float) -> float:
    """The bytes that a rank sends in one of the two rounds."""
    return encoded * (step.ranks - 1) / step.ranks


def link_seconds(step: Step, encoded: float, rate: float) -> float:
    """Seconds in which a rank's link carries one of the two rounds at this rate."""
    headers = _HEADERS_OF_SITES if step.delay or step.loss else HEADERS
    return headers * round_nbytes(step, encoded) / rate


def later(step: Step, encoded: float, first: float, second: float) -> tuple[float, float]:
    """For Call.later: so many delays beyond one, and what lost packets cost."""
    lost = wait_for_losses(step.rate, step.round_trip, step.loss, round_nbytes(step, encoded), step.ranks)
    return first * step.delay, second * step.delay + 2 * lost


def rank_of(step: Step) -> Rank:
    """A rank of the step's timeline."""
    latency = LATENCY if step.processors >= 1 else _SHARED_LATENCY
    return Rank(step.processors, latency + step.delay, step.threads)


def two_rounds(step: Step, codec: Codec, count: int, encoded: float, encode: float, decode: float) -> Call:
    """A call of qccl: a rank encodes for the others, reduces its shard and encodes it, and decodes the others'."""
    n, chunks = step.ranks, partition(count, step.ranks, codec).chunks
    others = (n - 1) / n
    moving = BYTE * round_nbytes(step, encoded) + chunks * (n - 1) * MESSAGE
    return Call(
        encode=count * encode * others + moving,
        reduce=count * (encode / n + decode) + 2 * moving,
        decode=count * decode * others + moving,
        link=link_seconds(step, encoded, step.own_rate),
        later=later(step, encoded, 1, 0),
        chunks=chunks,
    )


def reduction(
    step: Step, codec: Codec, counts: Sequence[int], ready: float, speed: Speed, dtype: DType = FLOAT32
) -> Reduction:
    """The call that reduces a group of gradients of so many elements each, which is complete at ``ready``."""
    count, encoded = sum(counts), sum(encoded_nbytes(codec, each, dtype) for each in counts)
    processor = count * (speed.encode + (2 * step.ranks - 1) / step.ranks * speed.decode)
    return Reduction(ready, two_rounds(step, codec, count, encoded, speed.encode, speed.decode), encoded, processor)


def predicted(
    step: Step,
    reductions: Sequence[Reduction],
    *,
    overlaps: bool = True,
    per_step: float = 0.0,
    per_call: float = 0.0,
    before: float = 0.0,
) -> float:
    """The seconds of the step with these calls, in the order in which they start.

    ``overlaps``: they run beside the backward pass, not after it. ``per_step`` and ``per_call`` are seconds of the
    trainer that the profile lacks, and ``before`` is computation between the backward pass and the first call.
    """
    profile, at = step.profile, 0.0
    segments = [Segment(per_step), Segment(profile.forward)]
    for each in reductions:
        ready = each.ready if overlaps else profile.backward
        segments += [Segment(max(0.0, ready - at)), Segment(per_call + before, [each.call])]
        at, before = max(at, ready), 0.0
    segments += [Segment(max(0.0, profile.backward - at)), Segment(profile.optimiser, waits=True)]
    return step_seconds(segments, rank_of(step))
