"""The choice of a codec for each layer of a model, such that a training step fits a budget of time.

The rule, for layers of which each has some codecs, from the most accurate to the cheapest:

1. All layers begin with their most accurate codec.
2. The calls that these codecs form are taken for a queue on one link. A layer occupies it for the time of its bytes,
   or of its encoding and decoding if that is longer. A codec can shorten the step only in the calls from which on the
   link does not rest until the last one ends. Of their layers the one moves to a cheaper codec that saves most seconds
   for the error that it adds. An error is the squared L2 norm of what one encoding loses of the layer's gradient.
3. This goes on until no layer moves any more. So there is one sequence of choices, each cheaper than the one before.
4. Taken is the first of the sequence whose step, predicted by the timeline (qccl.costs.step), fits the budget. If that
   is less than the sequence can reach, the limit is that least time, with a tolerance, because predictions are no more
   exact.

The result depends on the arguments alone. A larger budget never gives a layer a cheaper codec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import accumulate

from qccl.codecs import Codec
from qccl.costs.grouping import GROUP_NBYTES, grouped
from qccl.costs.step import COPIED, Reduction, Speed, Step, predicted, reduction
from qccl.dtypes import FLOAT32, DType

__all__ = ["LIMITS", "Choice", "Layer", "choose"]

#: beyond the least lengthening that can be reached, so much is as good as it
_TOLERANCE = 0.1
#: the choices of the sequence that are predicted at once, before those between two of them
_POINTS = 16
#: with more layers several move before the calls are formed anew
_LAYERS = 256
#: what may limit a step: parts of the network and of the machine, or none of them
_RATE, _DELAY, _CODING, _COMPUTATION = LIMITS = (
    "the link's rate",
    "the link's delay",
    "encoding and decoding",
    "the computation",
)
#: a part of the network or of the machine limits the step if it would be so much shorter without that part
_MATTERS = 0.01


@dataclass(frozen=True)
class Layer:
    """A parameter's gradient.

    Attributes:
        name: of the parameter.
        count: elements.
        ready: seconds from the start of the backward pass until a call may start with it.
        norm: L2 norm of the gradient.
        errors: the codecs that it may have, from the most accurate to the cheapest, and the L2 norm of what each loses
            in one encoding, relative to ``norm``.
        dtype: of its elements.
    """

    name: str
    count: int
    ready: float
    norm: float
    errors: Mapping[Codec, float]
    dtype: DType = FLOAT32


@dataclass(frozen=True)
class Choice:
    """A codec for each layer.

    Attributes:
        codecs: in the order of the layers.
        seconds: the predicted step.
        fits: communication lengthens it by no more than the budget.
        limit: what makes it longer than the computation, one of LIMITS.
    """

    codecs: tuple[Codec, ...]
    seconds: float
    fits: bool
    limit: str


def choose(
    layers: Sequence[Layer],
    speeds: Mapping[Codec, Speed],
    step: Step,
    budget: float,
    group_nbytes: int = GROUP_NBYTES,
) -> Choice:
    """Choose the most accurate codecs with which communication lengthens a step by ``budget`` seconds at most.

    After each move of a layer, or after several moves if there are many layers, the calls are formed anew. With five
    codecs each, the choice for 600 layers takes about a second, and that for 2,000 about five.

    Args:
        layers: in the order in which groups are formed: from the last parameter of the model to the first. Their times
            and ``step.profile.computation`` must be measured on the machine that also encodes.
        speeds: of each codec that a layer may have, except NoCodec().
        step: computation and network; its profile's gradients do not count.
        budget: seconds.
        group_nbytes: the most bytes of gradients that one call reduces.
    """
    sequence = _Sequence(layers, speeds, step, group_nbytes)
    computation, last = step.profile.computation, len(sequence.moves)
    points = _points(0, last)
    least = min(sequence.seconds(i) for i in points) - computation
    limit = computation + max(budget, least * (1 + _TOLERANCE))
    found = _first(0, last, lambda i: sequence.seconds(i) <= limit)
    seconds = sequence.seconds(found)
    return Choice(sequence.codecs(found), seconds, seconds <= computation + budget, sequence.limit(found))


def _points(low: int, high: int) -> list[int]:
    """Some integers from ``low`` to ``high``, both included, evenly spaced."""
    return sorted({low + (high - low) * i // _POINTS for i in range(_POINTS + 1)})


def _first(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The first number from ``low`` to ``high`` that fits, looked for at some points, then between two of them.

    The result does not grow where ``fits`` becomes true for more numbers. One of the points fits.
    """
    points = _points(low, high)
    at = next(i for i, point in enumerate(points) if fits(point))
    if at == 0 or points[at] - points[at - 1] == 1:
        return points[at]
    return _first(points[at - 1] + 1, points[at], fits)


