"""The state of compress() as tensors by the names of parameters: for torch.save(), and for groups of another size.

An element of a parameter's residual on a rank (qccl.collectives.feedback) is the error of the rank's own value, or, if
the rank owns the element's sum, the error of that sum. The rank, the number of ranks and the group tell which it is, so
one tensor per parameter is enough.

The error of the results of n ranks is, per element, the mean of the ranks' own errors plus the error of the sum, in the
unit of the result (op avg). A state of all ranks has this total. A group that loads it keeps the total: with one_shot
each rank gets it as the error of its own value, since the mean of equal values is the value; with two_round the owner
of the sum gets it, since owners do not encode their own values. In two levels owners encode the sums of their nodes,
and with one_shot each gets its node's share. Momentum is linear in the gradients, and its mean enters the result, so
each rank gets the mean.

Gradients that are sent as factors (qccl.torch.low_rank) have residuals of the ranks' own values alone, and factors that
are equal on all ranks; both become the mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
import torch

from qccl.base.errors import ArgumentError
from qccl.collectives import CoalescedSpec, CollectiveSpec, HierarchicalSpec, for_nodes
from qccl.collectives.arguments import count_of, integers
from qccl.collectives.feedback import encoded_parts, residuals_of, sums_of
from qccl.collectives.schedule import Role, Schedule, buffer_name
from qccl.communicator.communicator import Communicator
from qccl.torch.factors import matrix_shape
from qccl.torch.groups import ParameterGroup
from qccl.torch.models import like_in_bucket

__all__ = [
    *("FullState", "IncompatibleKeys", "from_saved", "owned_parts", "schedule_of", "take", "to_full"),
    *("to_saved", "what_fits", "without_choice"),
]

#: the kinds of state: the name in a schedule, and the key in a saved state
_KINDS = {"residual": "residuals", "momentum": "momenta", "factor": "factors"}
#: keys of a state of all ranks; a state of one rank also has _PLACE
_FULL = {"step", "calls", "lr", "groups", *_KINDS.values()}
_PLACE = {"rank", "size", "nodes"}


class IncompatibleKeys(NamedTuple):
    """The result of load_state_dict(), with the fields of torch.nn.Module's.

    Attributes:
        missing_keys: the parameters that keep state, and for which the loaded state had no fitting part.
        unexpected_keys: the parameters whose state does not fit any parameter here.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


class FullState:
    """``compression.full``: for frameworks that save one state for all ranks, to be loaded by any number of ranks.

    Such frameworks, for example torch.distributed.checkpoint and Accelerate's register_for_checkpointing(), call
    state_dict() on every rank and keep one result.
    """

    def __init__(self, owner: Any) -> None:
        """``owner`` has full_state_dict() and load_state_dict()."""
        self._owner = owner

    def state_dict(self) -> dict[str, Any]:
        """Collective: call full_state_dict() of the owner."""
        full: dict[str, Any] = self._owner.full_state_dict()
        return full

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Call load_state_dict() of the owner; every rank must do so."""
        self._owner.load_state_dict(state)


def to_saved(comm: Communicator, groups: Sequence[ParameterGroup], step: int) -> dict[str, Any]:
    """Copy this rank's state. Unused state is zeros: some checkpoints load only into tensors that they are given."""
    kept = comm.state_dict()
    saved: dict[str, Any] = {"rank": comm.rank, "size": comm.size, "nodes": [*comm.nodes]}
    saved |= {"step": step, "calls": kept["calls"], "lr": None}
    saved["groups"] = [group.description() for group in groups]
    saved |= {kind: {} for kind in _KINDS.values()}
    for group in groups:
        entry = kept["keys"].get(group.key, {"lr": saved["lr"], "values": {}})
        saved["lr"] = entry["lr"]
        for kind, buffer, name, like in _members(group):
            values = entry["values"].get(buffer, np.zeros(like.numel(), np.float32))
            saved[_KINDS[kind]][name] = _shaped(values, like)
    return saved


