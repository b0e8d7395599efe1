"""The time of a training step with a codec, and with fp32 and fp16 over gloo.

A call of qccl takes the time that the simulator computes for its schedules (simulated.py). The calls of a step follow
each other: a call occupies the link, or the processor if that is longer, and the rest of its time overlaps with the
next call. The trainer computes meanwhile, on the part of the rank's processors that calls do not use.

The constants below are for PyTorch's DistributedDataParallel and for gloo, fitted to the steps of docs/results (2 and 4
ranks on 2 cores behind 100 Mbit/s and 1 Gbit/s). bench/doctor_accuracy.py compares the predictions with measured steps.
With measured delays of 25, 50 and 100 ms, gloo's ring took two delays for each of its 2 (n - 1) messages, because a
rank first tells its neighbour that it may send. A call of qccl took one delay more than its schedule has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from qccl.base.dtypes import FLOAT32
from qccl.bench.doctor.simulated import ADD, Constants, Machines, Processor, simulated
from qccl.bench.doctor.speed import CodecSpeed
from qccl.bench.doctor.training import StepComputation
from qccl.bench.params import Link, codec_of
from qccl.bench.sweep.calls import Case
from qccl.codecs import Codec, NoCodec
from qccl.training.grouping import grouped, sent_nbytes

__all__ = ["FP16", "FP32", "Step", "StepCall", "StepCost", "call_of"]
__all__ += ["constants_of", "cost_of", "rate_of", "step_seconds"]

#: the codecs of DDP's own reduction and of its fp16 hook, over gloo
FP32, FP16 = "none", "cast"
#: seconds until a rank that shares a processor notices a message
_SHARED_LATENCY = 1.5e-3
#: a processor's seconds for a message of gloo; the message's bytes; seconds to convert an element to 16 bits or back
_GLOO_MESSAGE, _GLOO_NBYTES, _CONVERT = 70e-6, 64 << 10, 1.7e-9
#: the trainer's seconds for a call, and for a step beyond its computation
_CALL, _STEP = 0.35e-3, 2.0e-3
#: the least elements and dimensions of parameters that compress() encodes
_ENCODED_ELEMENTS, _ENCODED_DIMENSIONS = 4096, 2
#: bytes per second inside a node, which has one rank
_INTRA = 5e9


@dataclass(frozen=True)
class Step:
    """A training step.

    Attributes:
        computation: the computation of one rank.
        ranks: the number of ranks.
        rate: bytes per second of each rank's link, in each direction.
        processors: processors of each rank; less than 1 if ranks share one.
        delay: seconds of a packet from one rank to another, beyond the seconds in one room.
    """

    computation: StepComputation
    ranks: int
    rate: float
    processors: float = 1.0
    delay: float = 0.0

    @property
    def threads(self) -> int:
        """The threads of the trainer's computation on a rank."""
        return max(1, int(self.processors))

    @property
    def constants(self) -> Constants:
        """The simulator's constants for these ranks."""
        return constants_of(self.processors)


def constants_of(processors: float) -> Constants:
    """The simulator's constants for ranks with ``processors`` processors each."""
    return Constants() if processors >= 1 else replace(Constants(), latency=_SHARED_LATENCY)


@dataclass(frozen=True)
class StepCall:
    """A reduction of some gradients; all times are seconds.

    Attributes:
        seconds: the time of the call alone.
        link: the time for which the call occupies the rank's link.
        processor: the time for which the call occupies a processor.
        sent: the bytes that the rank sends.
    """

    seconds: float
    link: float
    processor: float
    sent: float


@dataclass(frozen=True)
class StepCost:
    """A step with one codec; all times are seconds.

    Attributes:
        codec: the codec's specification.
        sent: bytes that each rank sends.
        link: time of these bytes on the link.
        processor: a processor's time for calls.
        alone: the time of the step if communication follows the backward pass.
        overlapped: the time of the step with communication beside the backward pass, like DDP's.
        error: relative L2 error of one encoding of Gaussian values, measured.
    """

    codec: str
    sent: float
    link: float
    processor: float
    alone: float
    overlapped: float
    error: float


def cost_of(step: Step, spec: str, speed: CodecSpeed) -> StepCost:
    """The cost of a step with a codec of this speed. Raises ArgumentError for too many ranks."""
    calls = list(_of_gloo(step, spec) if spec in (FP32, FP16) else _of_groups(step, codec_of(spec), speed))
    at_the_end = [(step.computation.backward, call) for _, call in calls]
    sent, link, processor = (sum(getattr(call, name) for _, call in calls) for name in ("sent", "link", "processor"))
    alone, overlapped = step_seconds(step, at_the_end), step_seconds(step, calls)
    return StepCost(spec, sent, link, processor, alone, overlapped, speed.error)


