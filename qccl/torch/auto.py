"""compress(codec="auto"): some exact steps that are measured, then one choice of codecs for the rest of the training.

Each rank measures its backward passes: when each gradient is ready, the time between passes less the time in which the
trainer waited for calls, and samples of its gradients. At the end all ranks measure the link (qccl.torch.link) and tell
each other what they found. Rank 0 takes the slowest times and the mean squared errors, chooses by qccl.costs.choice,
and tells the others. So all ranks have the same choice, whatever their clocks say. A saved state has it, as text.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from qccl import codecs, dtypes
from qccl.codecs import Codec, NoCodec
from qccl.communicator import Communicator
from qccl.costs.choice import Layer, choose
from qccl.costs.profile import Profile
from qccl.costs.speed import relative_error, speed_of
from qccl.costs.step import Speed, Step
from qccl.errors import ArgumentError
from qccl.scalars import as_real, parse_seconds
from qccl.torch.clock import PassTimes
from qccl.torch.decision import Decision, LayerChoice, parameters_table
from qccl.torch.groups import ParameterGroup, Policy, form_groups, table
from qccl.torch.link import Link, measure_link

__all__ = ["CANDIDATES", "MEASURED_STEPS", "AutoCodec", "budget_of"]

#: the codecs to choose among, from the most accurate to the one with the fewest bytes
CANDIDATES = ("none", "minmax8", "minmax4+ef", "minmax2:bucket=256+ef", "trellis2+ef")
#: exact steps before the choice. The first one is not measured: DDP changes its buckets after it
MEASURED_STEPS = 5
#: elements of a gradient whose error is measured, and the blocks in which they are taken from it
_SAMPLE, _BLOCKS = 1 << 16, 4
#: random values on which the codecs' speeds are measured
_TIMED = 1 << 20
#: bytes per second of the link of a rank that is alone; it carries nothing
_INSTANT = 1e12
#: the part of the computation by which a step may become longer, if no budget is given
_SHARE = 0.05


def budget_of(budget: Any) -> float | None:
    """Seconds, from a number or a text such as "50 ms"; None stays. Raises ArgumentError."""
    if budget is None:
        return None
    try:
        seconds = parse_seconds(budget) if isinstance(budget, str) else as_real(budget)
    except ValueError as error:
        raise ArgumentError(f"budget: {error}") from error
    if seconds is None or not 0 < seconds < float("inf"):
        raise ArgumentError(
            f"budget is the positive number of seconds by which communication may lengthen a step, or text such as "
            f"'50 ms', not {budget!r}"
        )
    return float(seconds)


class AutoCodec:
    """The measurements of this rank, and the choice that the ranks have made of them.

    Attributes:
        until: so many first steps send all values as they are.
        decision: the choice; None: the ranks still measure.
    """

    def __init__(
        self, named: Mapping[str, Any], policy: Policy, group_bytes: int, budget: float | None, warmup_steps: int
    ) -> None:
        self._named, self._policy, self._group_bytes = dict(reversed([*named.items()])), policy, group_bytes
        self._budget, self._warmup_steps = budget, warmup_steps
        self._free = [name for name, p in self._named.items() if policy.takes_codec(name, p)]
        if not self._free:
            raise ArgumentError(
                "codec='auto' has nothing to choose: no parameter has two dimensions and min_elements elements, or "
                "codecs= and exclude= name all of them; give another codec"
            )
        self.restart(0)

    def text(self) -> str:
        """The choice for a saved state; empty if there is none yet."""
        return "" if self.decision is None else self.decision.text()

    def table(self, groups: Sequence[ParameterGroup], step: int) -> str:
        """The groups and how far the measurements are; after the choice the parameters, and why they have a codec."""
        if self.decision is not None:
            return "\n".join((parameters_table(groups, self.decision.layers), *self.decision.lines()))
        return (
            f"{table(groups)}\ncodec='auto' measures: {step} of {self.until} steps are done, which send all values as "
            f"they are; then the ranks choose codecs"
        )

    def restart(self, step: int) -> None:
        """Measure from this step on."""
        self.decision: Decision | None = None
        self.until = max(self._warmup_steps, step + MEASURED_STEPS)
        self._samples: dict[str, np.ndarray] = {}
        self._norms: dict[str, float] = {}
        self._ready: dict[str, list[float]] = {name: [] for name in self._named}
        self._backward: list[float] = []
        self._computation: list[float] = []

    def description(self) -> list[str]:
        """What all ranks must have alike, beside their groups, as lines."""
        arguments = f"codec='auto', budget={self._budget}, group_bytes={self._group_bytes}"
        return [arguments, *(f"codec='auto' for {name}" for name in self._free)]

    def groups(self) -> list[ParameterGroup]:
        """The groups by the choice, or by its most accurate codec until then."""
        chosen = {} if self.decision is None else self.decision.codecs
        return self._groups_with(chosen)

    def groups_of(self, text: str | None) -> tuple[Decision | None, list[ParameterGroup]]:
        """The choice in a saved state, and the groups by it. Raises ArgumentError for another one."""
        if text is None:
            raise ArgumentError(
                "the state has no choice of codecs, because its handle had other codecs than 'auto'; pass the same "
                "arguments to compress()"
            )
        found = Decision.from_text(text, {name: CANDIDATES for name in self._free}) if text else None
        return found, self._groups_with({} if found is None else found.codecs)

    def adopt(self, decision: Decision | None, step: int) -> None:
        """Continue at this step of a saved state."""
        self.restart(step)
        self.decision = decision

    def _groups_with(self, chosen: Mapping[str, Codec]) -> list[ParameterGroup]:
        named = list(self._named.items())[::-1]
        return form_groups(named, replace(self._policy, chosen=chosen), self._group_bytes)

    # -- measuring -----------------------------------------------------------------------------------------------------

    def is_measured(self, step: int) -> bool:
        """Whether the times and gradients of this step count."""
        return self.decision is None and self.until - MEASURED_STEPS < step < self.until

    def sample(self, names: Sequence[str], gradients: Sequence[Any]) -> None:
        """Keep samples of this rank's gradients, which are about to be reduced: the last that are finite and not zero.

        Zeros say nothing about the errors of codecs: a parameter may be unused in one step and not in the next.
        """
        for name, gradient in zip(names, gradients, strict=True):
            if name not in self._free:
                continue
            taken = _sampled(gradient)
            square = float(np.square(taken, dtype=np.float64).sum())  # of float32 values: cannot overflow
            if square == 0:
                self._norms.setdefault(name, 0.0)
            elif np.isfinite(square):
                self._samples[name] = taken
                self._norms[name] = (square * gradient.numel() / taken.size) ** 0.5

    def add(self, times: PassTimes, after: float) -> None:
        """The times of a measured pass that has ended; the next one began at ``after``."""
        self._computation.append(after - times.begin - times.exposed)
        self._backward.append(times.last - times.begin)
        for name, at in times.ready.items():
            self._ready[name].append(at - times.begin)

    # -- the choice ----------------------------------------------------------------------------------------------------

    def decide(self, comm: Communicator, timeout: float | None) -> None:
        """Collective: choose. Takes about a second, most of it for the link."""
        link = measure_link(comm, timeout) if comm.size > 1 else Link(_INSTANT, 0.0)
        found = [json.loads(item) for item in comm.allgather(json.dumps(self._found(comm)).encode())]
        text = self._chosen(found, link, comm.size).text() if comm.rank == 0 else ""
        text = comm.allgather(text.encode())[0].decode()
        self.adopt(Decision.from_text(text, {name: CANDIDATES for name in self._free}), self.until)

    def _found(self, comm: Communicator) -> dict[str, Any]:
        """What this rank has measured; its errors are those of the codecs that take its processor's time now."""
        candidates = [codecs.get(spec) for spec in CANDIDATES]
        random = np.random.default_rng(0).standard_normal(_TIMED, dtype=np.float32)
        speeds = [speed_of(codec, random) for codec in self._used()]
        errors = {
            name: [relative_error(codec, values) for codec in candidates] for name, values in self._samples.items()
        }
        return {
            "computation": statistics.median(self._computation),
            "backward": statistics.median(self._backward),
            "ready": [statistics.median(self._ready[name]) for name in self._named],
            "norms": self._norms,
            "errors": errors,
            "speeds": [[speed.encode, speed.decode] for speed in speeds],
            "processors": len(os.sched_getaffinity(0)) / comm.nodes.count(comm.nodes[comm.rank]),
        }

    def _used(self) -> list[Codec]:
        """All codecs that a parameter may have, except none."""
        fixed = (self._policy.codec_of(name, p) for name, p in self._named.items() if name not in self._free)
        used = dict.fromkeys([*(codecs.get(spec) for spec in CANDIDATES), *(c for c in fixed if c is not None)])
        return [codec for codec in used if codec != NoCodec()]

    def _chosen(self, ranks: Sequence[Mapping[str, Any]], link: Link, size: int) -> Decision:
        """The choice by what all ranks have found: the slowest times, and the means of squared errors."""
        computation, backward = (max(rank[name] for rank in ranks) for name in ("computation", "backward"))
        ready = [max(times) for times in zip(*(rank["ready"] for rank in ranks), strict=True)]
        speeds = {}
        for codec, times in zip(self._used(), zip(*(rank["speeds"] for rank in ranks), strict=True), strict=True):
            encode, decode = (max(each) for each in zip(*times, strict=True))
            speeds[codec] = Speed(encode, decode, 0.0)
        layers = [self._layer(name, at, ranks) for name, at in zip(self._named, ready, strict=True)]
        # times were measured with all ranks at work, so those that share a processor are not slowed down again
        processors = max(1.0, min(rank["processors"] for rank in ranks))
        profile = Profile((), max(0.0, computation - backward), backward, 0.0, is_measured=True)
        step = Step(profile, size, link.rate, processors, link.delay)
        budget = _SHARE * profile.computation if self._budget is None else self._budget
        choice = choose(layers, speeds, step, budget, self._group_bytes)
        reports = {
            layer.name: LayerChoice(codec.spec(), layer.ready, layer.errors[codec] if len(layer.errors) > 1 else None)
            for layer, codec in zip(layers, choice.codecs, strict=True)
            if layer.name in self._free
        }
        return Decision(
            reports,
            ranks=size,
            rate=link.rate if size > 1 else 0.0,
            delay=link.delay,
            computation=profile.computation,
            budget=budget,
            seconds=choice.seconds,
            fits=choice.fits,
            limit=choice.limit,
        )

    def _layer(self, name: str, ready: float, ranks: Sequence[Mapping[str, Any]]) -> Layer:
        """A parameter for the choice; with one codec if a pattern names it, or if its error is not known.

        That is so if its gradients were not finite on one rank, or zero on all of them. ``norms`` has a rank's finite
        gradients, and ``errors`` those of them that are not zero.
        """
        parameter = self._named[name]
        fixed = None if name in self._free else self._policy.codec_of(name, parameter)
        found = [rank["errors"][name] for rank in ranks if name in rank["errors"]]
        if name not in self._free or not found or not all(name in rank["norms"] for rank in ranks):
            words = -(-parameter.numel() * parameter.element_size() // 4)
            is_encoded = fixed is not None and fixed != NoCodec()
            count, dtype = (parameter.numel(), _dtype(parameter)) if is_encoded else (words, dtypes.FLOAT32)
            return Layer(name, count, ready, 0.0, {fixed or NoCodec(): 0.0}, dtype)
        squares = [[each**2 for each in errors] for errors in found]
        errors = [statistics.fmean(each) ** 0.5 for each in zip(*squares, strict=True)]
        norm = statistics.fmean(rank["norms"][name] ** 2 for rank in ranks) ** 0.5
        candidates = dict(zip((codecs.get(spec) for spec in CANDIDATES), errors, strict=True))
        return Layer(name, parameter.numel(), ready, norm, candidates, _dtype(parameter))


def _dtype(parameter: Any) -> dtypes.DType:
    return dtypes.get(str(parameter.dtype).removeprefix("torch."))


def _sampled(gradient: Any) -> np.ndarray:
    """Some elements of a flat gradient as float32: all, or blocks at equal distances."""
    count, block = gradient.numel(), _SAMPLE // _BLOCKS
    if count > _SAMPLE:
        starts = ((count - block) * i // (_BLOCKS - 1) for i in range(_BLOCKS))
        gradient = torch.cat([gradient[start : start + block] for start in starts])
    taken: np.ndarray = gradient.detach().to(torch.float32, copy=True).numpy()
    return taken