def to_full(
    comm: Communicator, groups: Sequence[ParameterGroup], step: int, add_ranks: Callable[[torch.Tensor], object]
) -> dict[str, Any]:
    """Collective: gather the state of all ranks, the same on each of them.

    ``add_ranks`` replaces a float64 tensor on the parameters' device by its sum over the ranks.
    """
    own = to_saved(comm, groups, step)
    full = {name: value for name, value in own.items() if name not in _PLACE}
    full |= {kind: {} for kind in _KINDS.values()}
    for group in groups:
        share = _share(_values_of(own, group), group, comm.rank, comm.nodes)
        for kind, buffer, name, like in _members(group):
            total = torch.from_numpy(share[buffer]).to(like.device)
            add_ranks(total)
            full[_KINDS[kind]][name] = _shaped(total.float().cpu().numpy(), like)
    return full


def from_saved(comm: Communicator, groups: Sequence[ParameterGroup], given: Any, hint: str = "") -> int:
    """Restore to_saved() of this rank, to_full(), or a list of to_saved() of all ranks of a group. Returns the step.

    Raises ArgumentError for anything else, and then changes nothing; ``hint`` is the end of the error for other groups.
    """
    with _refusing():
        state, values = _fitting(comm, groups, given, hint)
    keys = {}
    for group, found in zip(groups, values, strict=True):
        if found:
            keys[group.key] = {"call": _owner(group, comm.rank, comm.nodes), "lr": state["lr"], "values": found}
            keys[group.key] |= {"rank": comm.rank, "size": comm.size}
    ours = {group.key for group in groups}
    others = {key: entry for key, entry in comm.state_dict()["keys"].items() if key not in ours}
    comm.load_state_dict({"calls": state["calls"], "keys": {**others, **keys}})
    return int(state["step"])


def without_choice(given: Any) -> tuple[Any, str]:
    """Remove the choice that compress(codec="auto") added to states. Returns the states, and a hint for errors."""
    states = [given] if isinstance(given, Mapping) else given
    if not isinstance(states, Sequence) or not all(isinstance(state, Mapping) for state in states):
        return given, ""
    if not any("choice" in state for state in states):
        return given, ""
    rest = [{key: value for key, value in state.items() if key != "choice"} for state in states]
    hint = (
        "; the codecs of this state were chosen by compress(codec='auto'), which was removed: give codecs={...} with "
        "the codec of each parameter in state['groups']"
    )
    return rest[0] if isinstance(given, Mapping) else rest, hint


def what_fits(groups: Sequence[ParameterGroup], given: Any) -> tuple[Any, IncompatibleKeys]:
    """Make a to_full() of these groups from a to_full() of other groups, with zeros for parameters that do not fit.

    The state of a parameter fits if its name, shape, strides, element type and codec are the same. A state of these
    groups is returned unchanged. Raises ArgumentError for single ranks' states of other groups.
    """
    with _refusing():
        own = [group.description() for group in groups]
        states = [given] if isinstance(given, Mapping) else list(given)
        if all(state["groups"] == own for state in states):
            return given, IncompatibleKeys([], [])
        if not isinstance(given, Mapping) or "rank" in given:
            raise ArgumentError(
                "strict=False takes a full_state_dict() if parameters or codecs have changed: in the state of a rank, "
                "the groups of parameters decide which values are errors of sums; load it with the parameters and "
                "codecs that it was saved with, and save full_state_dict() there"
            )
        return _with_zeros(groups, given, own)


