"""The groups of parameters that are reduced together, and the codec of each: the policy of compress()."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from qccl import codecs
from qccl.base import dtypes
from qccl.base.errors import ArgumentError
from qccl.codecs import Codec, Momentum, NoCodec
from qccl.codecs.feedback import momentum_of
from qccl.collectives.arguments import CodecLike, count_of
from qccl.communicator.communicator import Communicator
from qccl.torch.factors import matrix_shape
from qccl.torch.models import like_in_bucket
from qccl.training.grouping import encoded_nbytes, grouped

__all__ = ["ENCODED", "ParameterGroup", "Policy", "faster", "form_groups", "table"]

#: element types that codecs encode; PyTorch itself moves and reduces the others
ENCODED = (torch.float32, torch.float16, torch.bfloat16)
#: a matrix has factors if it has at least this many times their elements; min_compression_rate of PyTorch's PowerSGD
_LOW_RANK_GAIN = 2


@dataclass(frozen=True, eq=False)
class ParameterGroup:
    """Parameters of one element type whose gradients are reduced by one call.

    Attributes:
        key: the key of the group's state.
        codec: the codec of the gradients, or of their factors; None: the process group reduces the gradients, exactly.
        names, parameters: the parameters in the order of the call's arrays.
        rank: the rank of the factors that are sent for the gradients (qccl.torch.low_rank); 0: no factors.
    """

    key: str
    codec: Codec | None
    names: tuple[str, ...]
    parameters: tuple[Any, ...]
    rank: int = 0

    @property
    def dtype(self) -> str:
        """The element type's name, such as "float32"."""
        return str(self.parameters[0].dtype).removeprefix("torch.")

    @property
    def codec_spec(self) -> str:
        """The codec's specification for tables, after the rank of factors, or the word "exact"."""
        if self.codec is None:
            return "exact"
        return f"low_rank:{self.rank}:{self.codec.spec()}" if self.rank else self.codec.spec()

    @property
    def state_names(self) -> tuple[str, ...]:
        """The kinds of state that the group's calls keep."""
        if self.rank:
            return "residual", "factor"
        return () if self.codec is None else self.codec.state_names

    @property
    def low_rank_owner(self) -> str:
        """The text that the state of factors belongs to (StateStore.take)."""
        return f"compress(low_rank={self.rank}) of {', '.join(self.names)} ({self.dtype})"

    @property
    def counts(self) -> list[int]:
        """The elements of each parameter."""
        return [parameter.numel() for parameter in self.parameters]

    @property
    def nbytes(self) -> int:
        """The bytes of the gradients."""
        return sum(self.counts) * int(self.parameters[0].element_size())

    @property
    def encoded_nbytes(self) -> int:
        """The bytes of the encoded gradients: the mean of both rounds, whose codecs differ in a pair such as "A/B"."""
        if self.codec is None:
            return self.nbytes
        if not self.rank:
            return int(sum(encoded_nbytes(self.codec, count, dtypes.get(self.dtype)) for count in self.counts))
        sides = [self.rank * side for p in self.parameters for side in matrix_shape(p)]  # elements of float32 factors
        return int(sum(encoded_nbytes(self.codec, count) for count in sides))

    def description(self) -> dict[str, Any]:
        """Describe the group in a state, in types that torch.load() always reads. Strides give the elements' order."""
        parameters = [
            [name, list(parameter.shape), list(like_in_bucket(parameter, device="meta").stride())]
            for name, parameter in zip(self.names, self.parameters, strict=True)
        ]
        return {"codec": self.codec_spec, "dtype": self.dtype, "parameters": parameters}


