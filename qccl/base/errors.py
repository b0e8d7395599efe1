"""The errors that qccl raises on purpose, and that callers may want to tell apart::

    QcclError
    +-- ArgumentError      also ValueError       an argument is out of range or does not fit the others
    |   +-- CodecError                           a codec's name, key or value does not exist
    |   +-- InvalidBufferError                   wrong device, strides, dtype; null or foreign pointer
    +-- MismatchError                            the ranks do not agree
    +-- CollectiveTimeout  also TimeoutError     a wait reached its deadline
    +-- PeerLost           also ConnectionError  another rank failed, left, or cannot be reached
    +-- EngineError                              MPI, NCCL or CUDA failed; its own message and code are kept

Each message says what was given, what is allowed, and what to do. Authors of collectives also meet
``schedule.VerificationError``; the errors of ``qccl-bench`` are defined beside the code that raises them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["ArgumentError", "CodecError", "CollectiveTimeout", "EngineError", "InvalidBufferError", "MismatchError"]
__all__ += ["PeerLost", "QcclError", "as_failure", "described", "for_others", "forked", "gave_up", "is_own"]
__all__ += ["names_rank", "own", "ranks_text", "reason_of", "with_text"]


class QcclError(Exception):
    """Base of every error that qccl raises on purpose."""


class ArgumentError(QcclError, ValueError):
    """An argument is out of range, or does not fit the other arguments."""


class CodecError(ArgumentError):
    """A codec specification names a codec, key or value that does not exist."""


class InvalidBufferError(ArgumentError):
    """A buffer has the wrong device, strides or dtype, or is null or foreign memory."""


class MismatchError(QcclError):
    """The ranks do not agree: on a call, on the size of a message, or at start-up."""


class CollectiveTimeout(QcclError, TimeoutError):
    """A wait reached its deadline."""


class PeerLost(QcclError, ConnectionError):
    """Another rank failed, left, or cannot be reached.

    Attributes:
        rank: the number of that rank in the group; None if it is unknown, is in no group yet, or if there are several.
        reason: the reason that the rank gave, such as the type and the text of its exception; None if it gave none.
    """

    def __init__(self, message: str = "", rank: int | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.rank, self.reason = rank, reason


class EngineError(QcclError):
    """The library of a transport or of the engine (MPI, UCX, gloo, NCCL, CUDA) failed, or cannot be used.

    Attributes:
        code: the library's error code, or None.
    """

    def __init__(self, message: str = "", code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


#: finds the number of a rank in a text
names_rank = re.compile(r"\branks? \[?\d").search


def gave_up(rank: int, reason: str) -> PeerLost:
    """The error of a group that ``rank`` has given up, for that rank and the others."""
    return PeerLost(f"rank {rank} gave up: {reason}", rank, reason)


def reason_of(rank: int, error: QcclError) -> str:
    """The reason why ``rank`` gave up with ``error``, to which gave_up() may add the rank."""
    return error.reason if isinstance(error, PeerLost) and error.rank == rank and error.reason else str(error)


def as_failure(rank: int, error: BaseException) -> QcclError:
    """The failure of a communicator after an exception ended a call on ``rank``."""
    return error if isinstance(error, QcclError) else gave_up(rank, described(error))


def for_others(rank: int, error: BaseException) -> QcclError:
    """The error that ``rank`` tells the other ranks after an exception: the exception if its text names a rank."""
    if isinstance(error, PeerLost | MismatchError | CollectiveTimeout) and names_rank(str(error)):
        return error
    return gave_up(rank, described(error))


def with_text(error: QcclError, text: str) -> QcclError:
    """Make an error of the same class with another text; its other attributes are those of ``error``."""
    made = type(error)(text)
    vars(made).update((name, value) for name, value in vars(error).items() if name in vars(made))
    return made


def own(error: QcclError) -> QcclError:
    """Mark an error as a transport's own: a signal handler of the program may raise an error of the same type."""
    error.__dict__["is_own"] = True
    return error


def is_own(error: BaseException) -> bool:
    """Whether an error was marked by own()."""
    return "is_own" in getattr(error, "__dict__", ())


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks by number, e.g. "rank 1" or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def described(error: BaseException) -> str:
    """An exception's type and text, even if its ``str()`` fails."""
    try:
        text = str(error)
    except Exception:
        text = "<its str() failed>"
    return f"{type(error).__name__}: {text}"


def forked(rank: int) -> str:
    """The message in a child of os.fork()."""
    return f"this process was forked by rank {rank}; only the process that made a communicator may use it"
