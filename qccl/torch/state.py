"""The state of groups as tensors by the names of parameters: for torch.save(), and for groups of another size.

A parameter's residual on a rank is, per element, one of two things (qccl.collectives.feedback): the error of the rank's
own value, or, where the rank owns the element's sum, the error of that sum. The rank, the number of ranks and the group
tell which, so one tensor per parameter is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from qccl.arguments import count_of
from qccl.codecs import Codec
from qccl.collectives import CoalescedSpec
from qccl.collectives.feedback import sums_of
from qccl.communicator import Communicator
from qccl.errors import ArgumentError
from qccl.schedule import Role, Schedule
from qccl.torch.groups import Group

__all__ = ["from_saved", "to_saved"]

#: the kinds of state by their names in a schedule, and in a saved state
_KINDS = {"residual": "residuals", "momentum": "momenta"}
_FIELDS = {"rank", "size", "step", "calls", "lr", "groups", *_KINDS.values()}


def to_saved(comm: Communicator, groups: Sequence[Group], step: int) -> dict[str, Any]:
    """This rank's state."""
    kept = comm.state_dict()
    saved: dict[str, Any] = {"rank": comm.rank, "size": comm.size, "step": step, "calls": kept["calls"], "lr": None}
    saved["groups"] = [group.description() for group in groups]
    saved |= {kind: {} for kind in _KINDS.values()}
    for group in groups:
        entry = kept["keys"].get(group.key)
        if entry is None:
            continue
        saved["lr"] = entry["lr"]
        for kind, i, name, parameter in _members(group):
            values = entry["values"].get(f"{kind} {i}")
            if values is not None:
                saved[_KINDS[kind]][name] = _shaped(values, parameter)
    return saved


def from_saved(comm: Communicator, groups: Sequence[Group], given: Any) -> int:
    """Restore to_saved() of this rank, or a list of those of all ranks of a group of any size; returns the step.

    Raises ArgumentError for anything else, and then changes nothing.
    """
    try:
        state, values = _fitting(comm, groups, given)
        step = count_of(state["step"], 'the state\'s "step"')
    except (TypeError, AttributeError, KeyError) as error:
        raise ArgumentError(f"this is not a state that state_dict() returned ({error!r})") from error
    keys = {}
    for group, found in zip(groups, values, strict=True):
        if found:
            call = _spec(group).state_owner(_schedule(group, comm.rank, comm.size).name)
            keys[group.key] = {"call": call, "lr": state["lr"], "rank": comm.rank, "size": comm.size, "values": found}
    ours = {group.key for group in groups}
    others = {key: entry for key, entry in comm.state_dict()["keys"].items() if key not in ours}
    comm.load_state_dict({"calls": state["calls"], "keys": {**others, **keys}})
    return step


def _fitting(
    comm: Communicator, groups: Sequence[Group], given: Any
) -> tuple[Mapping[str, Any], list[dict[str, np.ndarray]]]:
    """The state to restore here, and the values of each group in it."""
    states = [given] if isinstance(given, Mapping) else list(given)
    for each in states:
        _check(each, groups)
    if not isinstance(given, Mapping):
        states = _all_ranks(states)
        if len(states) != comm.size:
            return states[0], [_merged(states, group, comm.rank, comm.size) for group in groups]
    state = states[0] if isinstance(given, Mapping) else states[comm.rank]
    if (state["rank"], state["size"]) != (comm.rank, comm.size):
        raise ArgumentError(
            f"the state belongs to rank {state['rank']} of {state['size']}, and this is rank {comm.rank} of "
            f"{comm.size}; load this rank's own, or a list of the states of all {state['size']} ranks"
        )
    return state, [_values_of(state, group) for group in groups]


def _merged(states: Sequence[Mapping[str, Any]], group: Group, rank: int, size: int) -> dict[str, np.ndarray]:
    """A group's state on ``rank`` of ``size``, from the states of all ranks of another group.

    The result of a call lacks, per element, the mean of the n ranks' own errors and the error of the sum, whose unit is
    that of the result (op avg). That total is kept: with one_shot on each new rank, since the mean of equal values is
    the value; with two_round only where the new rank owns the sum, since owners do not encode values of their own.
    Momentum is linear in the gradients, and its mean enters the result: each new rank gets the mean.
    """
    found = [_values_of(state, group) for state in states]
    schedule = _schedule(group, rank, size)
    has_owners = any(True for r in range(size) for _ in sums_of(_schedule(group, r, size)))
    merged: dict[str, np.ndarray] = {}
    for name, buffer in schedule.buffers.items():
        if buffer.role is not Role.STATE or not any(found):
            continue
        total = np.zeros(buffer.size)
        for old, values in enumerate(found):
            own = values.get(name, np.zeros(buffer.size, np.float32)).astype(np.float64)
            for part in _owned(_schedule(group, old, len(states)), name):
                total[part] += own[part]
                own[part] = 0
            total += own / len(states)
        merged[name] = total.astype(np.float32)
        if name.startswith("residual") and has_owners:
            merged[name][:] = 0
            for part in _owned(schedule, name):
                merged[name][part] = total[part]
    return merged


