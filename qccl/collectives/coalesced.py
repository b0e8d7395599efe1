"""All-reduce of many arrays in one call: the algorithms of all-reduce, with the arrays joined to one vector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from qccl.base import dtypes
from qccl.base.arrays import Values, check_disjoint, same_or_disjoint
from qccl.base.dtypes import FLOAT32
from qccl.base.errors import ArgumentError
from qccl.collectives.allreduce import AllReduceSpec
from qccl.collectives.hierarchical import HierarchicalSpec
from qccl.collectives.operands import CallerBuffers
from qccl.collectives.schedule import buffer_name
from qccl.collectives.spec import Binding, Call, CollectiveSpec, common_order

__all__ = ["CoalescedSpec", "HierarchicalCoalescedSpec"]


class _ManyArrays(CollectiveSpec):
    """A call of many arrays; ``each`` has the number of elements of each array."""

    __slots__ = ()

    each: tuple[int, ...]

    def buffers(self, rank: int, size: int, *, in_place: bool = False) -> CallerBuffers:
        """See CollectiveSpec."""
        return CallerBuffers.alike(self.each, self.dtype, in_place=in_place, numbered=True)

    def order_of(self, arrays: Mapping[str, Values]) -> str:
        """See CollectiveSpec; a text of all orders if not all arrays are row-major."""
        orders = [common_order({name: arrays[name] for name in pair}) for pair in self._pairs()]
        return "C" if all(order == "C" for order in orders) else "; ".join(orders)

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> Binding:
        """See CollectiveSpec."""
        pairs = self._pairs()
        same = {same_or_disjoint(arrays[i], arrays[o]) for (i, o), n in zip(pairs, self.each, strict=True) if n}
        if len(same) > 1:
            raise ArgumentError(
                "some arrays are given as their own outputs and some are not; pass all in place or none"
            )
        in_place = not same or same.pop()
        targets = {name: arrays[name] for _, name in pairs}
        read = {} if in_place else {name: arrays[name] for name, _ in pairs}
        check_disjoint(targets.values(), read.values())
        return Binding(in_place, {name: values.address for name, values in (targets | read).items()})

    def _pairs(self) -> list[tuple[str, str]]:
        """The names of each input and its output."""
        return [(buffer_name("input", i), buffer_name("output", i)) for i in range(len(self.each))]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoalescedSpec(_ManyArrays, AllReduceSpec):
    """Arguments of quantized_allreduce_coalesced; the arrays are "input 0", "output 0", "input 1", ..."""

    name = "allreduce_coalesced"

    each: tuple[int, ...] = ()

    @classmethod
    def from_call(cls, call: Call) -> tuple[list[Self], dict[str, Values]]:
        """See CollectiveSpec; ``outs`` of the call: whether the arrays for the results follow the inputs."""
        count = len(call.arrays) // 2 if call.own.pop("outs") else len(call.arrays)
        xs, outs = call.arrays[:count], call.arrays[count:]
        arrays: dict[str, Values] = {}
        for i, x in enumerate(xs):
            arrays[f"input {i}"] = arrays[f"output {i}"] = call.find(x, f"xs[{i}]", writable=not outs)
            if outs:
                arrays[f"output {i}"] = call.find(outs[i], f"outs[{i}]")
        each = call.own["each"] = tuple(arrays[f"input {i}"].count for i in range(count))
        return cls._with_codecs(call, arrays, sum(each), dtypes.get(call.dtype or FLOAT32).name, "C"), arrays

    def _shown(self) -> dict[str, Any]:
        shown = AllReduceSpec._shown(self)
        last = {name: shown.pop(name) for name in ("op", "algorithm")}  # the order of fields in saved state's text
        return shown | last


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalCoalescedSpec(_ManyArrays, HierarchicalSpec):
    """A CoalescedSpec's call in two levels."""

    name = "hierarchical_allreduce_coalesced"

    each: tuple[int, ...]
