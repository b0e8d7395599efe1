"""A collective under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from qccl.base.errors import ArgumentError, CollectiveTimeout, QcclError
from qccl.base.guard import guarded, register_guard
from qccl.collectives.arguments import timeout_of
from qccl.communicator.dynamo import not_traced
from qccl.communicator.session import Session
from qccl.engine.base import Execution

__all__ = ["Work"]

#: first and longest pause of a thread that waits for another thread to end the same call
_NAP_SECONDS, _LONGEST_NAP_SECONDS = 20e-6, 1e-3


@not_traced
class Work:
    """One call of a collective. It keeps the call's arrays alive.

    On the host every rank must wait for the call, or have a progress thread; the order of waits is free. On CUDA the
    call completes by itself.
    """

    __slots__ = ("__weakref__", "_call", "_callbacks", "_check", "_exception", "_execution", "_result", "_session")

    def __init__(self, session: Session, result: Any, check: Callable[[], None] | None = None) -> None:
        """Prepare the Work of a call that is not made yet. After its success ``check`` may raise the call's error."""
        self._session = session
        self._call = -1  # the call's number, from _begin() on
        self._execution: Execution | None = None  # None before _begin(), and after the end
        self._result = result
        self._check = check
        self._exception: Exception | None = None
        self._callbacks: list[Callable[[Work], object]] = []  # not called yet

    def _begin(self, execution: Execution) -> None:
        """Keep the run of the call, which has begun or is queued."""
        self._call = execution.call
        self._execution = execution

    @guarded
    def is_completed(self) -> bool:
        """Whether the call has ended or failed. May advance the call; never blocks for long."""
        execution = self._execution
        if execution is not None:
            before = self._session.unsettle(self._call)
            try:
                if execution.step():
                    self._conclude()
            except ArgumentError:  # the query is forbidden now (a capture); the call continues
                self._session.settle(before)
                raise
            except QcclError as error:
                self._conclude(error)
        return self._execution is None

    def wait(self, timeout: float | None = None) -> Any:
        """Return the output array as soon as the program may use it.

        On the host this waits until the call has ended. On CUDA it makes the call's stream wait; the host waits only if
        a ``timeout`` is given or the result must be checked (``nonfinite="error"``).

        ``timeout`` is in seconds from now; None means the call's timeout, counted from its start (on CUDA from its
        begin on the GPU). Raises the error of the call, or CollectiveTimeout, which makes the communicator unusable.
        """
        execution = self._execution
        if execution is not None and execution.is_stream_ordered and timeout is None and self._check is None:
            return self._make_stream_wait(execution)
        return self._block(None if timeout is None else timeout_of(timeout))

    def synchronize(self) -> Any:
        """Block until the call has ended without an error, and return its output array. Raises the errors of wait()."""
        return self._block(None)

    @guarded
    def _make_stream_wait(self, execution: Execution) -> Any:
        try:
            execution.make_stream_wait()
        except QcclError as error:
            self._conclude(error)
            raise
        return self._result

    def _block(self, timeout: float | None) -> Any:
        """Do synchronize() for at most ``timeout`` seconds; a guard (guard.py)."""
        session, thread = self._session, get_ident()
        unsettled = session.unsettled
        if unsettled:
            session.check_abandoned()
        before = unsettled.get(thread)
        try:
            execution = self._execution  # another thread may set the attribute to None
            if execution is not None:
                unsettled[thread] = (self._call,)
                try:
                    if timeout is None:
                        if not execution.done:
                            execution.run()
                    elif not execution.run(time.monotonic() + timeout):
                        raise CollectiveTimeout(f"wait() ended after {timeout} s: {execution.waits_for()}")
                except ArgumentError:
                    session.settle(before)
                    raise
                except QcclError as error:
                    self._conclude(error)
                else:
                    if self._check is not None:
                        self._conclude()
                    else:
                        self._execution = None
        except BaseException as error:
            session.interrupted(error, before)
            raise
        if before is None:
            unsettled.pop(thread, None)
        else:
            unsettled[thread] = before
        if self._exception is not None:
            raise self._exception
        return self._result

    def exception(self) -> Exception | None:
        """The error of the call, or None if the call succeeded or has not ended. Does not advance the call."""
        execution = self._execution
        return self._exception if execution is None else execution.failure

    @guarded
    def add_done_callback(self, fn: Callable[[Work], object]) -> None:
        """Call ``fn(work)`` once, when the call has ended or failed; now if it has. Nobody needs to wait for the call.

        On the host the thread that ends the call runs ``fn``, usually the progress thread, and ``fn`` delays other
        calls, so it should return soon. On CUDA a separate thread runs it, some milliseconds after the end. ``fn`` may
        look at the Work, whose wait() returns at once, set events and futures, and start other threads' work. It must
        not make calls: methods of the communicator raise ArgumentError there. An exception that ``fn`` raises goes to
        sys.unraisablehook.

        Functions of one call run in the order in which they were added, one at a time: while one runs, the thread that
        runs it also calls those that are added. On the host, a transport without a progress
        thread (MPI without MPI_THREAD_MULTIPLE) ends calls only while somebody waits for one.
        """
        if not callable(fn):
            raise ArgumentError(f"add_done_callback() takes a function of the Work, not {fn!r}")
        execution = self._execution
        if execution is not None:
            self._session.unsettle(self._call)
        self._callbacks.append(fn)
        if execution is None:
            self._call_back()
            return

        def ended() -> None:
            self._conclude(execution.failure)
            self._call_back()

        execution.add_done_callback(ended)

    def get_future(self) -> Any:
        """Make a torch.futures.Future of the output array, or of the list of them; it raises the call's error.

        On the host the future is completed when the call has ended, like add_done_callback(). On CUDA it is completed
        now, and ordered by streams like other futures of PyTorch: a wait for it makes the current stream wait for the
        call. A failure of the call then shows in check() and synchronize() only.
        """
        import torch

        execution = self._execution
        if execution is not None and execution.is_stream_ordered:
            first = self._result[0] if isinstance(self._result, Sequence) else self._result
            if not isinstance(first, torch.Tensor):
                raise ArgumentError(
                    f"get_future() on CUDA needs a result in PyTorch's tensors, not {type(first).__name__}"
                )
            future = torch.futures.Future(devices=[first.device])
            with torch.cuda.stream(torch.cuda.ExternalStream(execution.stream, first.device)):
                future.set_result(self.wait())
            return future
        future = torch.futures.Future()

        def complete(work: Work) -> None:
            if work._exception is None:
                future.set_result(work._result)
            else:
                future.set_exception(work._exception)

        if self._execution is None:  # ended: complete now, also in a function passed to add_done_callback()
            complete(self)
        else:
            self.add_done_callback(complete)
        return future

    def _call_back(self) -> None:
        """Call the functions that were not called yet, unless a thread is already doing so: it will see new ones."""
        session, turn = self._session, (get_ident(),)
        while self._callbacks and session.calling.setdefault(self, turn) is turn:
            try:
                while self._callbacks:
                    function = self._callbacks.pop(0)
                    try:
                        function(self)
                    except BaseException as error:
                        _Unraisable(error)
            finally:
                session.calling.pop(self, None)

    def _is_under_way(self) -> bool:
        """Whether the call is not known to have ended; False if it is ordered by streams."""
        return self._execution is not None and not self._execution.is_stream_ordered

    def _conclude(self, error: QcclError | None = None) -> None:
        """End the call, or wait until another thread has ended it."""
        ending, turn, nap = self._session.ending, (get_ident(),), 0.0
        while self._execution is not None:
            found = ending.setdefault(self, turn)
            if found is turn:
                try:
                    self._end(error)
                finally:
                    ending.pop(self, None)
                break
            if found == turn:  # a signal handler interrupted this thread in the middle of the end
                return
            time.sleep(nap)
            nap = min(nap + _NAP_SECONDS, _LONGEST_NAP_SECONDS)
        else:
            return
        if error is not None:
            self._session.fail(error, self._call)

    def _end(self, error: QcclError | None) -> None:
        if self._execution is None:  # another thread has ended it before this one had its turn
            return
        self._exception = error
        try:
            if error is None and self._check is not None:
                self._check()
        except QcclError as refused:
            self._exception = refused
        finally:
            self._execution = None
            self._check = None


register_guard(Work._block)
register_guard(Work._call_back, settles=False)


class _Unraisable:
    """Passes an exception to sys.unraisablehook, by raising it in __del__()."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __del__(self) -> None:
        raise self._error
