"""DiLoCo: each rank trains alone for many steps, then the ranks average their changes and take one outer step."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from qccl import codecs
from qccl.base.arrays import Values
from qccl.base.errors import ArgumentError, MismatchError
from qccl.base.removed import Gone, without_removed
from qccl.base.scalars import as_bool, as_integer, as_real
from qccl.collectives.allreduce import ALLREDUCE
from qccl.collectives.arguments import CodecLike, count_of, one_of
from qccl.communicator.communicator import Communicator
from qccl.communicator.dynamo import not_traced
from qccl.communicator.owners import Owner
from qccl.training import parameters
from qccl.training.outer_step import OuterStep, Turns, advance
from qccl.training.parameters import ArrayChange, Form

__all__ = ["DiLoCo"]

#: the keys of a state_dict()
_STATE = {"common", "momentum", "steps", "local_steps", "under_way"}


@not_traced
class DiLoCo:
    """Local training with a compressed outer step (DiLoCo, Douillard et al. 2023, arXiv 2311.08105, algorithm 1).

    All ranks have the same common parameters. Each trains its own copy for any number of steps, with any optimizer.
    Then ``step()`` averages the changes over the ranks, with the codec and its error feedback, and takes a step of SGD
    with Nesterov momentum::

        d = average over the ranks of (common - local)        encoded
        v = momentum v + d
        common -= outer_lr (d + momentum v)                   without nesterov: outer_lr v

    Every rank then continues from the common parameters, which have the same bits on all ranks. The common parameters
    and the outer momentum have the parameters' element types; keep parameters of 16 bits in float32 for training.

    **Streaming and overlap** (Streaming DiLoCo, Douillard et al. 2025, arXiv 2501.18512, algorithm 2). With ``period``
    call ``after_local_step()`` after each local step, instead of ``step()``. The arrays are divided into ``fragments``,
    whose outer steps begin one after the other at equal distances, each every ``period`` local steps. The all-reduce of
    a fragment runs while the rank takes ``delay`` further local steps. Then its outer step changes the common
    parameters as above. The rank keeps the local steps that it took meanwhile (delayed averaging: Zhou et al. 2020,
    arXiv 2006.00441) in place of equation 3 of Streaming DiLoCo, which loses them or follows more slowly::

        local = common + (local - local at the begin)

    Attributes:
        params: the parameters that were given or returned last.
        common: the common parameters, which no local step changes; a list of arrays, in the order of a dict's sorted
            names.
        local_steps: the number of calls of after_local_step() so far.
        fragments: for each array of ``common``, the number of its fragment.
    """

    sparseloco = Gone("qccl.DiLoCo")

    @without_removed("qccl.DiLoCo")
    def __init__(
        self,
        comm: Communicator,
        params: Any,
        *,
        codec: CodecLike = "minmax4+ef",
        algorithm: str = "auto",
        outer_lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        period: int | None = None,
        fragments: int | Collection[int] = 1,
        delay: int = 0,
        key: str | None = None,
    ) -> None:
        """Collective: all ranks continue from rank 0's parameters, which are written to ``params``.

        Args:
            comm: the ranks.
            params: an array, a list of arrays or a dict of them, of float32, float16 or bfloat16 (NumPy, torch, CuPy;
                JAX on the host). Arrays of dicts belong together by name, whatever the dicts' orders.
            codec: the codec of the all-reduce. Error feedback keeps its residuals in the communicator.
            algorithm: the algorithm of the all-reduce: "two_round", "one_shot", or "auto" (by size).
            outer_lr: the learning rate of the outer step; 1 with ``momentum=0`` averages the parameters.
            momentum: the momentum of the outer step, from 0 to below 1.
            nesterov: whether the outer step looks ahead by the momentum.
            period: the local steps between two outer steps of a fragment; None leaves that to the calls of step().
            fragments: the number of fragments, at most ``period``; each array joins the fragment with the fewest
                elements so far, so arrays of equal size take turns ("strided" in the paper). Or the number of each
                array's fragment, from 0 on, in a list like ``common``, or by name if ``params`` is a dict.
            delay: local steps between the begin of a fragment's all-reduce and its outer step; less than ``period``. A
                fragment under way needs a copy of its local parameters.
            key: the begin of the residuals' names in the communicator's state, for this object alone. None: "diloco"
                for the first object, "diloco#2" for the second, and so on. The communicator's saved state then fits a
                program that makes its objects in the same order; give keys if the order changes.
        """
        self._codec = codecs.get(codec)
        if "momentum" in self._codec.state_names:
            raise ArgumentError(f"{self._codec.spec()} has momentum, and so has the outer step; use +ef alone")
        rate, decay, looks_ahead = as_real(outer_lr), as_real(momentum), as_bool(nesterov)
        if rate is None or not 0 < rate < math.inf:
            raise ArgumentError(f"outer_lr must be a positive number, the rate of the outer step, not {outer_lr!r}")
        if decay is None or not 0 <= decay < 1:
            raise ArgumentError(f"momentum must be a number from 0 to below 1, not {momentum!r}")
        if looks_ahead is None:
            raise ArgumentError(f"nesterov must be True or False, not {nesterov!r}")
        self._outer_lr, self._momentum, self._nesterov = float(rate), float(decay), looks_ahead
        self._algorithm = one_of(algorithm, ("auto", *ALLREDUCE), "algorithm")
        self.comm, self.params, self.local_steps = comm, params, 0
        given = self._values(params)
        parameters.check_separate(given)
        self._names = parameters.names_of(params)
        self._forms = [parameters.form_of(values) for values in given]
        self.common = [parameters.mutable_copy(values) for values in given]
        self._velocity = [parameters.zeros_like(array) for array in self.common]
        self.fragments = parameters.fragments_of(fragments, self._names, [values.count for values in given])
        self._taken = [0] * (max(self.fragments, default=0) + 1)
        self._turns = Turns(len(self._taken), period, delay)
        self._under_way: list[OuterStep] = []  # in the order of their begin
        self._change = ArrayChange()
        self._owner: Owner
        self._join_as_owner(comm, key, is_new=True)

    @property
    def steps(self) -> int:
        """The number of outer steps that every fragment has taken so far."""
        return min(self._taken)

    def step(self, params: Any = None) -> Any:
        """Collective: one outer step of all parameters; returns the parameters with the new values.

        It first applies the outer steps under way, like finish(). All ranks then have the same parameters. ``params``
        are the local parameters, in the same structure as before; None means ``self.params``. Writable arrays get the
        new values in place. JAX's arrays are read-only: the result has NumPy copies in their place.

        Raises ArgumentError on all ranks, and changes neither parameters nor residuals, if the average is not finite.
        """
        params = self.finish(params)
        outer_step = self._begin(range(len(self._taken)), self._local(params), self.local_steps)
        return self._apply(outer_step, params)

    def after_local_step(self, params: Any = None) -> Any:
        """Collective: note that a local step has ended; returns the parameters, which an outer step may have changed.

        All ranks make equally many calls. A call begins the all-reduce of the fragment whose turn it is, and applies
        the result of a fragment whose delay is over. It waits only if that result has not arrived. ``params`` are the
        local parameters, see step().

        Raises ArgumentError on all ranks if the average of a fragment is not finite. That fragment then keeps its
        common and local parameters and its residuals until its next turn; training may continue.
        """
        if self._turns.period is None:
            raise ArgumentError("after_local_step() needs the number of steps between outer steps; give DiLoCo period=")
        self._change.check()
        params, now = self.params if params is None else params, self.local_steps + 1
        begins = self._turns.begins(now)
        ends = bool(self._under_way) and self._under_way[0].due <= now
        local = self._local(params) if begins or ends else []
        self.local_steps, self.params = now, params
        if begins:
            self._under_way.append(self._begin(begins, local, now + self._turns.delay))
        if ends or (begins and self._turns.delay == 0):
            return self._apply(self._under_way.pop(0), params)
        return params

    def finish(self, params: Any = None) -> Any:
        """Collective: wait for all outer steps under way, and apply them now; returns the parameters.

        Call it before grow(), and before the communicator is closed. Arguments and errors are those of
        after_local_step().
        """
        self._change.check()
        params = self.params if params is None else params
        self._local(params)
        while self._under_way:
            params = self._apply(self._under_way.pop(0), params)
        return params

    def continue_on(self, comm: Communicator) -> None:
        """Collective: use another communicator, such as the result of shrink() or grow().

        For each fragment the ranks of ``comm`` continue from the state of the rank with the most outer steps; new ranks
        construct their DiLoCo on ``comm`` meanwhile. A rank that is new, was behind in a fragment, or was interrupted
        in an outer step (for example by Ctrl-C), gets the common parameters in ``params``. The others keep their local
        parameters, so that a failed step can be repeated. Raises ArgumentError on all ranks if each was interrupted.
        Outer steps under way are dropped: call finish() before grow(). Their changes are not lost, but become part of
        the fragment's next outer step; the residuals then have the error of one all-reduce too much.
        """
        if comm is self.comm:
            self._join(comm, is_new=False)
            return
        before = self._owner
        try:
            self._join_as_owner(comm, before.name, is_new=False)
        except BaseException:
            self._owner = before
            raise
        before.close()

    def close(self) -> None:
        """Delete the residuals, and free the key. All ranks must call it; ``comm`` stays open."""
        self._owner.close()

    def _join_as_owner(self, comm: Communicator, key: str | None, *, is_new: bool) -> None:
        """Join a group whose state has no keys of this object yet."""
        owners, is_stateful = comm.state.owners, bool(self._codec.state_names)
        self._owner = owners.add("DiLoCo", "diloco", key, separators=" ", is_stateful=is_stateful)
        try:
            self._join(comm, is_new=is_new)
        except BaseException:
            self._owner.release()  # the program may try again
            raise

    def _join(self, comm: Communicator, *, is_new: bool) -> None:
        form = struct.Struct(f"<{1 + len(self._taken)}q")
        identity, own_taken = self._identity(), [-1 if self._change.interrupted else each for each in self._taken]
        found = comm.allgather(identity + form.pack(self.local_steps, *own_taken))
        others = [rank for rank, each in enumerate(found) if each[: len(identity)] != found[0][: len(identity)]]
        if others:
            raise MismatchError(
                f"ranks {others} have other parameters (number, names, shapes, types) or arguments of DiLoCo "
                f"than rank 0; here its key is {self._owner.name!r}"
            )
        local_steps, *taken = zip(*(form.unpack(each[len(identity) :]) for each in found), strict=True)
        roots = [each.index(max(each)) for each in taken]
        if -1 in (max(each) for each in taken):
            raise ArgumentError("an exception interrupted an outer step on every rank; load a state on all ranks")
        behind = [is_new or own < max(each) for own, each in zip(own_taken, taken, strict=True)]
        for number, fragment in enumerate(self.fragments):
            for array in (self.common[number], self._velocity[number]):
                comm.quantized_broadcast(array, root=roots[fragment], codec="none")
        with self._change:
            self.comm, self.local_steps, self._under_way = comm, max(local_steps), []
            self._taken = [max(each) for each in taken]
            self.params = self._deliver(self.params, [n for n, f in enumerate(self.fragments) if behind[f]])

    def state_dict(self) -> dict[str, Any]:
        """Copy the common parameters, the outer momentum and the averages under way, with all counts.

        It waits for the outer steps under way, and does not apply them. Unless outer steps are under way, the state is
        the same on all ranks, so one rank may save it for all. The residuals of error feedback are in the
        communicator's state_dict(), which each rank saves. Raises ArgumentError if an average is not finite, and the
        failure of an outer step.
        """
        self._change.check()
        for outer_step in self._under_way:
            outer_step.settle()
        copies = {"common": self.common, "momentum": self._velocity}
        return {name: [parameters.copy_of(array) for array in arrays] for name, arrays in copies.items()} | {
            "steps": list(self._taken),
            "local_steps": self.local_steps,
            "under_way": [part for each in self._under_way for part in each.saved(self.comm.rank)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state_dict(); ``params`` get the common parameters.

        Arrays of an outer step under way get the local parameters of its begin. Training continues bit for bit if the
        local parameters are loaded afterwards. Raises ArgumentError for any other state, and then changes nothing.
        """
        if not isinstance(state, Mapping) or {*state} - {"weights"} != _STATE:  # the last release saved weights
            raise ArgumentError(f"a state is the dict that state_dict() returned, with {', '.join(sorted(_STATE))}")
        local_steps = count_of(state["local_steps"], 'the state\'s "local_steps"')
        taken = [count_of(each, 'the state\'s "steps"') for each in self._listed(state, "steps")]
        for name in ("common", "momentum"):
            self._check_arrays(state[name], self._forms, f"the state's {name}")
        under_way = self._loaded(state["under_way"], local_steps)
        with self._change:
            for arrays, name in ((self.common, "common"), (self._velocity, "momentum")):
                for array, saved in zip(arrays, state[name], strict=True):
                    array[...] = saved
            self.local_steps, self._taken, self._under_way = local_steps, taken, under_way
            self.params = self._deliver(self.params, range(len(self.common)))
            local = self._values(self.params)
            for outer_step in under_way:
                for number, begun in outer_step.begun.items():
                    local[number].array[...] = begun

    def _listed(self, state: Mapping[str, Any], name: str) -> list[Any]:
        """Check a part of a state that has one item for each fragment."""
        found = state[name]
        if not isinstance(found, list | tuple) or len(found) != len(self._taken):
            raise ArgumentError(f"the state's {name!r} must be a list with an item for each fragment, not {found!r}")
        return list(found)

    def _check_arrays(self, arrays: Any, forms: Sequence[Form], what: str) -> None:
        if not isinstance(arrays, list | tuple):
            raise ArgumentError(f"{what} must be a list of arrays, not {type(arrays).__name__}")
        self._values(arrays, forms, what)

    def _loaded(self, saved: Any, now: int) -> list[OuterStep]:
        """Load the outer steps under way from a state that was saved after local step ``now``."""
        what, found = "the state's under_way", list[OuterStep]()
        if not isinstance(saved, list | tuple):
            raise ArgumentError(f"{what} must be a list, not {type(saved).__name__}")
        for each in saved:
            if not isinstance(each, Mapping) or set(each) != {"fragment", "due", "averages", "begun", "rank"}:
                raise ArgumentError(
                    f"{what} must have dicts with fragment, due, averages, begun and rank, not {each!r}"
                )
            fragment, due = count_of(each["fragment"], f"{what}: fragment"), count_of(each["due"], f"{what}: due")
            earliest = max([now, *(other.due for other in found)])
            is_due = fragment in self._turns.begins(due - self._turns.delay)
            if not earliest < due <= now + self._turns.delay or not is_due:
                raise ArgumentError(
                    f"{what} has fragment {fragment}, due after local step {due}, which is not its turn between local "
                    f"steps {earliest + 1} and {now + self._turns.delay}"
                )
            members = self._members([fragment])
            averages = self._loaded_arrays(each["averages"], members, f"{what}: averages")
            begun = self._loaded_arrays(each["begun"], members, f"{what}: begun")
            is_own = as_integer(each["rank"]) == self.comm.rank if begun else each["rank"] is None
            if not is_own:
                raise ArgumentError(f"{what} belongs to rank {each['rank']!r}; rank {self.comm.rank} needs its own")
            found.append(OuterStep({fragment: averages}, due, begun=begun))
        return found

    def _loaded_arrays(self, saved: Any, numbers: Sequence[int], what: str) -> dict[int, Any]:
        """Copy the saved arrays of the parameters ``numbers`` into arrays of the parameters' library."""
        self._check_arrays(saved, [self._forms[n] for n in numbers], what)
        arrays = {n: parameters.copy_of(self.common[n]) for n in numbers}
        for array, each in zip(arrays.values(), saved, strict=True):
            array[...] = each
        return arrays

    def _members(self, fragments: Collection[int]) -> list[int]:
        """The numbers of the arrays in some fragments."""
        return [number for number, fragment in enumerate(self.fragments) if fragment in fragments]

    def _begin(self, fragments: Collection[int], local: Sequence[Values], due: int) -> OuterStep:
        """Begin to average the changes of some fragments, by one call for each fragment and element type."""
        outer_step, calls = OuterStep({fragment: {} for fragment in fragments}, due), dict[str, list[Any]]()
        for number in self._members(fragments):
            change = parameters.difference(self.common[number], local[number].array)
            if due > self.local_steps:
                outer_step.begun[number] = parameters.mutable_copy(local[number])
            fragment, (dtype, _) = self.fragments[number], self._forms[number]
            outer_step.changes[fragment][number] = change
            calls.setdefault(self._owner.key(f" {fragment} {dtype}"), []).append(change)
        if len(calls) > 1:  # a call may be refused after others have changed their residuals
            outer_step.put_back = [self.comm.state.keep(key) for key in calls]
        how: dict[str, Any] = {"codec": self._codec, "algorithm": self._algorithm, "nonfinite": "error"}
        try:
            for key, arrays in calls.items():
                call = self.comm.quantized_allreduce_coalesced(arrays, key=key, op="avg", async_op=True, **how)
                outer_step.works.append(call)
        except BaseException:  # Ctrl-C, too
            outer_step.abandon()
            raise
        return outer_step

    def _apply(self, outer_step: OuterStep, params: Any) -> Any:
        """End an outer step: change the common parameters, and return the local parameters."""
        outer_step.settle()
        rule: dict[str, Any] = {"outer_lr": self._outer_lr, "momentum": self._momentum, "nesterov": self._nesterov}
        with self._change:
            for averages in outer_step.changes.values():
                for n, average in averages.items():
                    advance(self.common[n], self._velocity[n], average, **rule)
            self._taken = [each + (fragment in outer_step.changes) for fragment, each in enumerate(self._taken)]
            self.params = self._deliver(params, self._members(outer_step.changes), outer_step.begun)
        return self.params

    def _local(self, params: Any) -> list[Values]:
        """The memory of the local parameters."""
        if parameters.names_of(params) != self._names:
            raise ArgumentError(
                f"params has the names {parameters.names_of(params)}, and DiLoCo was made for {self._names}"
            )
        values = self._values(params, self._forms)
        parameters.check_separate(values)
        return values

    def _values(self, params: Any, forms: Sequence[Form] | None = None, what: str = "params") -> list[Values]:
        """The memory of all arrays, which must have ``forms`` if given."""
        values = [
            self.comm.memory.from_array(parameters.plain(array), writable=False, what=name)
            for name, array in parameters.named(params, what)
        ]
        if forms is not None and len(values) != len(forms):
            raise ArgumentError(f"{what} has {len(values)} arrays, and DiLoCo was made for {len(forms)}")
        for each, form in zip(values, forms or (), strict=False):
            found = parameters.form_of(each)
            if found != form:
                raise ArgumentError(f"type and shape of {each.what} are {found}, and DiLoCo was made for {form}")
        return values

    def _deliver(self, params: Any, numbers: Collection[int], begun: Mapping[int, Any] | None = None) -> Any:
        """Write the common parameters into arrays of ``params``. Returns ``params``, with copies of read-only arrays.

        Arrays that have a copy in ``begun`` keep their changes since then.
        """
        delivered = [array for _, array in parameters.named(params)]
        for number, values in enumerate(self._values(params)):
            if number in numbers:
                target = parameters.mutable_copy(values) if values.view.readonly else values.array
                if begun and number in begun:
                    parameters.move(target, begun[number], self.common[number])
                else:
                    target[...] = self.common[number]
                if values.view.readonly:
                    delivered[number] = target
        return parameters.restored(delivered, params)

    def _identity(self) -> bytes:
        """The settings that must be the same on all ranks."""
        rule = self._outer_lr, self._momentum, self._nesterov, self._owner.name, self._algorithm
        schedule = self._turns.period, self._turns.delay, self._names, self._forms, self.fragments
        return hashlib.sha256(f"{codecs.identity(self._codec)} {rule} {schedule}".encode()).digest()
