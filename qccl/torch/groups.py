"""The groups of parameters that are reduced together, and the codec of each: the policy of compress()."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from qccl import codecs, dtypes
from qccl.arguments import CodecLike
from qccl.codecs import Codec, Momentum, NoCodec
from qccl.codecs.feedback import momentum_of
from qccl.errors import ArgumentError

__all__ = ["ParameterGroup", "Policy", "form_groups", "table"]

#: element types that codecs encode; the process group itself reduces the others
_ENCODED = (torch.float32, torch.float16, torch.bfloat16)
#: the most bytes of the first group of a kind: the network is idle until it starts. DDP's first bucket is as large
_FIRST_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class ParameterGroup:
    """Parameters of one element type whose gradients are reduced by one call.

    Attributes:
        key: the name of its state.
        codec: of its gradients; None: the process group reduces them, exactly.
        names, parameters: in the order of the call's arrays.
    """

    key: str
    codec: Codec | None
    names: tuple[str, ...]
    parameters: tuple[Any, ...]

    @property
    def dtype(self) -> str:
        """The element type's name, such as "float32"."""
        return str(self.parameters[0].dtype).removeprefix("torch.")

    @property
    def codec_spec(self) -> str:
        """The specification of the codec, or the word "exact", for tables."""
        return "exact" if self.codec is None else self.codec.spec()

    @property
    def counts(self) -> list[int]:
        """Elements of each parameter."""
        return [parameter.numel() for parameter in self.parameters]

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return sum(self.counts) * int(self.parameters[0].element_size())

    @property
    def encoded_nbytes(self) -> int:
        """Bytes of the encoded gradients: the mean of both rounds, whose codecs differ in a pair such as "A/B"."""
        if self.codec is None:
            return self.nbytes
        dtype = dtypes.get(self.dtype)
        return sum(each.encoded_nbytes(count, dtype) for each in self.codec.rounds for count in self.counts) // 2

    def description(self) -> dict[str, Any]:
        """What state belongs to, in types that torch.load() always reads. Strides tell the order of elements."""
        parameters = [
            [name, list(parameter.shape), list(torch.empty_like(parameter).stride())]
            for name, parameter in zip(self.names, self.parameters, strict=True)
        ]
        return {"codec": self.codec_spec, "dtype": self.dtype, "parameters": parameters}


@dataclass(frozen=True)
class Policy:
    """Which codec a parameter gets; the arguments of compress()."""

    codec: CodecLike
    codecs: Mapping[str, CodecLike] = field(default_factory=dict)
    exclude: Sequence[str] = ()
    min_elements: int = 0

    @property
    def state_names(self) -> set[str]:
        """The kinds of state that codecs keep."""
        return {kind for codec in (self.codec, *self.codecs.values()) for kind in codecs.get(codec).state_names}

    def codec_of(self, name: str, parameter: Any) -> Codec | None:
        """The codec of a parameter; None: the process group reduces it."""
        if parameter.dtype not in _ENCODED:
            return None
        if any(fnmatchcase(name, pattern) for pattern in self.exclude):
            return self._uncompressed()
        for pattern, codec in self.codecs.items():
            if fnmatchcase(name, pattern):
                return codecs.get(codec)
        if parameter.dim() <= 1 or parameter.numel() < self.min_elements:
            return self._uncompressed()
        return codecs.get(self.codec)

    def check(self, names: Iterable[str]) -> None:
        """Raise ArgumentError for a pattern that matches no name, and for something else than a codec."""
        names = list(names)
        for codec in (self.codec, *self.codecs.values()):
            codecs.get(codec)
        for pattern in (*self.codecs, *self.exclude):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ArgumentError(
                    f"the pattern {pattern!r} matches no parameter; the parameters that DDP reduces are "
                    f"{', '.join(names)}"
                )

    def _uncompressed(self) -> Codec:
        """No codec, and the momentum of the usual one: the optimiser has none then."""
        mu = momentum_of(codecs.get(self.codec))
        return Momentum(NoCodec(), mu) if mu else NoCodec()


def form_groups(named: Iterable[tuple[str, Any]], policy: Policy, group_bytes: int) -> list[ParameterGroup]:
    """The groups of these parameters, in the order in which a backward pass usually completes them.

    It runs from the last parameter to the first. A group has one element type and one codec, and at most
    ``group_bytes`` (the first of its kind also at most 1 MiB) unless it has a single parameter.
    """
    parts: list[_Part] = []
    filling: dict[tuple[torch.dtype, Codec | None], _Part] = {}
    for position, (name, parameter) in enumerate(reversed(list(named))):
        kind = parameter.dtype, policy.codec_of(name, parameter)
        nbytes = parameter.numel() * parameter.element_size()
        part = filling.get(kind)
        if part is None or part.nbytes + nbytes > part.limit:
            limit = min(group_bytes, _FIRST_BYTES) if part is None else group_bytes
            part = filling[kind] = _Part(kind[1], limit)
            parts.append(part)
        part.members.append((name, parameter))
        part.nbytes += nbytes
        part.last = position
    parts.sort(key=lambda part: part.last)
    return [ParameterGroup(f"group {i}", part.codec, *zip(*part.members, strict=True)) for i, part in enumerate(parts)]


@dataclass
class _Part:
    """A group that is being filled to ``limit`` bytes; ``last`` is its last parameter's place in the backward pass."""

    codec: Codec | None
    limit: int
    members: list[tuple[str, Any]] = field(default_factory=list)
    nbytes: int = 0
    last: int = 0


def table(groups: Sequence[ParameterGroup]) -> str:
    """A line for each group: its codec, element type, elements, bytes before and after encoding, and parameters."""
    rows: list[tuple[str, ...]] = [("group", "codec", "dtype", "elements", "bytes", "encoded", "parameters")]
    for i, group in enumerate(groups):
        sizes = f"{sum(group.counts)}", f"{group.nbytes}", f"{group.encoded_nbytes}"
        rows.append((f"{i}", group.codec_spec, group.dtype, *sizes, ", ".join(group.names)))
    total = [sum(getattr(group, name) for group in groups) for name in ("nbytes", "encoded_nbytes")]
    elements = sum(sum(group.counts) for group in groups)
    rows.append(("all", "", "", f"{elements}", *map(str, total), f"{sum(len(group.names) for group in groups)}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            text.rjust(width) if 3 <= i < 6 else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