def step_seconds(step: Step, calls: list[tuple[float, StepCall]]) -> float:
    """The time of a step with these calls, each with the seconds of the backward pass before its start."""
    scale = min(1.0, step.processors)
    #: the part of the trainer's time that is lost while a call keeps a processor busy
    loss = max(0.0, 1 - max(0.0, step.processors - 1) / step.threads)
    now = free = end = use = 0.0  # free: when calls release link and processor; use: the processor's time until then

    def compute(seconds: float) -> None:
        nonlocal now
        seconds /= scale
        busy, pace = max(0.0, free - now), 1 - loss * use
        now += seconds / pace if seconds < busy * pace else seconds + busy * (1 - pace)

    at = -step.computation.forward - _STEP
    for ready, call in calls:
        compute(max(0.0, ready - at) + _CALL)
        at, occupied = max(at, ready), max(call.link, call.processor)
        working = use * max(0.0, free - now) + call.processor
        free = max(now, free) + occupied
        use, end = working / (free - now), max(end, free + call.seconds - occupied)
    compute(step.computation.backward - at)
    return max(now, end) + step.computation.optimiser / scale


def _of_groups(step: Step, codec: Codec, speed: CodecSpeed) -> Iterator[tuple[float, StepCall]]:
    """Yield the calls of qccl.torch.compress(), in the order of their begins."""
    gradients, ready = step.computation.gradients[::-1], 0.0
    kinds = [
        codec if g.count >= _ENCODED_ELEMENTS and len(g.shape) >= _ENCODED_DIMENSIONS else NoCodec() for g in gradients
    ]
    known: dict[tuple[Codec, int], StepCall] = {}
    sizes = [g.count * FLOAT32.itemsize for g in gradients]
    for group in grouped(zip(kinds, sizes, strict=True)):
        ready = max(ready, *(gradients[i].ready for i in group))
        key = kinds[group[0]], sum(gradients[i].count for i in group)
        if key not in known:
            known[key] = call_of(step, *key, speed)
        yield ready, known[key]


def call_of(step: Step, codec: Codec, count: int, speed: CodecSpeed) -> StepCall:
    """Predict an all-reduce of ``count`` float32 elements by qccl."""
    scale = min(1.0, step.processors)
    machines = Machines(step.ranks, Link("", step.rate, 0), _INTRA, step.delay, processors=scale)
    processor = Processor(step.constants, {codec.spec(): (speed.encode, speed.decode)})
    found = simulated(Case(count, FLOAT32, "avg"), codec, "auto", None, machines, processor)
    timeline, sent = found.timeline, found.wire_nbytes
    return StepCall(timeline.total + step.delay, step.constants.headers * sent / step.rate, timeline.busy, sent)


def rate_of(seconds: float, nbytes: int, ranks: int, processors: float, delay: float) -> float:
    """The rate of a link with which an all-reduce of ``nbytes`` without a codec takes ``seconds``.

    The bytes take at least a quarter of the time, even if the predicted messages leave less.
    """
    byte, none = seconds / sent_nbytes(nbytes, ranks), CodecSpeed(ADD, ADD, 0.0)
    least = byte / 4
    for _ in range(3):  # a call's time is nearly linear in a byte's time
        step = Step(StepComputation((), 0.0, 0.0, 0.0), ranks, 1 / byte, processors, delay)
        call = call_of(step, NoCodec(), nbytes // FLOAT32.itemsize, none)
        byte = max(least, byte + (seconds - call.seconds) * byte / call.link)
    return 1 / byte


def _of_gloo(step: Step, spec: str) -> Iterator[tuple[float, StepCall]]:
    """Yield the all-reduces of DDP's buckets by gloo's ring."""
    hops, itemsize = 2 * (step.ranks - 1), FLOAT32.itemsize if spec == FP32 else 2
    for bucket in sorted({g.bucket for g in step.computation.gradients}):
        gradients = [g for g in step.computation.gradients if g.bucket == bucket]
        count = sum(g.count for g in gradients)
        sent = sent_nbytes(count * itemsize, step.ranks)
        link = step.constants.headers * sent / step.rate
        working = hops * _GLOO_MESSAGE + 2 * step.constants.byte * sent + count * ADD
        working = (working + (count * _CONVERT if spec == FP16 else 0.0)) / min(1.0, step.processors)
        chunks = max(1, count * itemsize // (_GLOO_NBYTES * step.ranks))  # the first chunk overlaps with nothing
        waiting = hops * (step.constants.latency + 2 * step.delay) + working / chunks
        yield max(g.ready for g in gradients), StepCall(max(link, working) + waiting, link, working, sent)
