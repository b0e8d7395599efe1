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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from qccl.codecs import Codec
from qccl.costs.grouping import GROUP_NBYTES, grouped
from qccl.costs.step import COPIED, Reduction, Speed, Step, predicted, reduction
from qccl.dtypes import FLOAT32, DType

__all__ = ["Choice", "Layer", "choose"]

#: beyond the least lengthening that can be reached, so much is as good as it
_TOLERANCE = 0.1
#: the choices of the sequence that are predicted at once, before those between two of them
_POINTS = 16
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
        limit: what makes it longer than the computation: "the link's rate", "the link's delay", "encoding and
            decoding"; or "the computation".
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
    """The choices of codecs, each with one more move of a layer to a cheaper codec."""

    def __init__(self, layers: Sequence[Layer], speeds: Mapping[Codec, Speed], step: Step, group_nbytes: int) -> None:
        self._layers, self._speeds, self._step, self._group_nbytes = layers, speeds, step, group_nbytes
        self._found: dict[int, float] = {}
        self.moves = self._all_moves()

    def codecs(self, number: int) -> tuple[Codec, ...]:
        """The choice after so many moves."""
        chosen = [next(iter(layer.errors)) for layer in self._layers]
        for i, codec in self.moves[:number]:
            chosen[i] = codec
        return tuple(chosen)

    def seconds(self, number: int) -> float:
        """The predicted step with it."""
        if number not in self._found:
            self._found[number] = self._predicted(self.codecs(number), self._step)
        return self._found[number]

    def limit(self, number: int) -> str:
        """What the step would be shortest without."""
        chosen, now = self.codecs(number), self.seconds(number)
        instant = {codec: Speed(0.0, 0.0, 0.0) for codec in self._speeds}
        without = {
            "the link's rate": self._predicted(chosen, replace(self._step, rate=self._step.rate * 1e6)),
            "the link's delay": self._predicted(chosen, replace(self._step, delay=0.0)),
            "encoding and decoding": self._predicted(chosen, self._step, instant),
        }
        name, seconds = min(without.items(), key=lambda item: item[1])
        return name if seconds < now * (1 - _MATTERS) else "the computation"

    def _predicted(self, chosen: Sequence[Codec], step: Step, speeds: Mapping[Codec, Speed] | None = None) -> float:
        """The step by the timeline, with calls for the groups that these codecs form."""
        speeds = self._speeds if speeds is None else speeds
        calls: list[Reduction] = []
        for group, ready in self._groups(chosen):
            codec, dtype = chosen[group[0]], self._layers[group[0]].dtype
            counts = [self._layers[i].count for i in group]
            calls.append(reduction(step, codec, counts, ready, speeds.get(codec, COPIED), dtype))
        return predicted(step, calls)

    def _groups(self, chosen: Sequence[Codec]) -> list[tuple[list[int], float]]:
        """The layers of each call, and when it may start: calls start in their order."""
        layers = self._layers
        kinds = ((layer.dtype, codec) for layer, codec in zip(layers, chosen, strict=True))
        sizes = (layer.count * layer.dtype.itemsize for layer in layers)
        found = grouped(zip(kinds, sizes, strict=True), self._group_nbytes)
        starts = accumulate((max(layers[i].ready for i in group) for group in found), max)
        return list(zip(found, starts, strict=True))

    def _all_moves(self) -> list[tuple[int, Codec]]:
        """The moves by rule 2, as a layer and its new codec."""
        layers = self._layers
        cost = [{codec: self._cost(layer, codec) for codec in layer.errors} for layer in layers]
        chosen = [next(iter(layer.errors)) for layer in layers]
        moves: list[tuple[int, Codec]] = []
        while layers:
            groups = self._groups(chosen)[::-1]
            rests = accumulate(sum(cost[i][chosen[i]] for i in group) for group, _ in groups)
            ends = [start + rest for (_, start), rest in zip(groups, rests, strict=True)]
            waiting = [i for group, _ in groups[: ends.index(max(ends)) + 1] for i in group]
            possible = ((i, codec) for i in waiting for codec in layers[i].errors)
            i, codec = max(possible, key=lambda move: self._gain(move[0], chosen[move[0]], move[1], cost[move[0]]))
            if cost[i][codec] >= cost[i][chosen[i]]:
                return moves
            chosen[i] = codec
            moves.append((i, codec))
        return moves

    def _gain(self, i: int, old: Codec, new: Codec, cost: Mapping[Codec, float]) -> tuple[float, float, float]:
        """What moves are compared by: the seconds saved for the error added, the seconds saved, when it is ready."""
        layer = self._layers[i]
        saved = cost[old] - cost[new]
        added = (layer.errors[new] ** 2 - layer.errors[old] ** 2) * layer.norm**2
        if saved <= 0:
            return 0.0, 0.0, 0.0
        return saved / added if added > 0 else float("inf"), saved, layer.ready

    def _cost(self, layer: Layer, codec: Codec) -> float:
        """Seconds that the layer's call occupies the link or, if that is longer, a processor."""
        speed = self._speeds.get(codec, COPIED)
        call = reduction(self._step, codec, [layer.count], layer.ready, speed, layer.dtype)
        return max(2 * call.call.link, call.processor)
