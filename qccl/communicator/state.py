"""State that a communicator keeps from call to call: residuals and momenta of codecs, by the caller's keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from qccl.base.dtypes import FLOAT32, DType
from qccl.base.errors import ArgumentError
from qccl.base.scalars import as_bool, as_integer, as_real
from qccl.communicator.owners import Owners

if TYPE_CHECKING:
    import numpy as np

    from qccl.engine.base import Bound, Persistent

__all__ = ["Entry", "Forms", "Parts", "Places", "StateArray", "StateStore", "extents", "lr_of"]

#: parts of state buffers: the buffer's name, and its elements from start to stop
Parts = Iterable[tuple[str, int, int]]
#: state buffers by name: the number of elements, and their type
Forms = Mapping[str, tuple[int, DType]]
#: the parts of parameters by their names; those of one parameter have the same order and lengths under every key
Places = Mapping[str, Sequence[tuple[str, int, int]]]
#: for a call that takes over no parameters from other keys
_NO_MOVE: tuple[Places, Mapping[str, Places]] = ({}, {})


@dataclass(frozen=True, slots=True)
class StateArray:
    """The ``count`` elements of a state buffer."""

    memory: Persistent
    count: int
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.count * self.dtype.itemsize

    def read(self) -> bytes:
        """A copy of all elements."""
        return self.memory.read(0, self.nbytes)

    def floats(self) -> np.ndarray:
        """A copy of all elements as float32, exactly."""
        import numpy as np

        from qccl.codecs.floats import storage, to_float32

        return to_float32(np.frombuffer(self.read(), storage(self.dtype)), self.dtype)


@dataclass(slots=True)
class Entry:
    """The state under one key.

    Attributes:
        call: the text of the calls that the state belongs to.
        lr: whether the calls give a learning rate; None before the first call.
        memory: by the name of the schedule's buffer.
        sums: the parts (buffer, start, stop) that have residuals of sums, which this rank owns; None before a call.
        is_carried: whether the state comes from an earlier group and no call of this one has used it.
        forms: the forms that take() has compared with ``memory``; None for loaded state that no call has used.
        bound, whole: the memory of the last call with this key, without the state and with it; the session keeps them
            here because they end with the entry, and a change of ``memory`` must reset ``bound``.
        resting: the buffers that the last call with lr=0 used in place of ``memory``, because the call may still run.
    """

    call: str
    lr: bool | None = None
    memory: dict[str, StateArray] = field(default_factory=dict)
    sums: Parts | None = None
    is_carried: bool = False
    forms: Forms | None = None
    bound: Bound | None = None
    whole: Bound | None = None
    resting: dict[str, StateArray] = field(default_factory=dict)

    def clear(self, parts: Parts) -> None:
        """Set parts to zeros."""
        for name in {name for name, _, _ in parts}:
            array = self.memory[name]
            values, size = bytearray(array.read()), array.dtype.itemsize
            for _, start, stop in (part for part in parts if part[0] == name):
                values[size * start : size * stop] = bytes(size * (stop - start))
            array.memory.write(bytes(values))


class StateStore:
    """The state of one rank.

    Attributes:
        entries: by key.
        owners: the objects that own keys.
        moves: by key, the parameters that the key's next call takes over; see expect().
    """

    def __init__(self, rank: int, size: int, allocate: Callable[[int], Persistent]) -> None:
        self._rank, self._size, self._allocate = rank, size, allocate
        self.entries: dict[str, Entry] = {}
        self.owners = Owners(self)
        self.moves: dict[str, tuple[Places, Mapping[str, Places]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all state."""
        return sum(array.nbytes for entry in self.entries.values() for array in entry.memory.values())

    def _zeros(self, form: tuple[int, DType]) -> StateArray:
        count, dtype = form
        return StateArray(self._allocate(count * dtype.itemsize), count, dtype)

    def _stored(self, values: np.ndarray, dtype: DType) -> StateArray:
        """Store float32 values in new memory, rounded to ``dtype``. As in a call, NaN and infinity become 0."""
        import numpy as np

        from qccl.codecs.floats import from_float32, to_float32

        rounded = from_float32(values, dtype)
        rounded[~np.isfinite(to_float32(rounded, dtype))] = 0
        array = self._zeros((values.size, dtype))
        array.memory.write(rounded.tobytes())
        return array

    def take(self, key: str, call: str, forms: Forms, lr: float | None, sums: Parts = ()) -> Entry:
        """Find the state for a call with buffers of these forms; a new key begins with zeros.

        ``sums`` are the parts of the buffers that hold residuals of sums, which this rank owns. No run may use the
        state that moves (see expect()). Raises ArgumentError if the state under this key belongs to another call or to
        an object's owner (Owners.check), or if only some calls give a learning rate.
        """
        self.owners.check(key)
        places, others = self.moves.get(key, _NO_MOVE)
        for other in others.keys() & self.entries.keys():
            self._check_lr(other, lr)
        entry = self.entries.get(key)
        if entry is not None and entry.is_carried:
            entry = self._settle(entry, call, forms, sums)
        if entry is None:
            entry = Entry(call, memory={name: self._zeros(form) for name, form in forms.items()})
            self.entries[key] = entry
        if entry.call != call:
            raise ArgumentError(
                f"the state under key={key!r} belongs to {entry.call}, and this is {call}; use another key for "
                f"each array, make the call as before (with its algorithm=, on the same nodes), or forget the state "
                f"with reset({key!r})"
            )
        if entry.forms is not forms:
            self._check_loaded(key, entry, forms)
        self._check_lr(key, lr)
        entry.lr, entry.sums, entry.forms = lr is not None, sums, forms
        self._move(entry, places, others)
        self.moves.pop(key, None)
        return entry

    def _check_lr(self, key: str, lr: float | None) -> None:
        before = self.entries[key].lr
        if before not in (None, lr is not None):
            raise ArgumentError(
                f"earlier calls with key={key!r} were made {'with' if before else 'without'} lr, and this one is not; "
                f"give lr in all calls or in none, or forget the state with reset({key!r})"
            )

    def expect(self, key: str, places: Places, others: Mapping[str, Places]) -> None:
        """Let the next call with ``key`` take over parameters from the state of other keys.

        ``places`` says where each parameter is in the state of ``key``, and ``others`` where it is under each other
        key. A key whose parameters have all moved is deleted. Raises ArgumentError if the state under another key is
        not as large as its places say.
        """
        for other, its_places in others.items():
            held = {name: array.count for name, array in self.entries[other].memory.items()}
            if held and held != (needed := extents(its_places)):
                raise ArgumentError(
                    f"the state under key={other!r} has the numbers of elements {held}, and its parameters, "
                    f"{', '.join(its_places)}, have {needed}; load what state_dict() returned for them, or forget the "
                    f"state with reset({other!r})"
                )
        if key in self.entries:
            self.entries[key].bound = None  # the next call asks take()
        self.moves[key] = places, others

    def _move(self, entry: Entry, places: Places, others: Mapping[str, Places]) -> None:
        """Move the parameters' values from ``others`` to ``entry``: add them there, and set the sources to zeros.

        In an average of n ranks, an error of one rank's own values counts 1/n, and an error of the sum counts in full.
        So a residual of own values is divided by n where it becomes a residual of sums, and multiplied by n the other
        way.
        """
        for key in others.keys() & self.entries.keys():
            source, its_places = self.entries[key], others[key]
            target, given = self._in_units_of_own(entry), self._in_units_of_own(source)
            for parameter in places.keys() & its_places.keys():
                for to, its in zip(places[parameter], its_places[parameter], strict=True):
                    if to[0] in target and its[0] in given:
                        (values, units), (its_values, its_units) = target[to[0]], given[its[0]]
                        part, its_part = slice(*to[1:]), slice(*its[1:])
                        values[part] += its_values[its_part] * its_units[its_part] / units[part]
                        its_values[its_part] = 0
            moved = [
                {name: self._stored(found[name][0], each.dtype) for name, each in held.memory.items()}
                for held, found in ((entry, target), (source, given))
            ]
            # one statement, within which no signal handler runs: a residual must be in exactly one of the entries
            (entry.memory, source.memory), entry.bound, source.bound = moved, None, None
            if its_places.keys() <= places.keys():
                del self.entries[key]

    def _in_units_of_own(self, entry: Entry) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return by buffer name: the values, and the weight of each (1: residual of own values, n: of the sum)."""
        import numpy as np

        found = {}
        for name, array in entry.memory.items():
            values = array.floats()
            found[name] = values, np.ones_like(values)
        for name, start, stop in entry.sums or ():
            found[name][1][start:stop] = self._size
        return found

    def at_rest(self, entry: Entry) -> dict[str, StateArray]:
        """Return the state buffers for a call with lr=0: zeros in place of the residuals, which stay as they are.

        The result of such a call changes no weights, so a residual that it sent would be lost.
        """
        entry.resting = {
            name: self._zeros((array.count, array.dtype)) if name.startswith("residual") else array
            for name, array in entry.memory.items()
        }
        return entry.resting

    def _check_loaded(self, key: str, entry: Entry, forms: Forms) -> None:
        """Convert a loaded state from float32 to the call's types. Raises ArgumentError if its sizes do not fit."""
        held, needed = {n: array.count for n, array in entry.memory.items()}, {n: form[0] for n, form in forms.items()}
        if held != needed:
            raise ArgumentError(
                f"the loaded state under key={key!r} has the numbers of elements {held}, but this call needs {needed}; "
                f"load what state_dict() returned, or forget the state with reset({key!r})"
            )
        for name, (_, dtype) in forms.items():
            if entry.memory[name].dtype is not dtype:
                entry.memory[name] = self._stored(entry.memory[name].floats(), dtype)

    def _settle(self, entry: Entry, call: str, forms: Forms, sums: Parts) -> Entry | None:
        """Adapt the state of an earlier group to its first call in this one; return None if it does not fit the call.

        A group of one rank keeps no residuals, so the call may need fewer or more buffers than the state has.
        """
        if any(forms.get(n, form) != form for n, form in ((n, (a.count, a.dtype)) for n, a in entry.memory.items())):
            return None
        entry.memory = {name: entry.memory.get(name) or self._zeros(form) for name, form in forms.items()}
        entry.clear(sums)
        entry.call, entry.is_carried, entry.bound = call, False, None
        return entry

    def carry_over(self, other: StateStore) -> None:
        """Begin with the state of this rank in an earlier group.

        Momenta and residuals of the rank's own values stay. Residuals of sums become zero: another rank may own those
        sums now.
        """
        for key, old in other.entries.items():
            if old.sums is None:
                continue
            entry = self.entries[key] = Entry(old.call, old.lr, is_carried=True)
            for name, array in old.memory.items():
                entry.memory[name] = self._zeros((array.count, array.dtype))
                entry.memory[name].memory.write(array.read())
            entry.clear(old.sums)

    def reset(self, key: str | None) -> None:
        """Forget the state under a key (None: all keys). Raises ArgumentError for a key without state."""
        if key is None:
            self.entries.clear()
        elif not isinstance(key, str) or self.entries.pop(key, None) is None:
            raise ArgumentError(f"there is no state under key={key!r}; the keys are {_listed(self.entries)}")

    def forget_used(self, keys: Iterable[str]) -> None:
        """Forget the state under these keys, except loaded state that no call has used yet."""
        for key in keys:
            if key in self.entries and self.entries[key].forms is not None:
                del self.entries[key]

    def drain(self, key: str) -> dict[str, np.ndarray]:
        """Return the values under ``key`` by buffer name, as float32, and set them to zero. No run may use them."""
        entry, found = self.entries.get(key), {}
        for name, array in entry.memory.items() if entry is not None else ():
            found[name] = array.floats()
            array.memory.write(bytes(array.nbytes))
        return found

    def keep(self, key: str) -> Callable[[], object]:
        """Return a function that restores the present state under ``key``. No run may use the state at either time."""
        entry = self.entries.get(key)
        if entry is None:
            return lambda: self.entries.pop(key, None)
        before = replace(entry, memory=dict(entry.memory), bound=None)
        contents = [(array.memory, array.read()) for array in entry.memory.values()]

        def put_back() -> None:
            for memory, content in contents:
                memory.write(content)
            self.entries[key] = before

        return put_back

    def save(self) -> dict[str, dict[str, Any]]:
        """A copy of all state, in NumPy arrays of float32."""
        place = {"rank": self._rank, "size": self._size}
        return {
            key: {
                "call": entry.call,
                "lr": entry.lr,
                **place,
                "values": {name: array.floats() for name, array in entry.memory.items()},
            }
            for key, entry in self.entries.items()
        }

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace all state by the result of save() on this rank. Changes nothing if it raises ArgumentError."""
        if not isinstance(saved, Mapping):
            raise ArgumentError(f"the state must be a dict by key, not {type(saved).__name__}")
        entries = {key: self._loaded(key, each) for key, each in saved.items()}
        self.entries = entries
        self.moves.clear()

    def _loaded(self, key: str, saved: Mapping[str, Any]) -> Entry:
        try:
            place = as_integer(saved["rank"]), as_integer(saved["size"])
            call, lr = saved["call"], None if saved["lr"] is None else as_bool(saved["lr"])
            arrays = {name: _floats(each) for name, each in saved["values"].items()}
            if not all(isinstance(text, str) for text in (key, call, *arrays)):
                raise TypeError("its key, its call and the names of its arrays must be strings")
            if lr is None and saved["lr"] is not None:
                raise TypeError(f"lr is {saved['lr']!r}, not True, False or None")
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ArgumentError(f"the state of key={key!r} is not one that state_dict() returns ({error!r})") from error
        if place != (self._rank, self._size):
            raise ArgumentError(
                f"the state of key={key!r} belongs to rank {place[0]} of {place[1]}, and this is rank {self._rank} of "
                f"{self._size}; residuals belong to one rank and its shard, so load each rank's own state, or none"
            )
        entry = Entry(call, lr)
        for name, array in arrays.items():
            entry.memory[name] = self._stored(array, FLOAT32)
        return entry


def _floats(values: Any) -> np.ndarray:
    """The finite float32 values of a one-dimensional array or list. Raises ValueError or TypeError otherwise."""
    import numpy as np

    given = np.asarray(values)
    if given.dtype.kind not in "fiu" or given.ndim != 1:
        raise ValueError(
            f"values must be a one-dimensional array of real numbers, not {given.dtype} of shape {given.shape}"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        floats = np.ascontiguousarray(given, np.float32)
    if not np.isfinite(floats).all() or (floats != given).any():
        raise ValueError("all values must be finite float32 numbers, and some are not")
    return floats


def extents(places: Places) -> dict[str, int]:
    """The number of elements of each buffer, if these places fill the buffers."""
    found: dict[str, int] = {}
    for name, _, stop in (span for spans in places.values() for span in spans):
        found[name] = max(stop, found.get(name, 0))
    return found


def lr_of(lr: float) -> float:
    """Check that a learning rate is 0, or positive and in the range of fp32. Raises ArgumentError otherwise."""
    value = lr if type(lr) is float else as_real(lr)
    if value is None or not (2.0**-120 <= value <= 2.0**120 or value == 0):
        raise ArgumentError(
            f"lr must be the present learning rate, 0 or a positive number (2**-120 to 2**120), not {lr!r}"
        )
    return float(value) or 0.0  # -0.0 becomes 0.0, because the ranks compare texts


def _listed(keys: Mapping[str, object]) -> str:
    return ", ".join(map(repr, keys)) or "none yet"
