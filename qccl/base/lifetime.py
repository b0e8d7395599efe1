"""The end of the process and os.fork(): what happens then, and in which order. Only this module registers functions.

**At the end of the process** the functions of each Stage are called, stage by stage. Python calls its exit handlers in
the reverse order of their registration. So whenever a function is registered, the functions of all earlier stages are
registered again: a transport's module may be imported, or MPI initialised, when there are engines already. Exit
handlers that the program registered before the last engine was made run after the engines have left.

**In a child of os.fork()** groups, connections, threads and devices belong to the parent. Each Registry calls a
function for each of its objects there, which makes the object unusable. At the end of the child nothing is done for
them. Objects that a registry keeps alive in the parent are kept alive in the child, too, and are never freed there.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator, MutableSet
from enum import IntEnum
from typing import Any, Generic, TypeVar

__all__ = ["Registry", "Stage", "at_exit", "keep", "members", "unhandled"]

_T = TypeVar("_T")


class Stage(IntEnum):
    """The steps at the end of the process, in this order."""

    #: compiled programs finish their calls, for which engines must still run
    CALLS = 0
    #: engines end their runs and tell the other ranks, over transports that must still work
    ENGINES = 1
    #: transports close their connections and wait for their threads
    TRANSPORTS = 2
    #: MPI ends, which transports use, and perhaps the program, too
    LIBRARIES = 3


_stages: dict[Callable[[], object], Stage] = {}
_registries: list[Registry[Any]] = []
_kept: list[object] = []


def at_exit(stage: Stage, function: Callable[[], object]) -> None:
    """Call ``function`` at the end of the process: after earlier stages, before the exit handlers registered so far.

    A function that is registered again is called once, as if it were registered for the first time.
    """
    _stages[function] = stage
    for each, its_stage in sorted(_stages.items(), key=lambda item: item[1], reverse=True):
        if each == function or its_stage < stage:
            atexit.unregister(each)
            atexit.register(each)


def keep(kept: object) -> None:
    """Do not free an object before the end of the process: other ranks' messages may still arrive in its memory."""
    _kept.append(kept)


def unhandled() -> BaseException | None:
    """At the process's end: the exception that ended the program, or None.

    Python keeps it in sys.last_value. The prompt, pytest and notebooks store exceptions there that they have caught;
    their tracebacks begin in a frame that has a caller, and the program's main frame has none.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is None or error.__traceback__ is None or hasattr(sys, "ps1"):
        return None
    return error if error.__traceback__.tb_frame.f_back is None else None


def members(objects: MutableSet[_T]) -> list[_T]:
    """Copy a WeakSet to a list; try again if another thread changes the set, whose iterator then raises an error."""
    while True:
        with contextlib.suppress(RuntimeError):
            return list(objects)


class Registry(Generic[_T]):
    """The objects of one kind that must do something at the end of the process, or in a child of os.fork()."""

    def __init__(
        self,
        at_exit: tuple[Callable[[_T], object], ...] = (),
        stage: Stage = Stage.TRANSPORTS,
        at_fork: Callable[[_T], object] = lambda each: None,
        *,
        keeps: bool = False,
    ) -> None:
        """An empty registry.

        In its ``stage`` the functions ``at_exit`` are called in turn, each for all objects. ``at_fork`` is called again
        in a child of a child. ``keeps``: the objects are kept alive until they are discarded.
        """
        self._stage, self._at_exit, self._at_fork = stage, at_exit, at_fork
        self._own: MutableSet[_T] = set() if keeps else weakref.WeakSet()
        self._inherited: MutableSet[_T] = set() if keeps else weakref.WeakSet()
        _registries.append(self)

    def __iter__(self) -> Iterator[_T]:
        """The objects that this process has made; further ones may be added meanwhile."""
        return iter(members(self._own))

    def __len__(self) -> int:
        return len(self._own)

    def add(self, each: _T) -> None:
        """From now on the functions are called for this object."""
        self._own.add(each)
        if self._at_exit:
            at_exit(self._stage, self.end)

    def discard(self, each: _T) -> None:
        """Forget an object, unless the parent of this process has made it."""
        self._own.discard(each)

    def end(self) -> None:
        """Run the functions that are due at the end of the process."""
        for function in self._at_exit:
            for each in self:
                function(each)

    def forked(self) -> None:
        """Run the functions that are due in a child of os.fork()."""
        self._inherited |= self._own
        self._own.clear()
        for each in list(self._inherited):
            self._at_fork(each)


def _forked() -> None:
    for registry in _registries:
        registry.forked()


os.register_at_fork(after_in_child=_forked)
