"""Keeps a group sound when an exception ends a call at any point: Ctrl-C, or a signal handler that raises.

Python runs the handlers of signals in the main thread when a function begins, after a call, and at the end of a loop's
body. Other threads can raise exceptions there, too. A ``try`` does not cover the moment at which it is entered or left.
So every use of a communicator has a guard. Most methods have guarded(). Calls and runs of plans have their guard in
Session.start(), and waits in Work._block(), which saves a function: nothing is sent before the guard, and only a
``return`` follows it, before which Python runs no handler.

- ``Session.unsettled`` has a mark for each thread that has begun something and not settled it. A thread sets its mark
  before its call takes a number, so before anything is sent. Its guard sets the mark back with its last statement,
  when the caller has the result or the Work, or when the other ranks were told. Code that refuses a call sets the mark
  back earlier, because nothing has happened then. No thread changes the mark of another one that is at work:
  one may wait for a Work, or call its functions, while another one makes calls.
- An exception that reaches the guard after the thread has set a mark ends the group (Session.interrupted). Here every
  later use raises an error, and the others raise PeerLost now. If there is no mark, nothing was sent.
- The guard releases the locks that the exception has left held by its thread.
- If another exception ends the guard's own work, the next use of the communicator, in any thread, finds a mark on which
  its thread is not working, or whose thread has ended, and ends the group (Session.check_abandoned).

No handler runs after the guard's last statement.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar, cast

__all__ = ["Guarded", "Mark", "abandoned", "guarded", "is_inside", "register_guard", "release_all"]

_F = TypeVar("_F", bound=Callable[..., Any])

#: the number of the call that a thread has begun; a new object for each call, so that ``is`` tells marks apart
Mark = tuple[int]

_IS_GENERATOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

#: code of the guards, whose frames have the variable ``session``, and ``before`` if they settle marks
_guards: set[CodeType] = set()


class Guarded(Protocol):
    """The part of a session that guards use."""

    unsettled: dict[int, Mark]

    def check_abandoned(self) -> None:
        """End the group if there is a mark that no thread is working on."""

    def interrupted(self, error: BaseException, before: Mark | None, number: int | None = None) -> None:
        """Clean up after an exception has left a call; ``before``, ``number``: mark and next call when it began."""


class Lock(Protocol):
    """A lock that one thread may acquire several times."""

    def release(self) -> None:
        """Raises RuntimeError if this thread does not hold it."""


def guarded(method: _F) -> _F:
    """Let any exception that leaves the method of an object with a ``_session`` leave the group sound."""

    @wraps(method)
    def call(self: Any, /, *args: Any, **options: Any) -> Any:
        session = self._session
        unsettled, thread = session.unsettled, get_ident()
        if unsettled:
            session.check_abandoned()
        before = unsettled.get(thread)
        try:
            result = method(self, *args, **options)
        except BaseException as error:
            session.interrupted(error, before)
            raise
        if before is not None:
            unsettled[thread] = before
        elif thread in unsettled:
            del unsettled[thread]
        return result

    register_guard(call)
    return cast(_F, call)


def register_guard(function: Any, *, settles: bool = True) -> None:
    """Let abandoned() and is_inside() find the frames of a function that does the same as guarded().

    They read the variables ``session`` and, if the function ``settles`` marks, ``before`` of its frame. Raises
    TypeError if it has no such variables.
    """
    names = {"session", "before"} if settles else {"session"}
    if lacking := names - {*function.__code__.co_varnames}:
        raise TypeError(f"the guard {function.__qualname__} lacks the variables {sorted(lacking)}")
    _guards.add(function.__code__)


def abandoned(session: Guarded) -> dict[int, Mark]:
    """The marks on which their threads are not working, by thread.

    A thread has its mark only while its guard is on its stack. So a mark was abandoned if it was there before and after
    the moment at which the stacks were taken, and its guard was not. Other threads go on meanwhile: a generator has no
    caller while it is suspended, so a mark of a thread with a generator on its stack is left to a later check.
    """
    marks = session.unsettled.copy()
    stacks = sys._current_frames()
    try:
        idle = {thread: mark for thread, mark in marks.items() if not _settles(thread, stacks, session, mark)}
    finally:
        stacks.clear()  # they hold this function's own frame: a cycle
    return {thread: mark for thread, mark in idle.items() if session.unsettled.get(thread) is mark}


def _settles(thread: int, stacks: dict[int, FrameType], session: Guarded, mark: Mark) -> bool:
    """Whether a guard on the stack of a thread will, or may, set back the mark."""
    is_other = thread != get_ident()
    return any(
        (is_other and frame.f_code.co_flags & _IS_GENERATOR)
        or (_guards_session(frame, session) and frame.f_locals.get("before", mark) is not mark)
        for frame in _stack(stacks.get(thread))
    )


def is_inside(session: Guarded, engine: object) -> bool:
    """Whether the present guarded call was made in the middle of another one, or of a method of the engine."""
    frames = _stack(sys._getframe())
    for frame in frames:
        if frame.f_code in _guards:  # the present guard; reading its f_locals would keep its objects, and itself, alive
            break
    return any(_guards_session(frame, session) or _is_method_of(frame, engine) for frame in frames)


def _is_method_of(frame: FrameType, engine: object) -> bool:
    """Whether a frame runs a method of the engine. Reading f_locals of other frames would keep their objects alive."""
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
    except RuntimeError:  # this thread does not hold the lock any more
        return