def _with_zeros(
    groups: Sequence[ParameterGroup], full: Mapping[str, Any], own: list[dict[str, Any]]
) -> tuple[dict[str, Any], IncompatibleKeys]:
    def forms(descriptions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        return {p[0]: repr((each["codec"], each["dtype"], p)) for each in descriptions for p in each["parameters"]}

    here, there = forms(own), forms(full["groups"])
    found, missing, unexpected = {**full, "groups": own}, dict[str, None](), dict[str, None]()
    for kind, field in _KINDS.items():
        needed = {name: like for group in groups for which, _, name, like in _members(group) if which == kind}
        fits = {name for name in full[field] if name in needed and here[name] == there.get(name)}
        missing |= dict.fromkeys(name for name in needed if name not in fits)
        unexpected |= dict.fromkeys(name for name in full[field] if name not in fits)
        found[field] = {
            name: full[field][name] if name in fits else torch.zeros(like.shape, dtype=torch.float32, device="cpu")
            for name, like in needed.items()
        }
    return found, IncompatibleKeys([*missing], [*unexpected])


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turn errors that a malformed state causes into ArgumentError."""
    try:
        yield
    except ArgumentError:
        raise
    except (TypeError, AttributeError, LookupError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"this is not a state that state_dict() returned ({error!r})") from error


def take(comm: Communicator, group: ParameterGroup, lr: float | None) -> None:
    """Take the state of a group like its next call would (StateStore.expect)."""
    schedule = schedule_of(group, comm.rank, comm.nodes)
    forms = {
        name: (buffer.size, buffer.dtype)
        for name, buffer in schedule.buffers.items()
        if buffer.role is Role.STATE and buffer.dtype is not None
    }
    sums = owned_parts(group, comm.rank, comm.nodes)
    comm.state.take(group.key, _owner(group, comm.rank, comm.nodes), forms, lr, sums)


def _fitting(
    comm: Communicator, groups: Sequence[ParameterGroup], given: Any, hint: str
) -> tuple[Mapping[str, Any], list[dict[str, np.ndarray]]]:
    """Find the state to restore here, and its values for each group."""
    states = [given] if isinstance(given, Mapping) else list(given)
    for each in states:
        _check(each, groups, _FULL if given is each and not _PLACE & given.keys() else _FULL | _PLACE, hint)
    place = comm.rank, comm.nodes
    if not isinstance(given, Mapping):
        states = _all_ranks(states)
        if len(states) != comm.size or not _fit(states[0]["nodes"], groups, comm.nodes):
            return states[0], [_divided(_total(states, group), group, *place) for group in groups]
    elif "rank" not in given:
        return given, [_divided(_values_of(given, group), group, *place) for group in groups]
    state = states[0] if isinstance(given, Mapping) else states[comm.rank]
    if (state["rank"], state["size"]) != (comm.rank, comm.size):
        raise ArgumentError(
            f"the state belongs to rank {state['rank']} of {state['size']}, and this is rank {comm.rank} of "
            f"{comm.size}; load this rank's own state, a list of all {state['size']} ranks' states, or a "
            f"full_state_dict()"
        )
    if not _fit(state["nodes"], groups, comm.nodes):
        raise ArgumentError(
            f"the state belongs to ranks on the nodes {state['nodes']}, and these are on {[*comm.nodes]}, so other "
            f"ranks have the errors of its sums; load a list of the states of all ranks, or a full_state_dict()"
        )
    needed = [_buffers(group, *place) for group in groups]
    return state, [
        {name: values for name, values in _values_of(state, group).items() if name in buffers}
        for group, buffers in zip(groups, needed, strict=True)
    ]


def _fit(saved: Sequence[int], groups: Sequence[ParameterGroup], nodes: Sequence[int]) -> bool:
    """Whether ranks on the nodes ``saved`` and ranks on ``nodes`` make the calls with state in the same way."""
    stateful = (group for group in groups if group.state_names and not group.rank)
    return all(_spec(group, saved) == _spec(group, nodes) for group in stateful)


def _share(
    values: Mapping[str, np.ndarray], group: ParameterGroup, rank: int, nodes: Sequence[int]
) -> dict[str, np.ndarray]:
    """Compute a rank's share of the total of its group from its own state, in double precision."""
    if not values:
        return {}
    shares = {name: own.astype(np.float64) / len(nodes) for name, own in values.items()}
    for name, start, stop in owned_parts(group, rank, nodes):
        shares[name][start:stop] = values[name][start:stop]
    return shares


def _total(states: Sequence[Mapping[str, Any]], group: ParameterGroup) -> dict[str, np.ndarray]:
    """Compute the total of a group from the states of its ranks."""
    shares = [_share(_values_of(state, group), group, rank, state["nodes"]) for rank, state in enumerate(states)]
    return {name: np.sum([share[name] for share in shares], axis=0).astype(np.float32) for name in shares[0]}


def _divided(
    total: Mapping[str, np.ndarray], group: ParameterGroup, rank: int, nodes: Sequence[int]
) -> dict[str, np.ndarray]:
    """Compute the state of ``rank`` from the total that all ranks on ``nodes`` have together."""
    if not total or group.rank:
        return dict(total)
    schedule, spec = schedule_of(group, rank, nodes), _spec(group, nodes)
    algorithm, share = schedule.name, 1.0
    if isinstance(spec, HierarchicalSpec):
        levels = spec.levels()
        algorithm, share = levels.algorithm, len(nodes) / len(levels.nodes)
    has_owners = algorithm == "two_round"
    found = {name: values for name, values in total.items() if name in schedule.buffers}
    for name in found.keys() & set(residuals_of(schedule)):
        found[name] = np.zeros_like(total[name])
        for buffer, start, stop, sums in encoded_parts(schedule):
            if (buffer, sums) == (name, has_owners):
                found[name][start:stop] = total[name][start:stop] * np.float32(1 if has_owners else share)
    return found


def _buffers(group: ParameterGroup, rank: int, nodes: Sequence[int]) -> set[str]:
    """The buffers that have state."""
    if group.rank:
        return {buffer for _, buffer, _, _ in _members(group)}
    buffers = schedule_of(group, rank, nodes).buffers if group.codec is not None else {}
    return {name for name, buffer in buffers.items() if buffer.role is Role.STATE}


def owned_parts(group: ParameterGroup, rank: int, nodes: Sequence[int]) -> list[tuple[str, int, int]]:
    """The parts (buffer, start, stop) of a rank's residuals that are errors of sums, among ranks on these nodes."""
    return [] if group.rank else sums_of(schedule_of(group, rank, nodes))


def _owner(group: ParameterGroup, rank: int, nodes: Sequence[int]) -> str:
    """The text of the call that owns the group's state."""
    if group.rank:
        return group.low_rank_owner
    return _spec(group, nodes).state_owner(schedule_of(group, rank, nodes).name)


def _spec(group: ParameterGroup, nodes: Sequence[int]) -> CollectiveSpec:
    """The spec of the group's calls by ranks on these nodes."""
    counts = group.counts
    spec = CoalescedSpec.from_arguments(sum(counts), group.dtype, group.codec, None, each=counts, op="avg")
    return for_nodes(spec, nodes)


def schedule_of(group: ParameterGroup, rank: int, nodes: Sequence[int]) -> Schedule:
    """The schedule of the group's calls on a rank, by ranks on these nodes."""
    return _spec(group, nodes).schedule(rank, len(nodes), in_place=True)


def _members(group: ParameterGroup) -> Iterator[tuple[str, str, str, Any]]:
    """Yield kind, buffer, name and a tensor of this form, for each kind of state and each non-empty parameter."""
    for kind in group.state_names:
        for i, (name, parameter) in enumerate(zip(group.names, group.parameters, strict=True)):
            if parameter.numel():
                yield kind, buffer_name(kind, i), name, _factor_of(parameter, group) if kind == "factor" else parameter


def _factor_of(parameter: Any, group: ParameterGroup) -> Any:
    """Make a tensor with the form of a parameter's factor Q."""
    return torch.empty(group.rank, matrix_shape(parameter)[1], dtype=torch.float32, device=parameter.device)


def _values_of(state: Mapping[str, Any], group: ParameterGroup) -> dict[str, np.ndarray]:
    """The values of a group's state by the buffers of its schedule; empty if the group had no state yet."""
    values: dict[str, np.ndarray] = {}
    for kind, buffer, name, like in _members(group):
        tensor = state[_KINDS[kind]].get(name)
        if tensor is not None:
            values[buffer] = _flat(tensor, like, f"{_KINDS[kind]}[{name!r}]")
    return values


def _shaped(values: np.ndarray, parameter: Any) -> Any:
    """Make a tensor of the parameter's shape from values in the order of a bucket (like_in_bucket)."""
    tensor = like_in_bucket(parameter, dtype=torch.float32, device="cpu")
    tensor.as_strided((tensor.numel(),), (1,)).copy_(torch.from_numpy(values))
    return tensor


def _flat(tensor: Any, parameter: Any, what: str) -> np.ndarray:
    """Do the inverse of _shaped(), with checks."""
    if not isinstance(tensor, torch.Tensor) or tensor.shape != parameter.shape or tensor.dtype != torch.float32:
        raise ArgumentError(f"the state's {what} is not a float32 tensor of the shape {tuple(parameter.shape)}")
    like = like_in_bucket(parameter, dtype=torch.float32, device="cpu")
    like.copy_(tensor.detach())
    flat: np.ndarray = like.as_strided((like.numel(),), (1,)).numpy()
    return flat


def _check(state: Any, groups: Sequence[ParameterGroup], fields: set[str], hint: str) -> None:
    if not isinstance(state, Mapping) or set(state) != fields:
        raise ArgumentError(
            f"a state is the dict that state_dict() returned, with {', '.join(sorted(_FULL | _PLACE))}, a list of "
            f"these dicts of all ranks, or the result of full_state_dict()"
        )
    if "nodes" in state and len(integers(state["nodes"], 'the state\'s "nodes"')) != state["size"]:
        raise ArgumentError(f"the state has the nodes {state['nodes']} of {state['size']} ranks; each rank has one")
    own = [group.description() for group in groups]
    if state["groups"] != own:
        raise ArgumentError(
            f"the state belongs to other parameters or codecs: {_difference(state['groups'], own)}; pass the same "
            f"model and the same arguments as when it was saved, and with codec='auto:CODEC' a comm with the same "
            f"profile{hint}"
        )
    step = count_of(state["step"], 'the state\'s "step"')
    for kind, name in _KINDS.items():
        needed = {member[2] for group in groups for member in _members(group) if member[0] == kind}
        lacking, unknown = (
            sorted(map(str, names)) for names in (needed - state[name].keys(), state[name].keys() - needed)
        )
        if unknown or (lacking and (step or state[name])):
            what = f"has no {name} of {', '.join(lacking)}" if lacking else f"has {name} of {', '.join(unknown)}"
            raise ArgumentError(
                f"the state, of step {step}, {shorten(what, 300)}; load the whole result of state_dict(), or begin "
                f"with an empty state"
            )


def _difference(saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> str:
    """Say the first difference between the descriptions of groups in a state and here."""
    theirs, ours = ([p[0] for each in groups for p in each["parameters"]] for groups in (saved, own))
    lacking, more = [n for n in ours if n not in theirs], [n for n in theirs if n not in ours]
    if lacking or more:
        parts = f"it lacks {', '.join(lacking)}" * bool(lacking), f"it also has {', '.join(more)}" * bool(more)
        return " and ".join(shorten(part, 300) for part in parts if part)
    if len(saved) != len(own):
        return f"it has {len(saved)} groups of parameters, and here there are {len(own)}"
    pairs = enumerate(zip(saved, own, strict=True))
    number, (other, mine) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    for field in ("codec", "dtype"):
        if other[field] != mine[field]:
            return f"the {field} of its group {number} is {other[field]}, and here it is {mine[field]}"
    both = zip_longest(other["parameters"], mine["parameters"])
    shown = next(([_shown(each) for each in pair] for pair in both if pair[0] != pair[1]), ["more fields", "has none"])
    return f"its group {number} has {shown[0]}, and the group here {shown[1]} in its place"


def _shown(parameter: Sequence[Any] | None) -> str:
    """Format one parameter of ParameterGroup.description() for an error."""
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
    for name in ("step", "calls", "lr", "nodes"):
        if any(state[name] != states[0][name] for state in states):
            raise ArgumentError(f"the ranks' states differ in {name!r}, so they were not saved after the same step")
    return [found[rank] for rank in range(len(states))]
