"""What compress(codec="auto") has chosen, and why: as text in saved states and between ranks, and as a table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from qccl import codecs
from qccl.codecs import Codec
from qccl.costs.choice import LIMITS
from qccl.errors import ArgumentError
from qccl.torch.groups import ParameterGroup, aligned

__all__ = ["CHOICE", "Decision", "LayerChoice", "parameters_table", "without_choice"]

#: the field of a saved state that has the choice
CHOICE = "choice"

#: the longest text that is read: some hundred bytes for each parameter
_MOST_NBYTES = 64 << 20


@dataclass(frozen=True)
class LayerChoice:
    """What a parameter got.

    Attributes:
        codec: its specification.
        ready: seconds from DDP's first bucket until its gradient was ready.
        error: what one encoding by it lost of the gradient, relative to its L2 norm; None: the gradient was not finite
            on a rank, or zero on all ranks.
    """

    codec: str
    ready: float
    error: float | None


@dataclass(frozen=True)
class Decision:
    """The choice, with the measurements that it followed from. All times are seconds.

    Attributes:
        layers: by the names of the parameters that had a choice.
        ranks: their number.
        rate: bytes per second of a rank's link; 0 for a single rank.
        delay: from one rank to another.
        computation: of a step, without communication.
        budget: by which communication may lengthen it.
        seconds: the predicted step.
        fits: the prediction is within the budget.
        limit: what makes the step longer than its computation, one of LIMITS.
    """

    layers: Mapping[str, LayerChoice]
    ranks: int
    rate: float
    delay: float
    computation: float
    budget: float
    seconds: float
    fits: bool
    limit: str

    @property
    def codecs(self) -> dict[str, Codec]:
        """By the names of the parameters."""
        return {name: codecs.get(layer.codec) for name, layer in self.layers.items()}

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str, allowed: Mapping[str, Sequence[str]]) -> Decision:
        """The inverse of text(). ``allowed`` are the codecs that each parameter may have.

        Raises ArgumentError for anything else: the text may come from a file.
        """
        try:
            return _checked(text, allowed)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ArgumentError(
                f"the state has no choice of codecs that compress(codec='auto') has made for these parameters "
                f"({error}); load what state_dict() returned, for the same model and arguments"
            ) from error

    def errors(self) -> dict[str, float]:
        """The measured errors, by names for statistics()."""
        known = {name: layer.error for name, layer in self.layers.items()}
        return {f"qccl/{name}/relative_error": error for name, error in known.items() if error is not None}

    def lines(self) -> Iterator[str]:
        """What was measured and predicted, in words."""
        link = f"{self.rate * 8e-6:.4g} Mbit/s in each direction of a rank, {self.delay * 1e3:.2g} ms from rank to rank"
        yield f"link: {link if self.rate else 'none, there is one rank'} (measured; the slowest of {self.ranks})"
        yield f"computation of a step: {_ms(self.computation)} (measured)"
        longer, budget = _ms(self.seconds - self.computation), _ms(self.budget)
        yield f"predicted step: {_ms(self.seconds)}, {longer} longer than its computation; the budget is {budget}"
        if not self.fits:
            yield "no choice fits the budget: these codecs come closest to it, or are about as fast and more accurate"
        yield f"what limits the step: {self.limit}"


def parameters_table(groups: Sequence[ParameterGroup], layers: Mapping[str, LayerChoice]) -> str:
    """A line for each parameter: its codec and bytes, the error of the codec, and when its gradient is ready."""
    rows: list[tuple[str, ...]] = [
        ("group", "codec", "dtype", "elements", "bytes", "encoded", "error", "ready ms", "parameter")
    ]
    for number, group in enumerate(groups):
        each = zip(group.names, group.parameters, group.encoded_each, strict=True)
        for name, parameter, encoded in each:
            sizes = f"{parameter.numel()}", f"{parameter.numel() * parameter.element_size()}", f"{encoded:.0f}"
            found = layers.get(name)
            error = "-" if found is None or found.error is None else f"{found.error:.2g}"
            ready = "-" if found is None else f"{found.ready * 1e3:.1f}"
            rows.append((f"{number}", group.codec_spec, group.dtype, *sizes, error, ready, name))
    total = sum(group.nbytes for group in groups), sum(group.encoded_nbytes for group in groups)
    elements = sum(sum(group.counts) for group in groups)
    rows.append(("all", "", "", f"{elements}", *map(str, total), "", "", f"{len(rows) - 1}"))
    return aligned(rows, range(3, 8))


def without_choice(given: Any) -> tuple[str | None, Any]:
    """The choice in a state or in a list of those of all ranks, and the states without it; None if they have none.

    Raises ArgumentError if a choice is no text, or the ranks' choices differ. What is no state is returned as it is.
    """
    states = [given] if isinstance(given, Mapping) else given
    if not isinstance(states, Sequence) or not all(isinstance(state, Mapping) for state in states):
        return None, given
    found = [state.get(CHOICE) for state in states]
    for text in found:
        if not isinstance(text, str | None):
            raise ArgumentError(
                f"the choice of codecs in a state is a text, not {type(text).__name__}; load what state_dict() returned"
            )
    if any(text != found[0] for text in found):
        raise ArgumentError("the ranks' states have different choices of codecs, so they are not of one group")
    rest = [{key: value for key, value in state.items() if key != CHOICE} for state in states]
    return (found[0] if found else None), (rest[0] if isinstance(given, Mapping) else rest)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _checked(text: str, allowed: Mapping[str, Sequence[str]]) -> Decision:
    if not isinstance(text, str) or len(text) > _MOST_NBYTES:
        raise ValueError("it is no text, or too long")
    found: dict[str, Any] = json.loads(text)
    if set(found) != {field.name for field in fields(Decision)}:
        raise ValueError(f"its fields are {', '.join(sorted(map(str, found)))}"[:300])
    layers = {name: LayerChoice(**layer) for name, layer in found["layers"].items()}
    if layers.keys() != allowed.keys():
        differing = sorted(layers.keys() ^ allowed.keys())
        raise ValueError(f"it differs in the parameters {', '.join(differing)}"[:300])
    for name, layer in layers.items():
        if layer.codec not in [codecs.get(spec).spec() for spec in allowed[name]]:
            raise ValueError(f"the codec {layer.codec!r} of {name} is not one of {', '.join(allowed[name])}"[:300])
        _check_numbers(layer.ready, 0.0 if layer.error is None else layer.error)
    _check_numbers(*(found[name] for name in ("rate", "delay", "computation", "budget", "seconds")))
    if type(found["ranks"]) is not int or not 0 < found["ranks"] < 1 << 31:
        raise ValueError("its ranks are not a positive integer")
    if not isinstance(found["fits"], bool):
        raise ValueError("its field fits is neither true nor false")
    if found["limit"] not in LIMITS:
        raise ValueError(f"its limit is not one of {', '.join(LIMITS)}")
    return Decision(**found | {"layers": layers})


def _check_numbers(*values: Any) -> None:
    for value in values:
        if not isinstance(value, float) or not 0 <= value < float("inf"):
            raise ValueError(f"{repr(value)[:40]} is not a finite floating-point number of at least 0")
