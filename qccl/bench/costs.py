"""What a training step costs with a codec, with fp32 and fp16 over gloo, and with PowerSGD.

The constants below are of PyTorch's DistributedDataParallel and of gloo, fitted to the steps of docs/results, as those
of qccl's calls are (qccl/costs/step.py). Measured with delays of 25, 50 and 100 ms, gloo's ring took two delays for
each of its 2 (n - 1) messages: a rank first tells its neighbour that it may send.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from qccl.bench.params import codec_of
from qccl.codecs import Codec, NoCodec
from qccl.costs.grouping import grouped
from qccl.costs.profile import Gradient
from qccl.costs.step import (
    ADD,
    BYTE,
    COPIED,
    Reduction,
    Speed,
    Step,
    encoded_nbytes,
    later,
    link_seconds,
    predicted,
    rank_of,
    reduction,
    round_nbytes,
    sent_nbytes,
    two_rounds,
)
from qccl.costs.timeline import Call, Segment, step_seconds
from qccl.dtypes import FLOAT32

__all__ = ["FP16", "FP32", "POWERSGD", "Cost", "call_seconds", "cost_of"]

#: what a step costs without a codec, and with 16 bits: DDP's own reduction and its hook, over gloo
FP32, FP16, POWERSGD = "none", "cast", "powersgd:"
#: seconds of a processor for a message of gloo
_GLOO_MESSAGE = 70e-6
#: bytes of gloo's messages; seconds of a processor to convert an element to 16 bits or back
_GLOO_NBYTES, _CONVERT = 64 << 10, 1.7e-9
#: seconds of the trainer for a call, and for a step beyond its computation
_CALL, _STEP = 0.35e-3, 2.0e-3
#: compress() encodes parameters of so many elements and dimensions
_ENCODED_ELEMENTS, _ENCODED_DIMENSIONS = 4096, 2
#: PowerSGD leaves a matrix as it is that it would make less than so many times smaller
_POWERSGD_GAIN = 2


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
    seconds = partial(predicted, step, reductions, per_step=_STEP, per_call=_CALL, before=extra)
    alone, overlapped = seconds(overlaps=False), seconds(overlaps=True)
    processor = extra + sum(each.processor for each in reductions)
    return Cost(spec, sent, sent / rate, processor, alone, overlapped, speed.error if speed else None)


def call_seconds(step: Step, spec: str, count: int, speed: Speed) -> float:
    """The time of one all-reduce of ``count`` float32 elements by qccl, with nothing beside it."""
    codec = codec_of(spec)
    call = two_rounds(step, codec, count, encoded_nbytes(codec, count), speed.encode, speed.decode)
    return step_seconds([Segment(0.0, [call]), Segment(0.0, waits=True)], rank_of(step))


# -- DDP's own reductions ----------------------------------------------------------------------------------------------


def _of_gloo(step: Step, itemsize: int) -> Iterator[Reduction]:
    """The buckets of DDP, each in one all-reduce of gloo: a ring."""
    for bucket in sorted({g.bucket for g in step.profile.gradients}):
        gradients = [g for g in step.profile.gradients if g.bucket == bucket]
        count = sum(g.count for g in gradients)
        converted = count * _CONVERT if itemsize < FLOAT32.itemsize else 0.0
        call = _gloo(step, count * itemsize, count * ADD, converted, rounds=1)
        yield Reduction(max(g.ready for g in gradients), call, count * itemsize, converted)


def _powersgd(step: Step, number: int) -> Reduction:
    """The reductions of PowerSGD, which come one after the other: the first factors, the second ones, vectors."""
    elements = 0.0
    for gradient in step.profile.gradients:
        rows = gradient.shape[0] if gradient.shape else 1
        columns = gradient.count // rows if rows else 0
        rank = min(number, rows, columns)
        is_small = len(gradient.shape) > 1 and (rows + columns) * rank * _POWERSGD_GAIN < gradient.count
        elements += (rows + columns) * rank if is_small else gradient.count
    encoded = elements * FLOAT32.itemsize
    return Reduction(step.profile.backward, _gloo(step, encoded, elements * ADD, 0.0, rounds=3), encoded, 0.0)


def _gloo(step: Step, encoded: float, adding: float, converting: float, rounds: int) -> Call:
    """``rounds`` all-reduces of ``encoded`` bytes in all, one after the other."""
    hops, moved = rounds * (step.ranks - 1), BYTE * round_nbytes(step, encoded)
    return Call(
        encode=hops * _GLOO_MESSAGE + moved + converting / 2,
        reduce=hops * _GLOO_MESSAGE + 2 * moved + adding,
        decode=moved + converting / 2,
        link=link_seconds(step, encoded, step.gloo_rate),
        later=later(step, encoded, 1, 1),
        chunks=1 if rounds > 1 else max(1, int(encoded // (_GLOO_NBYTES * step.ranks))),
        hops=hops,
    )


# -- qccl's compress() -------------------------------------------------------------------------------------------------


def _of_groups(step: Step, codec: Codec, speed: Speed) -> Iterator[Reduction]:
    """The groups of compress(), which start in their order; those that are not encoded are copied."""
    ready = 0.0
    for is_encoded, group in _groups(step.profile.gradients):
        ready = max([ready, *(g.ready for g in group)])
        used, fast = (codec, speed) if is_encoded else (NoCodec(), COPIED)
        yield reduction(step, used, [g.count for g in group], ready, fast)


def _groups(gradients: Sequence[Gradient]) -> list[tuple[bool, list[Gradient]]]:
    """The groups that compress() forms with its defaults: whether they are encoded, and their gradients."""

    def is_encoded(gradient: Gradient) -> bool:
        return len(gradient.shape) >= _ENCODED_DIMENSIONS and gradient.count >= _ENCODED_ELEMENTS

    order = gradients[::-1]
    found = grouped((is_encoded(each), each.count * FLOAT32.itemsize) for each in order)
    return [(is_encoded(order[group[0]]), [order[i] for i in group]) for group in found]
