"""What a training step costs with a codec: its reductions as calls of a timeline.

The constants below are of PyTorch's DistributedDataParallel, of gloo and of qccl over UCX's TCP, fitted to the steps of
docs/results (2 and 4 ranks on 2 cores behind 100 Mbit/s and 1 Gbit/s, and in shared memory). bench/doctor_accuracy.py
compares the predictions with measured steps.

With a delay, a message arrives that much later. Calls that are under way together share this time, and so do the
chunks of a call. Measured with 25, 50 and 100 ms, a call of qccl took three delays, one for each round and one between
them, and gloo's ring two for each of its 2 (n - 1) messages (a rank first tells its neighbour that it may send). What
lost packets cost is in tcp_model.py. A lost packet holds up all that is behind it, so nothing overlaps the wait for
it: that of both rounds is added at the end of the second one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qccl.bench.params import codec_of
from qccl.bench.profile import Gradient, Profile
from qccl.bench.tcp_model import Tcp, rate_with_loss, wait_for_losses
from qccl.bench.timeline import Call, Rank, Segment, step_seconds
from qccl.codecs import Codec, NoCodec
from qccl.collectives.partitions import partition
from qccl.dtypes import FLOAT32

__all__ = ["FP16", "FP32", "LATENCY", "POWERSGD", "Cost", "Speed", "Step", "call_seconds", "cost_of", "sent_nbytes"]

#: what a step costs without a codec, and with 16 bits: DDP's own reduction and its hook, over gloo
FP32, FP16, POWERSGD = "none", "cast", "powersgd:"
#: time on the link beyond that of the payload, for headers and pauses; and between sites, where 1448 bytes are a packet
#: of 1514, and for two packets there is an acknowledgement of 66 bytes in the other direction
_HEADERS, _HEADERS_OF_SITES = 1.012, (1514 + 33) / 1448
#: seconds of a processor for a byte that is sent or received, and for a message of qccl and of gloo
_BYTE, _MESSAGE, _GLOO_MESSAGE = 0.3e-9, 11e-6, 70e-6
#: bytes of gloo's messages; seconds of a processor to add an element, and to convert it to 16 bits or back
_GLOO_NBYTES, _ADD, _CONVERT = 64 << 10, 0.17e-9, 1.7e-9
#: seconds of the trainer for a call, and for a step beyond its computation
_CALL, _STEP = 0.35e-3, 2.0e-3
#: seconds until a message is noticed; ranks that share a processor wait for it, too
LATENCY, _SHARED_LATENCY = 0.2e-3, 0.8e-3
#: compress() encodes parameters of so many elements and dimensions, and reduces so many bytes in a call
_ENCODED_ELEMENTS, _ENCODED_DIMENSIONS = 4096, 2
_GROUP_NBYTES, _FIRST_NBYTES = 4 << 20, 1 << 20
#: connections of UCX and of gloo
_ONE = Tcp()
#: PowerSGD leaves a matrix as it is that it would make less than so many times smaller
_POWERSGD_GAIN = 2


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
    """A codec on one core: seconds to encode and to decode an element, and the relative L2 error of Gaussian values."""

    encode: float
    decode: float
    error: float


@dataclass(frozen=True)
class Cost:
    """A step with one codec; all times are seconds.

    Attributes:
        codec: its specification; "powersgd:4" is PyTorch's PowerSGD of rank 4.
        sent: bytes that each rank sends.
        link: time of these bytes at the link's rate, or at the lower one that losses permit.
        processor: time of a processor to encode and decode.
        alone: the step if communication follows the backward pass.
        overlapped: the step as DDP runs it, with communication beside the backward pass.
        error: relative L2 error of one encoding of Gaussian values, measured; None for PowerSGD.
    """

    codec: str
    sent: float
    link: float
    processor: float
    alone: float
    overlapped: float
    error: float | None


@dataclass(frozen=True)
class _Reduction:
    """A call, and what it adds to the columns of a Cost: encoded bytes, and seconds of the codec."""

    ready: float
    call: Call
    encoded: float
    processor: float


def cost_of(step: Step, spec: str, speed: Speed | None) -> Cost:
    """The cost of a step with a codec of this speed; None for PowerSGD, whose rank must be in the profile."""
    extra = 0.0
    if spec.startswith(POWERSGD):
        number = int(spec.removeprefix(POWERSGD))
        extra = step.profile.powersgd[number]
        reductions, rate = [_powersgd(step, number)], step.gloo_rate
    elif spec in (FP32, FP16):
        assert speed is not None
        reductions, rate = list(_of_gloo(step, FLOAT32.itemsize if spec == FP32 else 2)), step.gloo_rate
    else:
        assert speed is not None
        reductions, rate = list(_of_groups(step, codec_of(spec), speed)), step.own_rate
    sent = sent_nbytes(sum(each.encoded for each in reductions), step.ranks)
    alone, overlapped = (_seconds(step, reductions, extra, overlaps=overlaps) for overlaps in (False, True))
    processor = extra + sum(each.processor for each in reductions)
    return Cost(spec, sent, sent / rate, processor, alone, overlapped, speed.error if speed else None)


def call_seconds(step: Step, spec: str, count: int, speed: Speed) -> float:
    """The time of one all-reduce of ``count`` float32 elements by qccl, with nothing beside it."""
    codec = codec_of(spec)
    call = _two_rounds(step, codec, count, _encoded(codec, count), speed.encode, speed.decode)
    return step_seconds([Segment(0.0, [call]), Segment(0.0, waits=True)], _rank(step))


def _encoded(codec: Codec, count: int) -> float:
    """The encoded bytes of ``count`` elements, the mean of both rounds."""
    return sum(each.encoded_nbytes(count, FLOAT32) for each in codec.rounds) / 2


def sent_nbytes(encoded: float, ranks: int) -> float:
    """Bytes that a rank sends in a two-round all-reduce of a vector that takes ``encoded`` bytes."""
    return 2 * (ranks - 1) / ranks * encoded


def _seconds(step: Step, reductions: Sequence[_Reduction], extra: float, *, overlaps: bool) -> float:
    """The time of the step; ``extra`` is computation between the backward pass and the reductions."""
    profile, rank = step.profile, _rank(step)
    segments, at = [Segment(_STEP), Segment(profile.forward)], 0.0
    for each in reductions:
        ready = each.ready if overlaps else profile.backward
        segments += [Segment(max(0.0, ready - at)), Segment(_CALL + extra, [each.call])]
        at, extra = max(at, ready), 0.0
    segments += [Segment(max(0.0, profile.backward - at)), Segment(profile.optimiser, waits=True)]
    return step_seconds(segments, rank)


def _rank(step: Step) -> Rank:
    latency = LATENCY if step.processors >= 1 else _SHARED_LATENCY
    return Rank(step.processors, latency + step.delay, step.threads)


def _round(step: Step, encoded: float) -> float:
    """The bytes that a rank sends in one of the two rounds."""
    return encoded * (step.ranks - 1) / step.ranks


def _link(step: Step, encoded: float, rate: float) -> float:
    """Seconds in which a rank's link carries one of the two rounds at this rate."""
    headers = _HEADERS_OF_SITES if step.delay or step.loss else _HEADERS
    return headers * _round(step, encoded) / rate