def _owned(schedule: Schedule, name: str) -> Iterator[slice]:
    """The parts of a buffer with errors of sums."""
    return (slice(start, stop) for buffer, start, stop in sums_of(schedule) if buffer == name)


def _spec(group: Group) -> CoalescedSpec:
    """The spec of the group's calls."""
    counts = group.counts
    return CoalescedSpec.from_arguments(sum(counts), group.dtype, group.codec, None, each=counts, op="avg")


def _schedule(group: Group, rank: int, size: int) -> Schedule:
    return _spec(group).schedule(rank, size, in_place=True)


def _members(group: Group) -> Iterator[tuple[str, int, str, Any]]:
    """For each kind of state of the codec, and each parameter that has elements: kind, index, name, parameter."""
    kinds = group.codec.state_names if isinstance(group.codec, Codec) else ()
    for kind in kinds:
        for i, (name, parameter) in enumerate(zip(group.names, group.parameters, strict=True)):
            if parameter.numel():
                yield kind, i, name, parameter


def _values_of(state: Mapping[str, Any], group: Group) -> dict[str, np.ndarray]:
    """The values of a group's state by the buffers of its schedule; empty if the group had no state yet."""
    values: dict[str, np.ndarray] = {}
    for kind, i, name, parameter in _members(group):
        tensor = state[_KINDS[kind]].get(name)
        if tensor is not None:
            values[f"{kind} {i}"] = _flat(tensor, parameter, f"{_KINDS[kind]}[{name!r}]")
    return values


def _shaped(values: np.ndarray, parameter: Any) -> Any:
    """Values in the order of the parameter's memory, as a tensor of its shape and strides."""
    tensor = torch.empty_like(parameter, dtype=torch.float32, device="cpu", requires_grad=False)
    tensor.as_strided((tensor.numel(),), (1,)).copy_(torch.from_numpy(values))
    return tensor


def _flat(tensor: Any, parameter: Any, what: str) -> np.ndarray:
    """The inverse of _shaped()."""
    if not isinstance(tensor, torch.Tensor) or tensor.shape != parameter.shape or tensor.dtype != torch.float32:
        raise ArgumentError(f"the state's {what} is not a float32 tensor of the shape {tuple(parameter.shape)}")
    like = torch.empty_like(parameter, dtype=torch.float32, device="cpu", requires_grad=False)
    like.copy_(tensor.detach())
    flat: np.ndarray = like.as_strided((like.numel(),), (1,)).numpy()
    return flat


def _check(state: Any, groups: Sequence[Group]) -> None:
    if not isinstance(state, Mapping) or set(state) != _FIELDS:
        raise ArgumentError(
            f"a state is the dict that state_dict() returned, with {', '.join(sorted(_FIELDS))}, or a list of those of "
            f"all ranks"
        )
    own = [group.description() for group in groups]
    if state["groups"] == own:
        return
    raise ArgumentError(
        f"the state belongs to other parameters or codecs: {_difference(state['groups'], own)}; pass the same model "
        f"and the same arguments to compress()"
    )


def _difference(saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> str:
    """The first difference between the descriptions of groups in a state and here."""
    if len(saved) != len(own):
        return f"it has {len(saved)} groups of parameters, and here there are {len(own)}"
    number, (theirs, ours) = next(
        (i, pair) for i, pair in enumerate(zip(saved, own, strict=True)) if pair[0] != pair[1]
    )
    for field in ("codec", "dtype"):
        if theirs[field] != ours[field]:
            return f"the {field} of its group {number} is {theirs[field]}, and here it is {ours[field]}"
    pairs = zip_longest(theirs["parameters"], ours["parameters"])
    shown = next([_shown(each) for each in pair] for pair in pairs if pair[0] != pair[1])
    return f"its group {number} has {shown[0]}, and the group here {shown[1]} in its place"


def _shown(parameter: Sequence[Any] | None) -> str:
    """A parameter of Group.description()."""
    if parameter is None:
        return "nothing"
    name, shape, strides = parameter
    return f"{name!r} of shape {tuple(shape)} and strides {tuple(strides)}"


def _all_ranks(states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The states of all ranks of a group by rank."""
    found = {state["rank"]: state for state in states}
    sizes = {state["size"] for state in states}
    if len(sizes) != 1 or sorted(found) != list(range(*sizes)) or len(found) != len(states):
        have = ", ".join(f"{state['rank']} of {state['size']}" for state in states) or "none"
        raise ArgumentError(f"a list of states must have those of all ranks of one group, not those of ranks {have}")
    for name in ("step", "calls", "lr"):
        if len({state[name] for state in states}) != 1:
            raise ArgumentError(f"the ranks' states differ in {name!r}, so they were not saved after the same step")
    return [found[rank] for rank in range(len(states))]