@dataclass(frozen=True)
class Policy:
    """The rule that gives each parameter a codec, from the arguments of compress()."""

    codec: CodecLike
    codecs: Mapping[str, CodecLike] = field(default_factory=dict)
    exclude: Sequence[str] = ()
    min_elements: int = 0
    low_rank: int = 0

    @classmethod
    def of(cls, codec: CodecLike, codecs: Any, exclude: Any, min_elements: Any) -> Policy:
        """Make a policy from the arguments of compress() or AllReduce. Raises ArgumentError for wrong ones."""
        if isinstance(exclude, str):
            raise ArgumentError(f"exclude must be a list of patterns, such as [{exclude!r}], not a string")
        if codecs is not None and not isinstance(codecs, Mapping):
            raise ArgumentError(
                f"codecs must be a dict of codecs by patterns of names, such as {{'embedding.*': 'topk:k=0.01+ef'}}, "
                f"not {codecs!r}"
            )
        return cls(codec, codecs or {}, tuple(exclude), count_of(min_elements, "min_elements"))

    @property
    def state_names(self) -> set[str]:
        """The kinds of state that codecs keep."""
        return {kind for codec in (self.codec, *self.codecs.values()) for kind in codecs.get(codec).state_names}

    def codec_of(self, name: str, parameter: Any) -> Codec | None:
        """The codec of a parameter; None: the process group reduces it.

        Raises ArgumentError if the codec has momentum, which the process group would leave out.
        """
        codec = self._codec_by_name(name, parameter)
        if parameter.dtype in ENCODED:
            return codec
        if momentum_of(codec):
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ArgumentError(
                f"{name} has the element type {kind}, and +nesterov keeps momenta of float32, float16 and bfloat16 "
                f"gradients; leave +nesterov out and use the optimiser's momentum, or give codecs={{{name!r}: 'none'}} "
                f"(an exact mean without momentum) and a parameter group with the optimiser's momentum to this "
                f"parameter alone"
            )
        return None

    def _codec_by_name(self, name: str, parameter: Any) -> Codec:
        """The codec by the patterns and the size."""
        if any(fnmatchcase(name, pattern) for pattern in self.exclude):
            return self._uncompressed()
        for pattern, codec in self.codecs.items():
            if fnmatchcase(name, pattern):
                return codecs.get(codec)
        return codecs.get(self.codec) if self._is_large(parameter) else self._uncompressed()

    def _takes_codec(self, name: str, parameter: Any) -> bool:
        """Whether a parameter gets ``codec``: no pattern names it, it is large, and its elements can be encoded."""
        is_named = any(fnmatchcase(name, pattern) for pattern in (*self.exclude, *self.codecs))
        return parameter.dtype in ENCODED and self._is_large(parameter) and not is_named

    def rank_of(self, name: str, parameter: Any) -> int:
        """The rank of the factors that are sent for a parameter's gradient; 0: no factors.

        Only matrices with the codec ``codec`` have factors, not parameters that ``codecs`` or ``exclude`` name.
        """
        if not self.low_rank or not self._takes_codec(name, parameter):
            return 0
        rows, columns = matrix_shape(parameter)
        is_smaller = (rows + columns) * self.low_rank * _LOW_RANK_GAIN < rows * columns
        return self.low_rank if is_smaller else 0

    def _is_large(self, parameter: Any) -> bool:
        """Whether a parameter is large enough for ``codec``."""
        return bool(parameter.dim() > 1 and parameter.numel() >= self.min_elements)

    def check(self, names: Iterable[str]) -> None:
        """Raise ArgumentError for a pattern that matches no name, and for an invalid codec."""
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
        """The codec "none" with the momentum of ``codec``: the optimiser then has no momentum."""
        mu = momentum_of(codecs.get(self.codec))
        return Momentum(NoCodec(), mu) if mu else NoCodec()


def form_groups(named: Iterable[tuple[str, Any]], policy: Policy, group_bytes: int) -> list[ParameterGroup]:
    """Group parameters, in the order in which a backward pass usually completes the groups.

    A backward pass runs from the last parameter to the first. A group has one element type, one codec and one rank;
    qccl.training.grouping decides its size.
    """
    order = list(named)[::-1]
    kinds = [(p.dtype, policy.codec_of(name, p), policy.rank_of(name, p)) for name, p in order]
    sizes = [p.numel() * p.element_size() for _, p in order]
    groups = []
    for i, members in enumerate(grouped(zip(kinds, sizes, strict=True), group_bytes)):
        names, parameters = zip(*(order[position] for position in members), strict=True)
        _, codec, rank = kinds[members[0]]
        groups.append(ParameterGroup(f"group {i}", codec, names, parameters, rank))
    return groups


def faster(groups: Iterable[ParameterGroup], codec: Codec, comm: Communicator) -> list[ParameterGroup]:
    """Collective: take the codec away from the groups that are faster without it, by measured calls."""

    def chosen(group: ParameterGroup) -> ParameterGroup:
        if group.codec != codec or group.rank:
            return group
        key = group.key if codec.state_names else None
        plan = comm.plan("allreduce", sum(group.counts), group.dtype, codec=f"auto:{codec.spec()}", key=key)
        return group if plan.spec.codec == codec else replace(group, codec=NoCodec())

    return [chosen(group) for group in groups]


def table(groups: Sequence[ParameterGroup]) -> str:
    """Make a line for each group: codec, element type, elements, bytes before and after encoding, parameters."""
    rows: list[tuple[str, ...]] = [("group", "codec", "dtype", "elements", "bytes", "encoded", "parameters")]
    for i, group in enumerate(groups):
        sizes = f"{sum(group.counts)}", f"{group.nbytes}", f"{group.encoded_nbytes}"
        rows.append((f"{i}", group.codec_spec, group.dtype, *sizes, ", ".join(group.names)))
    total = [sum(getattr(group, name) for group in groups) for name in ("nbytes", "encoded_nbytes")]
    elements = sum(sum(group.counts) for group in groups)
    rows.append(("all", "", "", f"{elements}", *map(str, total), f"{sum(len(group.names) for group in groups)}"))
    return _aligned(rows, range(3, 6))


def _aligned(rows: Sequence[Sequence[str]], numbers: Container[int]) -> str:
    """Join rows to lines with aligned columns; the columns ``numbers`` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            text.rjust(width) if i in numbers else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