def _later(step: Step, encoded: float, first: float, second: float) -> tuple[float, float]:
    """For Call.later: so many delays beyond one, and what lost packets cost."""
    lost = wait_for_losses(step.rate, step.round_trip, step.loss, _round(step, encoded), step.ranks)
    return first * step.delay, second * step.delay + 2 * lost


# -- DDP's own reductions ----------------------------------------------------------------------------------------------


def _of_gloo(step: Step, itemsize: int) -> Iterator[_Reduction]:
    """The buckets of DDP, each in one all-reduce of gloo: a ring."""
    for bucket in sorted({g.bucket for g in step.profile.gradients}):
        gradients = [g for g in step.profile.gradients if g.bucket == bucket]
        count = sum(g.count for g in gradients)
        converted = count * _CONVERT if itemsize < FLOAT32.itemsize else 0.0
        call = _gloo(step, count * itemsize, count * _ADD, converted, rounds=1)
        yield _Reduction(max(g.ready for g in gradients), call, count * itemsize, converted)


def _powersgd(step: Step, number: int) -> _Reduction:
    """The reductions of PowerSGD, which come one after the other: the first factors, the second ones, vectors."""
    elements = 0.0
    for gradient in step.profile.gradients:
        rows = gradient.shape[0] if gradient.shape else 1
        columns = gradient.count // rows if rows else 0
        rank = min(number, rows, columns)
        is_small = len(gradient.shape) > 1 and (rows + columns) * rank * _POWERSGD_GAIN < gradient.count
        elements += (rows + columns) * rank if is_small else gradient.count
    encoded = elements * FLOAT32.itemsize
    return _Reduction(step.profile.backward, _gloo(step, encoded, elements * _ADD, 0.0, rounds=3), encoded, 0.0)


