"""Owners of state: objects whose calls keep state under keys that no other object, and no other call, can use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from qccl.base.errors import ArgumentError

__all__ = ["Owner", "Owners"]


class _Store(Protocol):
    """The state of a communicator (StateStore)."""

    entries: dict[str, Any]


class Owner:
    """An object that keeps state under the key ``name``, and under longer keys: ``name``, a separator and more.

    Attributes:
        name: the begin of the owner's keys.
    """

    def __init__(self, owners: Owners, what: str, name: str, file_name: str, separators: str) -> None:
        self.name, self._file_name = name, file_name
        self._owners, self._what, self._separators = owners, what, separators
        self._keys: dict[str, str] = {}
        self._is_closed = False

    def __str__(self) -> str:
        return f"{'an' if self._what[0] in 'AEIOU' else 'a'} {self._what} with key={self.name!r}"

    def key(self, rest: str = "") -> str:
        """The key ``name + rest``, always the same string object: only the owner's calls have this object.

        The key is not a class of its own, because calls with such a key would be prepared each time (CallTable).
        Raises ArgumentError after close().
        """
        if self._is_closed:
            raise ArgumentError(f"this {self._what} is closed; make another one")
        key = self.name + rest
        return self._keys.setdefault(key, key)

    def owns(self, key: object, name: str | None = None) -> bool:
        """Whether a key belongs to this owner, or would if the owner had the given ``name``."""
        name = self.name if name is None else name
        if not isinstance(key, str) or not key.startswith(name):
            return False
        return len(key) == len(name) or key[len(name)] in self._separators

    def renamed(self, saved: Mapping[Any, Any], *, to_file: bool = False) -> dict[str, Any]:
        """Rename the keys of a state from the names of files to this owner's; with ``to_file`` the other way.

        Files have "default" in place of a name such as "default#2", so another owner of this kind can load them.
        Raises ArgumentError for a key that is not this owner's.
        """
        old, new = (self.name, self._file_name) if to_file else (self._file_name, self.name)
        for key in saved:
            if not self.owns(key, old):
                raise ArgumentError(f"the state has the key {key!r}; this {self._what} has {old!r}")
        return {new + key[len(old) :]: entry for key, entry in saved.items()}

    def check(self, key: str) -> None:
        """Raise ArgumentError if another object's call uses a key of this owner."""
        if self.owns(key) and self._keys.get(key) is not key:
            raise ArgumentError(f"the state under key={key!r} belongs to {self}; give this call another key")

    def release(self) -> None:
        """Leave the keys and their state to a later owner with the same name."""
        self._owners.remove(self)

    def close(self) -> None:
        """Delete the state, and release the keys."""
        self._is_closed = True
        self._owners.forget(self)


class Owners:
    """The owners of the state of one communicator.

    Ranks make and close their owners in the same order, so an owner's name is the same on all ranks, and in a later run
    of the program. An object that Python has collected remains an owner, because ranks collect at different times.
    """

    def __init__(self, store: _Store) -> None:
        self._store = store
        self._owners: list[Owner] = []

    def add(
        self, what: str, default: str, key: str | None, *, separators: str = "/", is_stateful: bool = True
    ) -> Owner:  # fmt: skip
        """Add an owner, of the class ``what``, with the name ``key``.

        With the key None it gets the first free name of ``default``, "default#2", "default#3" and so on. State that was
        loaded, or came from an earlier group, goes to the first owner with its name. Without ``is_stateful`` several
        owners may have the name.

        Raises ArgumentError for a key that is not a string, that has another owner, or under which other calls have
        state.
        """
        if key is not None and not isinstance(key, str):
            raise ArgumentError(f"key must be a string that names the state of this {what}, not {key!r}")
        first = default if key is None else key
        number, owner = 1, Owner(self, what, first, first, separators)
        while is_stateful and (reason := self._conflict(owner)):
            if key is not None:
                raise ArgumentError(f"key={key!r} cannot name the state of this {what}: {reason}")
            number += 1
            owner.name = f"{default}#{number}"
        if is_stateful:
            self._owners.append(owner)
        return owner

    def _conflict(self, new: Owner) -> str:
        """Say why an owner cannot have its name; an empty text if it can."""
        for each in self._owners:
            if each.owns(new.name) or new.owns(each.name):
                return (
                    f"{each} exists, and the two would mix their residuals; give each a key of its own, leave key "
                    f"out, or close() the other one first"
                )
        used = next(
            (key for key, each in self._store.entries.items() if new.owns(key) and each.forms is not None), None
        )
        if used is not None:
            return f"calls have used key={used!r} before; give another key, or forget that state with reset({used!r})"
        return ""

    def check(self, key: str) -> None:
        """Raise ArgumentError if a key belongs to an owner, and the owner has not made this string object."""
        for each in self._owners:
            each.check(key)

    def remove(self, owner: Owner) -> None:
        """Remove an owner, if it is still in the list."""
        if owner in self._owners:
            self._owners.remove(owner)

    def forget(self, owner: Owner) -> None:
        """Remove an owner and its state. Calls under way keep the memory that they use."""
        if owner in self._owners:
            for key in [key for key in self._store.entries if owner.owns(key)]:
                del self._store.entries[key]
            self._owners.remove(owner)