class _Sequence:
    """The choices of codecs, each with one more move of a layer to a cheaper codec.

    A choice has for each layer the position of its codec among those that the layer may have.
    """

    def __init__(self, layers: Sequence[Layer], speeds: Mapping[Codec, Speed], step: Step, group_nbytes: int) -> None:
        self._layers, self._speeds, self._step, self._group_nbytes = layers, speeds, step, group_nbytes
        self._codecs = [tuple(layer.errors) for layer in layers]
        self._costs = [[self._cost(layer, codec) for codec in layer.errors] for layer in layers]
        # the layers of a call have one kind; numbers, because there are many choices, and codecs take long to hash
        numbers: dict[tuple[DType, Codec], int] = {}
        self._kinds = [
            [numbers.setdefault((layer.dtype, codec), len(numbers)) for codec in layer.errors] for layer in layers
        ]
        self._sizes = [layer.count * layer.dtype.itemsize for layer in layers]
        self._found: dict[int, float] = {}
        self.moves = self._all_moves()

    def codecs(self, number: int) -> tuple[Codec, ...]:
        """The choice after so many moves."""
        return tuple(own[at] for own, at in zip(self._codecs, self._chosen(number), strict=True))

    def seconds(self, number: int) -> float:
        """The predicted step with it."""
        if number not in self._found:
            self._found[number] = self._predicted(self._chosen(number), self._step)
        return self._found[number]

    def limit(self, number: int) -> str:
        """What the step would be shortest without."""
        chosen, now = self._chosen(number), self.seconds(number)
        instant = {codec: Speed(0.0, 0.0, 0.0) for codec in self._speeds}
        without = {
            _RATE: self._predicted(chosen, replace(self._step, rate=self._step.rate * 1e6)),
            _DELAY: self._predicted(chosen, replace(self._step, delay=0.0)),
            _CODING: self._predicted(chosen, self._step, instant),
        }
        name, seconds = min(without.items(), key=lambda item: item[1])
        return name if seconds < now * (1 - _MATTERS) else _COMPUTATION

    def _chosen(self, number: int) -> list[int]:
        chosen = [0] * len(self._layers)
        for i, at in self.moves[:number]:
            chosen[i] = at
        return chosen

    def _predicted(self, chosen: Sequence[int], step: Step, speeds: Mapping[Codec, Speed] | None = None) -> float:
        """The step by the timeline, with calls for the groups that these codecs form."""
        speeds = self._speeds if speeds is None else speeds
        calls: list[Reduction] = []
        for group, ready in self._groups(chosen):
            codec, dtype = self._codecs[group[0]][chosen[group[0]]], self._layers[group[0]].dtype
            counts = [self._layers[i].count for i in group]
            calls.append(reduction(step, codec, counts, ready, speeds.get(codec, COPIED), dtype))
        return predicted(step, calls)

    def _groups(self, chosen: Sequence[int]) -> list[tuple[list[int], float]]:
        """The layers of each call, and when it may start: calls start in their order."""
        kinds = (own[at] for own, at in zip(self._kinds, chosen, strict=True))
        found = grouped(zip(kinds, self._sizes, strict=True), self._group_nbytes)
        starts = accumulate((max(self._layers[i].ready for i in group) for group in found), max)
        return list(zip(found, starts, strict=True))

    def _all_moves(self) -> list[tuple[int, int]]:
        """The moves by rule 2, as a layer and the position of its new codec."""
        chosen = [0] * len(self._layers)
        best = [self._best_move(i, 0) for i in range(len(self._layers))]
        moves: list[tuple[int, int]] = []
        while chosen:
            groups = self._groups(chosen)[::-1]
            rests = accumulate(math.fsum(self._costs[i][chosen[i]] for i in group) for group, _ in groups)
            ends = [start + rest for (_, start), rest in zip(groups, rests, strict=True)]
            waiting = [i for group, _ in groups[: ends.index(max(ends)) + 1] for i in group]
            for i in nlargest(1 + len(chosen) // _LAYERS, waiting, key=lambda layer: best[layer][0]):
                (_, saved, _), at = best[i]
                if saved <= 0:
                    return moves
                chosen[i], best[i] = at, self._best_move(i, at)
                moves.append((i, at))
        return moves

    def _best_move(self, i: int, old: int) -> tuple[tuple[float, float, float], int]:
        """The gain of a layer's best move from its codec at ``old``, and the position of the new one."""
        gains = [self._gain(i, old, new) for new in range(len(self._codecs[i]))]
        at = max(range(len(gains)), key=gains.__getitem__)
        return gains[at], at

    def _gain(self, i: int, old: int, new: int) -> tuple[float, float, float]:
        """What moves are compared by: the seconds saved for the error added, the seconds saved, when it is ready."""
        layer, codecs = self._layers[i], self._codecs[i]
        saved = self._costs[i][old] - self._costs[i][new]
        added = (layer.errors[codecs[new]] ** 2 - layer.errors[codecs[old]] ** 2) * layer.norm**2
        if saved <= 0:
            return 0.0, 0.0, 0.0
        return saved / added if added > 0 else float("inf"), saved, layer.ready

    def _cost(self, layer: Layer, codec: Codec) -> float:
        """Seconds that the layer's call occupies the link or, if that is longer, a processor."""
        speed = self._speeds.get(codec, COPIED)
        call = reduction(self._step, codec, [layer.count], layer.ready, speed, layer.dtype)
        return max(2 * call.call.link, call.processor)
