"""What keeps a group sound when an exception ends a call at any point: Ctrl-C, or a signal handler that raises.

Python runs the handlers of signals between almost any two instructions of the main thread, and other threads can raise
exceptions there, too. No ``try`` in the functions below covers the moment at which it is entered or left. So every
method with which a program uses a communicator is guarded:

- ``Session.unsettled`` counts what was begun and not settled. It grows before a call takes its number, so before
  anything is sent. Only the guard sets it back: with its last statement, when the caller has the result or the Work, or
  when the other ranks were told. Code that refuses a call sets it back, too, because nothing has happened then.
- An exception that reaches the guard while something is unsettled ends the group (Session.interrupted). Here every
  later use raises an error, and the others raise PeerLost now. If nothing is unsettled, nothing was sent.
- The guard releases the locks that the exception has left held.
- If another exception ends the guard's own work, the next use of the communicator finds something unsettled that no
  thread is working on, and ends the group (Session.check_abandoned).

No statement after the guard's last one can be interrupted by a signal: CPython runs handlers when a function begins,
after a call, and at the end of a loop's body.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar, cast

__all__ = ["Guarded", "guarded", "is_guard", "is_inside", "is_under_way", "release_all"]

_F = TypeVar("_F", bound=Callable[..., Any])

#: guards: their frames have the variables ``session`` and ``before``
_guards: set[CodeType] = set()


class Guarded(Protocol):
    """What a guard needs of a session."""

    unsettled: int

    def check_abandoned(self) -> None:
        """End the group if something is unsettled that no thread is working on."""

    def interrupted(self, error: BaseException, before: int) -> None:
        """Settle what an exception has left, where ``before`` things were unsettled at the begin of the call."""


class Lock(Protocol):
    """A lock that one thread may acquire several times."""

    def release(self) -> None:
        """Raises RuntimeError if this thread does not hold it."""


def guarded(method: _F) -> _F:
    """Let any exception that leaves the method of an object with a ``_session`` leave the group sound."""

    @wraps(method)
    def call(self: Any, /, *args: Any, **options: Any) -> Any:
        session = self._session
        if session.unsettled:
            session.check_abandoned()
        before = session.unsettled
        try:
            result = method(self, *args, **options)
        except BaseException as error:
            session.interrupted(error, before)
            raise
        if session.unsettled > before:
            session.unsettled = before
        return result

    is_guard(call)
    return cast(_F, call)


def is_guard(function: Any) -> None:
    """Let is_under_way() and is_inside() find the frames of a function that does the same as guarded()."""
    _guards.add(function.__code__)


def is_under_way(session: Guarded) -> bool:
    """Whether a call of some thread is still working on what is unsettled."""
    return any(
        frame.f_code in _guards
        and frame.f_locals.get("session") is session
        and frame.f_locals.get("before", session.unsettled) < session.unsettled
        for top in sys._current_frames().values()
        for frame in _stack(top)
    )


def is_inside(session: Guarded, engine: object) -> bool:
    """Whether the present guarded call was made in the middle of another one, or of a method of the engine."""
    frames = _stack(sys._getframe())
    for frame in frames:
        if _guards_session(frame, session):
            break
    return any(_guards_session(frame, session) or _is_method_of(frame, engine) for frame in frames)


def _is_method_of(frame: FrameType, engine: object) -> bool:
    """Whether the engine runs in it. Of other frames f_locals is not read, which would keep their objects alive."""
    return frame.f_globals.get("__name__") == type(engine).__module__ and frame.f_locals.get("self") is engine


def _guards_session(frame: FrameType, session: Guarded) -> bool:
    return frame.f_code in _guards and frame.f_locals.get("session") is session


def _stack(frame: FrameType | None) -> Any:
    """A frame, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def release_all(lock: Lock) -> None:
    """Release a lock as often as this thread holds it."""
    try:
        while True:
            lock.release()
    except RuntimeError:  # it holds the lock no more
        return
