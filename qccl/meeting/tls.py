"""OpenSSL's functions, for the encrypted connections of native code (kernels/tls/tls.h).

The library is the one that Python's own module ``ssl`` is linked to, so a process has no second OpenSSL beside it, and
nothing has to be installed. If Python came without ``ssl``, or hides its OpenSSL (a static build that exports no
symbols), it is the system's library.

Checked: python.org's sources built against the system's OpenSSL (3.11 to 3.13), and Debian's Python, whose ``_ssl`` is
linked to libssl.so.3; OpenSSL 1.1.1r, 3.0.19 and 3.5.8. The builds that uv installs (python-build-standalone) hide
their OpenSSL, so they take the system's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from functools import cache

from qccl import _host
from qccl.base.errors import EngineError

__all__ = ["functions", "load_library", "version"]

_NAMES = ("libssl.so.3", "libssl.so.1.1")
#: argument of OpenSSL_version() that asks for the text "OpenSSL 3.0.19 27 Jan 2026"
_VERSION = 0


@cache
def load_library() -> ctypes.CDLL:
    """Load OpenSSL 1.1.1 or later, with all of its functions. Raises EngineError if there is none."""
    reasons = []
    for what, library in _candidates():
        missing = [name for name in _host.TlsStream.function_names() if not hasattr(library, name)]
        if not missing:
            return library
        reasons.append(f"{what} has no {missing[0]}")
    found = "; ".join(reasons) or "neither Python's module ssl nor the system has it"
    raise EngineError(
        f"OpenSSL 1.1.1 or later, for encrypted connections, was not found ({found}); use a Python with the module "
        "ssl, or install the system's OpenSSL, e.g. apt-get install libssl3"
    )


def _candidates() -> Iterator[tuple[str, ctypes.CDLL]]:
    """The libraries to try, with their names in messages: Python's, then those in the process, then the system's."""
    try:
        import _ssl
    except ImportError:
        pass
    else:
        path = getattr(_ssl, "__file__", None)  # without a file, ssl is built into the interpreter
        yield "Python's module ssl", ctypes.CDLL(path)
    for mode in (os.RTLD_NOLOAD | os.RTLD_NOW, os.RTLD_NOW):
        for name in _NAMES:
            try:
                yield name, ctypes.CDLL(name, mode=mode)
            except OSError:
                continue


@cache
def functions() -> list[int]:
    """The addresses of functions that _host.TlsStream needs. Raises EngineError if there is no OpenSSL."""
    library = load_library()
    names = _host.TlsStream.function_names()
    return [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]


def version() -> str:
    """The library's version, e.g. "OpenSSL 3.0.19 27 Jan 2026". Raises EngineError if there is no OpenSSL."""
    get = load_library().OpenSSL_version
    get.restype, get.argtypes = ctypes.c_char_p, [ctypes.c_int]
    return str(get(_VERSION).decode())
