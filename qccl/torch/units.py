"""The parameters that FSDP2 reduces together, and their state, which follows them from one vector to another.

FSDP2 passes the gradients of a module's parameters as one vector. It has only the parameters with a gradient in the
step: experts, skipped layers and frozen parameters change it. Residuals belong to parameters, not to positions in the
vector. So each set of parameters has its own key, and when the set changes, the state of its parameters moves to the
new key. The state of absent parameters stays under the old key.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from qccl.base.errors import ArgumentError, EngineError
from qccl.communicator.communicator import Communicator
from qccl.communicator.owners import Owner
from qccl.communicator.state import Entry, Parts, Places, extents

__all__ = ["SEPARATORS", "KeyOfSet", "not_known", "reduced_parameters"]

#: separators in keys, before a module's name, and before the names of a set of its parameters
SEPARATORS = "/:"
#: texts before the names of a set, and between them; no name has two dots in a row
_SET, _BETWEEN = ":..", ".."
#: the function of FSDP2 that knows the parameters that it reduces, and its variables with the group and the parameters
_REDUCTION = inspect.unwrap(FSDPParamGroup.post_backward).__code__
_GROUP, _MEMBERS = "self", "fsdp_params_with_grad"


def reduced_parameters() -> tuple[Any, Sequence[Any]] | None:
    """Find the FSDPParamGroup that FSDP2 reduces now, and its parameters in the vector, in order.

    Returns None outside of a reduction. FSDP2 passes this neither to its reduce-scatter nor to its hook, so this looks
    up the stack. Raises EngineError if this version of PyTorch has other variables there.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _REDUCTION:
            found = frame.f_locals
            if _GROUP not in found or _MEMBERS not in found:
                raise not_known()
            return found[_GROUP], found[_MEMBERS]
        frame = frame.f_back
    return None


def not_known() -> EngineError:
    """The error if FSDP2 does not show which parameters it reduces."""
    return EngineError(
        f"FSDP2 of PyTorch {torch.__version__} does not show which parameters it reduces, so residuals cannot follow "
        f"them; use PyTorch 2.13, or FSDP2 without qccl"
    )


class KeyOfSet:
    """The keys of the state of a list of parameters: one key for each set of them that is reduced together."""

    def __init__(
        self,
        comm: Communicator,
        owner: Owner,
        rest: str,
        names: Sequence[str],
        places: Callable[[Sequence[str]], Places],
        sums: Callable[[Sequence[str]], Parts] = lambda names: (),
    ) -> None:
        """``names`` are the names of all parameters, and ``rest`` follows the owner's name in the keys.

        ``places`` returns the places of a set's state under its key, and ``sums`` the parts that are errors of sums.
        """
        self._names, self._comm, self._owner, self._rest = tuple(names), comm, owner, rest
        self._places, self._sums = places, sums
        self._last, self._entries = tuple[str, ...](), dict[str, Entry]()

    def key(self, names: Sequence[str]) -> str:
        """The key of a set of parameters, in their order in calls."""
        is_whole = tuple(names) == self._names
        return self._owner.key(self._rest if is_whole else f"{self._rest}{_SET}{_BETWEEN.join(names)}")

    def arrange(self, names: Sequence[str]) -> bool:
        """Let the next call with these parameters find their state under key(names).

        Returns whether that call takes over state from other keys.
        """
        store, key = self._comm.state, self.key(names)
        if self._last != tuple(names) or self._entries is not store.entries or key not in store.entries:
            places = self._places(names)
            self._adopt(key, places)
            others = {other: members for other, members in self._others(key) if not places.keys().isdisjoint(members)}
            if others:
                for other, members in others.items():
                    if store.entries[other].sums is None:  # it was loaded
                        store.entries[other].sums = self._sums(members)
                store.expect(key, places, {other: self._places(members) for other, members in others.items()})
            self._last, self._entries = tuple(names), store.entries
        return key in store.moves

    def _adopt(self, key: str, places: Places) -> None:
        """Take a loaded state that fits this set and not the whole list: older files have no keys of sets."""
        entries, whole = self._comm.state.entries, self._owner.name + self._rest
        if key != whole and key not in entries and whole in entries and entries[whole].forms is None:
            held = {name: array.count for name, array in entries[whole].memory.items()}
            if held and held == extents(places) != extents(self._places(self._names)):
                entries[key] = entries.pop(whole)

    def _others(self, own: str) -> Iterator[tuple[str, Sequence[str]]]:
        """The other keys that have state, and their parameters."""
        whole = self._owner.name + self._rest
        for key, entry in self._comm.state.entries.items():
            if entry.is_carried or key == own or not (key == whole or key.startswith(whole + _SET)):
                continue
            members = self._names if key == whole else tuple(key[len(whole + _SET) :].split(_BETWEEN))
            if unknown := [name for name in members if name not in self._names]:
                raise ArgumentError(
                    f"the state under key={key!r} belongs to {', '.join(unknown)}, and the parameters are "
                    f"{', '.join(self._names)}; load a state of these, or delete that state with reset({key!r})"
                )
            yield key, members