def _gloo(step: Step, encoded: float, adding: float, converting: float, rounds: int) -> Call:
    """``rounds`` all-reduces of ``encoded`` bytes in all, one after the other."""
    hops, moved = rounds * (step.ranks - 1), _BYTE * _round(step, encoded)
    return Call(
        encode=hops * _GLOO_MESSAGE + moved + converting / 2,
        reduce=hops * _GLOO_MESSAGE + 2 * moved + adding,
        decode=moved + converting / 2,
        link=_link(step, encoded, step.gloo_rate),
        later=_later(step, encoded, 1, 1),
        chunks=1 if rounds > 1 else max(1, int(encoded // (_GLOO_NBYTES * step.ranks))),
        hops=hops,
    )


# -- qccl's compress() -------------------------------------------------------------------------------------------------


def _of_groups(step: Step, codec: Codec, speed: Speed) -> Iterator[_Reduction]:
    """The groups of compress(), which start in their order; those that are not encoded are copied."""
    ready = 0.0
    for is_encoded, group in _groups(step.profile.gradients):
        used, count = (codec if is_encoded else NoCodec()), sum(g.count for g in group)
        ready = max([ready, *(g.ready for g in group)])
        encoded = sum(_encoded(used, g.count) for g in group)
        encode, decode = (speed.encode, speed.decode) if is_encoded else (_ADD, _ADD)
        processor = count * (encode + (2 * step.ranks - 1) / step.ranks * decode)
        yield _Reduction(ready, _two_rounds(step, used, count, encoded, encode, decode), encoded, processor)


def _two_rounds(step: Step, codec: Codec, count: int, encoded: float, encode: float, decode: float) -> Call:
    """A call of qccl: a rank encodes for the others, reduces its shard and encodes it, and decodes the others'."""
    n, chunks = step.ranks, partition(count, step.ranks, codec).chunks
    others = (n - 1) / n
    moving = _BYTE * _round(step, encoded) + chunks * (n - 1) * _MESSAGE
    return Call(
        encode=count * encode * others + moving,
        reduce=count * (encode / n + decode) + 2 * moving,
        decode=count * decode * others + moving,
        link=_link(step, encoded, step.own_rate),
        later=_later(step, encoded, 1, 0),
        chunks=chunks,
    )


def _groups(gradients: Sequence[Gradient]) -> list[tuple[bool, list[Gradient]]]:
    """The groups that qccl.torch.groups.form_groups() makes with the defaults of compress(), without PyTorch."""
    parts: list[tuple[bool, list[Gradient]]] = []
    last: list[int] = []
    filling: dict[bool, int] = {}
    for position, gradient in enumerate(reversed(gradients)):
        is_encoded = len(gradient.shape) >= _ENCODED_DIMENSIONS and gradient.count >= _ENCODED_ELEMENTS
        number = filling.get(is_encoded)
        if number is None or _nbytes(parts[number][1]) + _nbytes([gradient]) > _limit(parts, number, is_encoded):
            number = filling[is_encoded] = len(parts)
            parts.append((is_encoded, []))
            last.append(0)
        parts[number][1].append(gradient)
        last[number] = position
    return [part for _, part in sorted(zip(last, parts, strict=True), key=lambda pair: pair[0])]


def _limit(parts: Sequence[tuple[bool, list[Gradient]]], number: int, is_encoded: bool) -> int:
    """The most bytes of a group: the first one of its kind is small."""
    is_first = all(kind != is_encoded for kind, _ in parts[:number])
    return _FIRST_NBYTES if is_first else _GROUP_NBYTES


def _nbytes(gradients: Sequence[Gradient]) -> int:
    return sum(g.count for g in gradients) * FLOAT32.itemsize
